"""The solver of one pass: the cheapest option of every group of a layer.

The cost of an option does not depend on other groups (:mod:`heterollm.solver.options`), so the cheapest chain
has the cheapest option of each group. Exceptions are passes of one token, where submissions count, and the
feed-forward network, which has two paths: two groups or one ffn. All layers share their placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from heterollm.kernels.ops import OpSpec
from heterollm.solver.candidates import NpuLimits, Splits
from heterollm.solver.costs import Costs
from heterollm.solver.ffn import entry_group, ffn_groups
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option, ffn_options, group_options, whole_cost_of
from heterollm.solver.submissions import LayerGroup, solve_layer, submits_singly


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen option of a group or ffn, and the others: allowed ones first."""

    spec: OpSpec
    chosen: Option
    others: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A solved pass of the layers of a kind.

    Args:
        choices: One for each operator of a layer, in order: the groups, or an ffn in place of some of them.
        time_us: Predicted time of all these layers, glue operators included.
        rejected_path: The path through the feed-forward network that costs more: the best ffn, or its
            groups; empty where there is one path only.
    """

    choices: tuple[Choice, ...]
    time_us: float
    rejected_path: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class SolvedPass:
    """A solved pass: a chain for each kind of layers."""

    chains: tuple[Chain, ...]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of one layer of each kind."""
        return tuple(choice for chain in self.chains for choice in chain.choices)

    @property
    def time_us(self) -> float:
        """Predicted time of all layers."""
        return sum(chain.time_us for chain in self.chains)


KnownOptions: TypeAlias = dict[str, tuple[list[Option], list[Option]]]
"""Allowed and rejected options of a pass by place, which several kinds of layers may share."""


def activation_cost(ffn: OpSpec, tokens: int, costs: Costs, objective: Objective) -> float:
    """Return the cost of the activation between the last two groups that an ffn stands for."""
    _, down = ffn_groups(ffn)
    activation_us = costs.between_us(down, tokens)
    return objective.cost(activation_us, activation_us, 0.0)


def between_parts_us(parts: Sequence[OpSpec], tokens: int, costs: Costs) -> float:
    """Return the time of the operators between the groups that an ffn stands for."""
    return sum(costs.between_us(spec, tokens) for spec in parts[1:])


def ffn_path_us(choices: Sequence[Choice], tokens: int, costs: Costs) -> float:
    """Return the time of ``choices``, a path through a feed-forward network, activation included."""
    between_us = between_parts_us([choice.spec for choice in choices], tokens, costs)
    return between_us + sum(choice.chosen.time_us for choice in choices)


def solve_chain(
    specs: Sequence[OpSpec],
    layers: int,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    splits: Mapping[str, Splits] | None = None,
    shortest: int | None = None,
    ffn: OpSpec | None = None,
    known: KnownOptions | None = None,
) -> Chain:
    """Return the options of the groups of layers that are alike with the least cost.

    Args:
        specs: The groups of one layer, in order.
        layers: Number of layers.
        tokens: Tokens of the pass.
        limits: Limits of the NPU; None without an NPU.
        costs: Times of both processors.
        objective: The objective.
        splits: By place, rows that the NPU may compute; default all aligned splits.
        shortest: Tokens of the shortest pass that the placements must also be legal for.
        ffn: The ffn as which some of the groups may be placed.
        known: Options of the pass so far; it is extended.

    Raises:
        PlanError: A group has no option.
    """
    known = {} if known is None else known

    def options_of(spec: OpSpec) -> _GroupOptions:
        if spec.place not in known:
            rows = None if splits is None else splits[spec.place]
            known[spec.place] = group_options(spec, tokens, limits, costs, objective, rows, shortest)
        return _GroupOptions(spec, costs.between_us(spec, tokens), *known[spec.place])

    groups = [options_of(spec) for spec in specs]
    as_groups = _cheapest_path(groups, tokens, costs, objective)
    if ffn is None:
        return Chain(as_groups.choices, layers * as_groups.time_us)
    place = next(place for place, spec in enumerate(specs) if spec.group == ffn.parts[0])
    parts = slice(place, place + len(ffn.parts))
    between_us = between_parts_us(specs[parts], tokens, costs)
    whole_cost = objective.cost(between_us, between_us, 0.0)
    whole_cost += sum(whole_cost_of(group.allowed) for group in groups[parts])
    # A plan of level tensor has no slices of an ffn.
    if ffn.place not in known:
        rows = None if splits is None else splits.get(ffn.place, {})
        known[ffn.place] = ffn_options(ffn, tokens, limits, costs, objective, rows, shortest, whole_cost)
    own = _GroupOptions(ffn, costs.between_us(entry_group(ffn), tokens), *known[ffn.place])
    if not own.allowed:
        rejected = (own.choice(own.rejected[0]),) if own.rejected else ()
        return Chain(as_groups.choices, layers * as_groups.time_us, rejected)
    as_ffn = _cheapest_path([*groups[:place], own, *groups[parts.stop :]], tokens, costs, objective)
    if as_groups.cost <= as_ffn.cost:
        rejected_path = as_ffn.choices[place : place + 1]
        return Chain(as_groups.choices, layers * as_groups.time_us, rejected_path)
    return Chain(as_ffn.choices, layers * as_ffn.time_us, as_groups.choices[parts])


@dataclass(frozen=True, slots=True)
class _GroupOptions:
    """The allowed and the rejected options of a group or ffn, and the time of the glue before it."""

    spec: OpSpec
    before_us: float
    allowed: Sequence[Option]
    rejected: Sequence[Option]

    def choice(self, chosen: Option) -> Choice:
        others = (item for item in (*self.allowed, *self.rejected) if item is not chosen)
        return Choice(self.spec, chosen, tuple(others))


@dataclass(frozen=True, slots=True)
class _Path:
    """The choices on one path through a layer.

    Args:
        choices: One for each of its operators.
        time_us: Time of the layer, glue operators included.
        cost: Number of operators over the cap on the GPU's share, then the cost.
    """

    choices: tuple[Choice, ...]
    time_us: float
    cost: tuple[int, float]

    @classmethod
    def of(cls, choices: Sequence[Choice], time_us: float, cost: float, objective: Objective) -> _Path:
        over = sum(not objective.allows(choice.chosen.gpu_us, choice.chosen.time_us) for choice in choices)
        return cls(tuple(choices), time_us, (over, cost))


def _cheapest_path(groups: Sequence[_GroupOptions], tokens: int, costs: Costs, objective: Objective) -> _Path:
    if submits_singly(tokens, costs.overheads):
        return _path_with_submissions(groups, costs, objective)
    between_us = sum(group.before_us for group in groups)
    choices = tuple(group.choice(group.allowed[0]) for group in groups)
    time_us = between_us + sum(choice.chosen.time_us for choice in choices)
    cost = objective.cost(between_us, between_us, 0.0) + sum(choice.chosen.cost for choice in choices)
    return _Path.of(choices, time_us, cost, objective)


def _path_with_submissions(groups: Sequence[_GroupOptions], costs: Costs, objective: Objective) -> _Path:
    """Return the cheapest choices where submissions count; other options have their costs in this chain."""
    layer = []
    for group in groups:
        # Only the chain shows whether a split beats one processor by the margin.
        more = [item for item in group.rejected if objective.allows(item.gpu_us, item.time_us)]
        items = sorted([*group.allowed, *more], key=lambda item: item.cost)
        layer.append(LayerGroup.of(group.spec, items, costs))
    found = solve_layer(layer, costs.overheads, objective)
    choices = []
    for number, (group, chosen) in enumerate(zip(groups, found.chosen, strict=True)):
        choice = group.choice(chosen)
        others = tuple(found.with_chain_cost(number, other) for other in choice.others)
        choices.append(replace(choice, others=others))
    return _Path.of(choices, found.time_us, found.cost, objective)
