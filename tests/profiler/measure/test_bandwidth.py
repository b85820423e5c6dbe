"""Bandwidth and contention: both parts really run at once."""

from __future__ import annotations

import pytest

from heterollm.base import MIB
from heterollm.kernels.devices import open_device
from heterollm.profiler.measure import SharedLoad, bandwidth, bandwidth_tasks
from heterollm.profiler.records import BandwidthKey, ContentionKey


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> SharedLoad:
    monkeypatch.setattr(bandwidth, "eviction_bytes", lambda _: 8 * MIB)
    monkeypatch.setattr(bandwidth, "COMPUTE_ROWS", 256)
    return SharedLoad(open_device("host"))


def test_every_key_is_recorded(load: SharedLoad) -> None:
    tasks = bandwidth_tasks(load)
    records = [record for task in tasks for record in task.run()]
    assert {record.key for record in records} == {key for task in tasks for key in task.keys}
    assert all(record.samples_us for record in records)
    rates = {key: record.values["gbps"] for record in records if isinstance(key := record.key, BandwidthKey)}
    assert len(rates) == 4
    assert all(rate > 0 for rate in rates.values())
    factors = [record.values["slowdown"] for record in records if isinstance(record.key, ContentionKey)]
    assert len(factors) == 8
    assert all(factor > 0 for factor in factors)
    load.close()


def test_runs_of_both_parts_overlap(load: SharedLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    complete = bandwidth.is_complete

    def watched(event: object) -> bool:
        seen.append(complete(event))
        return seen[-1]

    monkeypatch.setattr(bandwidth, "is_complete", watched)
    times = load.together_us("memory", "compute")
    # Every counted run of the NPU ended while the GPU was still at work.
    assert seen.count(False) >= len(times["npu"])
    assert seen[-1]


def test_a_device_without_an_npu_measures_its_gpu() -> None:
    device = open_device("host")
    device.npu = None
    [task] = bandwidth_tasks(SharedLoad(device))
    assert {key.processor for key in task.keys if isinstance(key, BandwidthKey)} == {"gpu"}
