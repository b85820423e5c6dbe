"""Which cores each part gets, and who is pinned to them."""

import logging
import os
import threading

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import OptionError
from heterollm.kernels import threads
from heterollm.kernels.threads import (
    SIBLINGS_FILE,
    ThreadSplit,
    allowed_cores,
    pin_current_thread,
    split_threads,
    whole_cores,
)

CORES = st.sets(st.integers(0, 127), min_size=1, max_size=24).map(lambda cores: tuple(sorted(cores)))
LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")


def split_of(cores, gpu_threads=None, npu_threads=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "allowed_cores", lambda: cores)
        return split_threads(gpu_threads, npu_threads)


@given(CORES)
def test_by_default_each_part_has_half(cores):
    split = split_of(cores)
    gpu, npu = split.gpu_cores, split.npu_cores
    assert set(gpu) <= set(cores)
    assert set(npu) <= set(cores)
    if len(cores) == 1:
        assert gpu == npu == cores
    else:
        assert not set(gpu) & set(npu)
        assert set(gpu) | set(npu) == set(cores)
        assert len(npu) - len(gpu) in (0, 1)


@pytest.fixture
def topology(tmp_path, monkeypatch):
    """Return a function that writes the files of cores with these threads, and allows some of them."""

    def write(siblings, allowed=None):
        for core, text in siblings.items():
            path = tmp_path / f"cpu{core}" / SIBLINGS_FILE
            path.parent.mkdir(parents=True)
            path.write_text(f"{text}\n")
        monkeypatch.setattr(threads, "CPU_FOLDER", tmp_path)
        monkeypatch.setattr(threads, "allowed_cores", lambda: tuple(allowed or sorted(siblings)))

    return write


def test_a_second_thread_of_a_core_is_no_core(topology):
    topology({core: f"{core % 8},{core % 8 + 8}" for core in range(16)})
    assert whole_cores() == tuple(range(8))
    assert split_threads() == ThreadSplit((0, 1, 2, 3), (4, 5, 6, 7))
    assert split_threads(6) == ThreadSplit((0, 1, 2, 3, 4, 5), (6, 7))
    assert split_threads(8, 0) == ThreadSplit(tuple(range(8)), ())
    # Numbers that need second threads get them.
    assert split_threads(8, 8) == ThreadSplit(tuple(range(8)), tuple(range(8, 16)))
    assert split_threads(12) == ThreadSplit(tuple(range(12)), (12, 13, 14, 15))
    with pytest.raises(OptionError, match="exceed the 16 cores"):
        split_threads(12, 8)


def test_neighbours_may_be_threads_of_a_core(topology):
    """Some cores have one thread, and a process may run on a part of the threads."""
    siblings = {core: f"{core // 2 * 2}-{core // 2 * 2 + 1}" for core in range(8)} | {8: "8", 9: "9"}
    topology(siblings, allowed=(1, 2, 3, 6, 8, 9))
    assert whole_cores() == (1, 2, 6, 8, 9)
    assert whole_cores((3, 9)) == (3, 9)


def test_two_threads_of_the_only_core_are_taken(topology):
    topology({0: "0-1", 1: "0-1"})
    assert split_threads() == ThreadSplit((0,), (1,))


@pytest.mark.parametrize("text", ["", "0-", "none", "\u00e9"])
def test_files_that_name_no_threads_are_left_alone(topology, text):
    topology(dict.fromkeys(range(4), text))
    assert whole_cores() == (0, 1, 2, 3)


@given(CORES, st.integers(1, 24), st.integers(0, 24))
def test_both_numbers_are_kept_or_refused(cores, gpu_threads, npu_threads):
    count = len(cores)
    fits = max(gpu_threads, npu_threads) <= count and gpu_threads + npu_threads <= max(2, count)
    if not fits:
        with pytest.raises(OptionError, match=f"{gpu_threads} GPU and {npu_threads} NPU"):
            split_of(cores, gpu_threads, npu_threads)
        return
    split = split_of(cores, gpu_threads, npu_threads)
    assert (len(split.gpu_cores), len(split.npu_cores)) == (gpu_threads, npu_threads)
    assert set(split.gpu_cores) | set(split.npu_cores) <= set(cores)
    if gpu_threads + npu_threads <= count:
        assert not set(split.gpu_cores) & set(split.npu_cores)
    assert str(split) == f"{gpu_threads} GPU thread(s), {npu_threads} NPU thread(s)"


@given(CORES, st.integers(1, 24))
def test_one_number_leaves_the_rest_to_the_other_part(cores, wanted):
    count = len(cores)
    if wanted > count:
        for options in ({"gpu_threads": wanted}, {"npu_threads": wanted}):
            with pytest.raises(OptionError):
                split_of(cores, **options)
        return
    by_gpu = split_of(cores, gpu_threads=wanted)
    assert len(by_gpu.gpu_cores) == wanted
    # All cores for the GPU is a wish for no NPU, except where one core must serve both.
    assert len(by_gpu.npu_cores) == max(count - wanted, 1 if count == 1 else 0)
    if wanted == count > 1:
        with pytest.raises(OptionError, match="exceed"):
            split_of(cores, npu_threads=wanted)
        return
    by_npu = split_of(cores, npu_threads=wanted)
    assert len(by_npu.npu_cores) == wanted
    assert len(by_npu.gpu_cores) == max(1, count - wanted)


@given(CORES)
def test_no_npu_threads_leave_all_cores_to_the_gpu(cores):
    split = split_of(cores, npu_threads=0)
    assert split == ThreadSplit(cores, ())


@pytest.mark.parametrize("count", [True, 1.0, "1", -1])
def test_what_is_no_number_of_threads(count):
    for name in ("gpu_threads", "npu_threads"):
        with pytest.raises(OptionError):
            split_of((0, 1, 2, 3), **{name: count})


def test_the_gpu_needs_a_thread():
    with pytest.raises(OptionError, match="1 thread or more"):
        split_of((0, 1), gpu_threads=0)


@LINUX
def test_the_allowed_cores_are_the_threads_own():
    assert allowed_cores() == tuple(sorted(os.sched_getaffinity(0)))


@LINUX
def test_pinning_concerns_one_thread():
    before, seen = os.sched_getaffinity(0), []

    def work():
        seen.append(pin_current_thread((min(before),)))
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, {min(before)}]
    assert os.sched_getaffinity(0) == before


@LINUX
def test_a_refused_pin_is_said_and_changes_nothing(caplog):
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING):
        assert pin_current_thread((100_000,)) is False
    assert "runs unpinned" in caplog.text
    assert os.sched_getaffinity(0) == before
    assert pin_current_thread(()) is False


def test_platforms_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [4, 2])
    assert allowed_cores() == (2, 4)
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    monkeypatch.setattr(psutil, "cpu_count", lambda: 6)
    assert allowed_cores() == (0, 1, 2, 3, 4, 5)
    assert pin_current_thread((0,)) is False
    assert split_threads() == ThreadSplit((0, 1, 2), (3, 4, 5))
    monkeypatch.setattr(psutil, "cpu_count", lambda: None)
    assert allowed_cores() == (0,)
