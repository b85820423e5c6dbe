"""Order of measurements: first those on which the solver's choices depend most.

A point matters if its processor may compute a shard of a split: if, at the low end of the predicted interval,
it is not so much slower than the faster processor that its help stays below the solver's margin. Points that
matter are sorted by their uncertainty, in microseconds for each second of measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from heterollm.base import ProfileError
from heterollm.profiler.measure import Task
from heterollm.profiler.predict import Predictor
from heterollm.profiler.records import LinearKey, LinearPoint, Profile

KNOWN_FRACTION: Final = 0.04
"""An interval this narrow is as good as a measurement repeated on another day."""

MOST_TIMES_SLOWER: Final = 30.0
"""Largest ratio of times for the same work: a slower processor saves less than a split's margin of 3 %."""

IRRELEVANT: Final = 0.05
"""Weight of points that cannot decide: the model behind them still gains by them."""


def by_worth(profile: Profile, tasks: Sequence[Task]) -> list[Task]:
    """Return tasks of linear layers, the most useful to the solver first; others keep their order.

    Tasks whose times are predicted closely enough are dropped.

    Args:
        profile: Measurements so far.
        tasks: Tasks to choose from.
    """
    try:
        predictor = Predictor.fit(profile)
    except ProfileError:
        return list(tasks)
    best_us: dict[tuple[object, ...], float] = {}
    for key, record in profile.of_kind(LinearKey):
        case = _case(key.point)
        best_us[case] = min(best_us.get(case, math.inf), _pace(record.median_us, key.point))
    scored = [(_score(task, predictor, best_us), place, task) for place, task in enumerate(tasks)]
    return [task for score, _, task in sorted(scored, key=lambda item: (-item[0], item[1])) if score > 0]


def _score(task: Task, predictor: Predictor, best_us: dict[tuple[object, ...], float]) -> float:
    total = 0.0
    for key in task.keys:
        if not isinstance(key, LinearKey):
            return math.inf
        try:
            found = predictor.predict_us(key.point, key.processor)
        except ProfileError:
            return math.inf  # the processor has no measurement
        width_us = found.high_us - found.low_us
        if found.known and width_us <= KNOWN_FRACTION * found.us:
            continue
        limit_us = MOST_TIMES_SLOWER * best_us.get(_case(key.point), math.inf)
        total += width_us * (1.0 if _pace(found.low_us, key.point) <= limit_us else IRRELEVANT)
    return total / (task.estimate_s + task.build_s)


def _case(point: LinearPoint) -> tuple[object, ...]:
    # The GPU has no measured ffn; most of an ffn is gate and up.
    group = "gate_up" if point.is_ffn else point.group
    return group, point.columns, point.tokens, point.bits, point.block, point.integer_inputs


def _pace(time_us: float, point: LinearPoint) -> float:
    return time_us / point.flops
