"""Which OpenCL device is the Adreno: several, Microsoft's stand-in, drivers that refuse."""

from types import SimpleNamespace

import pytest

from heterollm.kernels.devices import list_devices, runtimes
from heterollm.kernels.gpu.binding import cl

SMALL = ("QUALCOMM Adreno(TM) 642L", 3, "OpenCL 3.0 QUALCOMM build: 0636")
LARGE = ("QUALCOMM Adreno(TM) 750", 6, "OpenCL 3.0 QUALCOMM build: 0808")
OLDER = ("QUALCOMM Adreno(TM) 750", 6, "OpenCL 3.0 QUALCOMM build: 0762")


def adreno(name, units, driver):
    fixed = {"vendor": "QUALCOMM", "type": 4, "host_unified_memory": 1, "extensions": ""}
    return SimpleNamespace(name=name, max_compute_units=units, driver_version=driver, **fixed)


@pytest.fixture
def found(monkeypatch):
    """Return the status of ``snapdragon`` where some platforms are installed."""
    monkeypatch.setattr(runtimes, "make_pocl_cache", lambda: None)
    monkeypatch.setattr("heterollm.kernels.devices.software.require_qnn", lambda *, emulator: "")

    def status(*platforms, refuses_all=False):
        def platform(name, devices):
            def get_devices(kind=None):
                if refuses_all and kind is None:
                    raise cl.Error("clGetDeviceIDs failed: INVALID_DEVICE_TYPE")
                assert kind in (None, cl.device_type.GPU)
                return [adreno(*device) for device in devices]

            return SimpleNamespace(name=name, get_devices=get_devices)

        monkeypatch.setattr(cl, "get_platforms", lambda: [platform(*given) for given in platforms])
        # The process's split of PoCL's threads belongs to other tests.
        monkeypatch.setattr(runtimes, "_process_split", None)
        return next(found for found in list_devices() if found.name == "snapdragon")

    return status


def test_the_largest_adreno_with_the_newest_driver_comes_first(found):
    status = found(("QUALCOMM Snapdragon(TM)", [SMALL, OLDER, LARGE]))
    first, *others = status.gpu.split("; ")
    assert first.startswith("0: QUALCOMM Adreno(TM) 750")
    assert "0808" in first
    assert [other.split(":")[0].split()[-1] for other in others] == ["1", "2"]
    assert "0762" in others[0]
    assert "642L" in others[1]
    assert "HETEROLLM_GPU can choose" in status.gpu


@pytest.mark.parametrize(
    ("wanted", "driver"), [("2", "0636"), ("642l", "0636"), ("0762", "0762"), ("", "0808")]
)
@pytest.mark.parametrize("variable", ["HETEROLLM_GPU", "HETEROLLM_ADRENO"])
def test_a_number_or_a_part_of_a_name_chooses(found, monkeypatch, variable, wanted, driver):
    monkeypatch.setenv(variable, wanted)
    assert driver in found(("QUALCOMM Snapdragon(TM)", [SMALL, OLDER, LARGE])).gpu.split(";")[0]


@pytest.mark.parametrize("wanted", ["3", "750", "mali", "-1"])
def test_a_choice_that_names_not_one_is_refused(found, monkeypatch, wanted):
    monkeypatch.setenv("HETEROLLM_ADRENO", wanted)
    status = found(("QUALCOMM Snapdragon(TM)", [SMALL, OLDER, LARGE]))
    assert not status.usable
    assert f"HETEROLLM_ADRENO is '{wanted}'" in status.reason
    assert "0: QUALCOMM Adreno(TM) 750" in status.reason
    assert "unset it" in status.fix


def test_microsoft_s_opencl_over_direct3d_is_no_adreno(found):
    status = found(("OpenCLOn12", [LARGE]))
    assert not status.usable
    assert "No Adreno" in status.reason
    beside = found(("OpenCLOn12", [LARGE]), ("QUALCOMM Snapdragon(TM)", [SMALL]))
    assert "642L" in beside.gpu
    assert "OpenCLOn12" not in beside.gpu


def test_a_driver_that_refuses_all_devices_is_asked_for_gpus(found):
    assert "Adreno(TM) 750" in found(("QUALCOMM Snapdragon(TM)", [LARGE]), refuses_all=True).gpu
