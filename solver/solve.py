"""Plans of a whole model: the NPU's slices first, then every length exactly with those slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from heterollm.errors import OptionError
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.describe import describe
from heterollm.solver.objective import Objective
from heterollm.solver.plan import Alternative, Placement, Plan, PlanEntry, model_shape
from heterollm.solver.search import Chain, Choice, priced_candidates, solve_chain
from heterollm.solver.slices import Budget, GroupCosts, Rows, Slices, choose_slices

__all__ = ["Solver"]

RANGE_TOKENS: Final = 32
"""Between standard lengths a plan is solved in steps of this; a length in between is padded to its step."""

ALTERNATIVES: Final = 3


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
    """

    specs: tuple[OpSpec, ...]
    limits: NpuLimits | None
    costs: Costs
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    chunk_length: int = 1024
    head_rows: int = 32

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
    def layers(self) -> int:
        """How many layers there are."""
        return sum(spec.group == self.layer[0].group for spec in self.specs)

    def slices(self, weights: Mapping[int, float] | None = None) -> Slices:
        """Choose what the NPU holds.

        Args:
            weights: How often prompts of each length come, and decode under length 1; by default all lengths
                count alike.

        Raises:
            OptionError: A weight is not a number of at least 0.
            PlanError: A group can be computed by nobody.
        """
        if self.limits is None:
            return {spec.group: () for spec in (*self.layer, self.head)}
        if weights is not None and not all(0 <= weight < math.inf for weight in weights.values()):
            raise OptionError(f"Weights of prompt lengths {dict(weights)} are not all numbers of at least 0.")
        lengths = sorted({1, *(top for _, top in self._ranges())})
        if weights is not None:
            lengths = sorted({1, *(min(length, self.chunk_length) for length in weights)})
        layer = [GroupCosts(spec, self.layers, self._table(spec, lengths)) for spec in self.layer]
        return choose_slices(
            [*layer, GroupCosts(self.head, 1, self._table(self.head, [1]))], self.budget, weights
        )

    def plan(
        self,
        *,
        device: str,
        precision: str,
        level: str = "tensor",
        weights: Mapping[int, float] | None = None,
    ) -> Plan:
        """Return the plan of every length.

        Args:
            device: Name of the device.
            precision: Precision of the linears.
            level: Name of the plan's level.
            weights: As of :meth:`slices`.

        Raises:
            OptionError: A weight is not a number of at least 0.
            PlanError: A group can be computed by nobody.
        """
        slices = self.slices(weights)
        entries = list(self._entries("decode", 1, 1, slices))
        for low, high in self._ranges():
            own = list(self._entries("prefill", low, high, slices))
            # A decode pass of several tokens is planned like a prompt of as many.
            entries += own + [replace(entry, phase="decode") for entry in own]
        merged = tuple(_merged(entries))
        return Plan(level, device, precision, model_shape(self.specs), self.chunk_length, merged)

    def length(self, tokens: int, slices: Slices | None = None) -> Chain:
        """Return the placements of the layers' groups at one exact length.

        Args:
            tokens: Tokens of the pass.
            slices: What the NPU holds; by default every cut may be used.

        Raises:
            PlanError: A group can be computed by nobody.
        """
        cuts = self._cuts(slices)
        return solve_chain(self.layer, self.layers, tokens, self.limits, self.costs, self.objective, cuts)

    def head_choice(self, rows: int, slices: Slices | None = None) -> Choice:
        """Return the placement of the head for some positions.

        Raises:
            PlanError: Nobody can compute it.
        """
        cuts = self._cuts(slices)
        return solve_chain((self.head,), 1, rows, self.limits, self.costs, self.objective, cuts).choices[0]

    # -- pieces --------------------------------------------------------------------------------------

    def _cuts(self, slices: Slices | None) -> Slices | None:
        return None if slices is None or self.limits is None else slices

    def _table(self, spec: OpSpec, lengths: Sequence[int]) -> dict[int, dict[Rows, float]]:
        """Return the cheapest cost of a group by length and slice."""
        tables: dict[int, dict[Rows, float]] = {}
        for length in lengths:
            taken, _ = priced_candidates(spec, length, self.limits, self.costs, self.objective)
            best = tables.setdefault(length, {})
            for item in taken:
                best.setdefault(item.placement.npu_rows, item.cost)
        return tables

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of lengths, both ends included, in which one placement can serve all."""
        tops = set(range(RANGE_TOKENS, self.chunk_length, RANGE_TOKENS)) | {1, self.chunk_length}
        tops |= set(self.limits.standard_lengths) if self.limits else set()
        low = 1
        for top in sorted(top for top in tops if top <= self.chunk_length):
            yield low, top
            low = top + 1

    def _entries(self, phase: Phase, low: int, high: int, slices: Slices) -> Iterator[PlanEntry]:
        for choice in self.length(high, slices).choices:
            yield PlanEntry(
                phase,
                (low, high),
                self._layers_of(choice.spec.group),
                choice.spec.group,
                _placed(choice, high),
            )
        if low <= self.head_rows:
            rows = min(high, self.head_rows)
            choice = self.head_choice(rows, slices)
            reach = high if high < self.head_rows else self.chunk_length
            yield PlanEntry(phase, (low, reach), (-1, -1), "head", _placed(choice, rows))

    def _layers_of(self, group: Group) -> tuple[int, int]:
        layers = [spec.layer for spec in self.specs if spec.group == group]
        return min(layers), max(layers)


def _placed(choice: Choice, tokens: int) -> Placement:
    """Return what was chosen with its predicted time and the best of what was not, by kind."""
    others: dict[str, Alternative] = {}
    for other in sorted(choice.others, key=lambda item: item.cost):
        kind = other.placement.kind(choice.spec, tokens)
        if len(others) < ALTERNATIVES:
            text = describe(other.placement, choice.spec, tokens)
            others.setdefault(kind, Alternative(text, round(other.time_us, 3)))
    return replace(
        choice.chosen.placement,
        predicted_us=round(choice.chosen.time_us, 3),
        rejected=tuple(others.values()),
    )


def _merged(entries: Sequence[PlanEntry]) -> Iterator[PlanEntry]:
    """Join ranges of lengths that have the same placement; the longest range's prediction stays."""
    open_entries: dict[tuple[Phase, Group], PlanEntry] = {}
    for entry in entries:
        key = entry.phase, entry.group
        held = open_entries.get(key)
        if held is not None and held.lengths[1] + 1 == entry.lengths[0] and _same(held, entry):
            open_entries[key] = replace(entry, lengths=(held.lengths[0], entry.lengths[1]))
            continue
        if held is not None:
            yield held
        open_entries[key] = entry
    yield from open_entries.values()


def _same(one: PlanEntry, other: PlanEntry) -> bool:
    first, second = one.placement, other.placement
    return (first.npu_rows, first.npu_lengths, first.form) == (
        second.npu_rows,
        second.npu_lengths,
        second.form,
    )
