"""A trace in numbers: against a count of every microsecond, and by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.engine.step import LinearWork
from heterollm.trace import Pass, Span, Trace, summarise
from heterollm.trace.summary import BETWEEN, ENDS, HAND_OVER, PYTHON, SAME_PROCESSOR

LENGTH = 60
"""Microseconds of a pass."""


def made(passes: list[Pass], spans: list[Span], **more: Any) -> Trace:
    whole = [
        Span("engine", "pass", one.phase, one.begin_ns, one.end_ns, one.number) for one in passes
    ] + spans
    whole.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
    return Trace("host", "real", "tensor", "w4a16", tuple(passes), tuple(whole), **more)


def one_pass(*spans: tuple[Any, ...], **more: Any) -> Trace:
    """Return the trace of one pass from spans of track, category, first and last microsecond."""
    found = [
        Span(track, category, category, first * 1000, last * 1000, 0)
        for track, category, first, last in spans
    ]
    return made([Pass(0, "decode", 1, 0, 0, LENGTH * 1000)], found, **more)


def test_by_hand() -> None:
    summary = summarise(
        one_pass(
            ("gpu", "norm", 5, 10),
            ("npu", "linear", 13, 40),
            ("gpu", "linear", 11, 30),
            ("gpu", "attention", 44, 50),
            ("gpu", "norm", 51, 55),
            ("engine", "launch", 1, 4),
            ("engine", "wait", 6, 12),
            ("engine", "sleep", 6, 9),
            ("engine", "poll", 9, 12),
            ("engine", "graph", 13, 40),
        )
    )
    assert (summary.wall_us, summary.between_us) == (60, 0)
    assert (summary.gpu_busy_us, summary.npu_busy_us, summary.overlap_us) == (34, 27, 17)
    assert summary.overlap_fraction == pytest.approx(17 / 27)
    assert (summary.gpu_idle_us, summary.npu_idle_us, summary.both_idle_us) == (26, 33, 16)
    expected = {"launch": 3, "sleep": 3, "poll": 3, "graph": 27, "wait": 0, PYTHON: 24}
    assert summary.engine_us == expected
    # From the end: the norm, attention, the NPU's part, which ended after the GPU's, and the first norm.
    assert summary.critical_us == {
        "npu linear": 27,
        ENDS: 5 + 5,
        "gpu norm": 4 + 5,
        HAND_OVER: 4 + 3,
        "gpu attention": 6,
        SAME_PROCESSOR: 1,
    }
    assert (summary.hand_overs, summary.hand_over_us) == (2, 7)


def test_a_kernel_that_seems_to_end_late_is_still_what_was_waited_for() -> None:
    spans = (("gpu", "norm", 5, 12), ("npu", "linear", 11, 40), ("gpu", "norm", 45, 55))
    assert "gpu norm" in summarise(one_pass(*spans, clock_uncertainty_us=1.0)).critical_us
    close = summarise(one_pass(*spans, clock_uncertainty_us=1.0))
    assert close.critical_us["gpu norm"] == 10 + 6
    far = summarise(one_pass(*spans, clock_uncertainty_us=0.5))
    assert far.critical_us["gpu norm"] == 10
    for summary in (close, far):
        assert sum(summary.critical_us.values()) == pytest.approx(60)


def test_kernels_outside_of_their_pass_count_so_far_as_they_are_in_it() -> None:
    summary = summarise(one_pass(("gpu", "norm", -3, 5), ("gpu", "linear", 55, 63)))
    assert summary.gpu_busy_us == 10
    assert sum(summary.critical_us.values()) == 60


def test_what_lies_between_passes_counts_where_they_follow_each_other() -> None:
    passes = [
        Pass(number, "decode", 1, number, 100_000 * number, 100_000 * number + 60_000) for number in range(4)
    ]
    spans = [
        Span("engine", "tracing", "read times", one.end_ns, one.end_ns + 7000, one.number) for one in passes
    ]
    trace = made(passes, spans)
    whole = summarise(trace)
    assert (whole.wall_us, whole.between_us) == (360, 120)
    assert whole.engine_us == {PYTHON: 240, BETWEEN: 99, "tracing": 21}
    some = summarise(trace.select(lambda one: one.number != 1))
    assert (some.wall_us, some.between_us) == (180 + 40, 40)
    assert sum(some.engine_us.values()) == some.wall_us


def test_operators_are_summed_up_by_part() -> None:
    work = LinearWork(2, 8, 4, 128, 32)
    spans = [
        Span("gpu", "linear", "qkv", layer * 1000, layer * 1000 + 500, 0, layer, work) for layer in range(3)
    ]
    spans += [Span("npu", "linear", "qkv", 10_000, 10_100, 0, 0, work + work)]
    summary = summarise(made([Pass(0, "prefill", 2, 0, 0, 60_000)], spans))
    gpu, npu = summary.operators
    assert (gpu.track, gpu.count, gpu.time_us, gpu.weight_bytes, gpu.flops) == ("gpu", 3, 1.5, 96, 384)
    assert gpu.gbps == pytest.approx(96 / 1500)
    assert npu.gflops == pytest.approx(256 / 100)
    told = summary.to_dict()
    assert told["operators"][0]["gbps"] == gpu.gbps
    assert told["overlap_fraction"] == summary.overlap_fraction


PART_SPANS = st.lists(
    st.tuples(st.sampled_from(["gpu", "npu"]), st.integers(0, LENGTH - 1), st.integers(1, 20)), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(parts=PART_SPANS)
def test_busy_and_overlap_are_those_of_a_count(parts: list[tuple[str, int, int]]) -> None:
    spans = [(track, "linear", first, min(first + length, LENGTH)) for track, first, length in parts]
    summary = summarise(one_pass(*spans))
    at_work = {
        track: {moment for own, _, first, last in spans if own == track for moment in range(first, last)}
        for track in ("gpu", "npu")
    }
    assert summary.gpu_busy_us == len(at_work["gpu"])
    assert summary.npu_busy_us == len(at_work["npu"])
    assert summary.overlap_us == len(at_work["gpu"] & at_work["npu"])
    assert summary.both_idle_us == LENGTH - len(at_work["gpu"] | at_work["npu"])
    # The path never counts a moment twice, and says all of them.
    assert sum(summary.critical_us.values()) == pytest.approx(LENGTH)
    assert 0 <= summary.hand_over_us <= LENGTH


@st.composite
def nested(draw: st.DrawFn, first: int, last: int, depth: int) -> list[tuple[str, str, int, int]]:
    """Return engine spans between two moments that lie one after the other or in each other."""
    found = []
    at = first
    while depth and at < last and draw(st.booleans()):
        begin = draw(st.integers(at, last - 1))
        end = draw(st.integers(begin + 1, last))
        category = draw(st.sampled_from(["launch", "wait", "bind", "graph"]))
        found.append(("engine", category, begin, end))
        found += draw(nested(begin, end, depth - 1))
        at = end
    return found


@settings(max_examples=200, deadline=None)
@given(spans=nested(0, LENGTH, 3))
def test_the_engine_threads_times_are_those_of_a_count(spans: list[tuple[str, str, int, int]]) -> None:
    summary = summarise(one_pass(*spans))
    innermost = [PYTHON] * LENGTH
    # Inner spans come after those that they are in.
    for _, category, first, last in spans:
        innermost[first:last] = [category] * (last - first)
    counted = {name: innermost.count(name) for name in summary.engine_us}
    assert summary.engine_us == counted
    assert sum(summary.engine_us.values()) == LENGTH
