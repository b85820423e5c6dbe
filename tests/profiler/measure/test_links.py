"""What it costs to pass work on. The machine may be busy: only what holds then, too, is asserted."""

import time
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import DeviceError, KernelError, OptionError
from heterollm.kernels.gpu import (
    STRATEGIES,
    OpenClRuntime,
    kernel_times_ns,
)
from heterollm.kernels.gpu.signals import KernelTimes
from heterollm.kernels.sync import LateWriter, strategies_for
from heterollm.profiler.measure import (
    DeviceClock,
    copy_costs,
    fence_latencies,
    launch_costs,
    links,
    npu_return_costs,
)
from heterollm.profiler.records import CopyKey, FenceKey, LaunchKey, Record


@pytest.fixture(scope="module")
def mapped(device):
    return OpenClRuntime(device.gpu.context.devices[0], shared_memory="mapped")


@pytest.fixture(scope="module")
def twin(device):
    return device.gpu.profiling_twin()


def least_us(measured):
    """The shortest sample of each measurement: what others on the machine disturb least."""
    return {found.key: min(found.samples_us) for found in measured}


def test_every_launch_cost_is_measured(device):
    measured = launch_costs(device.gpu, repeats=7)
    assert [found.key for found in measured] == [
        LaunchKey(name) for name in ("enqueue", "enqueue_busy", "chained", "idle")
    ]
    assert all(len(found.samples_us) == 7 and min(found.samples_us) > 0 for found in measured)
    least = least_us(measured)
    # A round trip costs more than the call that begins it, and than a kernel among others.
    assert least[LaunchKey("idle")] > least[LaunchKey("enqueue")]
    assert least[LaunchKey("idle")] > least[LaunchKey("chained")]
    record = Record(measured[0].key, measured[0].samples_us, values=measured[0].values)
    assert record.median_us > 0


def test_a_fed_queue_goes_on_sooner_after_the_npu(device):
    measured = npu_return_costs(device, repeats=15)
    least = least_us(measured)
    assert list(least) == [LaunchKey("npu_to_gpu"), LaunchKey("npu_to_gpu_busy")]
    assert least[LaunchKey("npu_to_gpu_busy")] < least[LaunchKey("npu_to_gpu")]
    assert all(found.values["graph_us"] > 0 for found in measured)
    assert npu_return_costs(replace(device, npu=None)) == ()


def test_every_strategy_is_measured_for_every_kernel(device):
    offered = strategies_for(device.gpu)
    measured = fence_latencies(device.gpu, kernels_us=(200, 2000), repeats=6)
    keys = [FenceKey(strategy, kernel) for kernel in (200, 2000) for strategy in offered]
    assert [found.key for found in measured] == keys
    for found in measured:
        values, uncertainty_us = found.values, found.values["clock_uncertainty_us"]
        assert len(found.samples_us) == 6
        # The host cannot see an end that has not come.
        assert min(found.samples_us) >= -2 * uncertainty_us - 1.0, found
        assert 0.2 * found.key.kernel_us < values["kernel_us"], found
        assert values["wait_us"] > 0
        assert 0 <= values["processor_fraction"] <= 1
        assert values["processor_us"] <= values["process_us"] + 1000.0
    assert set(offered) <= set(STRATEGIES)


def test_chosen_strategies_only(device):
    (found,) = fence_latencies(device.gpu, kernels_us=(50,), strategies=("poll",), repeats=2)
    assert found.key == FenceKey("poll", 50)
    with pytest.raises(OptionError, match="guess"):
        fence_latencies(device.gpu, kernels_us=(50,), strategies=("guess",), repeats=2)


@pytest.mark.parametrize("coherent", [True, False])
def test_copies_and_the_way_without_them(device, mapped, coherent):
    measured = copy_costs(device.gpu if coherent else mapped, sizes_bytes=(8192, 4 << 20), repeats=5)
    least = least_us(measured)
    methods = ("write", "read", "acquire", "release")
    assert list(least) == [CopyKey(method, size) for size in (8192, 4 << 20) for method in methods]
    assert all(len(found.samples_us) == 5 for found in measured)
    # Copying takes time by size; on a CPU mapping does not, and coherent memory needs not even that.
    assert least[CopyKey("write", 4 << 20)] > 2 * least[CopyKey("write", 8192)]
    assert least[CopyKey("acquire", 4 << 20)] < least[CopyKey("read", 4 << 20)] / (20 if coherent else 1)


@pytest.mark.parametrize("size", [4, 8192, 100_003])
def test_copies_move_the_bytes(device, size):
    sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    received, buffer = np.zeros_like(sent), device.gpu.scratch(size)
    device.gpu.copy(buffer, sent)
    device.gpu.copy(received, buffer)
    np.testing.assert_array_equal(received, sent)
    with pytest.raises(KernelError, match=f"{size + 4096} bytes"):
        device.gpu.copy(buffer, np.zeros(size + 4096, np.uint8))


def test_the_clocks_agree(twin):
    clock = DeviceClock(twin)
    launch = LateWriter(twin).launch(500.0)
    for _ in range(10):
        before_ns = time.perf_counter_ns()
        event = launch()
        twin.finish()
        after_ns = time.perf_counter_ns()
        times = kernel_times_ns(event)
        slack_ns = (clock.uncertainty_us + 2.0) * 1e3
        assert (
            before_ns - slack_ns
            <= clock.host_ns(times.start)
            < clock.host_ns(times.end)
            <= after_ns + slack_ns
        )
        assert times.queued <= times.start < times.end


def test_a_queue_of_another_clock_does_not_count(twin, monkeypatch):
    """Some drivers stamp the queueing by the host's clock and the rest by the device's."""
    expected = DeviceClock(twin)
    shift = 10**12
    monkeypatch.setattr(
        links,
        "kernel_times_ns",
        lambda event: KernelTimes(
            kernel_times_ns(event).queued + shift, *(time + 7 * shift for time in kernel_times_ns(event)[1:])
        ),
    )
    clock = DeviceClock(twin)
    apart_us = abs(clock.offset_ns - 7 * shift - expected.offset_ns) / 1e3
    assert apart_us <= clock.uncertainty_us + expected.uncertainty_us + 5.0


def test_impossible_timestamps_are_an_error(twin, monkeypatch):
    times = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(links, "kernel_times_ns", lambda _: KernelTimes(0, next(times), 2 * 10**15))
    with pytest.raises(DeviceError, match="contradict"):
        DeviceClock(twin)


def test_a_queue_without_timestamps_says_so(device):
    event = LateWriter(device.gpu).launch(1.0)()
    device.gpu.finish()
    with pytest.raises(KernelError, match="keeps no times"):
        kernel_times_ns(event)
