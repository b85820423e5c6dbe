"""Experts of a mixture in plans: the groups of a layer that the NPU computes, and the options of NPUMoE.

Only passes of prefill have entries; the GPU computes all experts in decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, get_args

from msgspec import Struct

from heterollm.base import Amount, Count, OptionError, PlanError, Positive, format_bytes
from heterollm.kernels.npu import ExpertsShape, FfnShape, NpuBackend
from heterollm.kernels.ops import Activation, GraphMemory, OpSpec
from heterollm.solver.techniques.record import PlanTarget, TechniqueRecord

Overflow = Literal["gpu", "drop", "pad"]
"""Fate of tokens beyond a capacity: the GPU computes them, or nobody does; ``pad`` takes capacities that hold
all calibrated loads."""


class ExpertGroup(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Experts in one NPU graph.

    Args:
        experts: The experts, by falling popularity.
        capacity: Most tokens that it computes for each of them.
    """

    experts: tuple[Count, ...]
    capacity: Positive


class ExpertsPlacement(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="experts"):
    """The placement of a layer's experts; the GPU computes those in no group.

    Args:
        groups: The NPU's groups, in the order in which it runs them.
        overflow: Fate of tokens beyond a capacity.
        form: Form of the NPU graphs; None is the backend's first choice.
        predicted_us: Predicted mean time.
    """

    groups: tuple[ExpertGroup, ...] = ()
    overflow: Overflow = "gpu"
    form: str | None = None
    predicted_us: Amount | None = None

    @property
    def rows(self) -> int:
        """Rows of all graphs, filled or not."""
        return sum(len(group.experts) * group.capacity for group in self.groups)

    def capacities(self, experts: int) -> tuple[int, ...]:
        """Return the capacity of each of a layer's experts; 0 on the GPU.

        Raises:
            PlanError: An expert is given twice or is not the layer's, or a group is empty.
        """
        found = [0] * experts
        for group in self.groups:
            if not group.experts:
                raise PlanError(f"A group of capacity {group.capacity} has no experts.", fix="Leave it out.")
            for expert in group.experts:
                if not 0 <= expert < experts or found[expert]:
                    raise PlanError(
                        f"Expert {expert} is given twice, or is not among the {experts} of the layer.",
                        fix="Name each expert in one group at most.",
                    )
                found[expert] = group.capacity
        return tuple(found)


DROPS: Final = (
    "Tokens beyond an expert's capacity, those with the least norm of attention's output, are dropped, which "
    "changes results; --overflow gpu computes them."
)

EXPERTS_ON_GPU: Final = ExpertsPlacement()


class ExpertsEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of passes of prefill in ranges of lengths and of layers, both inclusive.

    Args:
        lengths: Least and most tokens of the pass.
        layers: First and last layer.
        placement: The groups on the NPU, with the predicted time of the longest pass.
        shortest_us: Predicted mean time of the shortest pass.
    """

    lengths: tuple[Positive, Positive]
    layers: tuple[Count, Count]
    placement: ExpertsPlacement
    shortest_us: Amount | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of lengths and layers."""
        return (self.lengths, self.layers)

    def serves(self, tokens: int, layer: int) -> bool:
        """Whether the entry is for a pass of so many tokens, and for a layer."""
        return self.lengths[0] <= tokens <= self.lengths[1] and self.holds(layer)

    def holds(self, layer: int) -> bool:
        """Whether the entry is for a layer."""
        return self.layers[0] <= layer <= self.layers[1]


class PlannedExperts(TechniqueRecord, frozen=True):
    """The experts of prefill on the NPU; the GPU computes all in cases without an entry."""

    KEY: ClassVar[str] = "experts"
    TITLE: ClassVar[str] = "Experts on the NPU"

    entries: tuple[ExpertsEntry, ...] = ()

    def of(self, tokens: int, layer: int) -> ExpertsPlacement:
        """Return the placement of a layer's experts in a pass of so many tokens."""
        serving = (entry.placement for entry in self.entries if entry.serves(tokens, layer))
        return next(serving, EXPERTS_ON_GPU)

    @property
    def is_active(self) -> bool:
        """Whether the NPU computes experts of any layer."""
        return any(entry.placement.groups for entry in self.entries)

    @property
    def uses_npu(self) -> bool:
        """Whether the NPU computes experts of any layer."""
        return self.is_active

    @property
    def changes_values(self) -> bool:
        """Whether tokens beyond the capacity of an expert on the NPU are dropped."""
        return any(own.placement.groups and own.placement.overflow == "drop" for own in self.entries)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on dropped tokens."""
        return (DROPS,) if self.changes_values else ()

    def npu_bytes(self, specs: Sequence[OpSpec], memory: GraphMemory, tokens: int | None = None) -> int:
        """Return the bytes that the NPU's graphs of experts take."""
        found: dict[tuple[OpSpec, tuple[int, ...]], set[int]] = {}
        for spec in (spec for spec in specs if spec.experts is not None):
            for entry in (one for one in self.entries if one.holds(spec.layer)):
                if tokens is None or entry.serves(tokens, spec.layer):
                    for group in entry.placement.groups:
                        found.setdefault((spec, group.experts), set()).add(group.capacity)
        return sum(
            len(experts) * spec.graph_bytes(spec.member_rows, capacities, memory)
            for (spec, experts), capacities in found.items()
        )

    def check(self, target: PlanTarget) -> None:
        """Refuse experts on the NPU that are not the model's, or that the device cannot compute."""
        npu, last = target.npu, max((spec.layer for spec in target.specs), default=-1)
        mixtures = [spec for spec in target.specs if spec.experts is not None]
        for entry in self.entries:
            where = f"The experts of layers {entry.layers[0]} to {entry.layers[1]}"
            spec = next((own for own in mixtures if entry.holds(own.layer)), None)
            if spec is None or entry.layers[1] > last:
                raise PlanError(
                    f"{where} are planned, and the model has experts in {len(mixtures)} layers.",
                    fix="Name the model's layers." if mixtures else "Leave them out.",
                )
            routing, down = spec.experts, spec.then
            assert routing is not None  # of a spec of experts
            assert down is not None  # the same
            entry.placement.capacities(routing.experts)
            if entry.placement.groups and npu is None:
                raise PlanError(
                    f"{where} need an NPU, and the device was opened without one.",
                    fix="Plan without the technique npumoe, or give the NPU at least one thread.",
                )
            if entry.placement.groups and spec.weight != down.weight:
                raise PlanError(
                    f"{where} have weights of {spec.weight} and {down.weight}; a graph takes one format.",
                    fix="Plan without the technique npumoe, or choose a group size that divides both widths.",
                )
            for group in entry.placement.groups:
                assert npu is not None  # checked above
                _check_group(where, group, entry.placement.form, spec, npu, target.activation)


class ExpertsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the technique ``npumoe``.

    Args:
        overflow: Fate of tokens beyond a capacity.

    Raises:
        OptionError: There is no such fate.
    """

    overflow: Overflow = "gpu"

    def __post_init__(self) -> None:
        if self.overflow not in get_args(Overflow):
            raise OptionError(
                f"There is no overflow {self.overflow!r:.40}.", fix=f"Choose {', '.join(get_args(Overflow))}."
            )


def _check_group(
    where: str, group: ExpertGroup, form: str | None, spec: OpSpec, npu: NpuBackend, activation: Activation
) -> None:
    """Refuse a group of experts that is no graph of the NPU."""
    if group.capacity not in npu.standard_lengths:
        raise PlanError(
            f"{where}: {npu.name} has no graphs of {group.capacity} rows of each expert.",
            fix=f"Use capacities among {', '.join(map(str, npu.standard_lengths))}.",
        )
    limit, need = npu.graph_weight_bytes, len(group.experts) * spec.slice_bytes(spec.member_rows)
    if limit is not None and need > limit:
        raise PlanError(
            f"{where}: a group of {len(group.experts)} experts has {format_bytes(need)} of weights, and a "
            f"graph of {npu.name} takes {format_bytes(limit)}.",
            fix="Use smaller groups.",
        )
    one = FfnShape.of(spec, spec.member_rows[0], activation)
    forms = npu.forms(ExpertsShape(one, len(group.experts)), group.capacity)
    if not forms or form not in (None, *forms):
        raise PlanError(
            f"{where}: {npu.name} does not run {spec.weight} weights in form {form!r} at {group.capacity} "
            "rows of each expert.",
            fix=f"Legal forms: {', '.join(forms) or 'none'}.",
        )
