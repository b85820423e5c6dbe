"""The token embedding: rows of a table, which :class:`heterollm.kernels.gpu.GpuLinear` packs and looks up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import GlueKernels, GpuLinear, Launch
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

STEPS: Final[Mapping[str, StepCategory]] = {"embedding": "embedding"}

TABLE_ROWS: Final = 4096
"""Rows of the table that is measured: the time of a look-up does not depend on their number."""


def exact_embedding(ids: NDArray[np.int32], table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows of some ids."""
    return table[ids]


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
