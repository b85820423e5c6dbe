"""The join of the logits' segments, their bias and their soft cap."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.gpu import Argument, GlueKernels, Launch, Segments, SharedArray, pointwise_work
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    StepCategory,
    Timed,
    Values,
    head_rows,
)
from heterollm.kernels.ops import Join

STEPS: Final[Mapping[str, StepCategory]] = {"join": "join", "head bias": "other", "soft cap": "other"}


def join_logits(
    on: GlueKernels, head: Segments, out: SharedArray, *, rows: int, label: str = "join"
) -> Launch:
    """Return the launch that joins the head's segments as float32 ``[rows, vocabulary]``."""
    if len(head.rows) != 1:
        raise KernelError(f"{label}: the head is one member, not {len(head.rows)}.")
    out.require(rows * head.rows[0] * 4, f"{label} output")
    sizes = (head.splits[0], head.rows[0])
    work = functools.partial(pointwise_work, rows * head.rows[0], 1, on.item_bytes * head.reads, 4)
    memory = (head.a, head.b, out)
    return on.pointwise("join_logits", memory, sizes, rows, label, work, segments=head)


def add_bias(
    on: GlueKernels,
    logits: SharedArray,
    bias: Argument,
    *,
    rows: int,
    vocabulary: int,
    label: str = "head bias",
) -> Launch:
    """Return the launch of ``logits += bias``, in place.

    Args:
        on: The device's kernels.
        logits: float32 ``[rows, vocabulary]``.
        bias: float32 ``[vocabulary]``.
        rows: Rows.
        vocabulary: Columns.
        label: Name for traces and errors.
    """
    logits.require(rows * vocabulary * 4, f"{label} logits")
    work = functools.partial(pointwise_work, rows * vocabulary, 1, 8, 4)
    return on.pointwise("add_bias", (logits, bias), (vocabulary,), rows, label, work)


def soft_cap(
    on: GlueKernels, logits: SharedArray, cap: float, *, rows: int, vocabulary: int, label: str = "soft cap"
) -> Launch:
    """Return the launch of ``logits = cap * tanh(logits / cap)``, in place.

    Args:
        on: The device's kernels.
        logits: float32 ``[rows, vocabulary]``.
        cap: Upper bound of the magnitude.
        rows: Rows.
        vocabulary: Columns.
        label: Name for traces and errors.
    """
    logits.require(rows * vocabulary * 4, f"{label} logits")
    work = functools.partial(pointwise_work, rows * vocabulary, 10, 4, 4)
    return on.pointwise("soft_cap", (logits, np.float32(cap)), (vocabulary,), rows, label, work)


def exact_soft_cap(x: NDArray[Any], cap: float) -> NDArray[np.float64]:
    """Return ``cap * tanh(x / cap)``."""
    result: NDArray[np.float64] = cap * np.tanh(x.astype(np.float64) / cap)
    return result


@dataclass(frozen=True, slots=True)
class JoinCase:
    """The join of the logits' segments as float32."""

    rows: int
    vocabulary: int
    split: int
    join: Join = "concatenate"

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        head = data.linear(self.rows, (self.vocabulary,), (self.split,), self.join)
        logits = data.output("logits", self.rows, self.vocabulary, dtype=np.float32)
        return (join_logits(on, head, logits, rows=self.rows),)

    def exact(self, data: Values) -> Exact:
        return {"logits": data["linear"]}


@dataclass(frozen=True, slots=True)
class SoftCapCase:
    """The cap of logits from far below it to far above it, in place."""

    rows: int
    vocabulary: int
    cap: float

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        logits = data.floats("logits", self.rows, self.vocabulary, scale=np.logspace(-5, 3, self.vocabulary))
        return (soft_cap(on, logits, self.cap, rows=self.rows, vocabulary=self.vocabulary),)

    def exact(self, data: Values) -> Exact:
        return {"logits": exact_soft_cap(data["logits"], self.cap)}


@dataclass(frozen=True, slots=True)
class AddBiasCase:
    """The bias of logits, in place."""

    rows: int
    vocabulary: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        logits, bias = data.floats("logits", self.rows, self.vocabulary), data.floats("bias", self.vocabulary)
        return (add_bias(on, logits, bias, rows=self.rows, vocabulary=self.vocabulary),)

    def exact(self, data: Values) -> Exact:
        return {"logits": data["logits"].astype(np.float64) + data["bias"]}


CHECKS: Final = (
    OperatorCheck("soft cap of the logits", "1 row", SoftCapCase(1, 300, 30.0), "logits"),
    OperatorCheck("join of the logits", "3 tokens, split", JoinCase(3, 300, 256), "logits"),
    OperatorCheck("join of the logits", "3 tokens, sum", JoinCase(3, 300, 256, "sum"), "logits"),
)


JOIN_LOGITS: Final = Timed(
    forms={Form(): "join_logits"},
    case=lambda at: JoinCase(at.sizes.tokens, at.sizes.hidden, at.sizes.hidden // 2),
    width=lambda model: model.vocab_size,
    points=head_rows,
)
