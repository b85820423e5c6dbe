"""Child processes of a bench: their environment, their ends, and their errors."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import psutil
import pytest

from heterollm.base import HeteroLLMError
from heterollm.benchmarks import Configuration, TerminatedInterrupt, signals_interrupt
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.children import Child, ChildDiedError
from heterollm.benchmarks.engine import Job

PARENT = """
import time
from heterollm.base import start_process
print(start_process(time.sleep, 600).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def started():
    """Start a child; return it and its process."""
    children = []

    def start(**options):
        before = {child.pid for child in multiprocessing.active_children()}
        children.append(Child("a test", **options))
        (pid,) = {child.pid for child in multiprocessing.active_children()} - before
        return children[-1], psutil.Process(pid)

    yield start
    for child in children:
        child.close()


def loading(model, engine="self", **options):
    configuration = Configuration(engine=engine, plan_level="gpu", device="host", **options)
    return Job(model, configuration, 64), random_ids(0, 100, 64)


def gone(process):
    return process in psutil.wait_procs([process], timeout=600)[0]


def test_a_child_chooses_its_own_threads_and_sends_no_telemetry(started, monkeypatch):
    monkeypatch.setenv("POCL_MAX_PTHREAD_COUNT", "7")
    child, process = started()
    child.ask("close")  # its answer shows that the interpreter has started
    found = process.environ()
    assert "POCL_MAX_PTHREAD_COUNT" not in found
    assert found["ORT_DISABLE_TELEMETRY"] == "1"
    assert os.environ["POCL_MAX_PTHREAD_COUNT"] == "7"


def test_a_closed_child_ends(started):
    child, process = started()
    child.close()
    assert gone(process)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_child_ends_in_the_middle_of_its_work_when_its_parent_is_interrupted(
    started, bundled_model, monkeypatch
):
    child, process = started()
    poll = Connection.poll

    def poll_and_be_killed(pipe, timeout_s):
        os.kill(os.getpid(), signal.SIGTERM)
        return poll(pipe, timeout_s)

    monkeypatch.setattr(Connection, "poll", poll_and_be_killed)

    def ask():
        with signals_interrupt():
            child.ask("load", *loading(bundled_model))

    with pytest.raises(TerminatedInterrupt):
        ask()
    child.close()
    assert gone(process)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_child_does_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "no_guard.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert gone(process)


def test_a_child_that_does_not_answer_is_stopped(started, bundled_model):
    child, process = started(timeout_s=0.001)
    # No interpreter starts as fast as that.
    with pytest.raises(ChildDiedError, match="did not answer for 0 s"):
        child.ask("load", *loading(bundled_model))
    assert gone(process)


def test_a_bug_ends_a_child_with_its_last_words(started):
    child, _ = started()
    with pytest.raises(ChildDiedError, match=r"(?s)exit code 1.*has no attribute 'nothing'"):
        child.ask("nothing")


def test_a_killed_child_names_the_signal(started):
    child, process = started()
    process.kill()
    with pytest.raises(ChildDiedError, match=r"signal 9.*memory"):
        child.ask("nothing")


def test_an_error_of_an_engine_leaves_the_child_alive(started, bundled_model):
    child, process = started()
    for _ in range(2):
        with pytest.raises(HeteroLLMError, match="no format for fp16"):
            child.ask("load", *loading(bundled_model, "llama.cpp", precision="fp16", threads=(1, 0)))
    assert process.is_running()
