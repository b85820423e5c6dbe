import json
import subprocess
import sys
from pathlib import Path

import pytest

from heterollm.base import DeviceError
from heterollm.kernels.gpu import OpenClRuntime, target_for_this_machine
from heterollm.kernels.gpu.pocl import target as pocl_target
from heterollm.kernels.gpu.pocl.target import TARGET_VARIABLE, TARGETS, chosen_target, mend_target, target_for
from heterollm.kernels.gpu.programs import POCL_NAME

pytestmark = pytest.mark.cpu

TWO_RUNTIMES = Path(__file__).with_name("two_runtimes.py")


@pytest.fixture
def identities(runtime, tmp_path, monkeypatch):
    """Who the device is to each runtime of a new process: ``identities("unknown")``."""
    if not runtime.traits.driver.startswith("3.") or runtime.traits.platform != POCL_NAME:
        pytest.skip("needs PoCL 3")

    def run(*words):
        monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path / "pocl"))
        monkeypatch.setenv("POCL_MAX_PTHREAD_COUNT", "1")
        command = [sys.executable, "-P", str(TWO_RUNTIMES), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


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
    monkeypatch.setattr("heterollm.kernels.gpu.programs.POCL_NAME", "another")
    with pytest.raises(DeviceError, match="only PoCL 3"):
        OpenClRuntime(runtime._device)


def test_an_unknown_processor_stays_who_it_is(identities, monkeypatch):
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    first, *later = identities("unknown")
    assert first["target"] == target_for_this_machine()
    assert f"for {first['target']}" in first["description"]["gpu_driver"]
    assert later == [first, first]


def test_an_older_target_stays_who_it_is(identities, monkeypatch):
    """Also where PoCL knows no other; and what is measured for it is filed apart."""
    fits = target_for(pocl_target._processor_flags())
    older = next((name for name, _ in reversed(TARGETS) if name != fits), None)
    try:
        monkeypatch.setenv(TARGET_VARIABLE, older)
        chosen_target()
    except DeviceError:
        pytest.skip("needs a processor that has more than the oldest target")
    named, *later = identities()
    assert named["target"] == older
    assert later == [named, named]
    assert identities("unknown") == [named] * 3
    monkeypatch.delenv(TARGET_VARIABLE)
    own, *later = identities()
    assert later == [own, own]
    assert own["fingerprint"] != named["fingerprint"]


def test_a_choice_that_changes_within_a_process_is_refused(runtime, monkeypatch):
    held = pocl_target._settled.get(runtime._device.int_ptr)
    if held is None:
        pytest.skip("needs PoCL 3")
    monkeypatch.setattr(pocl_target, "_processor_flags", lambda: frozenset().union(*dict(TARGETS).values()))
    for name in (name for name, _ in TARGETS if name != held[0]):
        monkeypatch.setenv(TARGET_VARIABLE, name)
        with pytest.raises(DeviceError, match=f"names {name}, but this process compiles"):
            OpenClRuntime(runtime._device)
    if held[0]:
        monkeypatch.delenv(TARGET_VARIABLE)
        with pytest.raises(DeviceError, match="names nothing, but this process compiles"):
            OpenClRuntime(runtime._device)
