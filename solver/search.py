"""The solver: the cheapest placement of every group, along the whole chain of groups.

What a group leaves behind is in its own price: where the NPU ends last, or shortly before the GPU, the kernel
behind it is submitted to a queue that has run empty, and a kernel of the GPU's follows every group whatever
comes next. So a group's cheapest placement is its cheapest in the chain, and the chain is the shortest path
over its places, in which the feed-forward network has two ways: an edge for each of its two groups, or one
that spans both. All layers share one placement for each group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heterollm.errors import PlanError
from heterollm.kernels.ops import Group, OpSpec
from heterollm.profiler.workload import rest_rows
from heterollm.solver.blocks import apart, gpu_part_us
from heterollm.solver.candidates import Cuts, NpuLimits, candidates
from heterollm.solver.costs import Costs, Slowdown, joint_time_us
from heterollm.solver.objective import Objective
from heterollm.solver.plan import Placement

__all__ = [
    "Chain",
    "Choice",
    "Priced",
    "activation_cost",
    "check_any",
    "network_us",
    "price",
    "priced_all",
    "priced_block",
    "priced_candidates",
    "solve_chain",
]

ALONE: Final = Slowdown()

SUBMISSIONS: Final = 2
"""Kernels to submit until one is long enough to keep the queue busy: a norm and what it feeds."""

UNSURE_FRACTION: Final = 0.02
"""By how much of its time an NPU graph may end later than predicted."""


@dataclass(frozen=True, slots=True)
class Priced:
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


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a group or a block, and the other candidates: those that may be taken first."""

    spec: OpSpec
    chosen: Priced
    others: tuple[Priced, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A solved pass.

    Args:
        choices: One for each group of a layer, in order; where a block is taken, one for its two groups.
        time_us: Predicted time of all layers, with the operators between their groups.
        passed_over: Of the two ways through the feed-forward network the one that was not taken: the best
            block, or the two groups; empty where there was one way only.
    """

    choices: tuple[Choice, ...]
    time_us: float
    passed_over: tuple[Choice, ...] = ()


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


def activation_cost(block: OpSpec, tokens: int, costs: Costs, objective: Objective) -> float:
    """Return what the activation costs where the two groups of a block are placed on their own."""
    _, down = apart(block)
    activation_us = costs.between_us(down, tokens)
    return objective.cost(activation_us, activation_us, 0.0)


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
    allowed = [item for item in priced if objective.allows(item)]
    if not allowed:
        # Nothing keeps the cap on the GPU's share: what comes nearest.
        allowed = [min(priced, key=lambda item: item.gpu_us / item.time_us if item.time_us else 0.0)]
    return _parted(priced, allowed, _whole_cost(allowed), objective)


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
    allowed = [item for item in priced if objective.allows(item)]
    return _parted(priced, allowed, min(whole_cost, _whole_cost(allowed)), objective)


def network_us(choices: Sequence[Choice], tokens: int, costs: Costs) -> float:
    """Return the time of one way through a feed-forward network, the activation included.

    Args:
        choices: Those of a pass; only the network's count.
        tokens: Tokens of the pass.
        costs: Times of the parts.
    """
    own = [choice for choice in choices if choice.spec.group in ("gate_up", "down", "ffn")]
    between_us = sum(costs.between_us(choice.spec, tokens) for choice in own if choice.spec.group == "down")
    return between_us + sum(choice.chosen.time_us for choice in own)


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


def _whole_cost(items: Sequence[Priced]) -> float:
    return min((item.cost for item in items if not item.is_cut), default=math.inf)


def _parted(
    priced: Sequence[Priced], allowed: Sequence[Priced], whole_cost: float, objective: Objective
) -> tuple[list[Priced], list[Priced]]:
    """Part the candidates into those that may be taken and the others."""
    bar = whole_cost * (1.0 - objective.margin_fraction)
    taken = [item for item in allowed if not item.is_cut or item.cost <= bar]
    kept = set(map(id, taken))
    return taken, [item for item in priced if id(item) not in kept]


def solve_chain(
    specs: Sequence[OpSpec],
    layers: int,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Mapping[Group, Cuts] | None = None,
    shortest: int | None = None,
    block: OpSpec | None = None,
) -> Chain:
    """Return the placements of a layer's groups that make all layers together cheapest.

    Args:
        specs: The groups of one layer, in the order in which a token meets them.
        layers: How many layers run them.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small.
        cuts: By group, what the NPU may use; default every legal cut.
        shortest: Tokens of the shortest pass that the placements must be legal for as well.
        block: The block that two of the groups may be placed as.

    Raises:
        PlanError: A group has no candidate.
    """
    found = [
        priced_candidates(
            spec, tokens, limits, costs, objective, None if cuts is None else cuts[spec.group], shortest
        )
        for spec in specs
    ]
    choices = [
        Choice(spec, taken[0], (*taken[1:], *refused))
        for spec, (taken, refused) in zip(specs, found, strict=True)
    ]
    passed_over: list[Choice] = []
    if block is not None:
        place = next(place for place, spec in enumerate(specs) if spec.group == "gate_up")
        both = slice(place, place + 2)
        activation = activation_cost(block, tokens, costs, objective)
        whole_cost = activation + sum(_whole_cost(taken) for taken, _ in found[both])
        # Whoever chose the slices may have known of no blocks.
        own_cuts = None if cuts is None else cuts.get(block.group, {})
        taken, refused = priced_block(block, tokens, limits, costs, objective, own_cuts, shortest, whole_cost)
        choices[both], passed_over = _cheaper_way(block, choices[both], activation, taken, refused, objective)
    between_us = (
        costs.between_us(choice.spec if choice.spec.then is None else apart(choice.spec)[0], tokens)
        for choice in choices
    )
    time_us = layers * (sum(between_us) + sum(choice.chosen.time_us for choice in choices))
    return Chain(tuple(choices), time_us, tuple(passed_over))


def _cheaper_way(
    block: OpSpec,
    pair: list[Choice],
    activation: float,
    taken: Sequence[Priced],
    refused: Sequence[Priced],
    objective: Objective,
) -> tuple[list[Choice], list[Choice]]:
    """Return the better way through the feed-forward network, and the other.

    Args:
        block: The network as a block.
        pair: The choices of its two groups.
        activation: What the operator between the two costs.
        taken: Candidates of the block that may be taken.
        refused: Those that may not.
        objective: Its cap on the GPU's share decides before the cost.
    """
    if not taken:
        return pair, [Choice(block, refused[0], tuple(refused[1:]))] if refused else []
    as_block = [Choice(block, taken[0], (*taken[1:], *refused))]
    keeps_cap = all(objective.allows(choice.chosen) for choice in pair)
    if keeps_cap and activation + sum(choice.chosen.cost for choice in pair) <= taken[0].cost:
        return pair, as_block
    return as_block, pair
