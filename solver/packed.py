"""Resident slices of a whole model under a budget for graphs: the input of :mod:`heterollm.solver.packing`.

Without a histogram the search serves prompts of each standard length, and of 1.5 times that, alike, and
single tokens as much as all prompts. It tries rows far apart first, then the neighbours of the chosen rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeAlias

from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.candidates import (
    NpuLimits,
    Rows,
    aligned_splits,
    placements_of_built,
    split_stride,
    splits_near,
)
from heterollm.solver.chain import activation_cost
from heterollm.solver.costs import Costs
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option, OptionTable, evaluated
from heterollm.solver.packing import FfnPacking, Frontier, GroupPacking, Packing, pack
from heterollm.solver.slices import Budget, Slices, pass_weights

FIRST_SPLITS: Final = 6
"""Splits of a group in the first search."""

LITTLE: Final = 1e-9
"""Weight of passes that nobody asked for and the GPU cannot run, relative to the others."""


class Layers(Protocol):
    """A model on a device, as :class:`heterollm.solver.solve.Solver` describes it."""

    @property
    def limits(self) -> NpuLimits | None:
        """Limits of the NPU."""

    @property
    def costs(self) -> Costs:
        """Times of both processors."""

    @property
    def objective(self) -> Objective:
        """The objective."""

    @property
    def budget(self) -> Budget:
        """The budget, which counts graphs."""

    @property
    def chunk_length(self) -> int:
        """Longest pass."""

    @property
    def head_rows(self) -> int:
        """Most positions that the head computes at a time."""

    @property
    def layer(self) -> tuple[OpSpec, ...]:
        """The groups of one layer."""

    @property
    def layers(self) -> int:
        """The number of layers."""

    @property
    def head(self) -> OpSpec:
        """The head."""

    @property
    def ffn(self) -> OpSpec | None:
        """The feed-forward network as one operator, if it may be placed so."""

    def in_chain(self, table: OptionTable) -> OptionTable:
        """Return options with their costs in a chain, which differ in a pass of one token."""
        ...


_Splits: TypeAlias = Mapping[Group, Collection[Rows]]


def packed_slices(
    solver: Layers, table: OptionTable, slices: Slices, weights: Mapping[int, float] | None
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
    splits: dict[Group, set[Rows]] = {}
    for group, spec in groups.items():
        every = aligned_splits(spec, alignment)
        step = -(-len(every) // FIRST_SPLITS)
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

    def __init__(self, solver: Layers, table: OptionTable, weights: Mapping[int, float] | None) -> None:
        self.solver = solver
        self.groups: dict[Group, OpSpec] = {spec.group: spec for spec in solver.layer}
        self.groups["head"] = solver.head
        if solver.ffn is not None:
            self.groups["ffn"] = solver.ffn
        self._table = table
        self._single = solver.in_chain({group: {1: self._of_one_token(group)} for group in self.groups})
        self._options: dict[tuple[Group, int, Rows], list[Option]] = {}
        self._weights = self._of_prompts(weights)
        self._frontiers: dict[tuple[tuple[Group, frozenset[Rows]], ...], Frontier] = {}

    def best(self, splits: _Splits) -> Slices:
        """Return the best slices with these rows."""
        solver = self.solver
        together: list[tuple[Group, ...]] = [(group,) for group in self.groups]
        if solver.ffn is not None:
            together = [("gate_up", "down", "ffn"), ("qkv",), ("o",), ("head",)]
        frontiers = []
        for groups in together:
            key = tuple((group, frozenset(splits[group])) for group in groups)
            if key not in self._frontiers:
                self._frontiers[key] = self._packing(groups, splits).frontier(solver.budget)
            frontiers.append(self._frontiers[key])
        return pack(frontiers, solver.budget)

    def _packing(self, groups: Sequence[Group], splits: _Splits) -> Packing:
        """Return the slices of a group, or of the operators of a feed-forward network, to choose from."""
        solver, objective = self.solver, self.solver.objective
        options = [self._all(group, splits[group]) for group in groups]
        if groups == ("head",):
            # The head computes one row in every pass; only passes with all logits have more.
            total = sum(self._weights.values())
            passes = {rows: total if rows == 1 else total * LITTLE for rows in options[0]}
            return GroupPacking(solver.head, 1, options[0], passes, objective)
        parts = [
            GroupPacking(self.groups[group], solver.layers, own, self._weights, objective)
            for group, own in zip(groups, options, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        ffn = self.groups["ffn"]
        activation = {
            tokens: activation_cost(ffn, tokens, solver.costs, objective) for tokens in self._weights
        }
        return FfnPacking(parts[0], parts[1], parts[2], activation)

    def _all(self, group: Group, splits: Iterable[Rows]) -> dict[int, list[Option]]:
        """Return the options of a group by length."""
        lengths = list(self._weights)
        if group == "head":
            rows = self.solver.head_rows
            lengths = [1] if rows == 1 or self._on_gpu("head", rows) else [1, rows]
        ordered = sorted({(), *splits})
        return {
            tokens: list(self._single[group][1])
            if tokens == 1
            else [item for rows in ordered for item in self._of(group, tokens, rows)]
            for tokens in lengths
        }

    def _of_one_token(self, group: Group) -> list[Option]:
        """Return the options of one token: those of the table, and their rows padded to the next length."""
        limits, items = self.solver.limits, self._table[group][1]
        assert limits is not None
        known = {item.placement for item in items}
        lengths = {length for item in items for length in item.placement.npu_lengths}
        longer = [length for length in limits.standard_lengths if length > max(lengths, default=0)][:1]
        rows = sorted({item.placement.npu_rows for item in items} - {()})
        padded = placements_of_built(
            self.groups[group], 1, replace(limits, standard_lengths=tuple(longer)), rows
        )
        more = [placement for placement in padded if placement.npu_lengths and placement not in known]
        return [
            *items,
            *evaluated(self.groups[group], 1, more, self.solver.costs, self.solver.objective),
        ]

    def _of(self, group: Group, tokens: int, rows: Rows) -> list[Option]:
        """Return the options of a group with some rows; empty rows are the GPU alone."""
        key = group, tokens, rows
        if key not in self._options:
            solver, spec = self.solver, self.groups[group]
            assert solver.limits is not None
            placements = placements_of_built(spec, tokens, solver.limits, [rows] if rows else [])
            wanted = (placement for placement in placements if placement.npu_rows == rows)
            self._options[key] = evaluated(spec, tokens, wanted, solver.costs, solver.objective)
        return self._options[key]

    def _on_gpu(self, group: Group, tokens: int) -> bool:
        return bool(self._of(group, tokens, ()))

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
        if not all(self._on_gpu(group, 1) for group in self.groups if group not in ("head", "ffn")):
            # Every pass needs a graph.
            little = LITTLE * max(found.values(), default=1.0)
            found = dict.fromkeys((*range(1, longest, 32), longest), little) | found
        return dict(sorted(found.items()))

    def _least(self, tokens: int) -> float:
        """Return the least cost of all layers' groups at a length without a budget."""
        table = self._single if tokens == 1 else self._table
        top = min(top for top in table["qkv"] if top >= tokens)
        groups = [group for group in self.groups if group not in ("head", "ffn")]
        least = sum(min(item.cost for item in table[group][top]) for group in groups)
        return self.solver.layers * least or 1.0
