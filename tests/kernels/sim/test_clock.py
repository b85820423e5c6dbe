"""The virtual clock: what may never happen whatever is asked of it, and what simple cases must take."""

import itertools
import random

import pytest

from heterollm.base import OptionError
from heterollm.kernels.sim import GpuLoad, SimulatedClock
from heterollm.kernels.sim.jobs import ClockCosts, SimulatedJob

COSTS = ClockCosts(
    submit_us=15.0,
    refill_us=75.0,
    gap_us=2.5,
    finish_us=400.0,
    write_us=300.0,
    poll_us=8.0,
    sleep_us=90.0,
    npu_start_share=0.25,
)
LIMIT_GBPS = 60.0


def fair(gpu_gbps, npu_gbps, _gpu_computes, _npu_computes):
    """Share the bandwidth in proportion to the demands, once they exceed it."""
    factor = min(1.0, LIMIT_GBPS / max(gpu_gbps + npu_gbps, 1e-9))
    return factor, factor


def make_clock(load=None):
    clock = SimulatedClock(COSTS, fair, load)
    clock.recording = True
    return clock


def test_a_kernel_of_an_empty_queue_pays_the_refill_and_one_behind_it_the_gap():
    clock = make_clock()
    first = clock.submit(SimulatedJob("first", 100.0))
    second = clock.submit(SimulatedJob("second", 50.0))
    clock.wait_for(second)
    assert first.begin_us == COSTS.submit_us + COSTS.refill_us
    assert second.begin_us == first.end_us + COSTS.gap_us
    assert clock.now_us == second.end_us + COSTS.finish_us
    # The queue has run empty.
    third = clock.submit(SimulatedJob("third", 1.0))
    clock.wait_idle()
    assert third.begin_us == second.end_us + COSTS.finish_us + COSTS.submit_us + COSTS.refill_us
    assert clock.totals.overhead_us == {"refill": 150.0, "driver": 800.0}


def test_waiting_for_what_is_done_is_a_mere_look():
    clock = make_clock()
    clock.wait_idle()
    assert clock.now_us == COSTS.poll_us


def test_polling_sees_the_end_one_look_later():
    clock = make_clock()
    job = clock.submit(SimulatedJob("kernel", 1000.0))
    assert not clock.is_done(job)
    clock.poll_on()
    assert clock.now_us == job.end_us
    assert clock.is_done(job)
    assert clock.now_us == job.end_us + COSTS.poll_us


def test_a_graph_is_started_ahead_as_far_as_the_npu_is_free():
    clock = make_clock()
    clock.run_npu(SimulatedJob("alone", 500.0, fixed_us=100.0))
    assert clock.now_us == 500.0
    clock.run_npu(SimulatedJob("again", 500.0, fixed_us=100.0))
    assert clock.now_us == 1000.0
    job = clock.submit(SimulatedJob("kernel", 300.0))
    clock.poll_on()
    assert clock.is_done(job)
    begin_us = clock.now_us
    clock.run_npu(SimulatedJob("behind a kernel", 500.0, fixed_us=100.0))
    assert clock.now_us - begin_us == pytest.approx(425.0)
    # Of what was done long ago as well, but not for longer than the NPU was free.
    for pause_us, hidden_us in ((200.0, 75.0), (30.0, 30.0 + COSTS.poll_us)):
        clock.work(pause_us, "other things")
        assert clock.is_done(job)
        begin_us = clock.now_us
        clock.run_npu(SimulatedJob("behind a look", 500.0, fixed_us=100.0))
        assert clock.now_us - begin_us == pytest.approx(500.0 - hidden_us)


def test_both_parts_slow_each_other_only_while_both_run():
    clock = make_clock()
    # 40 GB/s each: together 80 of 60, so that both run at three quarters.
    job = clock.submit(SimulatedJob("kernel", 1000.0, 40e6))
    clock.sleep(job.ready_us - clock.now_us - COSTS.sleep_us)
    begin_us = clock.now_us
    clock.run_npu(SimulatedJob("graph", 300.0, 12e6))
    assert clock.now_us - begin_us == pytest.approx(400.0)
    clock.wait_for(job)
    assert job.end_us - job.begin_us == pytest.approx(1100.0)
    assert clock.totals.peak_gbps == pytest.approx(LIMIT_GBPS)


def test_the_driver_hands_over_with_copies_both_ways():
    clock = make_clock()
    clock.hand_over_by_driver()
    clock.run_npu(SimulatedJob("graph", 100.0))
    clock.run_npu(SimulatedJob("the rest of a pipe", 50.0))
    assert clock.now_us == pytest.approx(COSTS.write_us + 150.0)
    # The next kernel needs the output.
    clock.submit(SimulatedJob("kernel", 1.0))
    back_us = COSTS.finish_us + COSTS.write_us
    assert clock.now_us == pytest.approx(COSTS.write_us + 150.0 + back_us + COSTS.submit_us)
    clock.run_npu(SimulatedJob("graph", 100.0))
    before_us = clock.now_us
    clock.submit(SimulatedJob("kernel", 1.0))
    assert clock.now_us == pytest.approx(before_us + COSTS.submit_us)


def test_the_driver_copies_back_behind_the_gpus_own_part():
    clock = make_clock()
    clock.hand_over_by_driver()
    own = clock.submit(SimulatedJob("own part", 1000.0))
    clock.run_npu(SimulatedJob("graph", 200.0))
    clock.submit(SimulatedJob("kernel", 1.0))
    assert clock.now_us == pytest.approx(own.end_us + COSTS.finish_us + COSTS.write_us + COSTS.submit_us)


def test_a_game_draws_between_kernels():
    clock = make_clock(GpuLoad(100.0, 4000.0))
    jobs = [clock.submit(SimulatedJob("kernel", 300.0)) for _ in range(100)]
    clock.wait_for(jobs[-1])
    # Four milliseconds of each ten are the game's, however irregularly they come.
    assert jobs[-1].end_us == pytest.approx(50_000.0, abs=4100.0)
    assert clock.totals.busy_us["gpu"] == pytest.approx(30_000.0)
    assert clock.totals.busy_us["game"] == pytest.approx(4000.0 * len(clock.totals.frame_us), abs=4000.0)
    # Kernels are short: no frame waits for longer than one of them, and none is dropped.
    assert all(4000.0 <= time <= 4300.0 for time in clock.totals.frame_us)
    assert clock.totals.frames_due == len(clock.totals.frame_us)


def test_a_frame_waits_for_the_kernel_that_runs_and_goes_before_those_queued():
    load = GpuLoad(100.0, 4000.0)
    clock = make_clock(load)
    clock.sleep(5000.0)
    long = clock.submit(SimulatedJob("long", 25_000.0))
    behind = clock.submit(SimulatedJob("behind", 10.0))
    clock.wait_for(behind)
    assert long.begin_us < load.begin_us(1) < long.end_us
    assert long.end_us - long.begin_us == pytest.approx(25_000.0)
    assert [span.name for span in clock.spans if span.processor in ("gpu", "game")] == (
        ["frame", "long", "frame", "frame", "behind"]
    )
    first, late, catching_up = in_order(clock, "game")
    assert (first.begin_us, first.end_us) == (0.0, 4000.0)
    assert (late.begin_us, late.end_us) == (long.end_us, long.end_us + 4000.0)
    assert catching_up.begin_us == late.end_us
    assert behind.begin_us == catching_up.end_us
    # It took from when it was due; of those that fell due meanwhile only the last is drawn.
    assert load.begin_us(3) < late.end_us < load.begin_us(4)
    assert clock.totals.frame_us == (
        [4000.0, late.end_us - load.begin_us(1), catching_up.end_us - load.begin_us(3)]
    )
    assert clock.totals.frames_due == 4
    clock.work(load.begin_us(4) + 4000.0 - clock.now_us, "other things")
    assert clock.last_job() is None
    assert in_order(clock, "game")[-1].begin_us == load.begin_us(4)
    assert clock.totals.frames_due == 5


def test_an_idle_gpu_drops_no_frame():
    for load in (GpuLoad(60.0, 15_800.0), GpuLoad(1000.0, 949.0), GpuLoad(60.0, 1.0)):
        clock = make_clock(load)
        clock.work(1e6, "other things")
        assert clock.last_job() is None
        due = clock.totals.frames_due
        assert due == pytest.approx(load.frames_per_s, abs=1)
        assert clock.totals.frame_us == pytest.approx([load.frame_us] * due)


def test_a_game_that_fills_the_gpu_leaves_each_wait_an_end():
    """A game that has caught up lets a kernel begin, whatever is waited for and however."""
    load = GpuLoad(1000.0, 949.0)
    clock = make_clock(load)
    for _ in range(20):
        job, last = clock.submit(SimulatedJob("kernel", 10.0)), clock.submit(SimulatedJob("kernel", 400.0))
        clock.run_npu(SimulatedJob("graph", 100.0))
        while not clock.is_done(job):
            clock.poll_on()
        clock.wait_for(last)
    assert clock.now_us < 200 * load.period_us


@pytest.mark.parametrize(("rate", "frame_us"), [(60.0, 17_000.0), (0.0, 5.0), (60.0, 0.0), (60.0, -1.0)])
def test_a_game_that_leaves_no_time_is_refused(rate, frame_us):
    with pytest.raises(OptionError):
        GpuLoad(rate, frame_us)


def in_order(clock, part):
    return sorted((span for span in clock.spans if span.processor == part), key=lambda span: span.begin_us)


def random_run(seed, load=None):
    """Drive a clock at random, and return it."""
    draw = random.Random(seed)
    clock = make_clock(load)
    jobs = []
    for _ in range(200):
        kind = draw.random()
        if kind < 0.5:
            duration_us = draw.choice([0.0, draw.uniform(1, 20), draw.uniform(100, 5000)])
            jobs.append(
                clock.submit(SimulatedJob("kernel", duration_us, duration_us * draw.uniform(0, 45e3)))
            )
        elif kind < 0.7:
            duration_us = draw.uniform(20, 3000)
            fixed_us = draw.choice([0.0, 20.0])
            moved = (duration_us - fixed_us) * draw.uniform(0, 40e3)
            clock.run_npu(SimulatedJob("graph", duration_us, moved, fixed_us))
        elif kind < 0.8:
            clock.poll_on()
        elif kind < 0.9 and jobs:
            clock.wait_for(draw.choice(jobs))
        else:
            clock.sleep(draw.uniform(1, 300))
    clock.wait_idle()
    return clock, jobs


@pytest.mark.parametrize("load", [None, GpuLoad(60.0, 5000.0), GpuLoad(120.0, 7900.0)])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_gained_or_lost(seed, load):
    clock, jobs = random_run(seed, load)
    # The game has the GPU to itself, and leaves no kernel half done.
    drawn = [span for span in clock.spans if span.processor in ("gpu", "game")]
    for before, after in itertools.pairwise(sorted(drawn, key=lambda span: span.begin_us)):
        assert before.end_us <= after.begin_us + 1e-6, (before, after)
    assert all(job.begin_us <= job.end_us <= clock.now_us for job in jobs)
    assert len(in_order(clock, "gpu")) == sum(job.end_us > job.begin_us for job in jobs)
    assert len(in_order(clock, "game")) == len(clock.totals.frame_us) <= clock.totals.frames_due
    assert all(time >= load.frame_us - 1e-6 for time in clock.totals.frame_us)
    for part in ("gpu", "npu", "host"):
        spans = in_order(clock, part)
        # No part does two things at once.
        for before, after in itertools.pairwise(spans):
            assert before.end_us <= after.begin_us + 1e-6, (before, after)
        if part != "host":
            assert clock.totals.busy_us[part] == pytest.approx(
                sum(span.end_us - span.begin_us for span in spans), rel=1e-9, abs=1e-6
            )
    # The kernels run in the order in which they came.
    assert [job.begin_us for job in jobs] == sorted(job.begin_us for job in jobs)
    assert clock.totals.peak_gbps <= LIMIT_GBPS * (1 + 1e-9)
    moved = sum(span.dram_bytes for span in clock.spans)
    assert clock.totals.dram_bytes == pytest.approx(moved, abs=1e6)
    # The control thread is never without something to do: its spans cover the time without a hole.
    host = in_order(clock, "host")
    covered = sum(span.end_us - span.begin_us for span in host)
    assert covered == pytest.approx(clock.now_us, rel=1e-9)


def test_equal_runs_take_equal_times():
    for load in (None, GpuLoad(60.0, 5000.0)):
        one, other = random_run(5, load)[0], random_run(5, load)[0]
        assert one.now_us == other.now_us
        assert one.spans == other.spans
        assert one.totals == other.totals


def test_long_runs_keep_going():
    """Sums of many times are never so coarse that a short job does not end."""
    clock = make_clock()
    clock.now_us = 3.3e9
    for _ in range(300):
        clock.submit(SimulatedJob("short", 1e-7, 1.0))
        clock.run_npu(SimulatedJob("short too", 3e-7, 1.0, 1e-7))
    clock.wait_idle()
    assert clock.last_job() is None
