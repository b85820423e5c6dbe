"""Times of links: each is measured on a real device, and compared on a simulated one.

Times of the real device depend on other work of the machine; those of the simulated one are exact.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import DeviceError, KernelError, OptionError
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import (
    STRATEGIES,
    OpenClRuntime,
    kernel_times_ns,
)
from heterollm.kernels.gpu.binding import cl
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


@pytest.fixture(scope="module")
def simulated():
    return open_device("sim:snapdragon-8gen3-paper")


def exact_us(measured):
    """The time of each measurement on a simulated device, which is the same in every sample."""
    assert all(len(set(found.samples_us)) == 1 for found in measured)
    return {found.key: found.samples_us[0] for found in measured}


def test_every_launch_cost_is_measured(device, simulated):
    measured = launch_costs(device.gpu, repeats=7)
    assert [found.key for found in measured] == [
        LaunchKey(name) for name in ("enqueue", "enqueue_busy", "chained", "idle")
    ]
    assert all(len(found.samples_us) == 7 and min(found.samples_us) > 0 for found in measured)
    costs_us = exact_us(launch_costs(simulated.gpu, repeats=3))
    assert list(costs_us) == [found.key for found in measured]
    # A round trip costs more than the call that begins it, and than a kernel among others.
    assert costs_us[LaunchKey("idle")] > costs_us[LaunchKey("enqueue")] > costs_us[LaunchKey("chained")]
    record = Record(measured[0].key, measured[0].samples_us, values=measured[0].values)
    assert record.median_us > 0


def test_a_fed_queue_goes_on_sooner_after_the_npu(device, simulated):
    measured = npu_return_costs(device, repeats=3)
    costs_us = exact_us(npu_return_costs(simulated, repeats=3))
    assert list(costs_us) == [found.key for found in measured]
    assert list(costs_us) == [LaunchKey("npu_to_gpu"), LaunchKey("npu_to_gpu_busy")]
    assert costs_us[LaunchKey("npu_to_gpu_busy")] < costs_us[LaunchKey("npu_to_gpu")]
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
        assert values["kernel_us"] > 0
        assert values["wait_us"] > 0
        assert 0 <= values["processor_fraction"] <= 1
    assert set(offered) <= set(STRATEGIES)


def test_a_fence_is_late_by_the_strategy_and_not_by_the_kernel(simulated):
    late_us, fractions = {}, {}
    for found in fence_latencies(simulated.gpu, kernels_us=(200, 2000), repeats=6):
        late_us[found.key] = found.median_us
        fractions[found.key] = found.values["processor_fraction"]
        assert found.values["kernel_us"] == pytest.approx(found.key.kernel_us, rel=1e-3)
        assert found.values["processor_us"] <= found.values["process_us"]
        assert found.values["wait_us"] > found.key.kernel_us
    for strategy in ("finish", "event", "poll"):
        assert late_us[FenceKey(strategy, 200)] == pytest.approx(late_us[FenceKey(strategy, 2000)])
    for kernel_us in (200, 2000):
        finish, event, poll, sleeping = (
            FenceKey(strategy, kernel_us) for strategy in ("finish", "event", "poll", "sleep_poll")
        )
        assert late_us[finish] > late_us[event] > late_us[poll] > 0
        assert fractions[sleeping] < 0.2 < fractions[poll] == 1.0


def test_chosen_strategies_only(device):
    (found,) = fence_latencies(device.gpu, kernels_us=(50,), strategies=("poll",), repeats=2)
    assert found.key == FenceKey("poll", 50)
    with pytest.raises(OptionError, match="guess"):
        fence_latencies(device.gpu, kernels_us=(50,), strategies=("guess",), repeats=2)


@pytest.mark.parametrize("coherent", [True, False])
def test_copies_and_the_way_without_them(device, mapped, coherent, monkeypatch):
    calls = []
    for method in ("enqueue_map_buffer", "enqueue_copy"):
        original = getattr(cl, method)

        def counted(*arguments, _original=original, _method=method, **options):
            calls.append(_method)
            return _original(*arguments, **options)

        monkeypatch.setattr(cl, method, counted)
    measured = copy_costs(device.gpu if coherent else mapped, sizes_bytes=(8192, 4 << 20), repeats=5)
    methods = ("write", "read", "acquire", "release")
    keys = [CopyKey(method, size) for size in (8192, 4 << 20) for method in methods]
    assert [found.key for found in measured] == keys
    assert all(len(found.samples_us) == 5 and min(found.samples_us) > 0 for found in measured)
    # Seven copies each way of each size; coherent memory needs no map.
    assert calls.count("enqueue_copy") == 2 * 2 * 7
    assert (calls.count("enqueue_map_buffer") == 0) == coherent


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
