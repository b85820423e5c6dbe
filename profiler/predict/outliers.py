"""Measured times that lie far off those of their neighbours: in tokens, in rows and in inputs.

Two rules hold on every processor: more work takes no less time, and twice the work takes at most about twice
as long. Devices have steps and cliffs that break them: a graph form that falls from one stage to the next,
rows that spill. Such a step is there at every other shape, or at every other length, too. So two neighbours
are compared with the rules and with the same step elsewhere in the profile, and a point that explains neither
is far off. Of two neighbours that contradict each other, the one with more contradictions is at fault, and
the slower one sooner: other work only makes a measurement slower.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heterollm.base import round_up
from heterollm.profiler.measure import SLOWDOWN, Measurement
from heterollm.profiler.predict.curves import ARRAY
from heterollm.profiler.predict.time_model import Kind
from heterollm.profiler.records import ExpertsKey, Key, LayerKey, LinearKey, Profile, Record, SparseKey

LEAST_FACTOR: Final = 4.0
"""Factor beyond the rules from which on a point is far off, in a profile without noise. Rows that spill from
one length on, of one group alone, take 3.5 times as long on a Hexagon."""

AGAIN_FACTOR: Final = 2.0
"""Factor from which on a point is measured again, which costs little."""

DISTURBED_SLOWDOWN: Final = 1.5
"""Slowdown of the reference operator beside a measurement from which on it is too rough to be corrected."""

SPREADS: Final = 3.0
"""Standard deviations of a sample by which medians may contradict each other through noise alone."""

QUARTILES_OF_DEVIATION: Final = 1.349
"""Distance between the quartiles of normal noise, in standard deviations."""

REACH: Final = 3
"""Neighbours on each side, in each direction, that a point is compared with."""

FEWEST_ELSEWHERE: Final = 2
"""Other places at which a step must be known to be one of the device."""

BLAME_OF_SLOW: Final = 2.0
"""Weight of a contradiction for the slower point: other work makes a measurement slower, nothing faster."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A measured time by its sizes.

    Args:
        position: Tokens of the pass, and positions before it.
        shape: Sizes of the weights or heads.
        work: Work of the pass, in any unit.
        log_us: Logarithm of the time in microseconds.
        key: Key of the record.
    """

    position: tuple[int, ...]
    shape: tuple[int, ...]
    work: float
    log_us: float
    key: Key


@dataclass(frozen=True, slots=True)
class _Contradiction:
    """Two neighbours of which one takes longer than rules, steps and the other explain.

    Args:
        slow: The one that is too slow beside the other.
        fast: The other one.
        log_excess: Logarithm of the factor by which it is.
    """

    slow: Key
    fast: Key
    log_excess: float


def series_of(key: Key) -> Hashable:
    """Return the series of points among which a point has neighbours; None where it has none.

    Args:
        key: Key of the point.
    """
    match key:
        case LinearKey(processor, point, code):
            return "linear", processor, Kind.of(point), code
        case LayerKey():
            return "layer", key.operator, key.code
        case SparseKey():
            return "sparse", key.operator, key.heads, key.group, key.head_dim, key.keep, key.code
        case ExpertsKey():
            variant = key.form, key.chosen, key.streamed, key.gated, key.code
            return "experts", key.operator, str(key.weight), *variant
        case _:
            return None


def far_off(
    profile: Profile, series: Collection[Hashable] | None = None, *, factor: float = LEAST_FACTOR
) -> dict[Key, float]:
    """Return the points that lie far off their neighbours, and the microseconds that these explain.

    Args:
        profile: The measurements.
        series: The series to look at, as of :func:`series_of`; None for all.
        factor: Factor beyond the rules from which on a point is far off; noise of the profile raises it.
    """
    found: dict[Hashable, list[Record]] = defaultdict(list)
    for key, record in profile.records.items():
        own = series_of(key)
        if own is not None and record.samples_us and (series is None or own in series):
            found[own].append(record)
    result: dict[Key, float] = {}
    for records in found.values():
        result |= _far_off(records, factor)
    return result


def mark(profile: Profile) -> int:
    """Mark the records that are disturbed, and no others; return their number.

    Those lie far off their neighbours, or the reference operator was far too slow beside them.
    """
    slow = {
        key: record.median_us
        for key, record in profile.records.items()
        if record.values.get(SLOWDOWN, 1.0) > DISTURBED_SLOWDOWN
    }
    found = {**slow, **far_off(profile)}
    for key, record in profile.records.items():
        if record.expected_us != found.get(key, 0.0):
            profile.records[key] = replace(record, expected_us=found.get(key, 0.0))
    return len(found)


def checked(profile: Profile) -> Profile:
    """Return a profile with its marks; one that an earlier version measured gets them now."""
    newest = max(profile.runs.values(), key=lambda run: run["started_s"], default={})
    if profile.time_kind == "real" and "disturbed" not in newest:
        mark(profile)
    return profile


def _far_off(records: Sequence[Record], factor: float) -> dict[Key, float]:
    places = [_place(record) for record in records]
    log_us = {place.key: place.log_us for place in places}
    left = list(_contradictions(places, math.log(factor) + SPREADS * _deviation(records)))
    found: dict[Key, float] = {}
    while left:
        blame: dict[Key, float] = defaultdict(float)
        for one in left:
            blame[one.slow] += BLAME_OF_SLOW * one.log_excess
            blame[one.fast] += one.log_excess
        worst = max(blame, key=lambda key: (blame[key], key))
        too_slow = [one.log_excess for one in left if one.slow == worst]
        too_fast = [one.log_excess for one in left if one.fast == worst]
        excess = -statistics.median(too_slow) if too_slow else statistics.median(too_fast)
        found[worst] = round(math.exp(log_us[worst] + excess), 3)
        left = [one for one in left if worst not in (one.slow, one.fast)]
    return found


def _deviation(records: Iterable[Record]) -> float:
    """Return the relative standard deviation of a pass, of half the points less."""
    return statistics.median(
        Measurement(record.samples_us).spread_fraction / QUARTILES_OF_DEVIATION for record in records
    )


def _contradictions(places: Sequence[_Place], slack: float) -> Iterator[_Contradiction]:
    """Yield the neighbours that contradict each other by more than a slack, a logarithm."""
    pairs = [
        *_pairs(places, lambda one: one.shape, lambda one: one.position),
        *_pairs(places, lambda one: one.position, lambda one: one.shape),
    ]
    steps: dict[Hashable, list[float]] = defaultdict(list)
    for small, large in pairs:
        steps[_step(small, large)].append(large.log_us - small.log_us)
    for rises in steps.values():
        rises.sort()
    for small, large in pairs:
        rise = large.log_us - small.log_us
        usual = _median_of_others(steps[_step(small, large)], rise)
        above = rise - max(math.log(large.work / small.work), usual)
        below = min(0.0, usual) - rise
        if above > slack:
            yield _Contradiction(large.key, small.key, above)
        elif below > slack:
            yield _Contradiction(small.key, large.key, below)


def _pairs(
    places: Iterable[_Place],
    fixed: Callable[[_Place], Hashable],
    varied: Callable[[_Place], tuple[int, ...]],
) -> Iterator[tuple[_Place, _Place]]:
    """Yield neighbours, the smaller first, that differ in one size.

    Args:
        places: The points of a series.
        fixed: Returns the sizes that neighbours share.
        varied: Returns the sizes of which one differs.
    """
    lines: dict[Hashable, list[_Place]] = defaultdict(list)
    for place in places:
        sizes = varied(place)
        for number in range(len(sizes)):
            lines[fixed(place), number, sizes[:number], sizes[number + 1 :]].append(place)
    for line in lines.values():
        # All sizes but one are equal.
        ordered = sorted(line, key=lambda place: (varied(place), place.key))
        for first, small in enumerate(ordered):
            yield from ((small, large) for large in ordered[first + 1 : first + 1 + REACH])


def _step(small: _Place, large: _Place) -> Hashable:
    """Return the step from one point to the other, which other points take elsewhere."""
    if small.shape == large.shape:
        return "position", small.position, large.position
    return "shape", small.shape, large.shape


def _median_of_others(rises: Sequence[float], own: float) -> float:
    """Return the lower median of ascending rises without one of them; 0 where too few are left."""
    left = len(rises) - 1
    if left < FEWEST_ELSEWHERE:
        return 0.0
    middle = (left - 1) // 2
    return rises[middle + (bisect.bisect_left(rises, own) <= middle)]


def _place(record: Record) -> _Place:
    key, log_us = record.key, math.log(record.median_us)
    if isinstance(key, LinearKey):
        point = key.point
        tokens = point.tokens if point.tokens <= ARRAY else round_up(point.tokens, ARRAY)
        # A row of more inputs may spill: Hexagon takes 3.5 times as long for each weight of 14336 as of 4096.
        work = float(tokens) * point.flops / point.tokens * point.columns
        return _Place((point.tokens,), (point.rows, point.columns), work, log_us, key)
    if isinstance(key, LayerKey):
        # The context of attention has the tokens of the pass; without heads it counts channels.
        before = key.context - key.tokens if key.heads else key.context
        shape = (key.hidden, key.heads, key.kv_heads, key.head_dim)
        width = max(key.hidden, key.heads * key.head_dim, 1)
        return _Place((key.tokens, before), shape, key.tokens * max(key.context, 1) * width, log_us, key)
    if isinstance(key, SparseKey):
        return _Place((key.tokens, key.keys), (), float(key.tokens * key.keys), log_us, key)
    assert isinstance(key, ExpertsKey)
    return _Place((key.tokens, key.experts), (key.columns, key.width), float(key.flops), log_us, key)
