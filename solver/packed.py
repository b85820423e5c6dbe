"""Resident slices of a whole model under a budget for graphs: the input of :mod:`heterollm.solver.packing`.

Without a histogram the search serves prompts of each standard length, and of 1.5 times that, alike, and
single tokens as much as all prompts. It tries rows far apart first, then the neighbours of the chosen rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from heterollm.kernels.ops import OpSpec
from heterollm.solver.candidates import (
    Rows,
    aligned_splits,
    placements_of_built,
    split_stride,
    splits_near,
)
from heterollm.solver.chain import activation_cost
from heterollm.solver.options import Option, OptionTable, evaluated, whole_cost_of
from heterollm.solver.packing import FfnPacking, Frontier, GroupPacking, Packing, pack
from heterollm.solver.problem import PlanProblem
from heterollm.solver.slices import Slices, pass_weights

FIRST_SPLITS: Final = 6
"""Splits of a group in the first search."""

LITTLE: Final = 1e-9
"""Weight of passes that nobody asked for and the GPU cannot run, relative to the others."""


_Splits: TypeAlias = Mapping[str, Collection[Rows]]


def packed_slices(
    solver: PlanProblem, table: OptionTable, slices: Slices, weights: Mapping[int, float] | None
) -> Slices:
    """Return the rows that the NPU holds, and their lengths, within the solver's budget.

    Args:
        solver: The model on its device.
        table: All options that were costed without regard to the budget, each by itself.
        slices: The slices without a budget.
        weights: Weights of prompts by length, and of decode under length 1; None as in this module's
            description.

    Raises:
        PlanError: The budget is too small for a group that only the NPU may compute.
    """
    assert solver.limits is not None
    search = _Search(solver, table, weights)
    alignment = solver.limits.row_alignment
    groups = search.groups
    strides = {group: split_stride(spec, alignment) for group, spec in groups.items()}
    splits: dict[str, set[Rows]] = {}
    for group, spec in groups.items():
        every = aligned_splits(spec, alignment)
        step = max(1, -(-len(every) // FIRST_SPLITS))  # narrow groups have no splits
        strides[group] *= step
        splits[group] = {*every[step - 1 :: step], *slices.get(group, {}), spec.member_rows} - {()}
    found = search.best(splits)
    while max(strides.values()) > 1:
        strides = {group: -(-stride // 2) for group, stride in strides.items()}
        for group, spec in groups.items():
            splits[group] = {
                near
                for rows in found[group]
                for near in (rows, *splits_near(spec, alignment, [rows], strides[group], ends=False))
            }
        found = search.best(splits)
    return found


class _Search:
    """The search for slices among some rows, with the costs of all options so far."""

    def __init__(self, solver: PlanProblem, table: OptionTable, weights: Mapping[int, float] | None) -> None:
        self.solver = solver
        self.groups = solver.places
        self._table = table
        self._single = solver.in_chain({group: {1: self._of_one_token(group)} for group in self.groups})
        self._options: dict[tuple[str, int, Rows], list[Option]] = {}
        self._weights = self._of_prompts(weights)
        self._frontiers: dict[tuple[tuple[str, frozenset[Rows]], ...], Frontier] = {}

    def best(self, splits: _Splits) -> Slices:
        """Return the best slices with these rows."""
        frontiers = []
        for unit in self.solver.units:
            key = tuple((spec.place, frozenset(splits[spec.place])) for spec in unit)
            if key not in self._frontiers:
                self._frontiers[key] = self._packing(unit, splits).frontier(self.solver.budget)
            frontiers.append(self._frontiers[key])
        return pack(frontiers, self.solver.budget)

    def _packing(self, unit: Sequence[OpSpec], splits: _Splits) -> Packing:
        """Return the slices of a group, or of the operators of a feed-forward network, to choose from."""
        solver = self.solver
        first, *others = (self._group(spec, splits[spec.place]) for spec in unit)
        if not others:
            return first
        down, ffn = others
        first_of = solver.first_of(ffn.spec)
        own = {} if first_of is None else self._all(first_of, ())
        activation = {
            tokens: activation_cost(ffn.spec, tokens, solver.costs, solver.objective)
            + (whole_cost_of(own[tokens]) if own else 0.0)
            for tokens in self._weights
        }
        return FfnPacking(first, down, ffn, activation)

    def _group(self, spec: OpSpec, splits: Iterable[Rows]) -> GroupPacking:
        options, weights = self._all(spec, splits), self._weights
        if spec == self.solver.head:
            # The head computes one row in every pass; only passes with all logits have more.
            total = sum(weights.values())
            weights = {rows: total if rows == 1 else total * LITTLE for rows in options}
        return GroupPacking(spec, self.solver.count(spec), options, weights, self.solver.objective)

    def _all(self, spec: OpSpec, splits: Iterable[Rows]) -> dict[int, list[Option]]:
        """Return the options of a group by length."""
        lengths, place = list(self._weights), spec.place
        if spec == self.solver.head:
            rows = self.solver.head_rows
            lengths = [1] if rows == 1 or self._on_gpu(place, rows) else [1, rows]
        ordered = sorted({(), *splits})
        return {
            tokens: list(self._single[place][1])
            if tokens == 1
            else [item for rows in ordered for item in self._of(place, tokens, rows)]
            for tokens in lengths
        }

    def _of_one_token(self, place: str) -> list[Option]:
        """Return the options of one token: those of the table, and their rows padded to the next length."""
        spec, limits, items = self.groups[place], self.solver.limits, self._table[place][1]
        assert limits is not None
        known = {item.placement for item in items}
        lengths = {length for item in items for length in item.placement.npu_lengths}
        longer = [length for length in limits.standard_lengths if length > max(lengths, default=0)][:1]
        rows = sorted({item.placement.npu_rows for item in items} - {()})
        padded = placements_of_built(spec, 1, replace(limits, standard_lengths=tuple(longer)), rows)
        more = [placement for placement in padded if placement.npu_lengths and placement not in known]
        return [*items, *evaluated(spec, 1, more, self.solver.costs, self.solver.objective)]

    def _of(self, place: str, tokens: int, rows: Rows) -> list[Option]:
        """Return the options of a group with some rows; empty rows are the GPU alone."""
        key = place, tokens, rows
        if key not in self._options:
            solver, spec = self.solver, self.groups[place]
            assert solver.limits is not None
            placements = placements_of_built(spec, tokens, solver.limits, [rows] if rows else [])
            wanted = (placement for placement in placements if placement.npu_rows == rows)
            self._options[key] = evaluated(spec, tokens, wanted, solver.costs, solver.objective)
        return self._options[key]

    def _on_gpu(self, place: str, tokens: int) -> bool:
        return bool(self._of(place, tokens, ()))

    def _of_prompts(self, weights: Mapping[int, float] | None) -> dict[int, float]:
        """Return the weights of passes by length."""
        solver = self.solver
        assert solver.limits is not None
        longest = solver.chunk_length
        if weights is not None:
            found = {tokens: own for tokens, own in pass_weights(weights, longest).items() if own > 0.0}
        else:
            standard = [length for length in solver.limits.standard_lengths if length > 1]
            every = {*standard, *(3 * length // 2 for length in standard), longest}
            # Each pass weighs by its cost relative to its own optimum.
            found = {length: 1.0 / self._least(length) for length in sorted(every) if 1 < length <= longest}
            found[1] = max(1, len(found)) / self._least(1)
        if not all(self._on_gpu(spec.place, 1) for kind in solver.kinds for spec in kind.specs):
            # Every pass needs a graph.
            little = LITTLE * max(found.values(), default=1.0)
            found = dict.fromkeys((*range(1, longest, 32), longest), little) | found
        return dict(sorted(found.items()))

    def _least(self, tokens: int) -> float:
        """Return the least cost of all layers' groups at a length without a budget."""
        table = self._single if tokens == 1 else self._table
        total = 0.0
        for kind in self.solver.kinds:
            options = [table[spec.place] for spec in kind.specs]
            top = min(top for top in options[0] if top >= tokens)
            total += kind.count * sum(min(item.cost for item in own[top]) for own in options)
        return total or 1.0
