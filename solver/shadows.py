"""Shadow outliers in plans: the operators whose calibration asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import Group
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan import Plan
from heterollm.solver.plan_records import PlanEntry

__all__ = ["with_shadows"]


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
