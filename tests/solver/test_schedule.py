"""Schedules of chunks keep the dependencies, and the exact search finds what enumeration finds."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import PlanError
from heterollm.solver.schedule import EXACT_STAGES, POLICIES, Schedule, Stage, schedule_chunks

KINDS = st.lists(st.tuples(st.sampled_from(("gpu", "npu")), st.booleans()), min_size=1, max_size=5)


@st.composite
def prompts(draw: st.DrawFn, most: int = EXACT_STAGES) -> list[list[Stage]]:
    kinds = draw(KINDS)
    chunks = draw(st.integers(1, min(4, most // len(kinds))))
    times = st.integers(0, 9).map(float)
    return [[Stage(processor, draw(times), reads) for processor, reads in kinds] for _ in range(chunks)]


def needs_of(chunks: list[list[Stage]], chunk: int, stage: int) -> list[tuple[int, int]]:
    if not stage:
        return []
    first = 0 if chunks[chunk][stage].reads_context else chunk
    return [(one, stage - 1) for one in range(first, chunk + 1)]


def require_valid(chunks: list[list[Stage]], found: Schedule) -> None:
    width = len(chunks[0])
    assert sorted(found.order) == [(chunk, stage) for chunk in range(len(chunks)) for stage in range(width)]
    begins = dict(zip(found.order, found.begins_us, strict=True))
    ends = {(chunk, stage): begin + chunks[chunk][stage].time_us for (chunk, stage), begin in begins.items()}
    for (chunk, stage), begin in begins.items():
        assert all(ends[need] <= begin for need in needs_of(chunks, chunk, stage))
    for processor in ("gpu", "npu"):
        spans = sorted((begins[at], ends[at]) for at in begins if chunks[at[0]][at[1]].processor == processor)
        assert all(before <= after for (_, before), (after, _) in pairwise(spans))
    assert found.elapsed_us == max(ends.values())


def shortest_us(chunks: list[list[Stage]]) -> float:
    """Return the least end of all orders, each stage as early as its order lets it."""
    best = float("inf")
    width = len(chunks[0])
    chains = [chunk for chunk in range(len(chunks)) for _ in range(width)]
    for order in set(permutations(chains)):
        ends: dict[tuple[int, int], float] = {}
        free = {"gpu": 0.0, "npu": 0.0}
        for chunk in order:
            at = chunk, sum(one == chunk for one, _ in ends)
            stage = chunks[chunk][at[1]]
            needs = needs_of(chunks, *at)
            if not all(need in ends for need in needs):
                break
            begin = max([free[stage.processor], *(ends[need] for need in needs)])
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


def test_a_waiting_npu_takes_the_next_chunk() -> None:
    layer = [Stage("gpu", 1.0), Stage("npu", 4.0), Stage("gpu", 3.0, reads_context=True), Stage("npu", 2.0)]
    chunks = [layer * 3] * 4
    in_order, out_of_order = schedule_chunks(chunks, "in_order"), schedule_chunks(chunks)
    assert in_order.bubble_fraction("npu") == pytest.approx(1 - 72 / in_order.elapsed_us)
    # The first stage of the GPU and nothing else delays the NPU.
    assert out_of_order.elapsed_us == 73.0
    assert out_of_order == schedule_chunks(chunks)


def test_unequal_chunks_and_large_searches_are_refused() -> None:
    stage = Stage("npu", 1.0)
    with pytest.raises(PlanError, match="Chunk 1 has other stages"):
        schedule_chunks([[stage], [stage, stage]])
    with pytest.raises(PlanError, match="25 stages are too many"):
        schedule_chunks([[stage] * 25], "exact")
    assert schedule_chunks([]).elapsed_us == 0.0
