"""The device ``opencl``: which GPU, which threads, and the race that ``auto`` asks."""

import os

import numpy as np
import pytest

from heterollm.base import DeviceError
from heterollm.doctor.case import run_case
from heterollm.doctor.layers import gpu_layer_cases
from heterollm.kernels.devices import list_devices, open_device, opens_host
from heterollm.kernels.devices import race as races
from heterollm.kernels.devices.kind import Race
from heterollm.kernels.devices.runtimes import fixed_threads
from heterollm.kernels.threads import allowed_cores

pytestmark = pytest.mark.cpu

FAST = Race("GPU X", (1.0, 2.0), (3.0, 24.0))
SLOW = Race("GPU X", (2.0, 4.0), (1.0, 6.0))
ALONE = Race("GPU X", (1.0, 2.0), None)


@pytest.fixture
def ended(monkeypatch):
    """Set the result of the race."""

    def set_result(race):
        monkeypatch.setattr("heterollm.kernels.devices.race.kept_race", lambda: race)
        monkeypatch.setattr("heterollm.kernels.devices.open.kept_race", lambda: race)

    return set_result


def status():
    return next(entry for entry in list_devices() if entry.name == "opencl")


# -- which GPU ---------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_says_so(host):
    assert not status().usable
    assert "No GPU among the OpenCL devices" in status().reason
    with pytest.raises(DeviceError, match="No GPU among"):
        open_device("opencl")


def test_the_list_names_memory_units_and_features(taken_for_gpu):
    assert status().usable
    assert "memory" in status().gpu
    assert "compute units" in status().gpu
    assert "onnxruntime" in status().npu


def test_an_unknown_gpu_is_refused(taken_for_gpu, monkeypatch):
    monkeypatch.setenv("HETEROLLM_GPU", "voodoo")
    with pytest.raises(DeviceError, match="HETEROLLM_GPU is 'voodoo', which names 0 of the GPUs"):
        open_device("opencl")


@pytest.mark.parametrize(("npu_threads", "expected"), [(None, len(allowed_cores())), (1, 1), (0, 0)])
def test_the_npu_has_all_cores_or_as_many_as_asked(taken_for_gpu, npu_threads, expected):
    device = open_device("opencl", npu_threads=npu_threads)
    assert (device.name, device.time_kind) == ("opencl", "real")
    assert device.gpu.shared_memory == "mapped"
    assert len(device.split.npu_cores) == expected
    assert (device.npu is None) == (expected == 0)
    assert (device.activation_dtype, device.cache_dtype) == (np.float32, np.float16)
    device.close()


# -- the race ----------------------------------------------------------------------------------------


def test_the_mean_of_decode_and_prefill_decides():
    assert FAST.is_won
    assert not SLOW.is_won
    assert ALONE.is_won


def test_auto_takes_a_gpu_that_wins_and_says_by_how_much(taken_for_gpu, ended):
    ended(FAST)
    device = open_device("auto")
    assert device.name == "opencl"
    assert device.reason.startswith("GPU X computes a linear layer 3 times as fast in decode as all cores")
    assert device.reason.endswith("12 times in prefill")
    assert not opens_host("auto")
    device.close()


def test_auto_takes_the_cores_where_the_gpu_loses_and_says_so(host, ended):
    ended(SLOW)
    device = open_device("auto")
    assert device.name == "host"
    assert "GPU X computes a linear layer 0.5 times" in device.reason
    assert opens_host("auto")
    device.close()


def test_a_race_is_run_once_for_the_drivers_and_again_for_a_damaged_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    monkeypatch.setenv("OCL_ICD_VENDORS", str(vendors))
    monkeypatch.setattr(races.platform, "system", lambda: "Linux")
    runs, fails = [], []

    def run():
        if fails:
            raise fails[0]
        runs.append(1)
        return FAST

    monkeypatch.setattr(races, "_in_child", run)

    def again():
        races.kept_race.cache_clear()
        return races.kept_race()

    assert again() is None
    driver = vendors / "gpu.icd"
    driver.write_text("libgpu.so")
    fails.append(DeviceError("No GPU among the OpenCL devices."))
    assert again() is None
    fails.clear()
    assert [again(), again()] == [FAST, FAST]
    assert len(runs) == 1
    os.utime(driver, ns=(1, 1))  # another version
    assert again() == FAST
    assert len(runs) == 2
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text('{"gpu": 7}')
    assert again() == FAST
    assert len(runs) == 3
    races.kept_race.cache_clear()


def test_a_child_that_finds_no_gpu_says_so(host):
    with pytest.raises(DeviceError, match="No GPU among"):
        races._in_child()


def test_a_gpu_wins_where_the_cores_have_no_opencl(taken_for_gpu, monkeypatch):
    def no_cpu(*_):
        raise DeviceError("No OpenCL runtime for the CPU was found.")

    monkeypatch.setattr(races, "SIDE", 256)
    monkeypatch.setattr(races, "whole_cores", lambda: allowed_cores()[: fixed_threads()])
    monkeypatch.setattr("heterollm.kernels.devices.gpu.open_cpu", no_cpu)
    race = races.run_race()
    assert race.is_won
    assert races._read(races._text(race).encode()) == race
    assert str(race).endswith("the cores of this machine have none")


def test_auto_says_why_a_gpu_that_won_does_not_open(host, ended):
    ended(FAST)
    device = open_device("auto")
    assert device.name == "host"
    assert "No GPU among the OpenCL devices" in device.reason
    device.close()


def test_the_race_compares_the_same_layer(taken_for_gpu, monkeypatch):
    monkeypatch.setattr(races, "SIDE", 256)
    monkeypatch.setattr(races, "whole_cores", lambda: allowed_cores()[: fixed_threads()])
    monkeypatch.setattr("heterollm.kernels.devices.gpu.open_cpu", lambda *_: open_device("opencl").gpu)
    race = races.run_race()
    assert race.gpu
    assert all(0 < seconds < np.inf for seconds in (*race.gpu_s, *race.cores_s))


def test_the_doctor_holds_a_float16_cache_to_the_gate_of_float16(taken_for_gpu):
    device = open_device("opencl", npu_threads=0)
    cases = [case for case in gpu_layer_cases(device) if case.operator == "RoPE and KV write"]
    checks = [run_case(case, "fp32") for case in cases[:2]]
    device.close()
    assert [check.status for check in checks] == ["pass"] * 2
    assert [check.gate for check in checks] == [1e-10, 1e-6]  # queries, keys
