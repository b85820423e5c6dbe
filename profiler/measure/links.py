"""Times of links: launches, fences of the host, returns from the NPU to the GPU, copies.

The device's own timestamps, on a separate queue that stamps events, tell the end of a kernel, so that the
latency of a fence excludes the kernel's time. Bracketing relates the device's clock to the host's: a kernel
is queued between two readings of the host's clock, and ends before the host sees it done. The tightest of
many brackets gives the offset; half its width is reported as ``clock_uncertainty_us`` (1 to 3 us on PoCL).
The method does not depend on the zero of the device's clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from heterollm.base import DeviceError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import quantize
from heterollm.kernels.gpu import (
    SOURCES,
    GpuRuntime,
    Launch,
    Strategy,
    aligned_empty,
    is_complete,
    kernel_times_ns,
)
from heterollm.kernels.npu import LinearShard, NpuBackend
from heterollm.kernels.sync import LateWriter, prepare_fence, strategies_for
from heterollm.profiler.measure.timing import collect_interleaved, measure_interleaved
from heterollm.profiler.records import CopyKey, FenceKey, LaunchKey, Record

KERNELS_US: Final = (100, 300, 1000, 5000)
"""Durations of the awaited kernels: one-token linears, small and large prefill operators."""

COPY_SIZES_BYTES: Final = (8 << 10, 256 << 10, 4 << 20)

CHAIN: Final = 100
IDLE_S: Final = 0.005
BUSY_US: Final = 1000.0
LONG_US: Final = 5000.0
CLOCK_ROUNDS: Final = 60
PREDICTION_WARMUP: Final = 12
"""Waits before a sleeping strategy knows how long they take."""

NPU_COLUMNS: Final = 256


class DeviceClock:
    """Relates a device's timestamps to the host's clock, ``now_ns`` of the runtime.

    Args:
        runtime: A runtime whose events carry timestamps.

    Attributes:
        offset_ns: Lead of the device's clock.
        uncertainty_us: Largest error of the offset.

    Raises:
        DeviceError: The timestamps contradict each other.
    """

    def __init__(self, runtime: GpuRuntime) -> None:
        launch = _small_launch(runtime)
        lows: list[int] = []
        highs: list[int] = []
        queued_lows: list[int] = []
        queued_highs: list[int] = []
        for round_number in range(CLOCK_ROUNDS + 2):
            before_ns = runtime.now_ns()
            event = launch()
            after_ns = runtime.now_ns()
            runtime.flush()
            while not is_complete(event):
                pass
            seen_ns = runtime.now_ns()
            runtime.finish()
            if round_number < 2:  # the first compiles
                continue
            times = kernel_times_ns(event)
            lows.append(times.end - seen_ns)
            highs.append(times.start - before_ns)
            queued_lows.append(times.queued - after_ns)
            queued_highs.append(times.queued - before_ns)
        low, high = max(lows), min(highs)
        # A driver may stamp the queueing by another clock; it counts only where it agrees with the rest.
        tight_low, tight_high = max(low, *queued_lows), min(high, *queued_highs)
        if tight_low <= tight_high:
            low, high = tight_low, tight_high
        if low > high:
            raise DeviceError(
                f"The timestamps of {runtime.traits.name!r} contradict the host's clock by "
                f"{(low - high) / 1e3:.1f} us.",
                fix="Measure again on a quiet machine.",
            )
        self.offset_ns = (low + high) // 2
        self.uncertainty_us = (high - low) / 2e3

    def host_ns(self, device_ns: int) -> int:
        """Return a moment of the device's clock on the host's."""
        return device_ns - self.offset_ns


# -- launches ----------------------------------------------------------------------------------------


def launch_costs(runtime: GpuRuntime, *, repeats: int = 40) -> tuple[Record, ...]:
    """Measure what a kernel launch costs.

    ``enqueue`` and ``enqueue_busy`` are the call alone, on an empty queue and behind a kernel that runs;
    ``chained`` is the time for each of 100 small kernels in a row, ``idle`` that of one after some
    milliseconds of rest, both until the host knows that they are done.

    Args:
        runtime: The device.
        repeats: Samples of each.
    """
    small, writer = _small_launch(runtime), LateWriter(runtime)
    busy, long = writer.launch(BUSY_US), writer.launch(LONG_US)

    def enqueue() -> float:
        elapsed_us = _timed_us(runtime, small)
        runtime.finish()
        return elapsed_us

    def enqueue_busy() -> float:
        busy()
        runtime.flush()
        return enqueue()

    def chain() -> None:
        for _ in range(CHAIN):
            small()
        runtime.finish()

    def chained() -> float:
        if not runtime.stamps_host_time:
            return _timed_us(runtime, chain) / CHAIN
        # Submitting may take longer than so small a kernel: the queue is filled beforehand.
        events = [launch() for launch in (long, *[small] * CHAIN)]
        runtime.finish()
        return (kernel_times_ns(events[-1]).end - kernel_times_ns(events[0]).end) / 1e3 / CHAIN

    def until_done() -> None:
        small()
        runtime.finish()

    def idle() -> float:
        runtime.host_clock().sleep_s(IDLE_S)
        return _timed_us(runtime, until_done)

    calls: dict[str, Callable[[], float]] = {
        "enqueue": enqueue,
        "enqueue_busy": enqueue_busy,
        "chained": chained,
        "idle": idle,
    }
    found = collect_interleaved(calls, warmup=2, repeats=repeats)
    return tuple(Record(LaunchKey(name), samples) for name, samples in found.items())


def npu_return_costs(device: Device, *, repeats: int = 40) -> tuple[Record, ...]:
    """Measure how long the GPU takes to go on after an NPU graph has returned.

    ``npu_to_gpu`` is the time from the graph's return until a small kernel, submitted then to an empty queue,
    has ended; ``npu_to_gpu_busy`` the same with a queue that is kept fed, counted from the end of the kernel
    that is still running. The difference is what an idle queue costs. ``graph_behind_wait_us`` is the graph's
    time where the host has waited for a kernel before: a driver may start graphs ahead.

    Args:
        device: The device; without an NPU there is nothing to measure.
        repeats: Samples of each.
    """
    if device.npu is None:
        return ()
    runtime, graph = device.gpu.profiling_twin(), _small_graph(device.npu)
    clock = DeviceClock(runtime)
    graph_us = statistics.median(_timed_us(runtime, graph) for _ in range(5))
    small, busy = _small_launch(runtime), LateWriter(runtime).launch(2 * graph_us + BUSY_US)
    waiting = prepare_fence(runtime, "poll", "a graph behind a kernel")

    def once(*, fed: bool) -> float:
        running = busy() if fed else None
        runtime.flush()
        graph()
        begin_ns = runtime.now_ns()
        event = small()
        runtime.finish()
        if running is not None:
            begin_ns = max(begin_ns, clock.host_ns(kernel_times_ns(running).end))
        return (clock.host_ns(kernel_times_ns(event).end) - begin_ns) / 1e3

    def behind() -> float:
        busy()
        waiting()
        return _timed_us(runtime, graph)

    calls = {"npu_to_gpu": lambda: once(fed=False), "npu_to_gpu_busy": lambda: once(fed=True)}
    found = collect_interleaved({**calls, "behind": behind}, warmup=2, repeats=repeats)
    values = {"clock_uncertainty_us": clock.uncertainty_us, "graph_us": graph_us}
    values["graph_behind_wait_us"] = statistics.median(found.pop("behind"))
    return tuple(Record(LaunchKey(name), samples, values=values) for name, samples in found.items())


def _small_launch(runtime: GpuRuntime) -> Launch:
    counter = runtime.shared((1,), np.uint32)
    return runtime.launch(runtime.kernel(SOURCES, "count_round"), (counter,), (1,), (1,), "small")


def _small_graph(npu: NpuBackend) -> Callable[[], None]:
    """Return the call of a smallest graph."""
    rows, length = max(64, npu.row_alignment), npu.standard_lengths[0]
    floats = np.random.default_rng(0).standard_normal((rows, NPU_COLUMNS)).astype(np.float32)
    packed = LinearShard(quantize(floats, bits=4, block=32), 0, "o", ((0, rows),), "links")
    plain = LinearShard(floats.astype(np.float16), 0, "o", ((0, rows),), "links")
    shard = packed if npu.forms(packed.shape, length) else plain
    x = aligned_empty((length, NPU_COLUMNS), npu.activation_dtype)
    y = aligned_empty((length, rows), npu.activation_dtype)
    x.fill(1)
    return npu.prepare(shard, length).bind({"x": x}, {"y": y})


def _timed_us(runtime: GpuRuntime, call: Callable[[], object]) -> float:
    begin_ns = runtime.now_ns()
    call()
    return (runtime.now_ns() - begin_ns) / 1e3


# -- fences ------------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    latency_us: float
    wait_us: float
    thread_us: float
    process_us: float
    kernel_us: float


def fence_latencies(
    runtime: GpuRuntime,
    *,
    kernels_us: Sequence[int] = KERNELS_US,
    strategies: Sequence[Strategy] | None = None,
    repeats: int = 30,
) -> tuple[Record, ...]:
    """Measure how late the host sees the end of a kernel by each strategy, and what waiting costs.

    Samples are times from the end of the kernel to the return of the fence. ``values`` hold medians:
    ``wait_us`` of the whole wait, ``processor_us`` of the waiting thread's processor time and
    ``process_us`` of the process's (on a CPU device the kernel itself is part of that),
    ``processor_fraction`` of the wait that the thread was computing, ``kernel_us`` as it really ran.

    Args:
        runtime: The device.
        kernels_us: About how long the kernels run.
        strategies: Strategies to measure; all that the device offers if None.
        repeats: Samples of each.
    """
    twin = runtime.profiling_twin()
    writer = LateWriter(twin)
    chosen = strategies_for(twin) if strategies is None else tuple(strategies)
    measured: list[Record] = []
    for kernel_us in kernels_us:
        # Once for each duration: the two clocks may drift apart.
        clock = DeviceClock(twin)
        launch = writer.launch(float(kernel_us))
        calls = {strategy: _waiting(twin, clock, launch, strategy) for strategy in chosen}
        found = collect_interleaved(calls, warmup=PREDICTION_WARMUP, repeats=repeats)
        for strategy, waits in found.items():
            key = FenceKey(strategy, kernel_us)
            samples = tuple(wait.latency_us for wait in waits)
            measured.append(Record(key, samples, values=_waiting_values(waits, clock)))
    return tuple(measured)


def _waiting(
    runtime: GpuRuntime, clock: DeviceClock, launch: Launch, strategy: Strategy
) -> Callable[[], _Wait]:
    fence = prepare_fence(runtime, strategy, f"measuring {strategy}")

    def once() -> _Wait:
        event: Any = launch()
        before_ns, begin_ns = runtime.processor_ns(), runtime.now_ns()
        fence()
        seen_ns, after_ns = runtime.now_ns(), runtime.processor_ns()
        thread_ns, process_ns = after_ns[0] - before_ns[0], after_ns[1] - before_ns[1]
        runtime.finish()
        times = kernel_times_ns(event)
        return _Wait(
            (seen_ns - clock.host_ns(times.end)) / 1e3,
            (seen_ns - begin_ns) / 1e3,
            thread_ns / 1e3,
            process_ns / 1e3,
            (times.end - times.start) / 1e3,
        )

    return once


def _waiting_values(waits: Sequence[_Wait], clock: DeviceClock) -> dict[str, float]:
    return {
        "wait_us": statistics.median(wait.wait_us for wait in waits),
        "processor_us": statistics.median(wait.thread_us for wait in waits),
        # The thread's clock is read around the host's, which shows in the shortest waits.
        "processor_fraction": statistics.median(min(1.0, wait.thread_us / wait.wait_us) for wait in waits),
        "process_us": statistics.median(wait.process_us for wait in waits),
        "kernel_us": statistics.median(wait.kernel_us for wait in waits),
        "clock_uncertainty_us": clock.uncertainty_us,
    }


# -- copies ------------------------------------------------------------------------------------------


def copy_costs(
    runtime: GpuRuntime, *, sizes_bytes: Sequence[int] = COPY_SIZES_BYTES, repeats: int = 20
) -> tuple[Record, ...]:
    """Measure copies to and from device memory, and the zero-copy way beside them.

    ``write`` and ``read`` are blocking copies. ``acquire`` and ``release`` give the host shared memory that a
    kernel has just written, and give it back: calls that do nothing where memory is coherent, maps elsewhere
    (``release`` then includes waiting for the queue).

    Args:
        runtime: The device.
        sizes_bytes: Sizes, multiples of 4.
        repeats: Samples of each.
    """
    measured: list[Record] = []
    for size in sizes_bytes:
        host = aligned_empty((size,), np.uint8)
        host[...] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        buffer = runtime.scratch(size)
        copies: dict[str, Callable[[], None]] = {
            "write": lambda buffer=buffer, host=host: runtime.copy(buffer, host),  # type: ignore[misc]
            "read": lambda buffer=buffer, host=host: runtime.copy(host, buffer),  # type: ignore[misc]
        }
        for method, own in measure_interleaved(
            copies, warmup=2, repeats=repeats, timer=runtime.now_ns
        ).items():
            measured.append(Record(CopyKey(method, size), own.samples_us))
        pairs = collect_interleaved({"": _mapping(runtime, size)}, warmup=2, repeats=repeats)[""]
        for method, samples in zip(("acquire", "release"), zip(*pairs, strict=True), strict=True):
            measured.append(Record(CopyKey(method, size), samples))
    return tuple(measured)


def _mapping(runtime: GpuRuntime, size: int) -> Callable[[], tuple[float, float]]:
    shared, counter = runtime.shared((size // 4,), np.uint32), runtime.shared((1,), np.uint32)
    local = min(64, runtime.traits.max_work_group)
    kernel = runtime.kernel(SOURCES, "write_round")
    launch = runtime.launch(kernel, (shared, counter), (size // 4,), (local,), "writes shared memory")

    def release() -> None:
        shared.release()
        if not shared.coherent:
            runtime.finish()

    def once() -> tuple[float, float]:
        launch()
        runtime.finish()
        return _timed_us(runtime, shared.acquire), _timed_us(runtime, release)

    return once
