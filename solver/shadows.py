"""Shadow outliers in plans: the operators whose calibration asks for them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan import Plan
from heterollm.solver.plan_records import PlanEntry


@dataclass(frozen=True, slots=True)
class ShadowChannels:
    """Input channels of an operator with a shadow of outliers.

    Args:
        held: Hot channels, whose float weights stay in memory.
        hot: Those of them that have outliers in one pass, on average.
        cold: Others that have, on average, whose weights are read when they occur.
    """

    held: int
    hot: float
    cold: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupShadow:
    """The shadows of a group in all layers of a kind: plans place these alike, so that their mean counts.

    Args:
        layers: Share of the layers that have one.
        hot: Hot channels with outliers in one pass, on average of these layers.
        cold: Other channels with outliers.
    """

    layers: float
    hot: float
    cold: float


def group_shadows(
    shadows: Mapping[tuple[int, Group], ShadowChannels], specs: Iterable[OpSpec]
) -> dict[str, GroupShadow]:
    """Return the mean shadow of each group by place.

    Args:
        shadows: Channels by layer and group.
        specs: Every group of the model.
    """
    found: dict[str, list[ShadowChannels | None]] = {}
    for spec in specs:
        found.setdefault(spec.place, []).append(shadows.get((spec.layer, spec.group)))
    means = {}
    for place, every in found.items():
        own = [one for one in every if one is not None]
        if own:
            hot, cold = (statistics.fmean(getattr(one, name) for one in own) for name in ("hot", "cold"))
            means[place] = GroupShadow(len(own) / len(every), hot, cold)
    return means


def with_shadows(plan: Plan, shadows: Collection[tuple[int, Group]]) -> Plan:
    """Return a plan in which some operators have a shadow wherever the NPU computes them in integers.

    Args:
        plan: A plan without shadows.
        shadows: Layer and group of these operators.
    """
    if not shadows:
        return plan
    entries = tuple(_entries(plan.entries, shadows))
    schedule = plan.schedule
    if schedule is not None:
        schedule = replace(schedule, entries=tuple(_entries(schedule.entries, shadows)))
    # Slices follow the layers of entries.
    return replace(plan, entries=entries, schedule=schedule, slices=())


def _entries(entries: Iterable[PlanEntry], shadows: Collection[tuple[int, Group]]) -> Iterator[PlanEntry]:
    for entry in entries:
        placement = entry.placement
        if not isinstance(placement, RowsPlacement) or placement.form not in INTEGER_FORMS:
            yield entry
            continue
        wanted = {layer for layer, group in shadows if group == entry.group}
        layers = range(entry.layers[0], entry.layers[1] + 1)
        for shadow, run in itertools.groupby(layers, wanted.__contains__):
            own = tuple(run)
            placed = replace(placement, shadow=shadow)
            yield replace(entry, layers=(own[0], own[-1]), placement=placed)
