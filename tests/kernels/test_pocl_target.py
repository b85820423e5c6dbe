import pytest

from heterollm.errors import DeviceError
from heterollm.kernels import pocl_target
from heterollm.kernels.opencl_runtime import OpenClRuntime
from heterollm.kernels.pocl_target import TARGET_VARIABLE, TARGETS, chosen_target, mend_target, target_for


def test_the_newest_processor_that_fits_is_taken():
    for name, needed in TARGETS:
        assert target_for(needed | {"sse2"}) == name
    assert target_for(frozenset()) is None


def test_nothing_is_chosen_by_default(monkeypatch):
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    assert chosen_target() is None
    monkeypatch.setenv(TARGET_VARIABLE, "")
    assert chosen_target() is None


def test_an_unknown_processor_is_refused(monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "Haswell")
    with pytest.raises(DeviceError, match="names 'Haswell', which is not a known") as caught:
        chosen_target()
    assert "haswell" in caught.value.fix


def test_a_processor_that_has_more_is_refused(monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "cascadelake")
    monkeypatch.setattr(pocl_target, "_processor_flags", lambda: dict(TARGETS)["skylake-avx512"])
    with pytest.raises(DeviceError, match="lacks avx512_vnni"):
        chosen_target()
    monkeypatch.setenv(TARGET_VARIABLE, "haswell")
    assert chosen_target() == "haswell"


def test_a_choice_that_has_no_effect_is_refused(runtime, monkeypatch):
    """As with an OpenCL runtime other than PoCL 3: nothing measured may claim it."""
    monkeypatch.setenv(TARGET_VARIABLE, "nehalem")
    monkeypatch.setattr(pocl_target, "_processor_flags", lambda: dict(TARGETS)["nehalem"])
    with pytest.raises(DeviceError, match="keeps its target elsewhere"):
        mend_target(0)
    monkeypatch.setattr("heterollm.kernels.opencl_runtime.POCL_NAME", "another")
    with pytest.raises(DeviceError, match="only PoCL 3"):
        OpenClRuntime(runtime._device)
