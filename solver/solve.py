"""Plans of a whole model: resident slices first, then the placements of every length with those slices."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from heterollm.base import OptionError
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.model import LayerKind
from heterollm.solver.candidates import Rows, Splits, split_stride, splits_near
from heterollm.solver.chain import (
    Chain,
    KnownOptions,
    SolvedPass,
    activation_cost,
    ffn_path_us,
    solve_chain,
)
from heterollm.solver.costs import CachedCosts
from heterollm.solver.entries import annotated, in_order, merged, without_kinds
from heterollm.solver.ffn_slices import FeedForwardCosts
from heterollm.solver.kinds import PlacedKind
from heterollm.solver.options import (
    Option,
    OptionTable,
    all_options,
    check_any,
    restricted,
    rows_of,
    whole_cost_of,
    with_new_rows,
)
from heterollm.solver.packed import packed_slices
from heterollm.solver.placements import RejectedOption
from heterollm.solver.plan import Plan, model_shape
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.predict import layer_cost
from heterollm.solver.problem import PlanProblem
from heterollm.solver.slices import (
    Budget,
    GroupCosts,
    SliceChoices,
    Slices,
    choose_slices,
    pass_weights,
    slice_costs,
)
from heterollm.solver.words import describe

RANGE_TOKENS: Final = 32
"""Step of lengths, between standard lengths, for which resident slices are chosen."""

FEW_TOKENS: Final = 16
"""Decode passes up to this length, as in speculative decoding, have entries of their own."""

FAR_OVER: Final = 1.5
"""Factor on the budget above which only decode is refined before the search under the budget.

No exact bound is known: refined slices could still fit. Either way the plan keeps the budget and serves all
lengths. On four made-up devices passes are up to 1.7 % faster on the mean over eight lengths (a test allows
2 %) if everything is refined first, and a single one up to 2.7 %. Llama-3-8B within 3.5 to 20 GiB does not
change; within 1 GiB its decode is 7.7 % slower then (simulated).
"""

SHARED_LOSS_FRACTION: Final = 0.01
"""Largest extra cost of a placement that several lengths share."""


@dataclass(frozen=True, slots=True)
class Solver(PlanProblem):
    """A solver of plans for one model on one device."""

    def slices(self, weights: Mapping[int, float] | None = None) -> Slices:
        """Choose the resident slices.

        Args:
            weights: Weights of prompts by length, and of decode under length 1. By default each length weighs
                by its cost relative to its own optimum, so that long prompts do not outweigh short ones, and
                decode weighs as much as all prompts.

        Raises:
            OptionError: A length or a weight is out of range.
            PlanError: No processor can compute a group, or the budget does not hold a group that only the NPU
                may compute.
        """
        return self._solved(weights)[1]

    def plan(self, *, device: str, precision: str, weights: Mapping[int, float] | None = None) -> Plan:
        """Return the plan of every length; arguments and errors as :meth:`solve`."""
        return self.solve(device=device, precision=precision, weights=weights)[0]

    def solve(
        self, *, device: str, precision: str, weights: Mapping[int, float] | None = None
    ) -> tuple[Plan, Slices]:
        """Return the plan of every length and its resident slices.

        Args:
            device: Name of the device.
            precision: Precision of the linears.
            weights: As in :meth:`slices`.

        Raises:
            OptionError: As :meth:`slices`.
            PlanError: As :meth:`slices`.
        """
        if not isinstance(self.costs, CachedCosts):
            cached = replace(self, costs=CachedCosts(self.costs))
            return cached.solve(device=device, precision=precision, weights=weights)
        table, slices = self._solved(weights)
        entries: list[PlanEntry] = []
        for low, high in self._fine_ranges(slices):
            own = list(self._entries("prefill", low, high, slices, table))
            entries += own
            if low > FEW_TOKENS:
                # A decode pass of several tokens is planned like a prompt of as many.
                entries += [structs.replace(entry, phase="decode") for entry in own]
        for tokens in range(1, min(FEW_TOKENS, self.chunk_length) + 1):
            entries += self._entries("decode", tokens, tokens, slices, table)
        joined = tuple(merged(in_order(without_kinds(entries, self.kinds))))
        shape = model_shape(self.specs)
        return Plan(self.level, device, precision, shape, self.chunk_length, joined), slices

    def length(self, tokens: int, slices: Mapping[str, Splits] | None = None) -> SolvedPass:
        """Return the placements of the groups of every kind of layer at one exact length.

        Args:
            tokens: Tokens of the pass.
            slices: Resident slices, as of :meth:`slices`, or rows that may run at every standard length; by
                default all aligned splits.

        Raises:
            OptionError: There are no tokens.
            PlanError: No processor can compute a group.
        """
        return self._pass(tokens, tokens, slices)

    def _pass(self, tokens: int, shortest: int, slices: Mapping[str, Splits] | None) -> SolvedPass:
        return SolvedPass(self._chains(self.kinds, tokens, shortest, slices))

    def _chains(
        self, kinds: Iterable[PlacedKind], tokens: int, shortest: int, slices: Mapping[str, Splits] | None
    ) -> tuple[Chain, ...]:
        if tokens < 1:
            raise OptionError(f"A pass of {tokens} tokens cannot be planned.", fix="Give at least 1.")
        splits = None if self.limits is None else slices
        known: KnownOptions = {}
        return tuple(
            solve_chain(
                *(kind.specs, kind.count, tokens, self.limits, self.costs, self.objective),
                *(splits, shortest, kind.ffn),
                known=known,
            )
            for kind in kinds
        )

    def _solved(self, weights: Mapping[int, float] | None) -> tuple[OptionTable, Slices]:
        """Return all options that were costed, and the resident slices.

        The first search tries splits far apart. Where its graphs are far over the budget, only decode is
        refined: the search under the budget refines the rows of prompts itself.
        """
        places, ranges = self.places, list(self._ranges())
        alone = self._all_options(dict.fromkeys(places), ranges)
        for place, spec in places.items():
            for tokens, items in alone[place].items() if spec.then is None else ():
                check_any(spec, tokens, items)
        if self.limits is None:
            return alone, {place: {} for place in places}
        table = self.in_chain(alone)
        range_weights = self._range_weights(table, weights)
        slices = self._slices(table, range_weights)
        if not self._holds(slices, FAR_OVER):
            single = {group: {1: items[1]} for group, items in alone.items()}
            decode = {1: 1.0}
            first = self._slices(self.in_chain(single), decode)
            refined, own = self._refined(single, first, decode, [(1, 1)])
            alone = {group: {**items, 1: refined[group][1]} for group, items in alone.items()}
            slices = {group: {**rows, **own[group]} for group, rows in slices.items()}
        else:
            alone, slices = self._refined(alone, slices, range_weights, ranges)
        if not self._holds(slices):
            slices = packed_slices(self, alone, slices, weights)
        return self.in_chain(alone), slices

    def _refined(
        self,
        alone: OptionTable,
        slices: Slices,
        range_weights: Mapping[int, float],
        ranges: Sequence[tuple[int, int]],
    ) -> tuple[OptionTable, Slices]:
        """Return more options of some ranges of lengths, each by itself, and slices chosen among them.

        Each step halves the distance of splits and tries the neighbours of the chosen ones, until the
        distance is the alignment.
        """
        assert self.limits is not None
        groups, alignment = self.places, self.limits.row_alignment
        strides = {group: split_stride(spec, alignment) for group, spec in groups.items()}
        tried: dict[str, set[Rows]] = {group: {spec.member_rows, ()} for group, spec in groups.items()}
        while max(strides.values()) > 1:
            wide = [group for group, stride in strides.items() if stride > 1]
            strides = {group: -(-stride // 2) for group, stride in strides.items()}
            near: dict[str, list[Rows]] = {
                group: splits_near(groups[group], alignment, slices[group], strides[group]) for group in wide
            }
            known = rows_of(alone)
            new = {group: [own for own in rows if own not in known[group]] for group, rows in near.items()}
            alone = with_new_rows(alone, self._all_options(new, ranges))
            table = self.in_chain(alone)
            if table is not alone:
                # The best rows of a group in decode may change with the splits of others, and come back.
                for group, by_length in table.items():
                    tried[group] |= set(slices[group])
                    if by_length[1]:
                        tried[group].add(min(by_length[1], key=lambda item: item.cost).placement.npu_rows)
            rows = {group: {*tried[group], *slices[group], *near.get(group, ())} for group in groups}
            slices = self._slices(restricted(table, rows), range_weights)
        return alone, slices

    def _holds(self, slices: Slices, factor: float = 1.0) -> bool:
        """Return whether all graphs of resident slices fit into ``factor`` times the budget."""
        if not self.budget.memory.counts_graphs:
            return True
        size_bytes = sum(
            self.count(spec) * spec.graph_bytes(rows, lengths, self.budget.memory)
            for place, spec in self.places.items()
            for rows, lengths in slices.get(place, {}).items()
        )
        return self.budget.holds(int(size_bytes / factor))

    def _all_options(
        self, splits: Mapping[str, Splits | None], ranges: Iterable[tuple[int, int]]
    ) -> OptionTable:
        """Return the options of groups for the longest pass of each range; None is all aligned splits."""
        places, table = self.places, dict[str, dict[int, list[Option]]]()
        for place, rows in splits.items():
            own, is_head = table.setdefault(place, {}), places[place] == self.head
            for low, high in ranges:
                if is_head and low > self.head_rows:
                    break
                tokens = min(high, self.head_rows) if is_head else high
                own[tokens] = all_options(
                    places[place], tokens, self.limits, self.costs, self.objective, rows, low
                )
        return table

    def _range_weights(self, table: OptionTable, weights: Mapping[int, float] | None) -> dict[int, float]:
        """Return the weight of each range of lengths, by its last length."""
        if weights is None:
            return self._equal_weights(table)
        found: dict[int, float] = {}
        tops = [top for _, top in self._ranges()]
        for length, weight in pass_weights(weights, self.chunk_length).items():
            # Planned like the longest pass of its range.
            top = tops[bisect.bisect_left(tops, length)]
            found[top] = found.get(top, 0.0) + weight
        return found

    def _slices(self, table: OptionTable, weights: Mapping[int, float]) -> Slices:
        assert self.limits is not None
        groups = {
            place: GroupCosts(
                spec,
                self.count(spec),
                {length: slice_costs(items, self.objective) for length, items in table[place].items()},
                # The head computes one row in every pass; only passes with all logits have more.
                {1: sum(weights.values())} if spec == self.head else weights,
                self.objective.margin_fraction,
            )
            for place, spec in self.places.items()
        }
        choices: list[SliceChoices] = []
        for unit in self.units:
            first, *others = (groups[spec.place] for spec in unit)
            if not others:
                choices.append(first)
                continue
            down, ffn = others
            first_of = self.first_of(ffn.spec)
            activation = {
                length: activation_cost(ffn.spec, length, self.costs, self.objective)
                + (0.0 if first_of is None else whole_cost_of(table[first_of.place][length]))
                for length in ffn.costs
            }
            choices.append(FeedForwardCosts(first, down, ffn, activation))
        chosen = choose_slices(choices, Budget() if self.budget.memory.counts_graphs else self.budget)
        return {group: dict.fromkeys(rows, self.limits.standard_lengths) for group, rows in chosen.items()}

    def _equal_weights(self, table: OptionTable) -> dict[int, float]:
        """Return weights by which all lengths count alike, and decode as much as all others."""
        sums: dict[int, float] = {}
        for kind in self.kinds:
            totals: dict[int, float] = {}
            for spec in kind.specs:
                for length, items in table[spec.place].items():
                    costs = slice_costs(items, self.objective).values()
                    best = min(min(item.whole, item.split) for item in costs)
                    totals[length] = totals.get(length, 0.0) + best
            for length, total in totals.items():
                sums[length] = sums.get(length, 0.0) + kind.count * total
        weights = {length: 1.0 / total if total else 0.0 for length, total in sums.items()}
        weights[1] *= max(1, len(weights) - 1)
        return weights

    def _fine_ranges(self, slices: Slices) -> Iterator[tuple[int, int]]:
        """Yield the ranges of lengths that have entries of their own in prefill, shortest first."""
        short = {2**power for power in range(RANGE_TOKENS.bit_length())}
        tops = sorted({top for _, top in self._ranges()} | {top for top in short if top < self.chunk_length})
        for low, high in zip((1, *(top + 1 for top in tops)), tops, strict=False):
            yield from self._halves(low, high, slices)

    def _halves(self, low: int, high: int, slices: Slices) -> Iterator[tuple[int, int]]:
        """Yield a range of lengths, halved until shared placements lose little in each range."""
        shared = self._pass(high, low, slices)
        if low == high or all(self._loss(shared, end, slices) <= SHARED_LOSS_FRACTION for end in (low, high)):
            yield low, high
            return
        middle = (low + high) // 2
        yield from self._halves(low, middle, slices)
        yield from self._halves(middle + 1, high, slices)

    def _loss(self, shared: SolvedPass, tokens: int, slices: Slices) -> float:
        """Return the fraction by which shared placements cost more at a length than the length's own."""

        def cost(found: SolvedPass) -> float:
            total = 0.0
            for kind, chain in zip(self.kinds, found.chains, strict=True):
                decisions = [(choice.spec, choice.chosen.placement) for choice in chain.choices]
                total += kind.count * layer_cost(decisions, tokens, self.costs, self.objective)
            return total

        return cost(shared) / cost(self.length(tokens, slices)) - 1.0

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of lengths, both ends included, for which resident slices are chosen."""
        tops = set(range(RANGE_TOKENS, self.chunk_length, RANGE_TOKENS)) | {1, self.chunk_length}
        longest = max(self.limits.standard_lengths, default=1) if self.limits else 1
        if self.limits and longest > 1:
            # Past the longest graph a new range begins where its pipe gets one more.
            tops |= {*self.limits.standard_lengths, *range(longest, self.chunk_length, longest)}
        low = 1
        for top in sorted(top for top in tops if top <= self.chunk_length):
            yield low, top
            low = top + 1

    def _entries(
        self, phase: Phase, low: int, high: int, slices: Slices, table: OptionTable
    ) -> Iterator[PlanEntry]:
        found = self._pass(high, low, slices)
        for kind, chain in zip(self.kinds, found.chains, strict=True):
            rejected_path, layers = self._rejected_path(chain, high), kind.kind.layers
            begins = () if kind.ffn is None else (kind.ffn.group, kind.ffn.parts[0])
            for choice in chain.choices:
                group = choice.spec.group
                other = rejected_path if group in begins else None
                placement = annotated(choice, high, self._every(choice.spec, low, high, table), other)
                yield PlanEntry(phase, (low, high), (layers[0], layers[-1]), group, placement, kind.name)
        if low <= self.head_rows:
            rows = min(high, self.head_rows)
            head = PlacedKind(LayerKind("", (-1,), (self.head,)), (self.head,))
            choice = self._chains([head], rows, low, slices)[0].choices[0]
            reach = high if high < self.head_rows else self.chunk_length
            placement = annotated(choice, rows, self._every(self.head, low, rows, table))
            yield PlanEntry(phase, (low, reach), (-1, -1), "head", placement)

    def _every(self, spec: OpSpec, low: int, high: int, table: OptionTable) -> list[Option]:
        """Return the options of a range of lengths without regard to resident slices, cheapest first."""
        return table[spec.place].get(high) or all_options(
            spec, high, self.limits, self.costs, self.objective, None, min(low, high)
        )

    def _rejected_path(self, chain: Chain, tokens: int) -> RejectedOption | None:
        """Return the path through the feed-forward network that a chain does not take; None without one."""
        if not chain.rejected_path:
            return None
        time_us = ffn_path_us(chain.rejected_path, tokens, self.costs)
        words = [describe(choice.chosen.placement, choice.spec, tokens) for choice in chain.rejected_path]
        text = words[0] if len(words) == 1 else f"apart: {', then '.join(words)}"
        return RejectedOption(text, round(time_us, 3), of_ffn=True)
