"""The rows of a mixture's experts on both processors in a simulation, under assumed loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from heterollm.base import GIB
from heterollm.kernels.ops import GraphMemory, OpSpec, Phase
from heterollm.simulate.routing import AssumedRouting, Ints
from heterollm.solver import EXPERTS_ON_GPU, ExpertsPlacement, Plan, PlannedExperts


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """The rows of the experts in a prompt. A pair is a token and an expert that it chose, in some layer.

    Args:
        imbalance: Assumed largest load of an expert over the mean one.
        pairs: All pairs.
        npu_pairs: Pairs that the NPU computes.
        gpu_pairs: Pairs that the GPU computes.
        overflow_pairs: Pairs beyond the capacity of an expert on the NPU, which the GPU computes.
        dropped_pairs: Such pairs that nobody computes.
        npu_rows: Rows that the NPU's graphs compute, padding included.
        npu_experts: Share of the experts that the NPU has in the passes of the prompt.
        graphs_per_layer: NPU graphs of experts that a layer runs in a pass, in the mean.
        hand_overs: Passes of a layer that hand experts over to the NPU.
        npu_gib: Memory of the graphs of experts, for all lengths of the plan.
    """

    imbalance: float
    pairs: int
    npu_pairs: int
    gpu_pairs: int
    overflow_pairs: int
    dropped_pairs: int
    npu_rows: int
    npu_experts: float
    graphs_per_layer: float
    hand_overs: int
    npu_gib: float

    @property
    def padding_share(self) -> float:
        """Share of the graphs' rows without a token; 0 without graphs."""
        return 1 - self.npu_pairs / self.npu_rows if self.npu_rows else 0.0

    @property
    def overflow_share(self) -> float:
        """Share of all pairs that are beyond a capacity."""
        return (self.overflow_pairs + self.dropped_pairs) / self.pairs

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        shares = {"padding_share": self.padding_share, "overflow_share": self.overflow_share}
        return {"loads": "assumed", **asdict(self), **shares}


class AssumedExperts:
    """The experts of a model under a plan and assumed loads.

    Args:
        plan: The plan.
        specs: The experts of each layer.
        routing: The loads.
    """

    def __init__(self, plan: Plan, specs: Sequence[OpSpec], routing: AssumedRouting) -> None:
        self._plan, self._specs, self._routing = plan, specs, routing

    def rows_on_gpu(self, layer: int, phase: Phase, tokens: int, position: int) -> tuple[int, int]:
        """Return the experts that have rows on the GPU in a pass, and the rows.

        Args:
            layer: Decoder layer.
            phase: Phase of the pass.
            tokens: Tokens of the pass.
            position: Position of the first token.
        """
        placement = (
            self._plan.technique(PlannedExperts).of(tokens, layer) if phase == "prefill" else EXPERTS_ON_GPU
        )
        loads = self._routing.loads(layer, position, tokens)
        on_gpu = _split(loads, placement)[1]
        return int(np.count_nonzero(on_gpu)), int(on_gpu.sum())

    def use(self, chunks: Iterable[tuple[int, int]], memory: GraphMemory) -> ExpertUse:
        """Return the rows of a prompt.

        Args:
            chunks: First token and length of each pass.
            memory: How the memory of the NPU's graphs counts.
        """
        passes = [(spec.layer, first, tokens) for first, tokens in chunks for spec in self._specs]
        npu = gpu = beyond = dropped = rows = held = graphs = hand_overs = 0
        for layer, first, tokens in passes:
            placement = self._plan.technique(PlannedExperts).of(tokens, layer)
            on_npu, on_gpu, over = _split(self._routing.loads(layer, first, tokens), placement)
            npu, gpu = npu + int(on_npu.sum()), gpu + int(on_gpu.sum())
            if placement.overflow == "drop":
                dropped += int(over.sum())
            else:
                beyond += int(over.sum())
            rows += sum(len(group.experts) * group.capacity for group in placement.groups)
            held += sum(len(group.experts) for group in placement.groups)
            graphs += len(placement.groups)
            hand_overs += bool(placement.groups)
        return ExpertUse(
            imbalance=self._routing.imbalance,
            pairs=sum(tokens for _, _, tokens in passes) * self._routing.routing.chosen,
            npu_pairs=npu,
            gpu_pairs=gpu,
            overflow_pairs=beyond,
            dropped_pairs=dropped,
            npu_rows=rows,
            npu_experts=held / (len(passes) * self._routing.routing.experts),
            graphs_per_layer=graphs / len(passes),
            hand_overs=hand_overs,
            npu_gib=self._plan.technique(PlannedExperts).npu_bytes(self._specs, memory) / GIB,
        )


def _split(loads: Ints, placement: ExpertsPlacement) -> tuple[Ints, Ints, Ints]:
    """Return each expert's rows on the NPU, on the GPU, and those of them beyond a capacity.

    With overflow ``drop`` the rows beyond a capacity are nowhere.
    """
    capacities = np.array(placement.capacities(len(loads)), np.int64)
    on_npu = np.minimum(loads, capacities)
    over = np.where(capacities > 0, loads - on_npu, 0)
    return on_npu, loads - on_npu - (over if placement.overflow == "drop" else 0), over
