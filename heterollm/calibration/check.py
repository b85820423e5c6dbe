"""Checks ranges: computes operators on their 16-bit grids, in exact arithmetic, against floats."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.calibration.observer import Floats
from heterollm.calibration.records import FfnCalibration, LinearCalibration, RangeErrors
from heterollm.kernels.formats import (
    LARGEST_CODE,
    ZERO_CODE,
    LinearWeight,
    QuantizedTensor,
    linear_errors,
    reference_layers,
)
from heterollm.kernels.npu import FfnRanges, LinearRanges, step_of
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights

__all__ = ["RangeCheck", "silu"]

WORST = RangeErrors(1.0, 1.0, 1.0)
"""Errors of an operator that no range can serve: all of its values were 0."""

SMALLEST_MAGNITUDE = 1e-20


class RangeCheck:
    """Reads inputs of linears and checks the ranges that earlier windows gave.

    Args:
        weights: The model's weights.
        linears: The measured magnitudes, by layer and group.
        ffns: Those inside of ffns, by layer.
        tokens: Most tokens to check.
    """

    def __init__(
        self,
        weights: ModelWeights,
        linears: Mapping[tuple[int, Group], LinearCalibration],
        ffns: Mapping[int, FfnCalibration],
        tokens: int,
    ) -> None:
        self.linears = dict(linears)
        self.ffns = dict(ffns)
        self.checked_tokens = 0
        self._weights = weights
        self._tokens = tokens

    def read(self, spec: OpSpec, x: Floats, _y: Floats) -> None:
        """Check a group of linears, and with ``gate_up`` the ffn."""
        x = x[: self._tokens]
        self.checked_tokens = len(x)
        members = [_floats(member) for member in self._weights.linear(spec.layer, spec.group)]
        found = self.linears[spec.layer, spec.group]
        weight = np.concatenate(members)
        self.linears[spec.layer, spec.group] = _checked(found, weight, x)
        if spec.group == "gate_up" and spec.layer in self.ffns:
            (down,) = self._weights.linear(spec.layer, "down")
            self._check_ffn(spec.layer, members, _floats(down), x)

    def _check_ffn(self, layer: int, gate_up: list[Floats], down: Floats, x: Floats) -> None:
        first, last = self.linears[layer, "gate_up"], self.linears[layer, "down"]
        magnitudes = (first.inputs, *first.outputs, self.ffns[layer].activated, last.inputs, *last.outputs)
        errors = WORST
        if min(magnitudes) > SMALLEST_MAGNITUDE:
            errors = _ffn_errors(FfnRanges(*magnitudes), gate_up, down, x)
        self.ffns[layer] = structs.replace(self.ffns[layer], errors=errors)


def silu(gate: Floats) -> Floats:
    """Return the SiLU of values."""
    return reference_layers.gated_activation(gate, np.ones(1, np.float32)).astype(np.float32)


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
    y: Floats = _on_grid(values @ weight.T, grid.output_step) * factors[:, None]
    return y


def _ffn_errors(ranges: FfnRanges, gate_up: list[Floats], down: Floats, x: Floats) -> RangeErrors:
    gate_weight, up_weight = gate_up
    exact = (silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down.T
    x = _rounded(x, ranges.inputs)
    gate, up = _rounded(x @ gate_weight.T, ranges.gate), _rounded(x @ up_weight.T, ranges.up)
    product = _rounded(_rounded(silu(gate), ranges.activated) * up, ranges.product)
    return _errors(_rounded(product @ down.T, ranges.outputs), exact)


def _rounded(values: Floats, magnitude: float) -> Floats:
    return _on_grid(values, step_of(magnitude))


def _on_grid(values: Floats, step: float) -> Floats:
    codes: NDArray[np.float64] = np.clip(np.rint(values / step), -ZERO_CODE, LARGEST_CODE)
    return (codes * step).astype(np.float32)


def _errors(actual: Floats, expected: Floats) -> RangeErrors:
    found = linear_errors(actual, expected.astype(np.float64))
    values = [min(float(value), 1e9) if np.isfinite(value) else 1e9 for value in found]
    return RangeErrors(*values)


def _floats(weight: LinearWeight) -> Floats:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.astype(np.float32)
