"""Passes whose kernels are short: the chain with submissions by the control thread.

In a pass of one token the GPU's small kernels end before the control thread submits the next one, and it
submits none while it waits for the NPU. A split whose own time is shorter can then make the pass longer,
since the queue runs empty behind it. So the simulation here follows two clocks, of the control thread and of
the queue, and the solver takes the options that are cheapest for a layer in the middle of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from heterollm.kernels.ops import OpSpec
from heterollm.solver.costs import Costs, Overheads
from heterollm.solver.ffn import entry_group, ffn_groups
from heterollm.solver.objective import Objective
from heterollm.solver.options import UNSURE_FRACTION, Option
from heterollm.solver.placements import Placement

MOST_LAYERS: Final = 16
"""Layers to simulate until they repeat; without repetition the mean of the later half counts."""

EQUAL_US: Final = 1e-6

MOST_TRIED: Final = 12
"""Options of a group that are tried, cheapest first; of those on one processor more are."""

SWEEPS: Final = 4


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A group in the chain.

    Args:
        spec: The group or ffn.
        before_us: Time of each of the GPU's kernels before it, in order.
        items: Allowed options, cheapest first.
        kernels: Number of kernels of the GPU's shard: of an ffn, its groups and what lies between them.
    """

    spec: OpSpec
    before_us: Sequence[float]
    items: Sequence[Option]
    kernels: int

    @classmethod
    def of(cls, spec: OpSpec, items: Sequence[Option], costs: Costs) -> LayerGroup:
        """Return a group or ffn behind its glue operators."""
        if spec.then is None:
            return cls(spec, costs.kernels_us(spec), items, 1)
        gate_up, down = ffn_groups(spec)
        kernels = 2 + len(costs.kernels_us(down))
        kernels += 0 if spec.first is None else 1 + len(costs.kernels_us(gate_up))
        return cls(spec, costs.kernels_us(entry_group(spec)), items, kernels)


class _Timeline:
    """Clocks of the control thread and of the GPU's queue, in microseconds, and a count of refills."""

    def __init__(self, overheads: Overheads) -> None:
        self.host_us = 0.0
        self.queue_us = 0.0
        self._overheads = overheads
        self.refills = 0
        self._slack_us = 0.0
        self._npu_free_us = -math.inf

    def submit(self, durations_us: Sequence[float]) -> None:
        """Enqueue kernels."""
        overheads = self._overheads
        # The delay of a kernel in an empty queue counts from before its submission.
        refill_us = max(0.0, overheads.refill_us - overheads.submit_us)
        for duration_us in durations_us:
            self.host_us += overheads.submit_us
            begin_us, busy_us = self.queue_us, self.queue_us - self.host_us
            if busy_us <= 0.0:
                begin_us = self.host_us + refill_us
                self._slack_us = 0.0
                self.refills += 1
            elif busy_us < self._slack_us:
                begin_us += refill_us * (1.0 - busy_us / self._slack_us)
            self.queue_us = begin_us + duration_us

    def compute(self, group: LayerGroup, item: Option) -> None:
        """Run a group whose input is enqueued."""
        overheads, shard_us = self._overheads, [item.shard_us / group.kernels] * group.kernels
        if not item.placement.npu_lengths:
            self.submit(shard_us)
            return
        if item.write_us and group.spec.follows_norm:
            self.queue_us += item.write_us
        elif item.write_us:
            self.submit((item.write_us,))
        if item.shadow.find_us:
            self.submit((item.shadow.find_us,))
        input_us = self.queue_us
        if item.shard_us and not overheads.empties_queue:
            self.submit(shard_us)
        latency_us = overheads.hand_over_us + overheads.hidden_us
        self.host_us = max(self.host_us, input_us) + latency_us + overheads.map_us
        if item.shard_us and overheads.empties_queue:
            # The option's time includes the refill.
            self.queue_us = self.host_us + item.shard_us
        # The option's time assumes that the NPU was free for the whole start of the graph.
        hidden_us = min(overheads.hidden_us, self.host_us - self._npu_free_us)
        graph_us = item.npu_us + max(0.0, -overheads.hand_over_us) - hidden_us
        self._npu_free_us = self.host_us + graph_us
        self.host_us = self._npu_free_us + overheads.map_us
        # A queue that is predicted to be busy for less than this may be empty, more likely the shorter.
        self._slack_us = UNSURE_FRACTION * graph_us
        if overheads.return_us:
            self.host_us = max(self.host_us, self.queue_us) + overheads.return_us
        if item.read_us:
            self.submit((item.behind_us,))


def submits_singly(tokens: int, overheads: Overheads) -> bool:
    """Return whether submitting may take longer than computing in a pass of ``tokens``."""
    return tokens == 1 and not overheads.merges_launches and math.isfinite(overheads.submit_us)


def kernels_before_us(
    groups: Sequence[LayerGroup], placements: Sequence[Placement], overheads: Overheads
) -> list[Sequence[float]]:
    """Return the time of each of the GPU's kernels before each group of a layer in the middle of a pass.

    A linear layer that the GPU has whole may compute the operator behind it, a norm only for another one.
    """
    rows_from, specs = dict(overheads.endings), [group.spec for group in groups]
    own = [(spec, not one.npu_lengths) for spec, one in zip(specs, placements, strict=True)]
    found = []
    for group, (before, follows), (spec, is_whole) in zip(groups, [*own[-1:], *own], own, strict=False):
        least_rows = rows_from.get(spec.place, math.inf) if before.then is None else math.inf
        ended = follows and before.rows >= least_rows and (is_whole or not spec.follows_norm)
        found.append(group.before_us[1:] if ended else group.before_us)
    return found


def layer_us(
    groups: Sequence[LayerGroup],
    chosen: Sequence[Option],
    overheads: Overheads,
    mixture_us: Sequence[float] = (),
) -> float:
    """Return the time of a layer in the middle of a pass.

    Args:
        groups: Its groups in order.
        chosen: Their options.
        overheads: Times of submissions and syncs.
        mixture_us: Time of each of the GPU's kernels behind them, of a mixture of experts.
    """
    timeline = _Timeline(overheads)
    half_us = end_us = ahead_us = 0.0
    launched_us = kernels_before_us(groups, [item.placement for item in chosen], overheads)
    for number in range(MOST_LAYERS):
        for group, item, before_us in zip(groups, chosen, launched_us, strict=True):
            timeline.submit(before_us)
            timeline.compute(group, item)
        timeline.submit(mixture_us)
        if number == MOST_LAYERS // 2 - 1:
            half_us = timeline.host_us
        was_us, end_us = end_us, max(timeline.host_us, timeline.queue_us)
        was_ahead_us, ahead_us = ahead_us, timeline.queue_us - timeline.host_us
        # All later layers are like this one if it ends as it began, or if the queue only grows.
        if abs(ahead_us - was_ahead_us) < EQUAL_US or (ahead_us > was_ahead_us and not timeline.refills):
            return end_us - was_us
        timeline.refills = 0
    return (timeline.host_us - half_us) / (MOST_LAYERS - MOST_LAYERS // 2)


@dataclass(frozen=True, slots=True)
class SolvedLayer:
    """Options of a layer's groups with the time and cost of the layer, margins left out."""

    groups: tuple[LayerGroup, ...]
    chosen: tuple[Option, ...]
    time_us: float
    cost: float
    overheads: Overheads
    objective: Objective

    @classmethod
    def of(
        cls, groups: Sequence[LayerGroup], chosen: Sequence[Option], overheads: Overheads, goal: Objective
    ) -> SolvedLayer:
        """Return options of a layer with their time and cost."""
        time_us = layer_us(groups, chosen, overheads)
        gpu_us, npu_us = sum(item.gpu_us for item in chosen), sum(item.npu_us for item in chosen)
        unsure_us = time_us + sum(item.error_us for item in chosen if item.is_split)
        cost = goal.cost(unsure_us, gpu_us, npu_us)
        return cls(tuple(groups), tuple(chosen), time_us, cost, overheads, goal)

    def chosen_with(self, number: int, item: Option) -> tuple[Option, ...]:
        """Return the options with another one of one group."""
        return (*self.chosen[:number], item, *self.chosen[number + 1 :])

    def with_chain_cost(self, number: int, item: Option) -> Option:
        """Return an option of one group with its time and cost beside the chosen options of the others."""
        chosen, own = self.chosen_with(number, item), self.chosen[number]
        other = SolvedLayer.of(self.groups, chosen, self.overheads, self.objective)
        time_us = own.time_us + other.time_us - self.time_us
        return replace(item, time_us=time_us, cost=own.cost + other.cost - self.cost)


def solve_layer(groups: Sequence[LayerGroup], overheads: Overheads, objective: Objective) -> SolvedLayer:
    """Return options of a layer's groups that make it cheap, margins of splits included.

    Coordinate descent from three starts: each group in turn takes its best option beside the others, until
    none changes.
    """
    tried = [_tried(group.items) for group in groups]
    known: dict[tuple[int, ...], SolvedLayer] = {}

    def layer_of(chosen: Sequence[Option]) -> SolvedLayer:
        key = tuple(map(id, chosen))
        if key not in known:
            known[key] = SolvedLayer.of(groups, chosen, overheads, objective)
        return known[key]

    margins = [
        objective.margin_fraction * min((item.cost for item in items if not item.is_split), default=0.0)
        for items in tried
    ]

    def cost_with_margin(layer: SolvedLayer) -> float:
        splits = zip(layer.chosen, margins, strict=True)
        return layer.cost + sum(margin for item, margin in splits if item.is_split)

    found: list[SolvedLayer] = []
    for first in (_cheapest, _on_gpu, _on_npu):
        best = layer_of([min(items, key=first) for items in tried])
        for _ in range(SWEEPS):
            before = best
            for number, items in enumerate(tried):
                others = (layer_of(best.chosen_with(number, item)) for item in items)
                best = min((best, *others), key=cost_with_margin)
            if best is before:
                break
        found.append(best)
    return min(found, key=cost_with_margin)


def chain_costs(
    found: Mapping[str, Sequence[Option]],
    specs: Sequence[OpSpec],
    ffn: OpSpec | None,
    costs: Costs,
    objective: Objective,
) -> dict[str, list[Option]]:
    """Return the options of a pass of one token, each with its time and cost beside the best others.

    Args:
        found: Options by place.
        specs: The groups of one layer, in order.
        ffn: The ffn as which some of them may be placed.
        costs: Times of both processors.
        objective: The objective.
    """

    def solved(path: Sequence[OpSpec]) -> tuple[SolvedLayer, dict[str, list[Option]]]:
        groups = [LayerGroup.of(spec, _allowed(found[spec.place], objective), costs) for spec in path]
        best = solve_layer(groups, costs.overheads, objective)
        return best, {
            spec.place: [best.with_chain_cost(number, item) for item in found[spec.place]]
            for number, spec in enumerate(path)
        }

    as_groups, options = solved(specs)
    if ffn is None or not found[ffn.place]:
        return options
    number = next(number for number, spec in enumerate(specs) if spec.group == ffn.parts[0])
    end = number + len(ffn.parts)
    as_ffn, options_with_ffn = solved([*specs[:number], ffn, *specs[end:]])
    # Both paths are compared by the cost of the whole layer.
    between_us = sum(costs.between_us(spec, 1) for spec in specs[number + 1 : end])
    activation = objective.cost(between_us, between_us, 0.0)
    parts, own = as_groups.chosen[number:end], as_ffn.chosen[number]
    time_us = sum(item.time_us for item in parts) + between_us + as_ffn.time_us - as_groups.time_us
    cost = sum(item.cost for item in parts) + activation + as_ffn.cost - as_groups.cost
    of_ffn = [
        replace(item, time_us=item.time_us - own.time_us + time_us, cost=item.cost - own.cost + cost)
        for item in options_with_ffn[ffn.place]
    ]
    others = options_with_ffn if as_ffn.cost < as_groups.cost else {}
    return {**options, **others, ffn.place: of_ffn}


def _allowed(items: Sequence[Option], objective: Objective) -> list[Option]:
    """Return the options that keep the cap on the GPU's share, cheapest first; all where none does."""
    ordered = sorted(items, key=_cheapest)
    return [item for item in ordered if objective.allows(item.gpu_us, item.time_us)] or ordered


def _tried(items: Sequence[Option]) -> list[Option]:
    whole = [item for item in items[MOST_TRIED:] if not item.is_split]
    return [*items[:MOST_TRIED], *whole[:MOST_TRIED]]


def _cheapest(item: Option) -> float:
    return item.cost


def _on_gpu(item: Option) -> tuple[bool, float]:
    return bool(item.placement.npu_lengths), item.cost


def _on_npu(item: Option) -> tuple[bool, float]:
    return not item.placement.npu_lengths or item.is_split, item.cost
