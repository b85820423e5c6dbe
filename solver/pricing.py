"""What every placement of a group costs, and which of them may be taken.

What a group leaves behind is in its own price: where the NPU ends last, or shortly before the GPU, the kernel
behind it is submitted to a queue that has run empty, and a kernel of the GPU's follows every group whatever
comes next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from heterollm.base import PlanError
from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import rest_rows
from heterollm.solver.blocks import gpu_part_us
from heterollm.solver.candidates import Cuts, NpuLimits, candidates
from heterollm.solver.costs import Costs, Slowdown, joint_time_us
from heterollm.solver.objective import Objective
from heterollm.solver.placements import Placement

__all__ = [
    "UNSURE_FRACTION",
    "Priced",
    "check_any",
    "price",
    "priced_all",
    "priced_block",
    "priced_candidates",
    "whole_cost_of",
]

ALONE: Final = Slowdown()

SUBMISSIONS: Final = 2
"""Kernels to submit until one is long enough to keep the queue busy: a norm and what it feeds."""

UNSURE_FRACTION: Final = 0.02
"""By how much of its time an NPU graph may end later than predicted."""


class Priced(Struct, frozen=True, gc=False):
    """A placement and what it costs in one pass.

    Args:
        placement: The placement.
        time_us: From the end of the operators before it to where the next one can begin, which finds the
            GPU's queue in whatever state it was left.
        gpu_us: How long the GPU is busy with it, slowed by the NPU where both run.
        npu_us: How long the NPU is.
        cost: What the objective makes of it; what is compared.
        is_cut: Whether both parts compute.
    """

    placement: Placement
    time_us: float
    gpu_us: float
    npu_us: float
    cost: float
    is_cut: bool


def price(
    spec: OpSpec, tokens: int, placement: Placement, costs: Costs, objective: Objective | None = None
) -> Priced | None:
    """Return what a placement costs; None where a part cannot compute its share.

    Args:
        spec: The group or block.
        tokens: Tokens of the pass.
        placement: A legal placement.
        costs: Times of the parts.
        objective: What is to be small; time by default.
    """
    overheads = costs.overheads
    goal = objective or Objective()
    left_rows, left_tokens = _left_to_gpu(spec, tokens, placement)
    gpu_us = gpu_part_us(costs, spec, left_rows, left_tokens) if left_tokens else 0.0
    form = placement.form or ""
    npu_us = sum(costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths)
    if not math.isfinite(gpu_us + npu_us):
        return None
    time_us = gpu_us
    if placement.npu_lengths:
        # The GPU's part follows the operator before in its queue; the NPU waits to be told.
        hidden_us = max(0.0, -overheads.hand_over_us)
        begin_us = max(0.0, overheads.hand_over_us) + overheads.map_us
        together_us = 0.0
        if overheads.empties_queue and left_tokens:
            # Both wait: what the GPU computes hides nothing of the hand-over.
            together_us, begin_us, gpu_us = begin_us, 0.0, gpu_us + overheads.refill_us
        npu_us = max(0.0, npu_us - hidden_us)
        slowdown = costs.slowdown(spec, tokens) if left_tokens else ALONE
        gpu_us, npu_end = joint_time_us(gpu_us, npu_us, slowdown, begin_us)
        npu_us = npu_end - begin_us
        # The next kernel is submitted when the NPU ends; what the GPU computes until then hides that. A queue
        # that is surely still busy by then needs no refill.
        free_us = npu_end + overheads.map_us
        busy_us = SUBMISSIONS * overheads.submit_us + UNSURE_FRACTION * npu_us
        refill_us = overheads.refill_us if gpu_us < free_us + busy_us else 0.0
        time_us = together_us + max(gpu_us, free_us + refill_us)
        if overheads.return_us:
            both_us = together_us + max(gpu_us, free_us)
            time_us = both_us + overheads.return_us + overheads.refill_us
    cost = goal.cost(time_us, gpu_us, npu_us)
    return Priced(placement, time_us, gpu_us, npu_us, cost, bool(placement.npu_lengths and left_tokens))


def _left_to_gpu(spec: OpSpec, tokens: int, placement: Placement) -> tuple[tuple[int, ...], int]:
    """Return the GPU's rows of each member, and of how many tokens; 0 tokens where it has no part."""
    whole = spec.member_rows
    if not placement.npu_lengths:
        return whole, tokens
    if placement.npu_rows != whole:
        return rest_rows(whole, placement.npu_rows), tokens
    return whole, max(0, tokens - sum(placement.npu_lengths))


def priced_candidates(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Cuts | None = None,
    shortest: int | None = None,
) -> tuple[list[Priced], list[Priced]]:
    """Return the candidates that may be taken, and those that may not, each cheapest first.

    A cut that does not beat the best whole placement by the objective's margin may not be taken: a worthless
    split keeps the other processor busy for nothing.

    Args:
        spec: The group.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small.
        cuts: What the NPU may use; default every legal cut.
        shortest: Tokens of the shortest pass that each must be legal for as well; default ``tokens``.

    Raises:
        PlanError: None may be taken.
    """
    priced = priced_all(spec, tokens, limits, costs, objective, cuts, shortest)
    check_any(spec, tokens, priced)
    allowed = [item for item in priced if objective.allows(item.gpu_us, item.time_us)]
    if not allowed:
        # Nothing keeps the cap on the GPU's share: what comes nearest.
        allowed = [min(priced, key=lambda item: item.gpu_us / item.time_us if item.time_us else 0.0)]
    return _parted(priced, allowed, whole_cost_of(allowed), objective)


def priced_block(
    block: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Cuts | None = None,
    shortest: int | None = None,
    whole_cost: float = math.inf,
) -> tuple[list[Priced], list[Priced]]:
    """Return the candidates of a block as :func:`priced_candidates`, except that there may be none.

    Args:
        block: The block.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small; its cap on the GPU's share has no exception here.
        cuts: What the NPU may use; default every legal cut.
        shortest: As of :func:`priced_candidates`.
        whole_cost: What its two groups cost where neither is cut, the activation included: a cut must beat
            that by the margin, too.
    """
    priced = priced_all(block, tokens, limits, costs, objective, cuts, shortest)
    allowed = [item for item in priced if objective.allows(item.gpu_us, item.time_us)]
    return _parted(priced, allowed, min(whole_cost, whole_cost_of(allowed)), objective)


def check_any(spec: OpSpec, tokens: int, priced: Sequence[Priced]) -> None:
    """Refuse a group that nobody can compute.

    Raises:
        PlanError: It has no candidate.
    """
    if not priced:
        raise PlanError(
            f"No processor can compute {spec.group} at {tokens} tokens under the options given.",
            fix="Allow both parts, or choose another precision.",
        )


def priced_all(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Cuts | None,
    shortest: int | None,
) -> list[Priced]:
    """Return every candidate that the parts can and may compute, cheapest first.

    Args:
        spec: The group or block.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small.
        cuts: What the NPU may use; None is every cut that is tried at first.
        shortest: Tokens of the shortest pass that each must be legal for as well; None is ``tokens``.
    """
    priced = [
        item
        for placement in candidates(spec, tokens, limits, cuts=cuts, shortest=shortest)
        if objective.allows_parts(placement, spec, tokens)
        and (item := price(spec, tokens, placement, costs, objective)) is not None
    ]
    return sorted(priced, key=lambda item: (item.cost, len(item.placement.npu_lengths)))


def whole_cost_of(items: Sequence[Priced]) -> float:
    """Return what the cheapest placement on one part costs; infinite where there is none."""
    return min((item.cost for item in items if not item.is_cut), default=math.inf)


def _parted(
    priced: Sequence[Priced], allowed: Sequence[Priced], whole_cost: float, objective: Objective
) -> tuple[list[Priced], list[Priced]]:
    """Part the candidates into those that may be taken and the others."""
    bar = whole_cost * (1.0 - objective.margin_fraction)
    taken = [item for item in allowed if not item.is_cut or item.cost <= bar]
    kept = set(map(id, taken))
    return taken, [item for item in priced if id(item) not in kept]
