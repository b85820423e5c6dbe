"""Laurel: two linears of low rank with a norm behind, beside attention (https://arxiv.org/abs/2411.07501)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.kernels.gpu import Argument, DeviceMemory, GlueKernels, GpuLinear, Launch, Segments
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.norm import exact_rms_norm, norm_output
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import WeightFormat

TITLE: Final = "laurel"
STEPS: Final[Mapping[str, StepCategory]] = {TITLE: "activation"}

MEASURED_RANK: Final = 64
"""Of all published models."""

EPSILON: Final = 1e-5
"""Of checks."""


def apply_laurel(
    on: GlueKernels,
    linears: Sequence[GpuLinear],
    post: Argument,
    x: DeviceMemory,
    inner: DeviceMemory,
    out: DeviceMemory,
    *,
    tokens: int,
    epsilon: float,
) -> tuple[Launch, Launch, Launch]:
    """Return the launches of ``out = norm(right(left(x)))``.

    Args:
        on: The device's kernels.
        linears: Left, to the rank, and right, back to the width; in the activation type.
        post: float32 ``[width]``, weights of the norm.
        x: ``[tokens, width]`` in the activation type.
        inner: What lies between the linears.
        out: ``[tokens, width]``.
        tokens: Rows.
        epsilon: Added to the mean square in the norm.
    """
    left, right = linears
    values = Segments(out, out, right.member_rows, (0,))
    return (
        left.launch(x, inner, tokens=tokens, label=TITLE),
        right.launch(inner, out, tokens=tokens, label=TITLE),
        norm_output(on, values, post, out, tokens=tokens, epsilon=epsilon),
    )


@dataclass(frozen=True, slots=True)
class LaurelCase:
    """A branch of some rank."""

    tokens: int
    width: int
    rank: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch, ...]:
        weight = WeightFormat(16 if on.item_bytes == 2 else 32)
        left, right = (
            GpuLinear.pack(on.runtime, [data.table(*shape, weight, name)], activation_dtype=data.dtype)
            for name, shape in (("left", (self.rank, self.width)), ("right", (self.width, self.rank)))
        )
        return apply_laurel(
            on,
            (left, right),
            data.weights("post", self.width),
            data.inputs("x", self.tokens, self.width),
            data.output("inner", self.tokens, self.rank),
            data.output("branch", self.tokens, self.width),
            tokens=self.tokens,
            epsilon=EPSILON,
        )

    def exact(self, data: Values) -> Exact:
        values = data["x"].astype(np.float64)
        for name in ("left", "right"):
            values = values @ data[name].astype(np.float64).T
        return {"branch": exact_rms_norm(values, data["post"], EPSILON)}


CHECKS: Final = (OperatorCheck(TITLE, "5 tokens", LaurelCase(5, 192, 32), "branch"),)

LAUREL: Final = Timed(
    forms={Form(): TITLE},
    case=lambda at: LaurelCase(at.sizes.tokens, at.sizes.hidden, MEASURED_RANK),
)
