"""The value of each token that gates must exceed, which makes most of them zero (Gaussian top-k)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.gpu import Argument, DeviceMemory, GlueKernels, Launch, Segments, pointwise_work
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
from heterollm.kernels.ops import Join

TITLE: Final = "gate cutoff"
STEPS: Final[Mapping[str, StepCategory]] = {TITLE: "activation"}

MEASURED_DEVIATIONS: Final = 1.645
"""Standard deviations above the mean that 5 % of normal numbers exceed."""


def find_cutoffs(
    on: GlueKernels, gate_up: Segments, cutoffs: DeviceMemory, *, tokens: int, deviations: float
) -> Launch:
    """Return the launch of ``cutoffs[t] = mean + deviations * deviation`` of a token's gates.

    Args:
        on: The device's kernels.
        gate_up: Output of the group, gate and up of equal rows.
        cutoffs: float32 ``[tokens]``.
        tokens: Rows.
        deviations: Standard deviations above the mean.
    """
    if len(gate_up.rows) != 2 or len({*gate_up.rows}) != 1:
        raise KernelError(f"{TITLE}: members of {gate_up.rows} rows are not gate and up.")
    columns = gate_up.rows[0]
    cutoffs.require(tokens * 4, f"{TITLE} output")
    kernel, _, items = on.kernel(
        ("gate_cutoff.cl",), "gate_cutoff", widths=(columns, *gate_up.splits), segments=gate_up
    )
    arguments: tuple[Argument, ...] = (
        *(gate_up.a, gate_up.b, cutoffs),
        *map(np.int32, (*gate_up.splits, columns)),
        np.float32(deviations),
    )
    work = functools.partial(pointwise_work, tokens * columns, 4, on.item_bytes * gate_up.reads, 0)
    return on.runtime.launch(kernel, arguments, (tokens * items,), (items,), TITLE, work=work)


def exact_cutoffs(gates: NDArray[np.float64], deviations: float) -> NDArray[np.float64]:
    """Return the cutoff of each row of gates."""
    found: NDArray[np.float64] = gates.mean(axis=1) + deviations * gates.std(axis=1)
    return found


@dataclass(frozen=True, slots=True)
class CutoffCase:
    """Cutoffs of gates, whose columns and those of up in the first segment are the ``splits``."""

    tokens: int
    width: int
    splits: tuple[int, int]
    join: Join = "concatenate"
    deviations: float = MEASURED_DEVIATIONS

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        launch = find_cutoffs(
            on,
            data.linear(self.tokens, (self.width,) * 2, self.splits, self.join),
            data.output("cutoffs", self.tokens, dtype=np.float32),
            tokens=self.tokens,
            deviations=self.deviations,
        )
        return (launch,)

    def exact(self, data: Values) -> Exact:
        return {"cutoffs": exact_cutoffs(data["linear"][:, : self.width], self.deviations)}


CHECKS: Final = (
    OperatorCheck(TITLE, "5 tokens, split", CutoffCase(5, 160, (64, 64)), "cutoffs"),
    OperatorCheck(TITLE, "5 tokens, sum", CutoffCase(5, 160, (64, 64), "sum"), "cutoffs"),
)


def _measured(at: Point) -> CutoffCase:
    width = at.sizes.hidden
    gate, up = at.form.splits(width, width)
    return CutoffCase(at.sizes.tokens, width, (gate, up), at.form.join)


GATE_CUTOFF: Final = Timed(
    forms={Form(): "gate_cutoff", Form("sum"): "gate_cutoff_sum"},
    case=_measured,
)
