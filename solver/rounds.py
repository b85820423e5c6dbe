"""Candidates that are priced in rounds: cuts far apart first, then those beside what was chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from heterollm.kernels.ops import Group
from heterollm.solver.candidates import Rows
from heterollm.solver.pricing import Priced

__all__ = ["PricedCandidates", "joined", "only"]

PricedCandidates: TypeAlias = Mapping[Group, Mapping[int, list[Priced]]]
"""By group and the last length of a range, what was priced."""


def joined(found: PricedCandidates, more: PricedCandidates) -> PricedCandidates:
    """Return candidates with those of other rows that a later round has priced."""
    result = dict(found)
    for group, by_length in more.items():
        known = {rows for items in found[group].values() for rows in _rows(items)}
        result[group] = {
            length: [
                *found[group][length],
                *(item for item in items if item.placement.npu_rows not in known),
            ]
            for length, items in by_length.items()
        }
    return result


def only(found: PricedCandidates, held: Mapping[Group, Collection[Rows]]) -> PricedCandidates:
    """Return the candidates that use some rows of each group."""
    return {
        group: {
            length: [item for item in items if item.placement.npu_rows in held[group]]
            for length, items in by_length.items()
        }
        for group, by_length in found.items()
    }


def _rows(items: list[Priced]) -> set[Rows]:
    return {item.placement.npu_rows for item in items}
