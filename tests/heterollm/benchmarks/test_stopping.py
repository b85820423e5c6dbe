"""Early ends of a bench: signals, and the file of rows meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from heterollm.base import CacheError
from heterollm.benchmarks import RowFile, Stop, TerminatedInterrupt, read_rows, signals_interrupt
from heterollm.benchmarks.stopping import TimeUpError


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals_that_end_a_process_interrupt(name):
    number = signal.Signals[name]

    def killed():
        with signals_interrupt():
            os.kill(os.getpid(), number)
            time.sleep(1)

    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            killed()
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert Stop.of(caught.value) == Stop(name, 128 + number)


def test_ignored_signals_stay_ignored_and_other_threads_change_nothing():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_interrupt():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    found = []

    def elsewhere():
        with signals_interrupt():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


def test_stops_have_the_exit_codes_of_shells():
    assert Stop.of(KeyboardInterrupt()) == Stop("Ctrl-C", 130)
    assert Stop.of(TerminatedInterrupt(15)).exit_code == 143
    assert Stop.of(TimeUpError("the limit")) == Stop("the limit", 0)


# -- the file --------------------------------------------------------------------------------------------


def test_rows_are_appended_one_by_one_behind_what_is_there(tmp_path, make_rows):
    path = tmp_path / "new" / "rows.jsonl"
    file = RowFile(path)
    assert path.read_bytes() == b""
    for time_us in (1.0, 2.0):
        file.add(make_rows([time_us]))
        assert read_rows(path)[-1].times.samples_ns == (time_us * 1000,)
    path.write_text(path.read_text().rstrip("\n"))  # as an editor leaves it
    RowFile(path).add(make_rows([3.0]))
    assert [row.times.samples_ns for row in read_rows(path)] == [(1000,), (2000,), (3000,)]
    assert file.error is None


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    with pytest.raises(CacheError, match="Cannot write"):
        RowFile(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_rows_and_not_the_bench(make_rows, caplog):
    file = RowFile(Path("/dev/full"))
    for _ in range(2):
        file.add(make_rows([1.0]))
    assert "No space left" in file.error.message
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_keeps_rows_and_leaves_no_process(bundled_model, tmp_path, number, code):
    out = tmp_path / "rows.jsonl"
    # In the last round the prompt's row is in the file while tokens are still written.
    options = ["-p", "8", "-n", "600", "-r", "2", "--plan", "gpu", "--device", "host", "--no-trace"]
    options += ["--threads", "1+0", "-o", str(out)]
    command = [sys.executable, "-P", "-m", "heterollm", "bench", str(bundled_model), *options]
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out.exists() and out.read_bytes()):
        time.sleep(0.02)
    children = process.children(recursive=True)
    process.send_signal(number)
    shown, said = process.communicate(timeout=600)
    assert process.returncode == code, said
    whole, row = read_rows(out)
    assert (whole.test, len(whole.times.samples_ns), whole.interrupted) == ("pp8", 2, None)
    assert row.interrupted == ("Ctrl-C" if code == 130 else "SIGTERM")
    assert (row.test, len(row.times.samples_ns), row.asked.repetitions) == ("tg600", 1, 2)
    assert "Interrupted by" in " ".join(shown.split())
    assert children
    assert not psutil.wait_procs(children, timeout=600)[1]
