"""A gated delta net between its linears: the convolution of q, k and v, and the delta rule.

A state space of Mamba-2 is one that recalls nothing (:class:`DeltaShape`): its rule is a selective scan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu import (
    LARGEST_KEY_DIM,
    Argument,
    Defines,
    DeltaShape,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    KernelStyle,
    Launch,
    RecurrentLayer,
    Segments,
    SharedArray,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.gated_activation import exact_gated_activation
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    Point,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import Join

CONVOLUTION: Final = "delta convolution"
RULE: Final = "delta rule"
SPACE_CONVOLUTION: Final = "state convolution"
SCAN: Final = "selective scan"
STEPS: Final[Mapping[str, StepCategory]] = {
    **dict.fromkeys((CONVOLUTION, SPACE_CONVOLUTION), "activation"),
    **dict.fromkeys((RULE, SCAN), "attention"),
}

NORM_EPSILON: Final = 1e-6
"""Added to the sum of squares of a head of q or k, as in delta_conv.cl."""

LANES: Final = 4
"""Work-items of a GPU that share a row."""
CPU_BLOCK, GPU_BLOCK = 32, 1 << 30
"""Tokens for which a row stays in registers; those of a CPU have a q and k that its cache holds."""

LEAST_BY_COLUMN, COLUMN_BLOCK, COLUMN_ROWS = 16, 16, 256
"""Tokens of a sequence from which a CPU holds columns of the state, in blocks of tokens whose q and k its
cache holds, and the most rows of a head whose columns fit in a thread's stack."""

SLOTS: Final = (1, 2)
"""Slots of checks that are read and written, of three."""


def convolve_inputs(
    on: GlueKernels,
    inputs: Segments,
    taps: Argument,
    rates: Argument,
    mixed: DeviceMemory,
    factors: DeviceMemory,
    state: RecurrentLayer,
    step: SharedArray,
    *,
    shape: DeltaShape,
    tokens: int,
    row_words: int = 0,
) -> Launch:
    """Return the launch of the convolution, which also writes its state behind the pass.

    Args:
        on: The device's kernels.
        inputs: Output of the group, the members of :attr:`DeltaShape.members`.
        taps: float32 ``[taps, channels]``; the last row weighs the token itself. In a state space a row of
            biases follows.
        rates: float32 ``[2, value_heads]``: rates of decay, then shifts of a.
        mixed: q, k and v ``[tokens, channels]`` in the activation type, before norms of heads.
        factors: float32 ``[tokens, factors]``: decay and beta of value heads, then for key heads the factors
            that norm q and k, and the product of both.
        state: The state of the layer.
        step: The step buffer.
        shape: The sizes.
        tokens: Tokens of the pass.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
    """
    title = CONVOLUTION if shape.recalls else SPACE_CONVOLUTION
    if inputs.rows != tuple(shape.members.values()) or state.values != shape.history + shape.matrix:
        raise KernelError(f"{title}: members of {inputs.rows} rows are not those of {shape}.")
    mixed.require(tokens * shape.channels * on.item_bytes, f"{title} output")
    factors.require(tokens * shape.factors * 4, f"{title} factors")
    heads = shape.key_heads, shape.value_heads
    widths = (*heads, shape.key_dim, shape.value_dim, state.values, *inputs.splits)
    kernel, _, items = on.kernel(
        ("gates.h", "delta_conv.cl"),
        "delta_conv",
        lambda _: {"TAPS": shape.taps, **_rule(shape)},
        widths=widths,
        segments=inputs,
    )
    *splits, last = inputs.splits
    gates = (last,) if shape.recalls else (0, last)
    sizes = (state.values, *splits, *gates, *heads, shape.key_dim, shape.value_dim)
    memory = (inputs.a, inputs.b, mixed, factors, taps, rates, state.memory, step)
    arguments = (*memory, *map(np.int32, (row_words, *sizes)))
    elements, units = tokens * shape.channels, sum(heads) + 1
    work = functools.partial(
        GpuWork,
        "elementwise",
        flops=(2 * shape.taps + 12) * elements,
        read_bytes=elements * on.item_bytes * inputs.reads
        + 4 * (shape.history + shape.taps * shape.channels),
        written_bytes=elements * on.item_bytes + 4 * (shape.history + tokens * shape.factors),
    )
    return on.runtime.launch(kernel, arguments, (units * items, tokens), (items, 1), title, work=work)


def apply_delta_rule(
    on: GlueKernels,
    mixed: DeviceMemory,
    factors: DeviceMemory,
    rates: Argument,
    out: DeviceMemory,
    state: RecurrentLayer,
    step: SharedArray,
    *,
    shape: DeltaShape,
    tokens: int,
    row_words: int = 0,
) -> Launch:
    """Return the launch of the delta rule, or a selective scan, which also writes its state behind the pass.

    Args:
        on: The device's kernels.
        mixed: What :func:`convolve_inputs` writes.
        factors: Likewise.
        rates: As for :func:`convolve_inputs`; in a state space a third row has factors of values in outputs.
        out: float32 ``[tokens, value_heads * value_dim]``.
        state: The state of the layer.
        step: The step buffer.
        shape: The sizes.
        tokens: Tokens of the pass.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
    """
    title = RULE if shape.recalls else SCAN
    if shape.value_heads % shape.key_heads:
        raise KernelError(f"{title}: {shape.value_heads} heads cannot share {shape.key_heads} key heads.")
    if shape.key_dim > LARGEST_KEY_DIM:
        raise KernelError(f"{title}: heads of {shape.key_dim} keys; at most {LARGEST_KEY_DIM} are possible.")
    out.require(tokens * shape.value_columns * 4, f"{title} output")

    def lanes(style: KernelStyle) -> int:
        return 1 if style == "vector" else LANES

    def defines(style: KernelStyle) -> Defines:
        block = CPU_BLOCK if style == "vector" else GPU_BLOCK
        runs = -(-shape.key_dim // (8 * lanes(style)))
        group = shape.value_heads // shape.key_heads
        sizes: Defines = {"GROUP": group, "KEY_DIM": shape.key_dim, "RUNS": runs, "BLOCK": block}
        sizes |= _rule(shape)
        if style == "vector" and by_column:
            padded = round_up(shape.value_dim, 16)
            return sizes | {"BY_COLUMN": 1, "BLOCK": COLUMN_BLOCK, "ROWS_PADDED": padded}
        return sizes | ({"LANES": 1, "TWO_ROWS": 1} if style == "vector" else {"LANES": LANES})

    by_column = tokens >= LEAST_BY_COLUMN and not row_words and shape.value_dim <= COLUMN_ROWS
    widths = (shape.key_dim, shape.channels, state.values, shape.history)
    kernel, style, items = on.kernel(("delta_rule.cl",), "delta_rule", defines, widths=widths)
    span = shape.value_dim if style == "vector" else 1
    sequences = tokens if row_words else 1
    size = round_up(shape.value_dim // span * lanes(style), items), shape.value_heads, sequences
    sizes = (state.values, shape.history, shape.value_heads, shape.value_dim, span)
    memory = (mixed, factors, out, rates, state.memory, step)
    arguments = (*memory, *map(np.int32, (row_words, *sizes)))
    work = functools.partial(
        GpuWork,
        "attention",
        # Two sums over a row, its decay and the write.
        flops=7 * tokens * shape.matrix,
        read_bytes=4 * shape.matrix + tokens * (shape.channels * on.item_bytes + 4 * shape.factors),
        written_bytes=4 * (shape.matrix + tokens * shape.value_columns),
        tokens=tokens,
    )
    return on.runtime.launch(kernel, arguments, size, (items, 1, 1), title, work=work)


def _rule(shape: DeltaShape) -> Defines:
    return {} if shape.recalls else {"STATE_SPACE": 1}


def exact_convolution(
    inputs: NDArray[np.float64], history: NDArray[np.float64], taps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return silu of the convolution of ``[tokens, channels]`` that follow the inputs ``history``.

    Behind the taps there may be a row of biases.
    """
    tokens, count = len(inputs), len(history) + 1
    held, bias = np.concatenate([history, inputs]), sum(taps[count:])
    return exact_gated_activation(bias + sum(taps[tap] * held[tap : tap + tokens] for tap in range(count)))


def exact_factors(
    heads: tuple[NDArray[np.float64], NDArray[np.float64]],
    gates: Sequence[NDArray[np.float64]],
    rates: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the factors of q and k ``[tokens, key_heads, key_dim]`` and of gates b and a, or of a alone."""
    (q, k), (*b, a) = heads, gates
    step = np.logaddexp(0.0, a + rates[1])
    decay = np.exp(rates[0] * step)
    if not b:
        ones = np.ones(q.shape[:-1])
        return np.concatenate([decay, step, ones, ones, (q * k).sum(-1)], axis=1)
    query = ((np.square(q).sum(-1) + NORM_EPSILON) * q.shape[-1]) ** -0.5
    key = (np.square(k).sum(-1) + NORM_EPSILON) ** -0.5
    parts = (decay, 1.0 / (1.0 + np.exp(-b[0])), query, key, query * key * (q * k).sum(-1))
    return np.concatenate(parts, axis=1)


def exact_delta_rule(
    shape: DeltaShape,
    mixed: NDArray[np.float64],
    factors: NDArray[np.float64],
    rates: NDArray[np.float64],
    matrix: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outputs ``[tokens, value_columns]`` and the state behind them, shaped as ``matrix``."""
    keys, heads = shape.key_heads * shape.key_dim, (shape.key_heads, shape.key_dim)
    ends = np.cumsum([shape.value_heads] * 2 + [shape.key_heads] * 2)
    outputs = []
    for row, own in zip(mixed, factors, strict=True):
        decay, beta, query, key, _ = np.split(own, ends)
        q, k, v = np.split(row, [keys, 2 * keys])
        q, k = (
            np.repeat(part.reshape(heads) * factor[:, None], shape.value_heads // shape.key_heads, axis=0)
            for part, factor in ((q, query), (k, key))
        )
        matrix = decay[:, None, None] * matrix
        v = v.reshape(-1, shape.value_dim)
        error = beta[:, None] * (v - shape.recalls * np.einsum("hvk,hk->hv", matrix, k))
        matrix = matrix + error[:, :, None] * k[:, None, :]
        skipped = 0.0 if shape.recalls else rates[2][:, None] * v
        outputs.append((np.einsum("hvk,hk->hv", matrix, q) + skipped).ravel())
    return np.array(outputs), matrix


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """A delta net; ``splits`` are the columns of its members that lie in the first segment."""

    tokens: int
    position: int
    shape: DeltaShape
    splits: tuple[int, ...] = ()
    join: Join = "concatenate"

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch, Launch]:
        shape, tokens = self.shape, self.tokens
        mixed = data.output("mixed", tokens, shape.channels)
        factors = data.output("factors", tokens, shape.factors, dtype=np.float32)
        values = shape.history + shape.matrix
        state = RecurrentLayer(data.floats("states", 3, values), values)
        step = data.step(self.position, tokens, slots=SLOTS)
        # Heads decay at all speeds.
        heads = shape.value_heads
        rows = [-np.geomspace(0.01, 16.0, heads), np.linspace(-3.0, 3.0, heads)]
        if not shape.recalls:
            rows.append(np.linspace(1.0, -2.0, heads))
        rates, members = data.put("rates", np.array(rows, np.float32)), tuple(shape.members.values())
        convolution = convolve_inputs(
            on,
            data.linear(tokens, members, self.splits or (0,) * len(members), self.join),
            data.floats("taps", shape.taps + (not shape.recalls), shape.channels),
            *(rates, mixed, factors, state, step),
            shape=shape,
            tokens=tokens,
        )
        out = data.output("out", tokens, shape.value_columns, dtype=np.float32)
        rule = apply_delta_rule(on, mixed, factors, rates, out, state, step, shape=shape, tokens=tokens)
        return convolution, rule

    def exact(self, data: Values) -> Exact:
        shape, rows = self.shape, tuple(self.shape.members.values())
        members = np.split(data["linear"], np.cumsum(rows)[:-1], axis=1)
        inputs, rates = np.concatenate(members[:3], axis=1), data["rates"].astype(np.float64)
        states = data["states"].astype(np.float64)
        read, written = (states[slot] for slot in SLOTS)
        history, matrix = np.split(read * (self.position > 0), [shape.history])
        history = history.reshape(-1, shape.channels)
        mixed = exact_convolution(inputs, history, data["taps"].astype(np.float64))
        q, k = np.split(mixed[:, : 2 * rows[0]].reshape(self.tokens, -1, shape.key_dim), 2, axis=1)
        factors = exact_factors((q, k), members[4:], rates)
        matrix = matrix.reshape(shape.value_heads, shape.value_dim, shape.key_dim)
        out, matrix = exact_delta_rule(shape, mixed, factors, rates, matrix)
        history = np.concatenate([history, inputs])[self.tokens :]
        written[:] = np.concatenate([history.ravel(), matrix.ravel()])
        return {"mixed": mixed, "factors": factors, "out": out, "states": states}


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """One launch of a delta net, to measure."""

    case: DeltaCase
    place: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        return (self.case.launches(on, data)[self.place],)


_SHAPE: Final = DeltaShape(key_heads=2, value_heads=6, key_dim=16, value_dim=24, taps=4)
_SPLIT: Final = DeltaCase(5, 7, _SHAPE, (32, 0, 144, 96, 0, 6))
_SPACE: Final = DeltaCase(5, 7, replace(_SHAPE, recalls=False), (32, 0, 144, 96, 6))
CHECKS: Final = tuple(
    OperatorCheck("gated delta net" if case.shape.recalls else "state space", title, case, output)
    for title, case, output in (
        ("5 tokens at 7, split, q, k and v", _SPLIT, "mixed"),
        ("5 tokens at 7, split, factors", _SPLIT, "factors"),
        ("5 tokens at 7, split, output", _SPLIT, "out"),
        ("5 tokens at 7, split, state", _SPLIT, "states"),
        ("1 token, state", replace(_SPLIT, tokens=1), "states"),
        ("70 tokens at 0, output", DeltaCase(70, 0, _SHAPE), "out"),
        ("5 tokens, sum", replace(_SPLIT, join="sum"), "out"),
        ("5 tokens at 7, split, factors", _SPACE, "factors"),
        ("5 tokens at 7, split, output", _SPACE, "out"),
        ("5 tokens at 7, split, state", _SPACE, "states"),
    )
)

MEASURED_DIM: Final = 128
MEASURED_KEY_HEADS: Final = 16
"""Of all published delta nets; profiles know the width of the values alone."""

SPACE_DIM: Final = 64
"""Width of a head of values in published state spaces. Their states are as wide as keys of a delta net, but
for Falcon-H1's of twice that; groups of heads that share B and C are one or eight."""


def _measured(at: Point, place: int, recalls: bool = True) -> DeltaPart:
    heads = max(1, at.sizes.hidden // (MEASURED_DIM if recalls else SPACE_DIM))
    keys = math.gcd(heads, MEASURED_KEY_HEADS) if recalls else 1
    shape = DeltaShape(keys, heads, MEASURED_DIM, at.sizes.hidden // heads, taps=4, recalls=recalls)
    splits = at.form.splits(*shape.members.values())
    return DeltaPart(DeltaCase(at.sizes.tokens, 1, shape, splits, at.form.join), place)


DELTA_CONVOLUTION: Final = Timed(
    forms={Form(): "delta_convolution", Form("sum"): "delta_convolution_sum"},
    case=functools.partial(_measured, place=0),
)
DELTA_RULE: Final = Timed(forms={Form(): "delta_rule"}, case=functools.partial(_measured, place=1))
STATE_CONVOLUTION: Final = Timed(
    forms={Form(): "state_convolution", Form("sum"): "state_convolution_sum"},
    case=functools.partial(_measured, place=0, recalls=False),
)
SELECTIVE_SCAN: Final = Timed(
    forms={Form(): "selective_scan"}, case=functools.partial(_measured, place=1, recalls=False)
)
