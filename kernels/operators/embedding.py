"""The token embedding, whose table :class:`heterollm.kernels.gpu.GpuLinear` packs, and learned positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import (
    Argument,
    DeviceMemory,
    GlueKernels,
    GpuLinear,
    Launch,
    SharedArray,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    Point,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import WeightFormat

STEPS: Final[Mapping[str, StepCategory]] = dict.fromkeys(
    ("embedding", "positions", "layer inputs"), "embedding"
)

TABLE_ROWS: Final = 4096
"""Rows of the table that is measured: the time of a look-up does not depend on their number."""


def exact_embedding(ids: NDArray[np.int32], table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows of some ids."""
    return table[ids]


def add_positions(
    on: GlueKernels,
    residual: DeviceMemory,
    table: Argument,
    step: SharedArray,
    *,
    hidden: int,
    tokens: int,
    label: str = "positions",
) -> Launch:
    """Return the launch that adds the row of its position to each token, in place.

    Args:
        on: The device's kernels.
        residual: float32 ``[tokens, hidden]``.
        table: float32 ``[context, hidden]``.
        step: The step buffer.
        hidden: Width of the model.
        tokens: Rows.
        label: Name for traces and errors.
    """
    residual.require(tokens * hidden * 4, f"{label} residual")
    work = functools.partial(pointwise_work, tokens * hidden, 1, 8, 4)
    return on.pointwise("add_positions", (residual, table, step), (hidden,), tokens, label, work)


@dataclass(frozen=True, slots=True)
class EmbeddingCase:
    """The rows of some ids."""

    weight: WeightFormat
    rows: int
    columns: int
    ids: tuple[int, ...]

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        table = data.table(self.rows, self.columns, self.weight)
        dtype = np.float16 if on.item_bytes == 2 else np.float32
        linear = GpuLinear.pack(on.runtime, [table], activation_dtype=dtype)
        out = data.output("embedded", len(self.ids), self.columns, dtype=np.float32)
        return (linear.embed_launch(data.put("ids", np.array(self.ids, np.int32)), out, count=len(self.ids)),)

    def exact(self, data: Values) -> Exact:
        return {"embedded": exact_embedding(data["ids"], data["table"])}


@dataclass(frozen=True, slots=True)
class PositionsCase:
    """The rows of positions from ``position`` on, added to some tokens."""

    tokens: int
    position: int
    hidden: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        residual = data.floats("residual", self.tokens, self.hidden)
        table = data.floats("positions", self.position + self.tokens, self.hidden)
        step = data.step(self.position, self.tokens)
        return (add_positions(on, residual, table, step, hidden=self.hidden, tokens=self.tokens),)

    def exact(self, data: Values) -> Exact:
        return {"residual": data["residual"].astype(np.float64) + data["positions"][self.position :]}


CHECKS: Final = tuple(
    OperatorCheck(
        f"embedding {weight}", "5 tokens", EmbeddingCase(weight, 70, 256, (0, 69, 64, 63, 7)), "embedded"
    )
    for weight in (
        WeightFormat(8, 32),
        WeightFormat(8, 32, symmetric=False, minimum=True),
        WeightFormat(16),
    )
)


def _measured(at: Point) -> EmbeddingCase:
    rows = min(TABLE_ROWS, at.model.vocab_size)
    ids = np.random.default_rng(0).integers(0, rows, at.sizes.tokens).tolist()
    return EmbeddingCase(at.model.head.weight, rows, at.sizes.hidden, tuple(ids))


EMBEDDING: Final = Timed(forms={Form(): "embedding"}, case=_measured, width=lambda model: model.hidden_size)
