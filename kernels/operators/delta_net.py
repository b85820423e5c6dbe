"""A gated delta net between its linears: the convolution of q, k and v, and the delta rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
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
STEPS: Final[Mapping[str, StepCategory]] = {CONVOLUTION: "activation", RULE: "attention"}

NORM_EPSILON: Final = 1e-6
"""Added to the sum of squares of a head of q or k, as in delta_conv.cl."""

LANES: Final = 4
"""Work-items of a GPU that share a row."""
CPU_BLOCK, GPU_BLOCK = 32, 1 << 30
"""Tokens for which a row stays in registers; those of a CPU have a q and k that its cache holds."""

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
        taps: float32 ``[taps, channels]``; the last row weighs the token itself.
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
    if inputs.rows != tuple(shape.members.values()) or state.values != shape.history + shape.matrix:
        raise KernelError(f"{CONVOLUTION}: members of {inputs.rows} rows are not those of {shape}.")
    mixed.require(tokens * shape.channels * on.item_bytes, f"{CONVOLUTION} output")
    factors.require(tokens * shape.factors * 4, f"{CONVOLUTION} factors")
    heads = shape.key_heads, shape.value_heads
    widths = (*heads, shape.key_dim, shape.value_dim, state.values, *inputs.splits)
    kernel, _, items = on.kernel(
        ("gates.h", "delta_conv.cl"),
        "delta_conv",
        lambda _: {"TAPS": shape.taps},
        widths=widths,
        segments=inputs,
    )
    sizes = (state.values, *inputs.splits, *heads, shape.key_dim, shape.value_dim)
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
    return on.runtime.launch(kernel, arguments, (units * items, tokens), (items, 1), CONVOLUTION, work=work)


def apply_delta_rule(
    on: GlueKernels,
    mixed: DeviceMemory,
    factors: DeviceMemory,
    out: DeviceMemory,
    state: RecurrentLayer,
    step: SharedArray,
    *,
    shape: DeltaShape,
    tokens: int,
    row_words: int = 0,
) -> Launch:
    """Return the launch of the delta rule, which also writes its state behind the pass.

    Args:
        on: The device's kernels.
        mixed: What :func:`convolve_inputs` writes.
        factors: Likewise.
        out: float32 ``[tokens, value_heads * value_dim]``.
        state: The state of the layer.
        step: The step buffer.
        shape: The sizes.
        tokens: Tokens of the pass.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
    """
    if shape.value_heads % shape.key_heads:
        raise KernelError(f"{RULE}: {shape.value_heads} heads cannot share {shape.key_heads} key heads.")
    if shape.key_dim > LARGEST_KEY_DIM:
        raise KernelError(f"{RULE}: heads of {shape.key_dim} keys; at most {LARGEST_KEY_DIM} are possible.")
    out.require(tokens * shape.value_columns * 4, f"{RULE} output")

    def lanes(style: KernelStyle) -> int:
        return 1 if style == "vector" else LANES

    def defines(style: KernelStyle) -> Defines:
        block = CPU_BLOCK if style == "vector" else GPU_BLOCK
        runs = -(-shape.key_dim // (8 * lanes(style)))
        group = shape.value_heads // shape.key_heads
        sizes: Defines = {"GROUP": group, "KEY_DIM": shape.key_dim, "RUNS": runs, "BLOCK": block}
        return sizes | ({"LANES": 1, "TWO_ROWS": 1} if style == "vector" else {"LANES": LANES})

    widths = (shape.key_dim, shape.channels, state.values, shape.history)
    kernel, style, items = on.kernel(("delta_rule.cl",), "delta_rule", defines, widths=widths)
    span = shape.value_dim if style == "vector" else 1
    sequences = tokens if row_words else 1
    size = round_up(shape.value_dim // span * lanes(style), items), shape.value_heads, sequences
    sizes = (state.values, shape.history, shape.value_heads, shape.value_dim, span)
    memory = (mixed, factors, out, state.memory, step)
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
    return on.runtime.launch(kernel, arguments, size, (items, 1, 1), RULE, work=work)


def exact_convolution(
    inputs: NDArray[np.float64], history: NDArray[np.float64], taps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return silu of the convolution of ``[tokens, channels]`` that follow the inputs ``history``."""
    tokens, count = len(inputs), len(taps)
    held = np.concatenate([history, inputs])
    return exact_gated_activation(sum(taps[tap] * held[tap : tap + tokens] for tap in range(count)))


def exact_factors(
    heads: tuple[NDArray[np.float64], NDArray[np.float64]],
    gates: tuple[NDArray[np.float64], NDArray[np.float64]],
    rates: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the factors of q and k ``[tokens, key_heads, key_dim]`` and of gates b and a."""
    (q, k), (b, a) = heads, gates
    decay = np.exp(rates[0] * np.logaddexp(0.0, a + rates[1]))
    query = ((np.square(q).sum(-1) + NORM_EPSILON) * q.shape[-1]) ** -0.5
    key = (np.square(k).sum(-1) + NORM_EPSILON) ** -0.5
    parts = (decay, 1.0 / (1.0 + np.exp(-b)), query, key, query * key * (q * k).sum(-1))
    return np.concatenate(parts, axis=1)


def exact_delta_rule(
    shape: DeltaShape, mixed: NDArray[np.float64], factors: NDArray[np.float64], matrix: NDArray[np.float64]
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
        error = beta[:, None] * (v.reshape(-1, shape.value_dim) - np.einsum("hvk,hk->hv", matrix, k))
        matrix = matrix + error[:, :, None] * k[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", matrix, q).ravel())
    return np.array(outputs), matrix


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """A delta net; ``splits`` are the columns of q, k, v, z, b and a that lie in the first segment."""

    tokens: int
    position: int
    shape: DeltaShape
    splits: tuple[int, ...] = (0,) * 6
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
        rates = np.stack([-np.geomspace(0.01, 16.0, heads), np.linspace(-3.0, 3.0, heads)])
        convolution = convolve_inputs(
            on,
            data.linear(tokens, tuple(shape.members.values()), self.splits, self.join),
            data.floats("taps", shape.taps, shape.channels),
            data.put("rates", rates.astype(np.float32)),
            *(mixed, factors, state, step),
            shape=shape,
            tokens=tokens,
        )
        out = data.output("out", tokens, shape.value_columns, dtype=np.float32)
        rule = apply_delta_rule(on, mixed, factors, out, state, step, shape=shape, tokens=tokens)
        return convolution, rule

    def exact(self, data: Values) -> Exact:
        shape, rows = self.shape, tuple(self.shape.members.values())
        *parts, _, b, a = np.split(data["linear"], np.cumsum(rows)[:-1], axis=1)
        inputs = np.concatenate(parts, axis=1)
        states = data["states"].astype(np.float64)
        read, written = (states[slot] for slot in SLOTS)
        history, matrix = np.split(read * (self.position > 0), [shape.history])
        history = history.reshape(-1, shape.channels)
        mixed = exact_convolution(inputs, history, data["taps"].astype(np.float64))
        q, k = np.split(mixed[:, : 2 * rows[0]].reshape(self.tokens, -1, shape.key_dim), 2, axis=1)
        factors = exact_factors((q, k), (b, a), data["rates"].astype(np.float64))
        matrix = matrix.reshape(shape.value_heads, shape.value_dim, shape.key_dim)
        out, matrix = exact_delta_rule(shape, mixed, factors, matrix)
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
CHECKS: Final = tuple(
    OperatorCheck("gated delta net", title, case, output)
    for title, case, output in (
        ("5 tokens at 7, split, q, k and v", _SPLIT, "mixed"),
        ("5 tokens at 7, split, factors", _SPLIT, "factors"),
        ("5 tokens at 7, split, output", _SPLIT, "out"),
        ("5 tokens at 7, split, state", _SPLIT, "states"),
        ("1 token, state", replace(_SPLIT, tokens=1), "states"),
        ("70 tokens at 0, output", DeltaCase(70, 0, _SHAPE), "out"),
        ("5 tokens, sum", replace(_SPLIT, join="sum"), "out"),
    )
)

MEASURED_DIM: Final = 128
MEASURED_KEY_HEADS: Final = 16
"""Of all published models; profiles know the width of the values alone."""


def _measured(at: Point, place: int) -> DeltaPart:
    heads = max(1, at.sizes.hidden // MEASURED_DIM)
    keys = math.gcd(heads, MEASURED_KEY_HEADS)
    shape = DeltaShape(keys, heads, MEASURED_DIM, at.sizes.hidden // heads, taps=4)
    splits = at.form.splits(*shape.members.values())
    return DeltaPart(DeltaCase(at.sizes.tokens, 1, shape, splits, at.form.join), place)


DELTA_CONVOLUTION: Final = Timed(
    forms={Form(): "delta_convolution", Form("sum"): "delta_convolution_sum"},
    case=functools.partial(_measured, place=0),
)
DELTA_RULE: Final = Timed(forms={Form(): "delta_rule"}, case=functools.partial(_measured, place=1))
