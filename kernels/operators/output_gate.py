"""The gate of a block's output, a member of its first linears, and a norm of each head before or behind."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu import (
    Argument,
    DeviceMemory,
    GlueKernels,
    Launch,
    RoundedInputs,
    Segments,
    SharedArray,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.gated_activation import exact_gated_activation
from heterollm.kernels.operators.norm import exact_rms_norm
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    Point,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import Join, WeightFormat

GATE: Final = "output gate"
NORM: Final = "gated norm"
STEPS: Final[Mapping[str, StepCategory]] = {GATE: "activation", NORM: "norm"}

EPSILON: Final = 1e-6
"""Of checks."""


def gate_output(
    on: GlueKernels,
    x: DeviceMemory,
    gates: Segments,
    member: int,
    out: SharedArray,
    *,
    heads: int,
    tokens: int,
    width: int | None = None,
    bias: Argument = None,
    norm: Argument = None,
    epsilon: float = 0.0,
    silu: bool = False,
    gate_first: bool = False,
    weights_by_head: bool = False,
    rounded: RoundedInputs | None = None,
) -> Iterator[Launch]:
    """Yield the launches of ``out = x * sigmoid(gate)``, or of ``norm(x) * silu(gate)`` for each head.

    Without a norm there may be silu, too; and the norm may be that of ``x * silu(gate)``.

    Args:
        on: The device's kernels.
        x: ``[tokens, width]`` in the activation type, which may be ``out``; float32 before a norm or silu.
        gates: Output of a group of linears.
        member: Place of the gate among its members, with a row for each element, or for each head.
        out: ``[tokens, width]`` in the activation type.
        heads: Heads of the width.
        tokens: Tokens of the pass.
        width: Elements of a token; by default the rows of the gate.
        bias: float32 of all members, of which that of the gate is added; or None.
        norm: float32 ``[width / heads]``, the weights of the norm; None without.
        epsilon: Added to the mean square in the norm.
        silu: Whether a gate without a norm is silu.
        gate_first: Whether the norm comes behind the gate.
        weights_by_head: Whether each head has weights of its own, ``[width]`` in all.
        rounded: Target of the int8 codes of ``out``, which a second kernel writes; None for no codes.
    """
    label = GATE if norm is None else NORM
    own, split = gates.rows[member], gates.splits[member]
    width = own if width is None else width
    by_head = own == heads != width
    if width % heads or not (by_head or own == width):
        raise KernelError(f"{label}: {width} columns are not {heads} heads.")
    out.require(tokens * width * on.item_bytes, f"{label} output")
    before, leading = sum(gates.rows[:member]), sum(gates.splits[:member])
    step = width // heads if weights_by_head else 0
    sizes = (sum(gates.rows), sum(gates.splits), before, leading, split, heads, width // heads, step)
    flags = {"SILU": silu or norm is not None, "NORMED": norm is not None, "GATE_FIRST": gate_first}
    flags["BY_HEAD"] = by_head
    kernel, _, items = on.kernel(
        ("gates.h", "output_gate.cl"),
        "output_gate",
        lambda _: {name: 1 for name, is_set in flags.items() if is_set},
        widths=(width // heads, *gates.rows, *gates.splits),
        segments=gates,
    )
    # Absent memory is never read, but OpenCL needs a valid argument.
    memory = (x, gates.a, gates.b, *(x if one is None else one for one in (bias, norm)), out)
    arguments = (*memory, *map(np.int32, (*sizes, bias is not None)), np.float32(epsilon))
    read_bytes = on.item_bytes * gates.reads + (4 if flags["SILU"] else on.item_bytes)
    work = functools.partial(pointwise_work, tokens * width, 12, read_bytes, on.item_bytes)
    yield on.runtime.launch(kernel, arguments, (heads * items, tokens), (items, 1), label, work=work)
    if rounded is not None:
        yield on.round_output(out, rounded, tokens, width)


@dataclass(frozen=True, slots=True)
class OutputGateCase:
    """The gate of an output, the last of two members; ``splits`` are their columns in the first segment."""

    tokens: int
    heads: int
    head_dim: int
    splits: tuple[int, ...] = (0, 0)
    join: Join = "concatenate"
    normed: bool = False
    by_head: bool = False
    biased: bool = False
    silu: bool = False
    gate_first: bool = False
    weights_by_head: bool = False
    rounds: WeightFormat | None = None

    def launches(self, on: GlueKernels, data: Data) -> Iterator[Launch]:
        tokens, width = self.tokens, self.heads * self.head_dim
        out = data.output("gated", tokens, width)
        return gate_output(
            on,
            (data.floats if self.normed or self.silu else data.inputs)("x", tokens, width),
            data.linear(tokens, (width, self.heads if self.by_head else width), self.splits, self.join),
            1,
            out,
            heads=self.heads,
            tokens=tokens,
            width=width,
            bias=data.floats("bias", 2 * width) if self.biased else None,
            norm=data.weights("norm", width if self.weights_by_head else self.head_dim)
            if self.normed
            else None,
            epsilon=EPSILON,
            silu=self.silu,
            gate_first=self.gate_first,
            weights_by_head=self.weights_by_head,
            rounded=data.int8(self.rounds, tokens, width),
        )

    def exact(self, data: Values) -> Exact:
        gate = (data["linear"] + data.get("bias", 0.0))[:, self.heads * self.head_dim :]
        gate = np.repeat(gate, self.head_dim, axis=1) if self.by_head else gate
        x = data["x"].astype(np.float64)
        if self.gate_first:
            x = exact_gated_activation(gate, x)
        if self.normed:
            weight = np.resize(data["norm"], gate.shape).reshape(-1, self.head_dim)
            x = exact_rms_norm(x.reshape(weight.shape), weight, EPSILON).reshape(gate.shape)
        if self.normed or self.silu:
            return {"gated": x if self.gate_first else exact_gated_activation(gate, x)}
        return {"gated": x / (1.0 + np.exp(-gate))}


_SPLIT: Final = OutputGateCase(5, 4, 40, (64, 96))
CHECKS: Final = (
    OperatorCheck(GATE, "5 tokens, split", _SPLIT, "gated"),
    OperatorCheck(GATE, "5 tokens, sum", replace(_SPLIT, join="sum"), "gated"),
    OperatorCheck(GATE, "5 tokens, of heads", replace(_SPLIT, by_head=True, splits=(64, 0)), "gated"),
    OperatorCheck(NORM, "5 tokens, split", replace(_SPLIT, normed=True), "gated"),
    OperatorCheck(
        *(NORM, "5 tokens, behind the gate"),
        replace(_SPLIT, normed=True, gate_first=True, weights_by_head=True),
        "gated",
    ),
)

MEASURED_DIMS: Final = {GATE: 256, NORM: 128}
"""Width of a head in published models."""


def _measured(at: Point, name: str) -> OutputGateCase:
    width, normed = at.sizes.hidden, name == NORM
    heads = max(1, width // MEASURED_DIMS[name])
    rounds = at.int8("delta_out" if normed else "o")
    return OutputGateCase(
        at.sizes.tokens, heads, width // heads, (width // 2,) * 2, normed=normed, rounds=rounds
    )


OUTPUT_GATE: Final = Timed(
    forms={Form(): "output_gate", Form(codes="int8"): "output_gate_int8"},
    case=functools.partial(_measured, name=GATE),
)
GATED_NORM: Final = Timed(
    forms={Form(): "gated_norm", Form(codes="int8"): "gated_norm_int8"},
    case=functools.partial(_measured, name=NORM),
)
