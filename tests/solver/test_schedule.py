"""Schedules of chunks keep the dependencies, and the exact search finds what enumeration finds."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import PlanError
from heterollm.solver.schedule import EXACT_STAGES, POLICIES, Schedule, Stage, schedule_chunks


@st.composite
def prompts(draw: st.DrawFn, most: int = EXACT_STAGES) -> list[list[Stage]]:
    """Stages that need the one before, and some of them that of every earlier chunk, as attention does."""
    width = draw(st.integers(1, 5))
    reads = draw(st.lists(st.booleans(), min_size=width, max_size=width))
    return [
        [
            Stage(
                draw(st.sampled_from(("gpu", "npu"))),
                float(draw(st.integers(0, 9))),
                tuple((one, index - 1) for one in range(0 if reads[index] else chunk, chunk + 1) if index),
            )
            for index in range(width)
        ]
        for chunk in range(draw(st.integers(1, min(4, most // width))))
    ]


def require_valid(chunks: list[list[Stage]], found: Schedule) -> None:
    assert sorted(found.order) == [
        (chunk, index) for chunk, stages in enumerate(chunks) for index in range(len(stages))
    ]
    begins = dict(zip(found.order, found.begins_us, strict=True))
    ends = {(chunk, stage): begin + chunks[chunk][stage].time_us for (chunk, stage), begin in begins.items()}
    for (chunk, stage), begin in begins.items():
        assert all(ends[need] <= begin for need in chunks[chunk][stage].needs)
    for processor in ("gpu", "npu"):
        spans = sorted((begins[at], ends[at]) for at in begins if chunks[at[0]][at[1]].processor == processor)
        assert all(before <= after for (_, before), (after, _) in pairwise(spans))
    assert found.elapsed_us == max(ends.values())


def shortest_us(chunks: list[list[Stage]]) -> float:
    """Return the least end of all orders, each stage as early as its order lets it."""
    best = float("inf")
    chains = [chunk for chunk, stages in enumerate(chunks) for _ in stages]
    for order in set(permutations(chains)):
        ends: dict[tuple[int, int], float] = {}
        free = {"gpu": 0.0, "npu": 0.0}
        for chunk in order:
            at = chunk, sum(one == chunk for one, _ in ends)
            stage = chunks[chunk][at[1]]
            if not all(need in ends for need in stage.needs):
                break
            begin = max([free[stage.processor], *(ends[need] for need in stage.needs)])
            ends[at] = free[stage.processor] = begin + stage.time_us
        else:
            best = min(best, max(ends.values()))
    return best


@settings(deadline=None)
@given(chunks=prompts())
def test_every_schedule_keeps_the_dependencies_and_better_policies_are_no_slower(
    chunks: list[list[Stage]],
) -> None:
    found = [schedule_chunks(chunks, policy) for policy in POLICIES]
    for one in found:
        require_valid(chunks, one)
    in_order, out_of_order, exact = (one.elapsed_us for one in found)
    assert exact <= out_of_order <= in_order


@settings(max_examples=60, deadline=None)
@given(chunks=prompts(most=8))
def test_the_exact_search_finds_what_enumeration_finds(chunks: list[list[Stage]]) -> None:
    assert schedule_chunks(chunks, "exact").elapsed_us == shortest_us(chunks)


def attention_after_linears(chunks: int, layers: int) -> list[list[Stage]]:
    times = (("gpu", 1.0), ("npu", 4.0), ("gpu", 3.0), ("npu", 2.0))
    return [
        [
            Stage(
                *times[index % 4],
                tuple((one, index - 1) for one in range(0 if index % 4 == 2 else chunk, chunk + 1) if index),
            )
            for index in range(4 * layers)
        ]
        for chunk in range(chunks)
    ]


def test_a_waiting_npu_takes_the_next_chunk() -> None:
    chunks = attention_after_linears(chunks=4, layers=3)
    in_order, out_of_order = schedule_chunks(chunks, "in_order"), schedule_chunks(chunks)
    assert in_order.bubble_fraction("npu") == pytest.approx(1 - 72 / in_order.elapsed_us)
    # The first stage of the GPU and nothing else delays the NPU.
    assert out_of_order.elapsed_us == 73.0 < in_order.elapsed_us
    assert out_of_order == schedule_chunks(chunks)


def test_circles_and_large_searches_are_refused() -> None:
    with pytest.raises(PlanError, match="not all before it"):
        schedule_chunks([[Stage("npu", 1.0, ((0, 1),)), Stage("gpu", 1.0)]])
    with pytest.raises(PlanError, match="25 stages are too many"):
        schedule_chunks([[Stage("npu", 1.0)] * 25], "exact")
    assert schedule_chunks([]).elapsed_us == 0.0
