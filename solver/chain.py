"""The solver: the cheapest placement of every group, along the whole chain of groups.

A group's cheapest placement is its cheapest in the chain (:mod:`heterollm.solver.pricing`), so the chain
costs the sum of the cheapest placements of its groups. The feed-forward network has two ways: a placement
for each of its two groups, or one that spans both; the cheaper counts. All layers share one placement for
each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.blocks import apart
from heterollm.solver.candidates import Cuts, NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.objective import Objective
from heterollm.solver.pricing import Priced, priced_block, priced_candidates, whole_cost_of
from heterollm.solver.submissions import Place, settled, submits_singly

__all__ = ["Chain", "Choice", "activation_cost", "network_us", "solve_chain"]


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


def activation_cost(block: OpSpec, tokens: int, costs: Costs, objective: Objective) -> float:
    """Return what the activation costs where the two groups of a block are placed on their own."""
    _, down = apart(block)
    activation_us = costs.between_us(down, tokens)
    return objective.cost(activation_us, activation_us, 0.0)


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
    offers = [
        _Offer(
            spec,
            *priced_candidates(
                spec, tokens, limits, costs, objective, None if cuts is None else cuts[spec.group], shortest
            ),
        )
        for spec in specs
    ]
    before_us = {spec.group: costs.between_us(spec, tokens) for spec in specs}
    as_groups = _way(offers, before_us, tokens, costs, objective)
    if block is None:
        return Chain(as_groups.choices, layers * as_groups.time_us)
    place = next(place for place, spec in enumerate(specs) if spec.group == "gate_up")
    both = slice(place, place + 2)
    whole_cost = objective.cost(before_us["down"], before_us["down"], 0.0)
    whole_cost += sum(whole_cost_of(offer.taken) for offer in offers[both])
    # A plan of level tensor has no slices of blocks.
    own_cuts = None if cuts is None else cuts.get(block.group, {})
    own = _Offer(
        block, *priced_block(block, tokens, limits, costs, objective, own_cuts, shortest, whole_cost)
    )
    if not own.taken:
        refused = (Choice(block, own.refused[0], tuple(own.refused[1:])),) if own.refused else ()
        return Chain(as_groups.choices, layers * as_groups.time_us, refused)
    before_us[block.group] = before_us["gate_up"]
    as_block = _way([*offers[:place], own, *offers[place + 2 :]], before_us, tokens, costs, objective)
    if as_groups.rank <= as_block.rank:
        passed_over = as_block.choices[place : place + 1]
        return Chain(as_groups.choices, layers * as_groups.time_us, passed_over)
    return Chain(as_block.choices, layers * as_block.time_us, as_groups.choices[both])


@dataclass(frozen=True, slots=True)
class _Offer:
    """The candidates of a group or a block: those that may be taken, and those that may not."""

    spec: OpSpec
    taken: Sequence[Priced]
    refused: Sequence[Priced]

    def choice(self, chosen: Priced) -> Choice:
        """Return one of them as chosen."""
        others = (item for item in (*self.taken, *self.refused) if item is not chosen)
        return Choice(self.spec, chosen, tuple(others))


@dataclass(frozen=True, slots=True)
class _Way:
    """What is chosen on one way through a layer.

    Args:
        choices: One for each of its groups.
        time_us: Of the layer, with the operators between its groups.
        rank: The smaller the better: groups that exceed the cap on the GPU's share, and the cost.
    """

    choices: tuple[Choice, ...]
    time_us: float
    rank: tuple[int, float]

    @classmethod
    def of(cls, choices: Sequence[Choice], time_us: float, cost: float, objective: Objective) -> _Way:
        """Return a way that takes so long and costs so much."""
        over = sum(not objective.allows(choice.chosen.gpu_us, choice.chosen.time_us) for choice in choices)
        return cls(tuple(choices), time_us, (over, cost))


def _way(
    offers: Sequence[_Offer],
    before_us: Mapping[Group, float],
    tokens: int,
    costs: Costs,
    objective: Objective,
) -> _Way:
    """Return the cheapest placements of a layer's groups.

    Args:
        offers: Their candidates.
        before_us: By group, the time of the operators before it.
        tokens: Tokens of the pass.
        costs: Times of the parts.
        objective: What is to be small.
    """
    if submits_singly(tokens, costs.overheads):
        return _settled_way(offers, before_us, costs, objective)
    between_us = sum(before_us[offer.spec.group] for offer in offers)
    choices = tuple(offer.choice(offer.taken[0]) for offer in offers)
    time_us = between_us + sum(choice.chosen.time_us for choice in choices)
    cost = objective.cost(between_us, between_us, 0.0) + sum(choice.chosen.cost for choice in choices)
    return _Way.of(choices, time_us, cost, objective)


def _settled_way(
    offers: Sequence[_Offer], before_us: Mapping[Group, float], costs: Costs, objective: Objective
) -> _Way:
    """Return the same where submitting may take longer than computing; the others' prices are beside it."""
    overheads = costs.overheads
    places = []
    for offer in offers:
        # Whether a cut beats the whole by the margin shows in the chain.
        more = [item for item in offer.refused if objective.allows(item.gpu_us, item.time_us)]
        items = sorted([*offer.taken, *more], key=lambda item: item.cost)
        places.append(Place.of(offer.spec, before_us[offer.spec.group], items, overheads))
    found = settled(places, overheads, objective)
    choices = []
    for number, (offer, chosen) in enumerate(zip(offers, found.chosen, strict=True)):
        choice = offer.choice(chosen)
        choices.append(replace(choice, others=tuple(found.beside(number, other) for other in choice.others)))
    return _Way.of(choices, found.time_us, found.cost, objective)
