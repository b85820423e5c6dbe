"""Prices of a layer's experts on both processors, and costs of placements over loads of calibrated chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from heterollm.solver.costs import Slowdown
from heterollm.solver.experts.placements import ExpertsPlacement
from heterollm.solver.slice_sets import Floats, Ints


@dataclass(frozen=True, slots=True)
class ExpertPrices:
    """Times and sizes of a layer's experts on a device.

    Args:
        npu_us: Returns the time of the graph of so many experts at a capacity, its launch included;
            ``math.inf`` if the NPU cannot run it.
        gpu_us: ``[rows + 1]``, the GPU's time for one expert with so many rows, the first for none.
        capacities: Capacities of graphs, ascending.
        expert_bytes: Size of an expert's weights.
        row_bytes: Size of the input and the output of a row, if each graph has memory of its own for them.
        most_weight_bytes: Most bytes of weights in one graph; None without a limit.
        gpu_base_us: The GPU's time that no placement changes, while the NPU waits.
        hand_over_us: Time that the hand-over to the NPU and back takes, once for a layer.
        slowdown: Of both processors while both work.
        form: Form of the NPU graphs that has these times; None is the backend's first choice.
    """

    npu_us: Callable[[int, int], float]
    gpu_us: Floats
    capacities: tuple[int, ...]
    expert_bytes: int
    row_bytes: int = 0
    most_weight_bytes: int | None = None
    gpu_base_us: float = 0.0
    hand_over_us: float = 0.0
    slowdown: Slowdown = field(default_factory=Slowdown)
    form: str | None = None

    def most_experts(self, experts: int) -> int:
        """Return the most experts of one graph, of a layer's."""
        limit = self.most_weight_bytes
        return experts if limit is None else min(experts, limit // self.expert_bytes)

    def graph_bytes(self, experts: int, capacity: int) -> int:
        """Return the size of the graph of so many experts."""
        return experts * (self.expert_bytes + capacity * self.row_bytes)

    def joint_us(self, gpu_us: Floats, npu_us: Floats) -> Floats:
        """Return when both processors end, as :func:`joint_time_us` does, but for arrays."""
        gpu, npu = self.slowdown.gpu, self.slowdown.npu
        together = np.minimum(npu_us * npu, gpu_us * gpu)
        joint: Floats = npu_us + gpu_us - together * (1 / npu + 1 / gpu - 1)
        return joint


@dataclass(frozen=True, slots=True)
class ExpertsEstimate:
    """Costs of a placement over calibrated chunks.

    Args:
        time_us: Mean time of the layer's experts.
        npu_us: The NPU's time, hand-over included, the same in each chunk.
        gpu_us: Mean time of the GPU.
        padding_share: Share of the graphs' rows that have no token.
        overflow_share: Share of all rows that are beyond the capacity of an expert on the NPU.
        graph_bytes: Size of the graphs.
        graphs: Number of the graphs.
    """

    time_us: float
    npu_us: float
    gpu_us: float
    padding_share: float
    overflow_share: float
    graph_bytes: int
    graphs: int


def estimate_experts(placement: ExpertsPlacement, loads: Ints, prices: ExpertPrices) -> ExpertsEstimate:
    """Return the costs of a placement.

    Args:
        placement: Any placement of the layer's experts.
        loads: ``[chunks, experts]``, tokens of each expert in calibrated chunks.
        prices: Times and sizes.

    Raises:
        PlanError: The placement is not one of this layer.
    """
    capacities = np.array(placement.capacities(loads.shape[1]), np.int64)
    held = np.minimum(loads, capacities)
    beyond = np.where(capacities > 0, loads - held, 0)
    on_gpu = loads - held - (beyond if placement.overflow != "gpu" else 0)
    gpu_us = prices.gpu_us[on_gpu].sum(axis=1)
    graphs = [(len(own.experts), own.capacity) for own in placement.groups]
    npu_us = sum(prices.npu_us(*graph) for graph in graphs) + (prices.hand_over_us if graphs else 0.0)
    rows = int(capacities.sum()) * len(loads)
    return ExpertsEstimate(
        time_us=prices.gpu_base_us + float(prices.joint_us(gpu_us, np.full_like(gpu_us, npu_us)).mean()),
        npu_us=npu_us,
        gpu_us=prices.gpu_base_us + float(gpu_us.mean()),
        padding_share=1 - int(held.sum()) / rows if rows else 0.0,
        overflow_share=int(beyond.sum()) / max(1, int(loads.sum())),
        graph_bytes=sum(prices.graph_bytes(*graph) for graph in graphs),
        graphs=len(graphs),
    )
