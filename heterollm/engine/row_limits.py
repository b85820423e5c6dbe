"""The rows of decode passes that several sessions share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from heterollm.engine.slots import SHORT_PASS
from heterollm.kernels.gpu import GpuRuntime, rows_alike
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelConfig, RecurrentSpec
from heterollm.solver import Plan


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Rows of a decode pass that several sessions share: a token of each, and guesses of some.

    Args:
        most: Rows at most.
        exact: Those of a pass in which each row has the bits of its session alone; 1 if others change them.
        takes_guesses: Whether a session may have several rows: it has no recurrent state.
    """

    most: int
    exact: int
    takes_guesses: bool = True

    @classmethod
    def of(cls, plan: Plan, specs: Sequence[OpSpec], runtime: GpuRuntime, config: ModelConfig) -> RowLimits:
        """Return the limits of a plan.

        The CPU's linears of few tokens add in the same order whatever their number, those for a matrix unit
        always. Those of a GPU do not, the NPU does not promise it, and a plan may place more rows elsewhere.
        """

        def on_gpu(rows: int) -> bool:
            placed = plan.operators("decode", rows, specs, rows=rows)
            return not any(placement.npu_lengths for _, placement in placed)

        most, traits = min(SHORT_PASS, plan.chunk_length), runtime.traits
        unit = {"is_cpu": traits.is_cpu, "has_matrix": traits.has_matrix}
        alike = min((rows_alike(spec.weight, **unit) for spec in specs), default=1)
        few = itertools.takewhile(on_gpu, range(1, min(most, alike) + 1))
        recurrent = any(isinstance(spec, RecurrentSpec) for _, spec in config.states)
        return cls(most, max(1, len(list(few))), takes_guesses=not recurrent)
