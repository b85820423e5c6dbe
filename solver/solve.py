"""Plans of a whole model: the NPU's slices first, then every length exactly with those slices."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from heterollm.base import OptionError
from heterollm.kernels.ops import Group, OpSpec, Phase, ffn_specs
from heterollm.solver.candidates import Cuts, NpuLimits, Rows, cut_stride, cuts_near
from heterollm.solver.chain import Chain, Choice, activation_cost, network_us, solve_chain
from heterollm.solver.costs import Costs, RememberedCosts
from heterollm.solver.entries import in_order, merged, placed
from heterollm.solver.feed_forward import FeedForwardCosts
from heterollm.solver.objective import Objective
from heterollm.solver.placements import Alternative
from heterollm.solver.plan import Plan, model_shape
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.predict import layer_cost
from heterollm.solver.pricing import Priced, check_any, priced_all
from heterollm.solver.request import SOLVED_LEVELS, SolvedLevel
from heterollm.solver.rounds import PricedCandidates, joined, only
from heterollm.solver.slices import (
    Budget,
    GroupCosts,
    Holdings,
    Slices,
    choose_slices,
    pass_weights,
    slice_costs,
)
from heterollm.solver.submissions import priced_in_chain, submits_singly
from heterollm.solver.words import describe

__all__ = ["Solver"]

RANGE_TOKENS: Final = 32
"""Between standard lengths the NPU's slices are chosen for lengths in steps of this."""

FEW_TOKENS: Final = 16
"""Decode passes of up to so many tokens have entries of their own: speculative decoding checks as many."""

WORTH_FRACTION: Final = 0.01
"""Lengths share a placement as long as it costs none of them more than this."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Solves one model on one device.

    Args:
        specs: Every group of the model.
        limits: The NPU; None where there is none.
        costs: Times of the parts.
        objective: What is to be small.
        budget: What the NPU may hold.
        chunk_length: Longest pass; longer prompts run in chunks.
        head_rows: Most positions that the head computes at a time.
        level: What is placed as one.

    Raises:
        OptionError: A length is not positive, or there is no such level.
    """

    specs: tuple[OpSpec, ...]
    limits: NpuLimits | None
    costs: Costs
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    chunk_length: int = 1024
    head_rows: int = 32
    level: SolvedLevel = "tensor"

    def __post_init__(self) -> None:
        if self.chunk_length < 1 or self.head_rows < 1:
            raise OptionError(
                f"The chunk length is {self.chunk_length} and the head's rows {self.head_rows}.",
                fix="Both are at least 1.",
            )
        if self.level not in SOLVED_LEVELS:
            raise OptionError(
                f"The solver has no level {self.level!r:.40}.", fix=f"Choose {' or '.join(SOLVED_LEVELS)}."
            )

    @property
    def layer(self) -> tuple[OpSpec, ...]:
        """One layer's groups, in the order in which a token meets them."""
        first = min(spec.layer for spec in self.specs if spec.group != "head")
        return tuple(spec for spec in self.specs if spec.layer == first)

    @property
    def head(self) -> OpSpec:
        """The head."""
        return next(spec for spec in self.specs if spec.group == "head")

    @property
    def block(self) -> OpSpec | None:
        """One layer's feed-forward network as a block; None where the level or the NPU has none."""
        if self.level != "block" or self.limits is None:
            return None
        return next(iter(ffn_specs(self.layer)), None)

    @property
    def layers(self) -> int:
        """How many layers there are."""
        group = self.layer[0].group
        return sum(spec.group == group for spec in self.specs)

    def slices(self, weights: Mapping[int, float] | None = None) -> Slices:
        """Choose what the NPU holds.

        Args:
            weights: How often prompts of each length come, and decode under length 1. By default every length
                counts by what it loses on its own best, so that long prompts do not drown short ones, and
                decode as much as all prompts.

        Raises:
            OptionError: A length or a weight is out of range.
            PlanError: A group can be computed by nobody, or the budget does not hold what only the NPU may.
        """
        return self._solved(weights)[1]

    def plan(
        self,
        *,
        device: str,
        precision: str,
        weights: Mapping[int, float] | None = None,
    ) -> Plan:
        """Return the plan of every length.

        Args:
            device: Name of the device.
            precision: Precision of the linears.
            weights: As of :meth:`slices`.

        Raises:
            OptionError: As :meth:`slices`.
            PlanError: As :meth:`slices`.
        """
        return self.solve(device=device, precision=precision, weights=weights)[0]

    def solve(
        self,
        *,
        device: str,
        precision: str,
        weights: Mapping[int, float] | None = None,
    ) -> tuple[Plan, Slices]:
        """Return the plan of every length and what the NPU holds for it; as :meth:`plan`."""
        if not isinstance(self.costs, RememberedCosts):
            remembering = replace(self, costs=RememberedCosts(self.costs))
            return remembering.solve(device=device, precision=precision, weights=weights)
        found, slices = self._solved(weights)
        entries: list[PlanEntry] = []
        for low, high in self._fine_ranges(slices):
            own = list(self._entries("prefill", low, high, slices, found))
            entries += own
            if low > FEW_TOKENS:
                # A decode pass of several tokens is planned like a prompt of as many.
                entries += [structs.replace(entry, phase="decode") for entry in own]
        for tokens in range(1, min(FEW_TOKENS, self.chunk_length) + 1):
            entries += self._entries("decode", tokens, tokens, slices, found)
        joined, shape = tuple(merged(in_order(entries))), model_shape(self.specs)
        return Plan(self.level, device, precision, shape, self.chunk_length, joined), slices

    def length(self, tokens: int, slices: Mapping[Group, Cuts] | None = None) -> Chain:
        """Return the placements of the layers' groups at one exact length.

        Args:
            tokens: Tokens of the pass.
            slices: What the NPU holds: what :meth:`slices` returns, or rows that may run at every standard
                length; by default every cut may be used.

        Raises:
            OptionError: There are no tokens.
            PlanError: A group can be computed by nobody.
        """
        return self._chain(self.layer, self.layers, tokens, tokens, slices, self.block)

    def head_choice(self, rows: int, slices: Mapping[Group, Cuts] | None = None) -> Choice:
        """Return the placement of the head for some positions.

        Raises:
            OptionError: There are no positions.
            PlanError: Nobody can compute it.
        """
        return self._chain((self.head,), 1, rows, rows, slices).choices[0]

    def other_way(self, chain: Chain, tokens: int) -> Alternative | None:
        """Return the way through the feed-forward network that a chain does not take; None without one."""
        if not chain.passed_over:
            return None
        time_us = network_us(chain.passed_over, tokens, self.costs)
        words = [describe(choice.chosen.placement, choice.spec, tokens) for choice in chain.passed_over]
        text = words[0] if len(words) == 1 else f"apart: {', then '.join(words)}"
        return Alternative(text, round(time_us, 3), of_ffn=True)

    # -- pieces --------------------------------------------------------------------------------------

    def _chain(
        self,
        specs: Sequence[OpSpec],
        layers: int,
        tokens: int,
        shortest: int,
        slices: Mapping[Group, Cuts] | None,
        block: OpSpec | None = None,
    ) -> Chain:
        if tokens < 1:
            raise OptionError(f"A pass of {tokens} tokens cannot be planned.", fix="Give at least 1.")
        cuts = None if self.limits is None else slices
        return solve_chain(
            specs, layers, tokens, self.limits, self.costs, self.objective, cuts, shortest, block
        )

    def _solved(self, weights: Mapping[int, float] | None) -> tuple[PricedCandidates, Slices]:
        """Return every candidate that was priced, and what the NPU holds.

        Where a group has more positions of a cut than are tried at once, those halfway between what was
        chosen and what was not are tried beside it, until they lie on the alignment.
        """
        costs = self.costs
        groups = {spec.group: spec for spec in (*self.layer, self.head, self.block) if spec is not None}
        found = self._every_candidate(costs, dict.fromkeys(groups))
        for spec in (*self.layer, self.head):
            for tokens, items in found[spec.group].items():
                check_any(spec, tokens, items)
        if self.limits is None:
            return found, {group: {} for group in groups}
        alignment = self.limits.row_alignment
        alone, found = found, self._in_chain(found, costs)
        counts = self._counts(found, weights)
        slices = self._slices(found, counts)
        strides = {group: cut_stride(spec, alignment) for group, spec in groups.items()}
        held: dict[Group, set[Rows]] = {group: {spec.member_rows, ()} for group, spec in groups.items()}
        while max(strides.values()) > 1:
            wide = [group for group, stride in strides.items() if stride > 1]
            strides = {group: -(-stride // 2) for group, stride in strides.items()}
            near: dict[Group, list[Rows]] = {
                group: cuts_near(groups[group], alignment, slices[group], strides[group]) for group in wide
            }
            alone = joined(alone, self._every_candidate(costs, near))
            found = self._in_chain(alone, costs)
            if found is not alone:
                # What decode takes of a group may change with the cuts of others, and come back.
                for group, by_length in found.items():
                    held[group] |= set(slices[group])
                    if by_length[1]:
                        held[group].add(min(by_length[1], key=lambda item: item.cost).placement.npu_rows)
            tried = {group: {*held[group], *slices[group], *near.get(group, ())} for group in groups}
            slices = self._slices(only(found, tried), counts)
        return found, slices

    def _every_candidate(self, costs: Costs, cuts: Mapping[Group, Cuts | None]) -> PricedCandidates:
        """Return candidates of some groups in each range of lengths, by its last one, cheapest first.

        Args:
            costs: Times of the parts.
            cuts: By group, what the NPU may use; None is every cut that is tried at first.
        """
        found: dict[Group, dict[int, list[Priced]]] = {group: {} for group in cuts}
        block = self.block
        for low, high in self._ranges():
            groups = [(spec, high) for spec in self.layer if spec.group in cuts]
            if low <= self.head_rows and self.head.group in cuts:
                groups.append((self.head, min(high, self.head_rows)))
            if block is not None and block.group in cuts:
                groups.append((block, high))
            for spec, tokens in groups:
                found[spec.group][tokens] = priced_all(
                    spec, tokens, self.limits, costs, self.objective, cuts[spec.group], low
                )
        return found

    def _in_chain(self, found: PricedCandidates, costs: Costs) -> PricedCandidates:
        """Return candidates as a chain of them is priced in a pass of one token."""
        if not submits_singly(1, costs.overheads):
            return found
        groups = (*self.layer, *(() if self.block is None else (self.block,)))
        decode = {spec.group: found[spec.group][1] for spec in groups}
        priced = priced_in_chain(decode, self.layer, self.block, costs, self.objective)
        return {
            group: {**items, 1: priced[group]} if group in priced else items for group, items in found.items()
        }

    def _counts(self, found: PricedCandidates, weights: Mapping[int, float] | None) -> dict[int, float]:
        """Return how much each range of lengths counts, by its last one."""
        if weights is None:
            return self._equal_weights(found)
        counts: dict[int, float] = {}
        tops = [top for _, top in self._ranges()]
        for length, weight in pass_weights(weights, self.chunk_length).items():
            # Planned like the longest pass of its range.
            top = tops[bisect.bisect_left(tops, length)]
            counts[top] = counts.get(top, 0.0) + weight
        return counts

    def _slices(self, found: PricedCandidates, counts: Mapping[int, float]) -> Slices:
        assert self.limits is not None
        tables = {
            group: {length: slice_costs(items, self.objective) for length, items in by_length.items()}
            for group, by_length in found.items()
        }
        head, own_block = tables.pop("head"), tables.pop("ffn", None)
        margin = self.objective.margin_fraction
        groups = {
            spec.group: GroupCosts(spec, self.layers, tables[spec.group], counts, margin)
            for spec in self.layer
        }
        held: list[Holdings] = []
        block = self.block
        if block is not None and own_block is not None:
            activation = {
                length: activation_cost(block, length, self.costs, self.objective) for length in own_block
            }
            of_block = GroupCosts(block, self.layers, own_block, counts, margin)
            gate_up, down = groups.pop("gate_up"), groups.pop("down")
            held.append(FeedForwardCosts(gate_up, down, of_block, activation))
        # The head computes one row in every pass; many are for those who ask for all logits.
        held += [*groups.values(), GroupCosts(self.head, 1, head, {1: sum(counts.values())}, margin)]
        chosen = choose_slices(held, self.budget)
        if self.budget.copies_by_length and self.budget.npu_bytes is not None:
            return chosen
        return {
            group: dict.fromkeys(slices, self.limits.standard_lengths) for group, slices in chosen.items()
        }

    def _equal_weights(self, found: PricedCandidates) -> dict[int, float]:
        """Return weights by which every length counts alike, and decode as much as all others."""
        totals: dict[int, float] = {}
        for spec in self.layer:
            for length, items in found[spec.group].items():
                costs = slice_costs(items, self.objective).values()
                best = min(min(item.whole, item.cut) for item in costs)
                totals[length] = totals.get(length, 0.0) + best
        weights = {length: 1.0 / (self.layers * total) if total else 0.0 for length, total in totals.items()}
        weights[1] *= max(1, len(weights) - 1)
        return weights

    def _fine_ranges(self, slices: Slices) -> Iterator[tuple[int, int]]:
        """Yield the ranges of lengths that have entries of their own in prefill, shortest first."""
        short = {2**power for power in range(RANGE_TOKENS.bit_length())}
        tops = sorted({top for _, top in self._ranges()} | {top for top in short if top < self.chunk_length})
        for low, high in zip((1, *(top + 1 for top in tops)), tops, strict=False):
            yield from self._worthwhile(low, high, slices)

    def _worthwhile(self, low: int, high: int, slices: Slices) -> Iterator[tuple[int, int]]:
        """Yield a range of lengths in halves, as long as one placement for all of it costs too much."""
        shared = self._chain(self.layer, self.layers, high, low, slices, self.block)
        if low == high or all(self._loss(shared, end, slices) <= WORTH_FRACTION for end in (low, high)):
            yield low, high
            return
        middle = (low + high) // 2
        yield from self._worthwhile(low, middle, slices)
        yield from self._worthwhile(middle + 1, high, slices)

    def _loss(self, shared: Chain, tokens: int, slices: Slices) -> float:
        """Return the fraction by which a chain's placements cost more at a length than the length's own."""

        def cost(chain: Chain) -> float:
            decisions = [(choice.spec, choice.chosen.placement) for choice in chain.choices]
            return layer_cost(decisions, tokens, self.costs, self.objective)

        return cost(shared) / cost(self.length(tokens, slices)) - 1.0

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of lengths, both ends included, by which the NPU's slices are chosen."""
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
        self, phase: Phase, low: int, high: int, slices: Slices, found: PricedCandidates
    ) -> Iterator[PlanEntry]:
        chain = self._chain(self.layer, self.layers, high, low, slices, self.block)
        other_way = self.other_way(chain, high)
        for choice in chain.choices:
            group = choice.spec.group
            beside = other_way if group in ("ffn", "gate_up") else None
            every = found[group].get(high) or self._every(choice.spec, low, high)
            placement = placed(choice, high, every, beside)
            yield PlanEntry(phase, (low, high), self._layers_of(choice.spec), group, placement)
        if low <= self.head_rows:
            rows = min(high, self.head_rows)
            choice = self._chain((self.head,), 1, rows, low, slices).choices[0]
            reach = high if high < self.head_rows else self.chunk_length
            yield PlanEntry(
                phase,
                (low, reach),
                (-1, -1),
                "head",
                placed(choice, rows, found["head"].get(rows) or self._every(self.head, low, rows)),
            )

    def _every(self, spec: OpSpec, low: int, high: int) -> list[Priced]:
        """Return the candidates of a range of lengths whatever the NPU holds, cheapest first."""
        return priced_all(spec, high, self.limits, self.costs, self.objective, None, min(low, high))

    def _layers_of(self, spec: OpSpec) -> tuple[int, int]:
        group = "gate_up" if spec.then is not None else spec.group
        layers = [other.layer for other in self.specs if other.group == group]
        return min(layers), max(layers)
