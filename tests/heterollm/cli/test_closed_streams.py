"""Closed streams and cache folders that cannot be: one message, an exit code, no traceback."""

import os
import shlex
import subprocess
import sys

import pytest

from heterollm import __version__
from heterollm.data import bundled_model

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX closes the streams")


def run(words, closed="", **surroundings):
    command = shlex.join([sys.executable, "-Pm", "heterollm", *words])
    return subprocess.run(
        ["/bin/sh", "-c", f"{command} {closed}"],
        env={**os.environ, **surroundings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def message(done):
    """Return the one line of a failed command's output."""
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == done.stderr.startswith("Error: ") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("words", [("chat",), ("generate", "-"), ("cache", "clear")])
def test_a_command_that_reads_stdin_says_that_it_is_closed(words):
    model = [] if words[0] == "cache" else [str(bundled_model())]
    done = run([words[0], *model, *words[1:]], "<&-")
    if words[0] == "cache":  # the question comes behind its table
        done.stderr = done.stderr[done.stderr.index("Error: ") :]
    assert "stdin is closed. Redirect it" in message(done)


@pytest.mark.parametrize("words", ["devices", "cache list --json", "--version"])
def test_closed_stdout_is_named_before_any_work(words):
    assert "stdout is closed. Redirect it" in message(run(words.split(), ">&-"))


def test_streams_that_are_not_needed_may_be_closed():
    done = run(["--version"], "<&- 2>&-")
    assert (done.returncode, done.stdout) == (0, f"heterollm {__version__}\n")
    done = run(["--version"], "<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_no_file_takes_the_descriptor_of_a_closed_stream():
    script = (
        "import os; from heterollm.base import hold_descriptors as hold; hold(); os._exit(os.open('/', 0))"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join([sys.executable, '-Pc', script])} <&- >&- 2>&-"], timeout=600
    )
    assert done.returncode > 2


def test_nobody_reads_the_messages():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-Pm", "heterollm", "nothing"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, text=True, timeout=600)
    os.close(write)
    assert (done.returncode, done.stdout) == (141, "")


@pytest.mark.parametrize("words", ["cache list", "cache path", "devices"])
def test_a_cache_below_a_file_is_one_message(words, tmp_path):
    file = tmp_path / "file"
    file.touch()
    told = message(run(words.split(), HETEROLLM_CACHE=str(file / "cache")))
    assert "The cache folder" in told
    assert "Point HETEROLLM_CACHE at a folder." in told


@pytest.mark.parametrize(
    "surroundings",
    [
        {"HETEROLLM_CACHE": "~no-such-user/cache"},
        {"HETEROLLM_CACHE": "~/cache", "HOME": "/no/such/home"},
        {"HETEROLLM_CACHE": "", "HOME": "/no/such/home", "XDG_CACHE_HOME": ""},
    ],
)
def test_a_home_folder_that_is_not_there_is_named(surroundings):
    assert "cannot be used: there is no home folder" in message(run(["cache", "list"], **surroundings))
