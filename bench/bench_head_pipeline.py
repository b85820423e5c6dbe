"""How long does planning the pipeline over heads take, and what does the paper's greedy order lose?

Rows of planning: processor time for one layer of 32 key heads with random times, which have one, four or 32
exponents; the aim is the paper's, under 1 ms. Rows of loss: layers of 2 to 7 heads against the shortest of
all orders, in three lanes (as in the paper) and in two (as here, where Johnson's rule is exact).

    python bench/bench_head_pipeline.py --out bench/results/head_pipeline.jsonl
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from conditions import append_rows, conditions, script_parser

from heterollm.solver.sparse.head_pipeline import (
    PipelineUnit,
    johnson_order,
    plan_pipeline,
    two_lanes_us,
)

HEADS: Final = 32
AIM_MS: Final = 1.0
ROUNDS: Final = 50
LAYERS: Final = 200
LAUNCH_US: Final = {1: 2000.0, 2: 3000.0, 4: 4000.0}
"""Launches of 1, 2 and 4 heads (shadowAttn, section 3.4)."""


def three_lanes_us(order: Sequence[PipelineUnit]) -> float:
    """Return the time of units in an order, where selection has a lane of its own and heads go one by one."""
    npu_us = select_us = attend_us = 0.0
    for unit in order:
        npu_us += unit.npu_us
        for own_select_us, own_attend_us in zip(unit.select_us, unit.attend_us, strict=True):
            select_us = max(npu_us, select_us) + own_select_us
            attend_us = max(attend_us, select_us) + own_attend_us
    return attend_us


def greedy_order(units: Sequence[PipelineUnit]) -> list[PipelineUnit]:
    """Return the order by the paper's greedy search (algorithm 1), with the heads of each unit in order, too.

    Each step appends the unit after which the lane of attention is free first.
    """
    left = [(unit, min(unit.select_us), sum(unit.attend_us)) for unit in units]
    order = list[PipelineUnit]()
    npu_us = select_us = attend_us = 0.0
    while left:
        place, heads, selected_us, attended_us = 0, [0], 0.0, math.inf
        for number, (unit, least_us, own_us) in enumerate(left):
            scored_us = npu_us + unit.npu_us
            # No order of its heads ends before this, so that most units need no search.
            if max(attend_us, max(scored_us, select_us) + least_us) + own_us < attended_us:
                order_of_heads, free_us, end_us = _greedy_heads(unit, scored_us, select_us, attend_us)
                if end_us < attended_us:
                    place, heads, selected_us, attended_us = number, order_of_heads, free_us, end_us
        unit, *_ = left.pop(place)
        npu_us, select_us, attend_us = npu_us + unit.npu_us, selected_us, attended_us
        order.append(unit if len(heads) == 1 else _with_order(unit, heads))
    return order


def _with_order(unit: PipelineUnit, heads: Sequence[int]) -> PipelineUnit:
    """Return a unit with its heads in another order."""
    return replace(
        unit,
        heads=tuple(unit.heads[head] for head in heads),
        select_us=tuple(unit.select_us[head] for head in heads),
        attend_us=tuple(unit.attend_us[head] for head in heads),
    )


def _greedy_heads(
    unit: PipelineUnit, npu_us: float, select_us: float, attend_us: float
) -> tuple[list[int], float, float]:
    """Return the order of a unit's heads, and when the lanes of selection and attention are free then.

    The next head is always the one after which the lane of attention is free first.
    """
    left, order = list(range(len(unit.heads))), list[int]()
    while left:
        begin_us = max(npu_us, select_us)
        best, best_us = left[0], math.inf
        for head in left:
            end_us = max(attend_us, begin_us + unit.select_us[head]) + unit.attend_us[head]
            if end_us < best_us:
                best, best_us = head, end_us
        left.remove(best)
        order.append(best)
        select_us, attend_us = begin_us + unit.select_us[best], best_us
    return order, select_us, attend_us


def spread(what: str, layer: str, times_ms: list[float]) -> dict[str, Any]:
    """Return the least, the median and the largest of some times."""
    found = {"least_ms": min(times_ms), "median_ms": statistics.median(times_ms), "largest_ms": max(times_ms)}
    rounded = {name: round(time_ms, 3) for name, time_ms in found.items()}
    return {"what": what, "costs": layer, **rounded, "rounds": len(times_ms), "aim_ms": AIM_MS}


def processor_ms(call: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def planning_rows() -> list[dict[str, Any]]:
    """Time both searches for one layer."""
    rows = []
    for exponents in (1, 4, HEADS):
        own = [head % exponents for head in range(HEADS)]
        johnson_ms, greedy_ms = [], []
        for seed in range(ROUNDS):
            draw = random.Random(seed)  # noqa: S311 - no secret
            select, attend = ([draw.uniform(100, 2000) for _ in own] for _ in range(2))

            def plan(*times: list[float], own: list[int] = own) -> Sequence[PipelineUnit]:
                return plan_pipeline(own, LAUNCH_US.__getitem__, *times).units

            units = plan(select, attend)
            johnson_ms.append(processor_ms(lambda: plan(select, attend)))  # noqa: B023 - called at once
            greedy_ms.append(processor_ms(lambda: greedy_order(units)))  # noqa: B023 - called at once
        kind = f"{HEADS} key heads, {exponents} exponents"
        rows.append(spread("fuse and order by Johnson's rule", kind, johnson_ms))
        rows.append(spread("order by the greedy search", kind, greedy_ms))
    return rows


def loss_rows() -> list[dict[str, Any]]:
    """Compare orders of single heads with the shortest of all."""
    lanes: tuple[tuple[str, Callable[[Sequence[PipelineUnit]], float]], ...] = (
        ("three lanes", three_lanes_us),
        ("two lanes", two_lanes_us),
    )
    searches = (("greedy", greedy_order), ("johnson", johnson_order), ("unordered", list))
    losses: dict[tuple[str, str], list[float]] = {}
    for seed in range(LAYERS):
        draw = random.Random(seed)  # noqa: S311 - no secret
        scale = [draw.choice((0.3, 1.0, 3.0)) for _ in range(3)]
        units = [
            PipelineUnit((head,), 0, scale[0] * draw.random(), *((own * draw.random(),) for own in scale[1:]))
            for head in range(draw.randint(2, 7))
        ]
        for lane, time_us in lanes:
            best_us = min(map(time_us, itertools.permutations(units)))
            for name, search in searches:
                losses.setdefault((lane, name), []).append(time_us(search(units)) / best_us - 1.0)
    return [
        {
            "what": f"loss of order {name} in {lane}",
            "layers": LAYERS,
            "mean_fraction": round(statistics.mean(own), 4),
            "median_fraction": round(statistics.median(own), 4),
            "p90_fraction": round(statistics.quantiles(own, n=10)[-1], 4),
            "largest_fraction": round(max(own), 4),
        }
        for (lane, name), own in losses.items()
    ]


def main() -> None:
    """Print and append the rows."""
    parser = script_parser(__doc__)
    out = parser.parse_args().out
    for row in (*planning_rows(), *loss_rows()):
        print(json.dumps(row))
        append_rows(out, {**conditions(), **row})


if __name__ == "__main__":
    main()
