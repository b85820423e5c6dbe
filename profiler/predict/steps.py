"""Whether the times of a device's NPU move in steps of a tile of tokens, as it was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from msgspec import structs

from heterollm.profiler.predict.curves import ARRAY
from heterollm.profiler.records import LinearPoint, Profile, SweepKey

CLEAR: Final = 1.1
"""Least ratio of the time of a tile more that says anything."""

HALF: Final = 0.5
"""Least share of the rise from one end of a tile to the next that lies within it where there are no steps."""


def grows_within_tiles(costs_us: Mapping[LinearPoint, float]) -> bool | None:
    """Return whether times rise from token to token within a tile of 32; None where nothing tells.

    With steps the first token of a tile costs what the last does, and without nearly nothing. Most of the
    measured weights and tiles decide.

    Args:
        costs_us: Those of :func:`sweep_costs`.
    """
    times: dict[LinearPoint, dict[int, float]] = defaultdict(dict)
    for point, cost_us in costs_us.items():
        times[structs.replace(point, tokens=1)][point.tokens] = cost_us
    found = []
    for own in times.values():
        for end, before in own.items():
            first, last = own.get(end + 1), own.get(end + ARRAY)
            if end % ARRAY == 0 and first and last and last > CLEAR * before:
                found.append(last - first > HALF * (last - before))
    return 2 * sum(found) > len(found) if found else None


def sweep_costs(profile: Profile) -> dict[LinearPoint, float]:
    """Return the time, or where the NPU is emulated the CPU time, of weights at lengths on and off tiles.

    A default profile has those of one weight, one of ``--characterise`` those of several.
    """
    found = {}
    for key, record in profile.of_kind(SweepKey):
        cost_us = record.values.get("cpu_us", 0.0) or (record.median_us if record.samples_us else 0.0)
        if cost_us > 0:
            found[key.point] = cost_us
    return found
