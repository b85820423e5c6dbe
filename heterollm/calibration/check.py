"""Checks ranges: computes operators on their 16-bit grids, in exact arithmetic, against floats."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from msgspec import structs

from heterollm.calibration.float_weights import as_floats
from heterollm.calibration.int8_check import int8_checked
from heterollm.calibration.observer import Floats
from heterollm.calibration.range_records import (
    FfnCalibration,
    LinearCalibration,
    RangeErrors,
    StreamCalibration,
)
from heterollm.kernels.formats import ZERO_CODE, linear_errors, on_grid
from heterollm.kernels.npu import FfnRanges, LinearRanges, step_of
from heterollm.kernels.operators import exact_gated_activation
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights, norm_before

WORST = RangeErrors(1.0, 1.0, 1.0)
"""Errors of an operator that no range can serve: all of its values were 0."""

CHANNEL_STEP = 64
"""Shards of an ffn's width end at multiples of it on every NPU."""

MOST_PARTIAL_SUMS = 64
SHARD_QUARTERS = (1, 2, 3)
SMALLEST_MAGNITUDE = 1e-20


class RangeCheck:
    """Reads inputs of linears and checks the ranges that earlier windows gave.

    Args:
        weights: The model's weights.
        linears: The measured magnitudes, by layer and group.
        ffns: Those inside of ffns, by layer.
        tokens: Most tokens to check.
        streams: Those of residual streams, by layer.
    """

    def __init__(
        self,
        weights: ModelWeights,
        linears: Mapping[tuple[int, Group], LinearCalibration],
        ffns: Mapping[int, FfnCalibration],
        tokens: int,
        streams: Mapping[int, StreamCalibration] = MappingProxyType({}),
    ) -> None:
        self.streams = dict(streams)
        self.linears = dict(linears)
        self.ffns = dict(ffns)
        self.checked_tokens = 0
        self._weights = weights
        self._tokens = tokens

    def read(self, spec: OpSpec, x: Floats, _y: Floats) -> None:
        """Check a group of linears, and with ``gate_up`` the ffn."""
        x = x[: self._tokens]
        self.checked_tokens = len(x)
        members = [as_floats(member) for member in self._weights.linear(spec.layer, spec.group)]
        found = self.linears[spec.layer, spec.group]
        weight = np.concatenate(members)
        checked = _checked(found, weight, x)
        if found.int8 is not None:
            int8 = int8_checked(
                *(found.int8, weight, x),
                inputs=found.inputs,
                outputs=found.outputs,
                member_rows=spec.member_rows,
            )
            checked = structs.replace(checked, int8=int8)
        self.linears[spec.layer, spec.group] = checked
        if spec.group == "gate_up" and spec.layer in self.ffns:
            (down,) = self._weights.linear(spec.layer, "down")
            self._check_ffn(spec.layer, members, as_floats(down), x)

    def _check_ffn(self, layer: int, gate_up: list[Floats], down: Floats, x: Floats) -> None:
        first, last = self.linears[layer, "gate_up"], self.linears[layer, "down"]
        found = self.ffns[layer]
        magnitudes = (first.inputs, *first.outputs, found.activated, last.inputs, *last.outputs)
        errors = split_errors = WORST
        if min(magnitudes) > SMALLEST_MAGNITUDE:
            ranges = found.ranges(self.linears)
            errors, split_errors = _ffn_errors(ranges, gate_up, down, x, _rounded(x, ranges.inputs))
        self.ffns[layer] = structs.replace(found, errors=errors, split_errors=split_errors)

    def read_stream(self, o: OpSpec, x: Floats, _y: Floats, stream: Floats) -> None:
        """Check the fused groups of a layer."""
        layer, found = o.layer, self.streams.get(o.layer)
        if found is None:
            return
        linears = [self.linears[layer, group] for group in ("qkv", "o", "gate_up", "down")]
        sizes = (size for one in linears for size in (one.inputs, *one.outputs))
        activated = self.ffns[layer].activated
        if min(found.stream, found.sums, activated, *sizes) <= SMALLEST_MAGNITUDE:
            changes = dict.fromkeys(("norm_errors", "errors", "split_errors"), WORST)
            self.streams[layer] = structs.replace(found, **changes)
            return
        x, stream = x[: self._tokens], stream[: self._tokens]
        qkv, (weight,), gate_up, (down,) = (
            [as_floats(member) for member in self._weights.linear(layer, group)]
            for group in ("qkv", "o", "gate_up", "down")
        )
        coarse = _rounded(stream, found.stream)
        norm = found.norm_ranges(self.linears)
        assert norm.normed is not None
        exact = self._normed(layer, "qkv", stream) @ np.concatenate(qkv).T
        normed = _rounded(self._normed(layer, "qkv", coarse), norm.normed)
        norm_errors = _errors(_rounded(normed @ np.concatenate(qkv).T, norm.outputs), exact)
        ranges = found.fused_ranges(self.linears, self.ffns[layer])
        fused = ranges.fused
        assert fused is not None
        output = x @ weight.T
        coarse_output = _rounded(_rounded(x, fused.inputs) @ weight.T, fused.outputs)
        inputs = self._normed(layer, "gate_up", stream + output)
        sums = self._normed(layer, "gate_up", _rounded(coarse + coarse_output, fused.sums))
        sums = _rounded(sums, ranges.inputs)
        errors, split_errors = _ffn_errors(ranges, gate_up, down, inputs, sums, output, coarse_output)
        self.streams[layer] = structs.replace(
            found, norm_errors=norm_errors, errors=errors, split_errors=split_errors
        )

    def _normed(self, layer: int, group: Group, stream: Floats) -> Floats:
        """Return the norm before a group."""
        config = self._weights.config
        factors = self._weights.norm(layer, norm_before(config, layer, group)) + config.norm_offset
        mean = np.square(stream, dtype=np.float64).mean(axis=1, keepdims=True)
        normed: Floats = (stream / np.sqrt(mean + config.rms_norm_eps) * factors).astype(np.float32)
        return normed


def silu(gate: Floats) -> Floats:
    """Return the SiLU of values."""
    return exact_gated_activation(gate).astype(np.float32)


def _checked(found: LinearCalibration, weight: Floats, x: Floats) -> LinearCalibration:
    """Return the record with the check of token scales, or of a static grid if only that passes."""
    if min(found.inputs, max(found.outputs), max(found.relative_outputs)) <= SMALLEST_MAGNITUDE:
        return structs.replace(found, errors=WORST)
    exact = x @ weight.T
    errors = _errors(_on_grids(found.token_ranges, weight, x), exact)
    if not errors.passed:
        static = _errors(_on_grids(found.static_ranges, weight, x), exact)
        if static.passed:
            return structs.replace(found, errors=static, static=True)
    return structs.replace(found, errors=errors)


def _on_grids(ranges: LinearRanges, weight: Floats, x: Floats) -> Floats:
    grid = ranges.grid
    codes, factors = grid.codes(x)
    values: Floats = (codes.astype(np.float32) - np.float32(ZERO_CODE)) * np.float32(grid.input_step)
    y: Floats = on_grid(values @ weight.T, grid.output_step, 16) * factors[:, None]
    return y


def largest_partial(product: Floats, down: Floats) -> float:
    """Return the largest magnitude of sums of an ffn's output over leading channels of its width.

    Args:
        product: Input of down ``[m, c]``.
        down: Its weight ``[h, c]``.
    """
    width = down.shape[1]
    step = CHANNEL_STEP * -(-width // (CHANNEL_STEP * MOST_PARTIAL_SUMS))
    total = np.zeros((len(product), len(down)), np.float32)
    largest = 0.0
    for first in range(0, width, step):
        total += product[:, first : first + step] @ down[:, first : first + step].T
        largest = max(largest, float(total.max()), -float(total.min()))
    return largest


def _ffn_errors(
    ranges: FfnRanges,
    gate_up: list[Floats],
    down: Floats,
    exact_x: Floats,
    x: Floats,
    exact_added: Floats | float = 0.0,
    added: Floats | None = None,
) -> tuple[RangeErrors, RangeErrors]:
    """Return the errors of the whole ffn, and the worst ones of shards that exact sums join.

    Args:
        ranges: The ranges, those of shards among them.
        gate_up: Weights of gate and up.
        down: Weights of down.
        exact_x: The input.
        x: The input on its grid.
        exact_added: Addend of the output of the whole ffn.
        added: The same on its grid; None for none.
    """
    gate_weight, up_weight = gate_up
    exact_product = silu(exact_x @ gate_weight.T) * (exact_x @ up_weight.T)
    exact = exact_product @ down.T
    gate, up = _rounded(x @ gate_weight.T, ranges.gate), _rounded(x @ up_weight.T, ranges.up)
    product = _rounded(_rounded(silu(gate), ranges.activated) * up, ranges.product)
    partial_range = ranges.partial or 0.0
    shards = [] if partial_range > SMALLEST_MAGNITUDE else [WORST]
    for quarters in SHARD_QUARTERS if not shards else ():
        width = max(CHANNEL_STEP, down.shape[1] * quarters // 4 // CHANNEL_STEP * CHANNEL_STEP)
        rest = exact_product[:, width:] @ down[:, width:].T
        partial = _rounded(product[:, :width] @ down[:, :width].T, partial_range)
        shards.append(_errors(partial + rest, exact))
    worst = RangeErrors(*(max(values) for values in zip(*map(structs.astuple, shards), strict=True)))
    whole = ranges.of_shard(whole=True)
    assert whole is not None
    y = _rounded(product @ down.T, ranges.outputs)
    y = y if added is None else _rounded(y + added, whole.outputs)
    return _errors(y, exact + exact_added), worst


def _rounded(values: Floats, magnitude: float) -> Floats:
    return on_grid(values, step_of(magnitude), 16)


def _errors(actual: Floats, expected: Floats) -> RangeErrors:
    found = linear_errors(actual, expected.astype(np.float64))
    values = [min(float(value), 1e9) if np.isfinite(value) else 1e9 for value in found]
    return RangeErrors(*values)
