"""The solver: the cheapest placement of every group, along the whole chain of groups.

A group's cheapest placement is its cheapest in the chain (:mod:`heterollm.solver.pricing`), so the chain is
the shortest path over its places, in which the feed-forward network has two ways: an edge for each of its two
groups, or one that spans both. All layers share one placement for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.blocks import apart
from heterollm.solver.candidates import Cuts, NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.objective import Objective
from heterollm.solver.pricing import Priced, priced_block, priced_candidates, whole_cost_of

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
        whole_cost = activation + sum(whole_cost_of(taken) for taken, _ in found[both])
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
