"""The problem that the solver solves: a model on a device, its kinds of layers, and limits of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from heterollm.base import OptionError
from heterollm.kernels.ops import PARTS, Group, OpSpec
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.kinds import PlacedKind, placed_kinds
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option, OptionTable, mean_options
from heterollm.solver.request import SOLVED_LEVELS, SolvedLevel
from heterollm.solver.slices import Budget
from heterollm.solver.submissions import chain_costs, submits_singly

JOINED: Final[Mapping[SolvedLevel, tuple[Group, ...]]] = {
    "tensor": (),
    "block": ("ffn",),
    "fused": ("o_ffn", "ffn"),
}
"""Groups for which a level may place feed-forward networks as one operator, the best first."""


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A model on a device, with the groups to place.

    Args:
        specs: Every group of the model.
        limits: Limits of the NPU; None without an NPU.
        costs: Times of both processors.
        objective: The objective.
        budget: Limit of resident slices.
        chunk_length: Longest pass; longer prompts run in chunks.
        head_rows: Most positions that the head computes at a time.
        level: Level of the plan.
        kinds: The kinds of layers, with the groups to place.

    Raises:
        OptionError: A length is not positive, or the level is unknown.
    """

    specs: tuple[OpSpec, ...]
    limits: NpuLimits | None
    costs: Costs
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    chunk_length: int = 1024
    head_rows: int = 32
    level: SolvedLevel = "tensor"
    kinds: tuple[PlacedKind, ...] = field(init=False)

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
        joined = () if self.limits is None else JOINED[self.level]
        kinds = placed_kinds(self.specs, self.costs, self.chunk_length, joined)
        object.__setattr__(self, "kinds", kinds)
        if self.limits is not None:
            # The NPU holds a fused group or its parts, not both, and a norm serves all tokens of a graph.
            fused = [kind for kind in kinds if kind.ffn is not None and kind.ffn.first is not None]
            left_out, covering = (
                frozenset(spec.place for kind in fused for spec in kind.specs if spec.group in PARTS[group])
                for group in ("o_ffn", "norm_qkv")
            )
            limits = replace(self.limits, left_out=left_out, covering=covering)
            object.__setattr__(self, "limits", limits)

    @property
    def head(self) -> OpSpec:
        """The head."""
        return next(spec for spec in self.specs if spec.group == "head")

    @property
    def places(self) -> dict[str, OpSpec]:
        """The distinct groups of all kinds, the head, and the ffns, by their keys in tables."""
        groups = [spec for kind in self.kinds for spec in kind.specs]
        ffns = [kind.ffn for kind in self.kinds if kind.ffn is not None]
        return {spec.place: spec for spec in (*groups, self.head, *ffns)}

    @property
    def units(self) -> tuple[tuple[OpSpec, ...], ...]:
        """The distinct groups whose slices are chosen together: two of a network with its ffn, else one."""
        found: dict[tuple[str, ...], tuple[OpSpec, ...]] = {}
        for kind in self.kinds:
            # The GPU alone computes o where it is no part of the ffn.
            parts = () if kind.ffn is None else kind.ffn.parts[-2:]
            pair = tuple(spec for spec in kind.specs if spec.group in parts)
            alone = [(spec,) for spec in kind.specs if spec.group not in parts]
            for unit in (*([] if kind.ffn is None else [(*pair, kind.ffn)]), *alone):
                found.setdefault(tuple(spec.place for spec in unit), unit)
        return (*found.values(), (self.head,))

    def first_of(self, ffn: OpSpec) -> OpSpec | None:
        """Return the placed group ``o`` that is a part of an ffn; None where it is not."""
        if ffn.first is None:
            return None
        kind = next(kind for kind in self.kinds if kind.ffn == ffn)
        return next(spec for spec in kind.specs if spec.group == ffn.first.group)

    def count(self, spec: OpSpec) -> int:
        """Return the number of layers that have a group; 1 for the head."""
        return sum(kind.count for kind in self.kinds if spec in kind.operators) or 1

    def in_chain(self, table: OptionTable) -> OptionTable:
        """Return options with their costs in a chain, which differ in a pass of one token."""
        if not submits_singly(1, self.costs.overheads):
            return table
        found: dict[str, list[tuple[int, list[Option]]]] = {}
        for kind in self.kinds:
            decode = {spec.place: table[spec.place][1] for spec in kind.operators}
            options = chain_costs(decode, kind.specs, kind.ffn, self.costs, self.objective)
            for place, items in options.items():
                found.setdefault(place, []).append((kind.count, items))
        return {
            place: {**items, 1: mean_options(found[place])} if place in found else items
            for place, items in table.items()
        }
