"""The solver: the cheapest placement of every group, along the whole chain of groups.

What couples the groups is how each leaves the GPU's queue. Where the NPU ends last the queue is drained and
the next kernel pays for an empty one; where the GPU ends last it is fed and the join costs nothing. The chain
is solved exactly by dynamic programming over these two states; all layers share one placement for each group,
so what a layer hands to the next one is counted too, and what the last one hands to the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heterollm.errors import PlanError
from heterollm.kernels.ops import Group, OpSpec
from heterollm.profiler.workload import rest_rows
from heterollm.solver.candidates import Cuts, NpuLimits, candidates
from heterollm.solver.costs import Costs, Slowdown, State, joint_time_us
from heterollm.solver.objective import Objective
from heterollm.solver.plan import Placement

__all__ = ["Chain", "Choice", "Priced", "price", "priced_candidates", "solve_chain"]

STATES: Final[tuple[State, ...]] = ("fed", "drained")
ALONE: Final = Slowdown()


@dataclass(frozen=True, slots=True)
class Priced:
    """A placement and what it costs in one pass.

    Args:
        placement: The placement.
        time_us: From the end of the operators before it to where the next one can begin.
        gpu_us: How long the GPU is busy with it, slowed by the NPU where both run.
        npu_us: How long the NPU is.
        after: How it leaves the GPU's queue.
        cost: What the objective makes of it.
        settled_cost: The cost, and what the next operator pays for the queue that it finds; what is compared.
        is_cut: Whether both parts compute.
    """

    placement: Placement
    time_us: float
    gpu_us: float
    npu_us: float
    after: State
    cost: float
    settled_cost: float
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a group, and the other candidates: those that may be taken first."""

    spec: OpSpec
    chosen: Priced
    others: tuple[Priced, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A solved pass.

    Args:
        choices: One for each group of a layer, in order.
        time_us: Predicted time of all layers, with the operators between their groups.
    """

    choices: tuple[Choice, ...]
    time_us: float


def price(
    spec: OpSpec, tokens: int, placement: Placement, costs: Costs, objective: Objective | None = None
) -> Priced | None:
    """Return what a placement costs; None where a part cannot compute its share.

    Args:
        spec: The group.
        tokens: Tokens of the pass.
        placement: A legal placement.
        costs: Times of the parts.
        objective: What is to be small; time by default.
    """
    overheads = costs.overheads
    goal = objective or Objective()
    left_rows, left_tokens = _left_to_gpu(spec, tokens, placement)
    gpu_us = costs.gpu_us(spec, left_rows, left_tokens) if left_tokens else 0.0
    form = placement.form or ""
    npu_us = sum(costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths)
    if not math.isfinite(gpu_us + npu_us):
        return None
    after: State = "fed"
    time_us = gpu_us
    if placement.npu_lengths:
        # The GPU's part follows the operator before in its queue; the NPU waits to be told.
        begin_us = overheads.hand_over_us + overheads.map_us
        slowdown = costs.slowdown(spec, tokens) if left_tokens else ALONE
        gpu_us, npu_end = joint_time_us(gpu_us, npu_us, slowdown, begin_us)
        npu_us = npu_end - begin_us
        npu_end += overheads.map_us
        time_us = max(gpu_us, npu_end)
        after = "fed" if gpu_us > npu_end else "drained"
    cost = goal.cost(time_us, gpu_us, npu_us)
    settled_cost = cost + (refill_cost(costs, goal) if after == "drained" else 0.0)
    is_cut = bool(placement.npu_lengths and left_tokens)
    return Priced(placement, time_us, gpu_us, npu_us, after, cost, settled_cost, is_cut)


def refill_cost(costs: Costs, objective: Objective) -> float:
    """Return what an operator pays that finds a drained queue."""
    return objective.cost(costs.overheads.refill_us, 0.0, 0.0)


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
    split keeps the other processor busy for nothing. Its part in what the next operator pays counts.

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
    priced = [
        item
        for placement in candidates(spec, tokens, limits, cuts=cuts, shortest=shortest)
        if objective.allows_parts(placement, spec, tokens)
        and (item := price(spec, tokens, placement, costs, objective)) is not None
    ]
    if not priced:
        raise PlanError(
            f"No processor can compute {spec.group} at {tokens} tokens under the options given.",
            fix="Allow both parts, or choose another precision.",
        )
    priced.sort(key=lambda item: (item.settled_cost, len(item.placement.npu_lengths)))
    allowed = [item for item in priced if objective.allows(item)]
    if not allowed:
        # Nothing keeps the cap on the GPU's share: what comes nearest.
        allowed = [min(priced, key=lambda item: item.gpu_us / item.time_us if item.time_us else 0.0)]
    whole = min((item.settled_cost for item in allowed if not item.is_cut), default=math.inf)
    bar = whole * (1.0 - objective.margin_fraction)
    taken = [item for item in allowed if not item.is_cut or item.settled_cost <= bar]
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

    Raises:
        PlanError: A group has no candidate.
    """
    found = [
        priced_candidates(
            spec, tokens, limits, costs, objective, None if cuts is None else cuts[spec.group], shortest
        )
        for spec in specs
    ]
    allowed = [taken for taken, _ in found]
    between_us = [costs.between_us(spec, tokens) for spec in specs]
    refill = refill_cost(costs, objective)
    best: tuple[float, list[Priced]] | None = None
    for last in STATES:
        # The first layer finds a fed queue; the others, and the kernel behind them, what a layer left.
        left = layers * refill if last == "drained" else 0.0
        path = _cheapest_path(allowed, last, left, layers, refill)
        if path is not None and (best is None or path[0] < best[0]):
            best = path
    assert best is not None  # every group has a candidate, and that ends in one of the states
    chosen = best[1]
    time_us = layers * (sum(between_us) + sum(item.time_us for item in chosen))
    drained = layers * sum(item.after == "drained" for item in chosen)
    choices = tuple(
        Choice(spec, item, tuple(other for other in [*taken, *refused] if other is not item))
        for spec, item, (taken, refused) in zip(specs, chosen, found, strict=True)
    )
    return Chain(choices, time_us + drained * costs.overheads.refill_us)


def _cheapest_path(
    allowed: Sequence[Sequence[Priced]], last: State, entry_cost: float, layers: int, refill: float
) -> tuple[float, list[Priced]] | None:
    """Return the cheapest choice of candidates that ends in a state, and its cost over all layers.

    Args:
        allowed: Candidates of each group.
        last: State that the last group must leave.
        entry_cost: What is paid over all layers for the state that the last group leaves.
        layers: How often a layer is run.
        refill: What a group pays that finds a drained queue.
    """
    paths: dict[State, tuple[float, list[Priced]]] = {"fed": (entry_cost, [])}
    for place, items in enumerate(allowed):
        # Of the candidates that leave one state only the first can be part of a cheapest chain.
        leaders = {state: next((item for item in items if item.after == state), None) for state in STATES}
        following: dict[State, tuple[float, list[Priced]]] = {}
        for before, (cost, path) in paths.items():
            wait = layers * refill if place and before == "drained" else 0.0
            for after, item in leaders.items():
                if item is None:
                    continue
                total = cost + wait + layers * item.cost
                if after not in following or total < following[after][0]:
                    following[after] = (total, [*path, item])
        paths = following
    return paths.get(last)
