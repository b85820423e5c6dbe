"""The solver: the cheapest placement of every group, along the whole chain of groups.

What couples the groups is how each leaves the GPU's queue. Where the NPU ends last the queue is drained and
the next kernel pays for an empty one; where the GPU ends last it is fed and the join costs nothing. The chain
is solved exactly by dynamic programming over these two states; all layers share one placement for each group,
so what a layer hands to the next one is counted too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.errors import PlanError
from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.candidates import NpuLimits, candidates
from heterollm.solver.costs import Costs, State, joint_time_us
from heterollm.solver.objective import Objective
from heterollm.solver.plan import Placement

__all__ = ["Chain", "Choice", "Priced", "price", "priced_candidates", "solve_chain"]

STATES: Final[tuple[State, ...]] = ("fed", "drained")
Cuts: TypeAlias = Mapping[Group, Iterable[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Priced:
    """A placement and what it costs in one pass.

    Args:
        placement: The placement.
        time_us: From the end of the operators before it to where the next one can begin.
        gpu_us: How long the GPU is busy with it.
        npu_us: How long the NPU is.
        after: How it leaves the GPU's queue.
        cost: What the objective makes of it; what is compared.
    """

    placement: Placement
    time_us: float
    gpu_us: float
    npu_us: float
    after: State
    cost: float

    @property
    def is_cut(self) -> bool:
        """Whether both parts compute."""
        return self.gpu_us > 0.0 and self.npu_us > 0.0


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
    whole = spec.member_rows
    after: State = "fed"
    if not placement.npu_lengths:
        gpu_us, npu_us = costs.gpu_us(spec, whole, tokens), 0.0
        time_us = gpu_us
    else:
        form = placement.form or ""
        npu_us = sum(costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths)
        gpu_us = 0.0
        if placement.npu_rows != whole:
            rest = tuple(rows - taken for rows, taken in zip(whole, placement.npu_rows, strict=True))
            gpu_us = costs.gpu_us(spec, rest, tokens)
        elif sum(placement.npu_lengths) < tokens:
            gpu_us = costs.gpu_us(spec, whole, tokens - sum(placement.npu_lengths))
        # The GPU's part follows the operator before in its queue; the NPU waits to be told.
        begin_us = overheads.hand_over_us + overheads.map_us
        gpu_end, npu_end = gpu_us, begin_us + npu_us
        if gpu_us:
            gpu_end, npu_end = joint_time_us(gpu_us, begin_us + npu_us, costs.slowdown(spec, tokens))
        npu_end += overheads.map_us
        time_us = max(gpu_end, npu_end)
        after = "fed" if gpu_end > npu_end else "drained"
    if not math.isfinite(time_us):
        return None
    goal = objective or Objective()
    return Priced(placement, time_us, gpu_us, npu_us, after, goal.cost(time_us, gpu_us, npu_us))


def priced_candidates(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Iterable[tuple[int, ...]] | None = None,
) -> tuple[list[Priced], list[Priced]]:
    """Return the candidates that may be taken, and those that may not, each cheapest first.

    A cut that does not beat the best whole placement by the objective's margin may not be taken: a worthless
    split keeps the other processor busy for nothing.

    Raises:
        PlanError: None may be taken.
    """
    priced = [
        item
        for placement in candidates(spec, tokens, limits, cuts=cuts)
        if objective.allows_parts(placement, spec, tokens)
        and (item := price(spec, tokens, placement, costs, objective)) is not None
    ]
    if not priced:
        raise PlanError(
            f"No processor can compute {spec.group} at {tokens} tokens under the options given.",
            fix="Allow both parts, or choose another precision.",
        )
    priced.sort(key=lambda item: (item.cost, len(item.placement.npu_lengths)))
    allowed = [item for item in priced if objective.allows(item)]
    if not allowed:
        # Nothing keeps the cap on the GPU's share: what comes nearest.
        allowed = [min(priced, key=lambda item: item.gpu_us / item.time_us)]
    whole = min((item.cost for item in allowed if not item.is_cut), default=math.inf)
    bar = whole * (1.0 - objective.margin_fraction)
    taken = [item for item in allowed if not item.is_cut or item.cost <= bar]
    return taken, [item for item in priced if item not in taken]


def solve_chain(
    specs: Sequence[OpSpec],
    layers: int,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    cuts: Cuts | None = None,
) -> Chain:
    """Return the placements of a layer's groups that make all layers together cheapest.

    Args:
        specs: The groups of one layer, in the order in which a token meets them.
        layers: How many layers run them.
        tokens: Tokens of the pass.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small.
        cuts: By group, the NPU's rows that may be used; default every legal cut.

    Raises:
        PlanError: A group has no candidate.
    """
    found = [
        priced_candidates(spec, tokens, limits, costs, objective, None if cuts is None else cuts[spec.group])
        for spec in specs
    ]
    allowed = [taken for taken, _ in found]
    between_us = [costs.between_us(spec, tokens) for spec in specs]
    refill_us = costs.overheads.refill_us
    best: tuple[float, list[Priced]] | None = None
    for last in STATES:
        # The first layer finds a fed queue; each of the others finds what the layer before left.
        entry = {"fed": 1, "drained": 0}
        entry[last] += layers - 1
        entry_us = entry["drained"] * refill_us
        path = _cheapest_path(allowed, last, entry_us, layers, refill_us)
        if path is not None and (best is None or path[0] < best[0]):
            best = path
    assert best is not None  # every group has a candidate, and that ends in one of the states
    chosen = best[1]
    time_us = layers * (sum(between_us) + sum(item.time_us for item in chosen))
    drained = layers * sum(item.after == "drained" for item in chosen) - (chosen[-1].after == "drained")
    choices = tuple(
        Choice(spec, item, tuple(other for other in [*taken, *refused] if other is not item))
        for spec, item, (taken, refused) in zip(specs, chosen, found, strict=True)
    )
    return Chain(choices, time_us + drained * refill_us)


def _cheapest_path(
    allowed: Sequence[Sequence[Priced]], last: State, entry_us: float, layers: int, refill_us: float
) -> tuple[float, list[Priced]] | None:
    """Return the cheapest choice of candidates that ends in a state, and its cost over all layers.

    Args:
        allowed: Candidates of each group.
        last: State that the last group must leave.
        entry_us: What the first group pays over all layers for the state that it finds.
        layers: How often a layer is run.
        refill_us: What a group pays that finds a drained queue.
    """
    paths: dict[State, tuple[float, list[Priced]]] = {"fed": (entry_us, [])}
    for place, items in enumerate(allowed):
        # Of the candidates that leave one state only the first can be part of a cheapest chain.
        leaders = {state: next((item for item in items if item.after == state), None) for state in STATES}
        following: dict[State, tuple[float, list[Priced]]] = {}
        for before, (cost, path) in paths.items():
            wait = layers * refill_us if place and before == "drained" else 0.0
            for after, item in leaders.items():
                if item is None:
                    continue
                total = cost + wait + layers * item.cost
                if after not in following or total < following[after][0]:
                    following[after] = (total, [*path, item])
        paths = following
    return paths.get(last)
