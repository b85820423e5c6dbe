"""Fences between GPU and host: complete data, bounds, predictions, fairness, no growth.

Delays are inside the kernel or the graph. No test depends on the speed of the machine: a gate holds the GPU
until the test opens it, and a clock that the test moves tells the time.
"""

import gc
import math
import re
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from faults import Gate, StaleArray

import heterollm.kernels
from heterollm.base import DeviceError, EngineError, FenceError, HeteroLLMError, KernelError, OptionError
from heterollm.kernels.gpu import STRATEGIES, HostClock, OpenClRuntime, WaitPrediction
from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.memory import MEMORY_KINDS
from heterollm.kernels.gpu.waiting import sleep_overshoot_us
from heterollm.kernels.npu import HostNpu
from heterollm.kernels.npu import host as npu_host
from heterollm.kernels.sync import (
    LateWriter,
    WaitLimits,
    flag_litmus,
    litmus,
    prepare_fence,
    refused_strategies,
    stale_memory,
    strategies_for,
)
from heterollm.kernels.sync.fence import PollingFence
from heterollm.kernels.sync.litmus import Litmus

PACKAGE = Path(heterollm.kernels.__file__).parent
POLLING = tuple(strategy for strategy in STRATEGIES if strategy not in ("finish", "event"))


@pytest.fixture(scope="module", params=MEMORY_KINDS)
def device(request, runtime):
    """The same device with each kind of shared memory that it has."""
    try:
        return OpenClRuntime(runtime.context.devices[0], shared_memory=request.param)
    except DeviceError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def writer(device):
    return LateWriter(device, words=4096)


@pytest.fixture(params=STRATEGIES)
def strategy(request, runtime):
    if request.param not in strategies_for(runtime):
        pytest.skip(f"not offered here: {refused_strategies(runtime)[request.param]}")
    return request.param


# -- the data is complete ----------------------------------------------------------------------------


def test_the_host_sees_all_that_a_late_kernel_wrote(device, writer, strategy):
    fence = prepare_fence(device, strategy, "late")
    assert (fence.strategy, fence.label) == (strategy, "late")
    target = device.shared((16,), np.float32)
    # Mapped memory is taken once the wait is over; on coherent memory that does nothing.
    calls = [fence, writer.data.acquire_to_read, target.acquire]
    device.finish()
    number = writer.number()
    for launch in (writer.launch(20.0), writer.launch(3000.0)):
        for _ in range(6):
            launch()
            for call in calls:
                call()
            number += 1
            seen = writer.data.array.copy()
            assert (writer.data._mapped is None) == (target._mapped is None) == device.traits.coherent
            for memory in (writer.data, target):
                memory.release()
            np.testing.assert_array_equal(seen, number)
    device.finish()
    assert writer.number() == number


def test_a_wait_ends_at_its_mark(runtime, strategy):
    """What is enqueued behind the mark may still run: the GPU's part of a cut starts before the NPU's."""
    gate, data = Gate(runtime), runtime.shared((64,), np.uint32)
    counter = runtime.shared((1,), np.uint32)
    kernel = runtime.kernel(("sync.cl",), "write_round")
    launch = runtime.launch(kernel, (data, counter), (64,), (1,), "before the mark")
    fence = prepare_fence(runtime, strategy, "marked")
    launch()
    fence.mark()
    if strategy != "finish":  # which waits for the gate, too
        gate.close()
        runtime.flush()
    try:
        fence.wait()
        if runtime.traits.coherent or runtime.maps_beside_kernels:  # else a map waits for the gate
            np.testing.assert_array_equal(data.read(), 1)
    finally:
        gate.open()
        runtime.finish()
    np.testing.assert_array_equal(data.read(), 1)
    fence.wait()


def test_hand_overs_come_in_the_order_of_the_queue(runtime, strategy):
    writer = LateWriter(runtime, words=8)
    first, second = (prepare_fence(runtime, strategy, label) for label in ("first", "second"))
    launch, number = writer.launch(500.0), writer.number()
    for _ in range(3):
        launch()
        first.mark()
        launch()
        second.mark()
        second.wait()
        first.wait()
        number += 2
        np.testing.assert_array_equal(writer.data.read(), number)


def test_a_graph_that_is_late_inside_its_session(runtime, make_slice, strategy, monkeypatch, delay_graph):
    """The whole chain: a late kernel, a fence, a late graph, and a kernel behind it."""
    write_graph = npu_host.write_graph

    def write_delayed(*arguments):
        path = write_graph(*arguments)
        delay_graph(path, 300)
        return path

    part = make_slice(64, 64)
    plain, x = HostNpu(), np.ones((1, 64), np.float32)
    expected = np.empty((1, 64), np.float32)
    run_plain = plain.prepare(part, 1).bind({"x": x}, {"y": expected})
    run_plain()
    monkeypatch.setattr(npu_host, "write_graph", write_delayed)
    npu, writer = HostNpu(), LateWriter(runtime, words=64)
    y = np.full((1, 64), np.nan, np.float32)
    run = npu.prepare(part, 1).bind({"x": x}, {"y": y})
    fence = prepare_fence(runtime, strategy, "chain")
    launch, number = writer.launch(1000.0), writer.number()
    run()
    # The session keeps the loop: other work can only add to the process's time.
    assert min(_processor_s(run) for _ in range(5)) > 0.0002
    for _ in range(3):
        y.fill(np.nan)
        launch()
        fence()
        number += 1
        np.testing.assert_array_equal(writer.data.read(), number)
        run()
        np.testing.assert_array_equal(y, expected)
    npu.close()
    plain.close()


def _processor_s(call):
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _waited_s(error):
    (seconds,) = re.findall(r"in (\S+) s\.", error.message)
    return float(seconds)


def hold(gate):
    """Close a gate for a minute or more: the GPU stands at each of its kernels for some seconds."""
    for _ in range(20):
        gate.close()


class HurriedClock:
    """The host's clock, on which a sleep takes an hour and no real time while ``hurries`` is set."""

    def __init__(self):
        self.hurries = False
        self._ahead_ns = 0
        own = HostClock.of_this_thread()
        self._sleep_s = own.sleep_s
        self.clock = HostClock(
            lambda: own.now_ns() + self._ahead_ns, self.sleep, own.yield_lock, own.overshoot_us
        )

    def sleep(self, seconds):
        if self.hurries:
            self._ahead_ns += 3600 * 10**9
        else:
            self._sleep_s(seconds)


# -- signals that do not come ------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLLING)
def test_a_signal_that_does_not_come_is_an_error_and_no_hang(runtime, name):
    gate, host = Gate(runtime), HurriedClock()
    limits = WaitLimits(spin_us=2000.0, timeout_s=1000.0)
    fence = prepare_fence(runtime, name, "3.qkv", limits=limits, clock=host.clock)
    fence()
    hold(gate)
    host.hurries = True
    try:
        with pytest.raises(FenceError) as caught:
            fence()
    finally:
        gate.open()
        runtime.finish()
    assert _waited_s(caught.value) >= 3600
    assert repr(name) in caught.value.message
    assert "'3.qkv'" in caught.value.message
    assert "doctor" in caught.value.fix
    assert isinstance(caught.value, EngineError)
    # The late signal of the lost wait is not taken for that of the next one.
    writer = LateWriter(runtime)
    number = writer.number()
    writer.launch(2000.0)()
    prepare_fence(runtime, name, "again")()
    np.testing.assert_array_equal(writer.data.read(), number + 1)


@pytest.mark.parametrize("name", POLLING)
def test_a_driver_that_compiles_behind_the_first_wait_is_no_lost_signal(runtime, name):
    """PoCL compiles a kernel when the queue reaches it: minutes on a cold cache and a busy machine."""
    gate, clock = Gate(runtime), HostClock.of_this_thread()
    passed_s, opens_s = [0.0], [300.0]

    def sleep(_seconds):
        passed_s[0] += 20.0
        if passed_s[0] >= opens_s[0]:
            gate.open()
            runtime.finish()

    def now_ns():
        return clock.now_ns() + int(passed_s[0] * 1e9)

    slow = HostClock(now_ns, sleep, clock.yield_lock, clock.overshoot_us)
    fence = prepare_fence(runtime, name, "cold", limits=WaitLimits(spin_us=0.0), clock=slow)
    hold(gate)
    fence()  # the build takes five minutes, and the limit is one
    assert passed_s[0] >= 300.0
    passed_s[0], opens_s[0] = 0.0, math.inf
    hold(gate)
    try:
        with pytest.raises(FenceError):
            fence()  # all is compiled: the limit holds
    finally:
        gate.open()
        runtime.finish()
    assert passed_s[0] < 300.0


def test_a_flag_that_is_lost_is_noticed_before_the_timeout(runtime):
    """Its kernel is done and has written elsewhere: the event says so long before the time is over."""
    if "flag" not in strategies_for(runtime):
        pytest.skip("no flag here")
    flag = runtime.flag
    assert flag is not None
    fence = prepare_fence(runtime, "flag", "a flag", limits=WaitLimits(spin_us=500.0, timeout_s=600.0))
    fence()
    elsewhere = runtime.shared((64,), np.uint32)
    kernel = runtime.kernel(("sync.cl",), "raise_flag")
    right, flag.launch = flag.launch, runtime.launch(kernel, (elsewhere,), (1,), (1,), "wrong flag")
    try:
        with pytest.raises(FenceError, match="a flag") as caught:
            fence()
        assert _waited_s(caught.value) < 600.0
        assert elsewhere.read()[0] == 1
    finally:
        flag.launch = right
    fence()


def test_a_long_wait_sleeps_once_its_spin_budget_is_spent(runtime):
    gate, slept = Gate(runtime), []
    clock = HostClock.of_this_thread()

    def sleep(seconds):
        slept.append(seconds)
        time.sleep(seconds)
        if len(slept) == 8:
            gate.open()

    clock = HostClock(clock.now_ns, sleep, clock.yield_lock, clock.overshoot_us)
    fence = prepare_fence(runtime, "poll", "long", limits=WaitLimits(spin_us=500.0), clock=clock)
    hold(gate)
    fence()
    runtime.finish()
    assert len(slept) >= 8
    assert 0 < min(slept) <= max(slept) <= 0.005


@pytest.mark.parametrize(("spin_us", "timeout_s"), [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_impossible_limits_are_refused(spin_us, timeout_s):
    with pytest.raises(OptionError, match="cannot poll"):
        WaitLimits(spin_us, timeout_s)


class FailedEvent:
    command_execution_status = -5


@pytest.mark.parametrize("name", ["poll", "flag"])
def test_a_kernel_that_failed_is_an_error(runtime, name):
    if name not in strategies_for(runtime):
        pytest.skip("no flag here")
    fence = prepare_fence(runtime, name, "failed", limits=WaitLimits(spin_us=0.0))
    fence.mark()
    runtime.finish()
    fence._signal.event = FailedEvent()
    if name == "flag":
        fence._signal.number += 1  # as if its kernel had not run
    with pytest.raises(KernelError, match="-5"):
        fence.wait()


# -- what is offered ---------------------------------------------------------------------------------


@pytest.fixture
def fresh(runtime):
    """A runtime of which nothing has been found out."""
    return OpenClRuntime(runtime.context.devices[0])


def test_a_device_without_a_flag_says_why(fresh, monkeypatch):
    monkeypatch.setattr("heterollm.kernels.gpu.signals.has_fine_grained_atomics", lambda _: False)
    unmapped = OpenClRuntime(fresh.context.devices[0], shared_memory="mapped")
    assert strategies_for(unmapped) == ("finish", "event", "poll", "sleep_poll")
    assert set(refused_strategies(unmapped)) == {"flag", "sleep_flag"}
    for name in ("flag", "sleep_flag"):
        with pytest.raises(OptionError, match=f"does not offer .*'{name}'.*fine-grained SVM") as caught:
            prepare_fence(unmapped, name, "x")
        assert "sleep_poll" in caught.value.fix
    with pytest.raises(DeviceError, match="no memory"):
        flag_litmus(unmapped, 1)
    # On coherent memory the flag needs no SVM.
    assert ("flag" in strategies_for(fresh)) == fresh.traits.coherent


def test_stale_data_refuses_the_flag(fresh, monkeypatch):
    if fresh.flag is None or fresh.flag.promised:
        pytest.skip("no flag here that the litmus test decides on")
    monkeypatch.setattr(litmus, "flag_litmus", lambda _, rounds: Litmus(rounds, 2))
    assert "flag" not in strategies_for(fresh)
    assert "2 of 500 rounds" in refused_strategies(fresh)["sleep_flag"]


def test_unknown_strategies_are_refused_by_name(runtime):
    with pytest.raises(OptionError, match="'guess'") as caught:
        prepare_fence(runtime, "guess", "x")
    assert all(name in caught.value.fix for name in STRATEGIES)


# -- the litmus test ---------------------------------------------------------------------------------


def test_the_flag_is_never_seen_before_the_data(device, monkeypatch):
    if device.flag is None:
        pytest.skip("no memory for a flag")
    monkeypatch.setattr(litmus, "TIMEOUT_S", 60.0)
    assert flag_litmus(device, 300) == (300, 0, 0)
    assert flag_litmus(device, 300, limit_s=0.0).rounds == 0


@pytest.mark.parametrize("side", ["host", "device"])
def test_the_litmus_test_sees_stale_data(side, runtime, monkeypatch):
    """A host that sees no write of kernels, and kernels that see none of the host."""
    shared = OpenClRuntime.shared
    words = litmus.WORDS if side == "host" else 1

    def stale(self, shape, dtype):
        memory = shared(self, shape, dtype)
        return StaleArray(memory) if shape == (words,) else memory

    monkeypatch.setattr(OpenClRuntime, "shared", stale)
    found = flag_litmus(runtime, 20)
    assert found == (20, 20, 20 * 4 * words) if side == "host" else found.stale >= 19
    assert "of 500 rounds" in stale_memory(runtime)


def test_the_litmus_test_counts_lost_flags(fresh, monkeypatch):
    monkeypatch.setattr(litmus, "TIMEOUT_S", 0.0)
    flag = fresh.flag
    assert flag is not None
    elsewhere = fresh.shared((64,), np.uint32)
    kernel = fresh.kernel(("sync.cl",), "raise_flag")
    flag.launch = fresh.launch(kernel, (elsewhere,), (1,), (1,), "wrong flag")
    assert flag_litmus(fresh, 1000) == (3, 3, 0)


def test_the_litmus_test_waits_for_a_kernel_that_is_late(fresh, monkeypatch):
    """On a machine that is too busy to run it: the kernel has not ended at several timeouts."""
    monkeypatch.setattr(litmus, "TIMEOUT_S", 0.0)
    flag, looks = fresh.flag, [False] * 5
    assert flag is not None
    reached, is_complete, number = FlagWord.reached, litmus.is_complete, flag.sent + 2

    def late(self, wanted):
        return reached(self, wanted) and (wanted != number or not looks)

    monkeypatch.setattr(FlagWord, "reached", late)
    monkeypatch.setattr(litmus, "is_complete", lambda event: looks.pop() if looks else is_complete(event))
    assert flag_litmus(fresh, 3) == (3, 0, 0)
    assert not looks


# -- prediction --------------------------------------------------------------------------------------


class FakeTime:
    """A host and a device whose work takes as long as it is told; reading the clock takes 0.2 us."""

    def __init__(self, overshoot_us=8.0):
        self.now = 0
        self.end = 0
        self.slept_us = []
        self.looks = 0
        self.durations = iter(())
        self.overshoot_us = overshoot_us

    def clock(self):
        return HostClock(self.read, self.sleep, lambda: self.pass_us(1.0), self.overshoot_us)

    def pass_us(self, us):
        self.now += int(us * 1e3)

    def read(self):
        self.pass_us(0.2)
        return self.now

    def sleep(self, seconds):
        self.slept_us.append(seconds * 1e6)
        self.pass_us(seconds * 1e6 + self.overshoot_us)

    def send(self):
        self.end = self.now + int(next(self.durations) * 1e3)

    def seen(self):
        self.looks += 1
        return self.now >= self.end

    def lost(self):
        return False

    def run(self, durations_us, fence=None):
        """Return for each wait how late it ended and how long it did not sleep, in us."""
        self.durations = iter(durations_us)
        fence = fence or PollingFence(
            "sleep_flag", "fake", self, WaitLimits(), self.clock(), WaitPrediction()
        )
        results = []
        for _ in durations_us:
            begin, slept = self.now, len(self.slept_us)
            fence()
            asleep = sum(self.slept_us[slept:])
            results.append(((self.now - self.end) / 1e3, (self.now - begin) / 1e3 - asleep))
        return results, fence


def test_a_prediction_converges_on_a_constant_duration():
    results, fence = FakeTime().run([1000.0] * 60)
    assert fence.prediction.mean_us == pytest.approx(1000.0, rel=0.01)
    late, awake = zip(*results[20:], strict=True)
    # Seen at the next look, for the price of the margin.
    assert max(late) < 3.0
    assert max(awake) < 60.0


def test_a_prediction_leaves_room_for_jitter():
    durations = np.random.default_rng(0).normal(1000.0, 30.0, 400)
    results, fence = FakeTime().run(durations.tolist())
    late, awake = np.array(results[50:]).T
    assert fence.prediction.deviation_us == pytest.approx(24.0, rel=0.6)
    assert np.median(late) < 3.0
    assert np.percentile(late, 90) < 25.0
    assert np.median(awake) < 150.0


@pytest.mark.parametrize(("before", "after"), [(5000.0, 300.0), (300.0, 5000.0), (1000.0, 700.0)])
def test_a_prediction_follows_a_changed_load(before, after):
    results, fence = FakeTime().run([before] * 40 + [after] * 80)
    late, awake = np.array(results[-30:]).T
    assert fence.prediction.mean_us == pytest.approx(after, rel=0.05)
    assert late.max() < 3.0
    assert awake.max() < 0.25 * after + 60.0
    # Within twenty waits it is no longer late by more than a tenth.
    assert np.array(results[60:])[:, 0].max() < 0.1 * after


def test_one_slow_wait_does_not_spoil_the_next():
    results, _ = FakeTime().run([1000.0] * 40 + [50_000.0] + [1000.0] * 20)
    assert np.array(results[41:])[:, 0].max() < 60.0


def test_short_waits_and_coarse_timers_are_not_slept_through():
    short = FakeTime()
    short.run([40.0] * 50)
    assert short.slept_us == []
    coarse = FakeTime(overshoot_us=15_600.0)
    results, _ = coarse.run([5000.0] * 50)
    assert coarse.slept_us == []
    assert max(late for late, _ in results) < 3.0


def test_a_wait_that_was_over_anyway_teaches_nothing():
    fake = FakeTime()
    results, fence = fake.run([1000.0] * 30)
    before = fence.prediction.mean_us
    fake.durations = iter([1000.0])
    fence.mark()
    fake.pass_us(5000.0)
    fence.wait()
    assert fence.prediction.mean_us == before
    assert results


def test_a_sleep_counts_from_the_mark():
    fake = FakeTime()
    _, fence = fake.run([1000.0] * 40)
    fake.durations = iter([1000.0])
    fence.mark()
    fake.pass_us(600.0)
    fence.wait()
    assert fake.slept_us[-1] < 400.0
    assert (fake.now - fake.end) / 1e3 < 3.0


def test_sleeping_strategies_learn_from_real_waits(runtime):
    # The wait itself opens the gate, at the earliest 4 ms after the mark.
    gate, host, marked_ns = Gate(runtime), HostClock.of_this_thread(), []

    def look():
        if host.now_ns() - marked_ns[-1] > 4_000_000:
            gate.open()

    clock = HostClock(
        host.now_ns,
        lambda seconds: (host.sleep_s(seconds), look()),
        lambda: (host.yield_lock(), look()),
        host.overshoot_us,
    )
    fence = prepare_fence(runtime, "sleep_poll", "real", clock=clock)
    for _ in range(12):
        hold(gate)
        marked_ns.append(host.now_ns())
        fence()
    runtime.finish()
    assert fence.prediction.mean_us > 1000.0
    assert sleep_overshoot_us() >= 0.0


# -- other threads, and memory -----------------------------------------------------------------------


class Worker:
    """A thread that gives up the interpreter lock and wants it back so many times, and then calls ``end``."""

    def __init__(self, turns, end):
        self.count = 0
        self._turns, self._end = turns, end
        self._thread = threading.Thread(target=self._work)

    def _work(self):
        for _ in range(self._turns):
            time.sleep(50e-6)
            self.count += 1
        self._end()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join()


@pytest.mark.parametrize("name", ["poll", "flag"])
def test_another_thread_runs_while_this_one_polls(runtime, name):
    if name not in strategies_for(runtime):
        pytest.skip("no flag here")
    gate = Gate(runtime)
    fence = prepare_fence(runtime, name, "fair", limits=WaitLimits(spin_us=60e6))
    fence()
    hold(gate)
    interval_s = sys.getswitchinterval()
    # From here on a thread runs only when another one lets it.
    sys.setswitchinterval(1000.0)
    try:
        with Worker(50, gate.open) as worker:
            fence()
            seen = worker.count
    finally:
        sys.setswitchinterval(interval_s)
        gate.open()
        runtime.finish()
    assert seen == 50


def test_a_thousand_calls_leave_nothing_behind(runtime, strategy):
    writer = LateWriter(runtime)
    launch = writer.launch(5.0)
    fence = prepare_fence(runtime, strategy, "many")

    def run(count):
        for _ in range(count):
            launch()
            fence()

    run(50)
    gc.collect()
    ours = [tracemalloc.Filter(True, str(PACKAGE / "*"))]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        tracemalloc.reset_peak()
        start, _ = tracemalloc.get_traced_memory()
        run(1000)
        _, peak = tracemalloc.get_traced_memory()
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    assert sum(entry.size_diff for entry in after.compare_to(before, "lineno")) < 1024
    assert peak - start < 8 * 1024


def test_the_error_keeps_its_parts_across_processes():
    import copy

    error = copy.copy(FenceError("What.", fix="Do."))
    assert (error.message, error.fix) == ("What.", "Do.")
    assert isinstance(error, HeteroLLMError)
