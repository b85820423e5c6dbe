"""Long work without a terminal: a line every ten seconds, and the columns that the user states."""

import subprocess
import sys

import pytest

from heterollm.report.console import PIPE_WIDTH, pipe_width, render, table
from heterollm.report.stage_lines import LINE_S, StageLines

SLOW = """
import time
from heterollm.report import stage_lines
from heterollm.report.console import progress_bars
stage_lines.LINE_S = 0.2
with progress_bars() as progress:
    progress("Quantising weights", 1, 4)
    time.sleep(1)
"""

WAITING = """
import time
from heterollm.report import stage_lines
from heterollm.report.console import Waiting
stage_lines.LINE_S = 0.2
waiting = Waiting("Reading the prompt")
def tokens():
    waiting.progress("prefill", 3, 4)
    time.sleep(1)
    yield 1
    time.sleep(0.5)
    yield 2
assert list(waiting.until_first(tokens())) == [1, 2]
"""


def test_each_stage_says_where_it_is_every_ten_seconds():
    now = [0.0]
    lines = StageLines(lambda: now[0])
    assert lines.due() is None
    lines.report("Loading", 0, 10)
    now[0] = LINE_S - 0.1
    assert lines.due() is None
    now[0] = LINE_S
    lines.report("Loading", 5, 10)
    assert lines.due() == "Loading: 50% after 10 s"
    assert lines.due() is None
    now[0] = 2 * LINE_S
    assert lines.due() == "Loading: 50% after 20 s"
    lines.report("Tuning", 0, 3)
    assert lines.due() is None
    now[0] = 3 * LINE_S
    assert lines.due() == "Tuning: 0% after 10 s"
    lines.report("Tuning", 3, 3)
    now[0] = 9 * LINE_S
    assert lines.due() is None  # between two stages


@pytest.mark.parametrize(
    ("program", "line"), [(SLOW, "Quantising weights: 25% after"), (WAITING, "Reading the prompt: 75% after")]
)
def test_a_silent_stage_prints_lines_into_a_pipe(program, line):
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert line in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("stated", "columns"), [("72", 72), ("3", 40), ("", PIPE_WIDTH), ("wide", PIPE_WIDTH), ("²", PIPE_WIDTH)]
)
def test_columns_hold_in_pipes(monkeypatch, stated, columns):
    monkeypatch.setenv("COLUMNS", stated)
    assert pipe_width() == columns
    made = table("a", "b")
    made.add_row("word " * 40, "word " * 40)
    assert max(map(len, render(made).splitlines())) <= columns
