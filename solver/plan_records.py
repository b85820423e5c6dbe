"""Records of a plan: entries, sync strategies and resident slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from heterollm.base import Amount, Count, Factor, Positive
from heterollm.kernels.gpu import SyncChoice
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.solver.placements import Placement
from heterollm.solver.request import MOST_IN_FLIGHT

Layer = Annotated[int, Meta(ge=-1)]
"""A decoder layer, counted from 0; -1 is the head."""


class PhaseSync(Struct, frozen=True, forbid_unknown_fields=True):
    """Strategy by which the NPU waits for the GPU in each phase.

    ``operator`` finishes the GPU's queue after every operator, as a baseline of comparisons. The others are
    strategies of :mod:`heterollm.kernels.sync.fence`; every device offers ``event``.
    """

    prefill: SyncChoice = "event"
    decode: SyncChoice = "event"

    def of(self, phase: Phase) -> SyncChoice:
        """Return the choice for a phase."""
        return self.prefill if phase == "prefill" else self.decode


class GroupTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Predicted times of a group in a whole chunk, by which chunks in flight are ordered.

    Args:
        group: The group, or ``ffn``.
        before_us: Time of the glue operators before it, where the chunk begins the context.
        before_us_per_position: What each position before the chunk adds to that.
        gpu_us: Time of the GPU's shard while the NPU is idle.
        npu_us: Time of the NPU's shard while the GPU is idle.
        gpu_slowdown: Factor on the GPU's shard, and on attention before it, while the NPU computes.
        npu_slowdown: Factor on the NPU's shard while the GPU computes anything but attention.
        refill_us: Time that the glue operators take longer where the GPU is idle before.
        kind: Name of the kind of layers; absent where all layers are alike.
    """

    group: Group
    before_us: Amount
    before_us_per_position: Amount
    gpu_us: Amount
    npu_us: Amount
    gpu_slowdown: Factor = 1.0
    npu_slowdown: Factor = 1.0
    refill_us: Amount = 0.0
    kind: str | UnsetType = UNSET


class ResidentSlice(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of a group, or a width of an ffn, in the NPU's memory, with the lengths of their graphs.

    Args:
        group: The group, or ``ffn``.
        layers: First and last layer.
        npu_rows: Rows of each member.
        lengths: Standard lengths at which graphs of it exist, ascending.
        kind: Name of the kind of these layers; empty for all layers that have the group.
    """

    group: Group
    layers: tuple[Layer, Layer]
    npu_rows: tuple[Count, ...]
    lengths: tuple[Positive, ...]
    kind: str = ""

    def holds(self, spec: OpSpec) -> bool:
        """Whether the rows are of an operator."""
        return _is_of(spec, self.group, self.layers, self.kind)


class PlanEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The placement of one group for a range of lengths and of layers, both inclusive.

    Args:
        phase: Prefill or decode.
        lengths: Least and most tokens of the pass.
        layers: First and last layer.
        group: The group, or ``ffn``.
        placement: The placement.
        kind: Name of the kind of these layers; empty for all layers that have the group.
    """

    phase: Phase
    lengths: tuple[Count, Count]
    layers: tuple[Layer, Layer]
    group: Group
    placement: Placement
    kind: str = ""

    def holds(self, spec: OpSpec) -> bool:
        """Whether the entry places an operator, at some length of a phase."""
        return _is_of(spec, self.group, self.layers, self.kind)

    def serves(self, phase: Phase, length: int) -> bool:
        """Whether the entry is for passes of a phase and length."""
        return self.phase == phase and self.lengths[0] <= length <= self.lengths[1]


class ChunkSchedule(Struct, frozen=True, forbid_unknown_fields=True):
    """The order of several chunks of a long prompt that run at once.

    Args:
        policy: How stages of different chunks are ordered. No prompt of a model is small enough for the
            exact search of :data:`heterollm.solver.flights.schedule.SchedulePolicy`.
        in_flight: Most chunks at once, each with slots of its own.
        times: Predicted times of the groups of one layer of each kind in a whole chunk.
        entries: Placements of whole chunks while others are in flight; groups without one keep the plan's.
    """

    policy: Literal["in_order", "out_of_order"]
    in_flight: Annotated[int, Meta(ge=2, le=MOST_IN_FLIGHT)]
    times: tuple[GroupTimes, ...]
    entries: tuple[PlanEntry, ...] = ()


def resident_slices(entries: Iterable[PlanEntry]) -> tuple[ResidentSlice, ...]:
    """Return the slices that entries use, in the order of the entries."""
    found: dict[tuple[Group, tuple[int, int], tuple[int, ...], str], set[int]] = {}
    for entry in entries:
        placement = entry.placement
        if placement.npu_lengths:
            key = entry.group, entry.layers, placement.npu_rows, entry.kind
            found.setdefault(key, set()).update(placement.npu_lengths)
    return tuple(
        ResidentSlice(group, layers, rows, tuple(sorted(lengths)), kind)
        for (group, layers, rows, kind), lengths in found.items()
    )


def _is_of(spec: OpSpec, group: Group, layers: tuple[int, int], kind: str) -> bool:
    return spec.group == group and kind in ("", spec.kind) and layers[0] <= spec.layer <= layers[1]
