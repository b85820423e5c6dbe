"""Damaged programs in PoCL's cache, which end the process that loads them."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from heterollm.base import DeviceError, make_own_folder
from heterollm.kernels.gpu.pocl import program_guard

pytestmark = pytest.mark.cpu

SCRIPT = """
import logging
from heterollm.kernels.devices import gpu, open_device
logging.basicConfig()
device = open_device("host", npu_threads=0, gpu_threads=1)
if device.gpu.traits.platform != "Portable Computing Language":
    raise SystemExit(77)
gpu.self_test(device.gpu)
"""


def run(cache):
    environment = os.environ | {"HETEROLLM_CACHE": str(cache)}
    environment.pop("POCL_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode == 77:
        pytest.skip("the OpenCL of this machine is not PoCL")
    return done


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    done = run(cache)
    assert done.returncode == 0, done.stderr
    return cache


@pytest.fixture
def cache(compiled, tmp_path):
    return shutil.copytree(compiled, tmp_path / "cache")


def programs(cache):
    found = list((cache / "opencl").rglob("*.so"))
    assert found
    return found


def damage(cache):
    for program in programs(cache):
        program.write_bytes(program.read_bytes()[:4096])


def test_a_damaged_program_is_compiled_again(cache):
    damage(cache)
    done = run(cache)
    assert done.returncode == 0, done.stderr
    assert "are damaged; compiling again" in done.stderr
    assert run(cache).stderr == ""


def test_what_killed_a_process_is_gone_at_the_next_start(cache):
    damage(cache)
    [listed] = (cache / "opencl").glob("pocl-*/.checksums.json")
    listed.unlink()  # as when the programs were cut short before any process ended well
    assert run(cache).returncode < 0
    done = run(cache)
    assert done.returncode == 0, done.stderr
    assert "Compiling OpenCL programs again: a process ended while it loaded them" in done.stderr
    assert run(cache).stderr == ""


def test_a_process_that_is_loading_keeps_its_programs(cache, monkeypatch):
    [folder] = (cache / "opencl").glob("pocl-*")
    marker = program_guard.FileLock(folder / f"{program_guard.MARKER}0123456789abcdef")
    before = programs(cache)
    with marker:
        assert run(cache).returncode == 0
    assert set(before) <= set(programs(cache))


def test_one_process_has_one_marker(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    folder = make_own_folder("opencl") / "pocl-unknown"
    folder.mkdir()
    monkeypatch.setattr(program_guard, "_marker", None)
    monkeypatch.setattr(program_guard, "_guarded", None)
    monkeypatch.setattr(program_guard.atexit, "register", lambda _: None)
    program_guard.guard_programs(folder)
    program_guard.guard_programs(folder)
    assert len(list(folder.glob(f"{program_guard.MARKER}*"))) == 1
    program_guard.programs_are_sound()
    assert not list(folder.glob(f"{program_guard.MARKER}*"))
    assert not caplog.records


def test_room_is_checked_before_anything_is_compiled(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(program_guard.ROOM_BYTES - 1)
    monkeypatch.setattr(program_guard.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DeviceError, match="too little to compile OpenCL programs"):
        program_guard.guard_programs(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"../../x": 5, "a/b": "c"}'])
def test_a_damaged_list_is_none(cache, content):
    [listed] = (cache / "opencl").glob("pocl-*/.checksums.json")
    listed.write_bytes(content)
    done = run(cache)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_list_that_names_other_folders_deletes_nothing_there(cache, tmp_path):
    outside = tmp_path / "outside" / "thesis"
    outside.mkdir(parents=True)
    (outside / "text").write_text("mine")
    [listed] = (cache / "opencl").glob("pocl-*/.checksums.json")
    named = [f"{outside}/text", "../../../outside/thesis/text"]
    listed.write_text(json.dumps(dict.fromkeys(named, 5)))
    done = run(cache)
    assert done.returncode == 0, done.stderr
    assert (outside / "text").read_text() == "mine"
