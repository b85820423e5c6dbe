"""Schedules of chunks keep the dependencies, and the exact search finds what enumeration finds."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import PlanError
from heterollm.solver.costs import Slowdown, joint_time_us
from heterollm.solver.flights.schedule import (
    EXACT_STAGES,
    POLICIES,
    Schedule,
    SchedulePolicy,
    Stage,
    schedule_chunks,
)


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
    assert in_order.busy_us["npu"] == pytest.approx(72)
    # The first stage of the GPU and nothing else delays the NPU.
    assert out_of_order.elapsed_us == 73.0 < in_order.elapsed_us
    assert out_of_order == schedule_chunks(chunks)


@pytest.mark.parametrize("policy", ["in_order", "out_of_order"])
@pytest.mark.parametrize(("gpu_us", "npu_us"), [(10.0, 10.0), (30.0, 4.0), (3.0, 20.0)])
def test_stages_slow_each_other_only_while_both_run(
    gpu_us: float, npu_us: float, policy: SchedulePolicy
) -> None:
    slowdown = Slowdown(1.5, 1.25)

    def found(gpu_slows: bool = True, npu_slows: bool = True) -> Schedule:
        gpu = Stage("gpu", gpu_us, (), slowdown.gpu, gpu_slows)
        npu = Stage("npu", npu_us, (), slowdown.npu, npu_slows)
        return schedule_chunks([[gpu], [npu]], policy)

    joint = dict(zip(("gpu", "npu"), joint_time_us(gpu_us, npu_us, slowdown), strict=True))
    slowed = found()
    assert slowed.busy_us == pytest.approx(joint)
    assert slowed.elapsed_us == pytest.approx(max(joint.values()))
    both_us = min(gpu_us * slowdown.gpu, npu_us)
    assert found(gpu_slows=False).busy_us == pytest.approx(
        {"gpu": gpu_us + both_us - both_us / slowdown.gpu, "npu": npu_us}
    )
    assert found(gpu_slows=False, npu_slows=False).busy_us == {"gpu": gpu_us, "npu": npu_us}


def test_a_stage_behind_an_idle_time_refills_the_queue() -> None:
    """The GPU waits for the graph before its last stage, and has no gap before the second."""
    stages = [Stage("gpu", 5.0, refill_us=2.0), Stage("gpu", 3.0, ((0, 0),), refill_us=2.0)]
    stages += [Stage("npu", 4.0, ((0, 1),)), Stage("gpu", 1.0, ((0, 2),), refill_us=2.0)]
    found = schedule_chunks([stages])
    assert found.begins_us == (0.0, 7.0, 10.0, 14.0)
    assert found.elapsed_us == 17.0


def test_circles_and_large_searches_are_refused() -> None:
    with pytest.raises(PlanError, match="not all before it"):
        schedule_chunks([[Stage("npu", 1.0, ((0, 1),)), Stage("gpu", 1.0)]])
    with pytest.raises(PlanError, match="25 stages are too many"):
        schedule_chunks([[Stage("npu", 1.0)] * 25], "exact")
    assert schedule_chunks([]).elapsed_us == 0.0
