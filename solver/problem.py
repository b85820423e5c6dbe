"""The problem that the solver solves: a model on a device, its kinds of layers, and limits of the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterollm.base import OptionError
from heterollm.kernels.ops import OpSpec
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.kinds import PlacedKind, placed_kinds
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option, OptionTable, mean_options
from heterollm.solver.request import SOLVED_LEVELS, SolvedLevel
from heterollm.solver.slices import Budget
from heterollm.solver.submissions import chain_costs, submits_singly


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
        with_ffn = self.level == "block" and self.limits is not None
        kinds = placed_kinds(self.specs, self.costs, self.chunk_length, with_ffn=with_ffn)
        object.__setattr__(self, "kinds", kinds)

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
        """The distinct groups whose slices are chosen together: those of a network with its ffn, else one."""
        found: dict[tuple[str, ...], tuple[OpSpec, ...]] = {}
        for kind in self.kinds:
            parts = () if kind.ffn is None else kind.ffn.parts
            pair = tuple(spec for spec in kind.specs if spec.group in parts)
            alone = [(spec,) for spec in kind.specs if spec.group not in parts]
            for unit in (*([] if kind.ffn is None else [(*pair, kind.ffn)]), *alone):
                found.setdefault(tuple(spec.place for spec in unit), unit)
        return (*found.values(), (self.head,))

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
