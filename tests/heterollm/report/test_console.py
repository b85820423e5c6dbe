import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from heterollm.base import CacheKind, DeviceError
from heterollm.benchmarks import DemoResult, DemoRow
from heterollm.doctor import Check, Diagnosis
from heterollm.doctor.run import Problem
from heterollm.kernels.device import DeviceStatus
from heterollm.report import console as report
from heterollm.report import demo_heading, demo_report, diagnosis_report
from heterollm.report.plan import pass_tables
from heterollm.solver import PredictedKind, PredictedPass
from heterollm.text import GenerationResult

WIDTH = 80


def text_of(renderable):
    text = report.render(renderable, width=WIDTH)
    assert max(map(len, text.splitlines())) <= WIDTH
    return text


def words_of(renderable):
    return " ".join(text_of(renderable).replace("│", " ").split())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_an_error_says_what_failed_and_what_to_do():
    words = words_of(report.error_line(DeviceError("No part [bold] was found.", fix="Install [one] now.")))
    assert words.startswith("Error: ")
    assert "No part [bold] was found. Install [one] now." in words


def test_an_error_has_one_line():
    assert text_of(report.error_line(DeviceError("It broke.", fix="Mend it."))).count("\n") == 1


def test_a_bug_asks_for_a_report():
    words = words_of(report.bug_line(KeyError("x")))
    assert "KeyError: 'x'" in words
    assert "--debug" in words
    assert "MemoryError" in words_of(report.bug_line(MemoryError()))


def test_colours_need_a_terminal_and_no_wish_against_them(monkeypatch):
    line = report.error_line(DeviceError("It broke."))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" in report.render(line, like=Terminal())
    assert "\x1b" not in report.render(line, like=io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in report.render(line, like=Terminal())


@pytest.mark.parametrize(
    ("elapsed", "total", "completed", "words"),
    [
        (0.5, 4, 2, "0.5 s"),
        (10.0, 4, 1, "10 s, 30 s left"),
        (90.0, 4, 0, "1 min 30 s"),
        (90.0, None, 2, "1 min 30 s"),
        (30.0, 10, 9, "30 s, 3.3 s left"),
    ],
)
def test_a_bar_tells_the_time_left_as_soon_as_there_is_a_pace(elapsed, total, completed, words):
    task = SimpleNamespace(elapsed=elapsed, total=total, completed=completed)
    assert report.TimeColumn().render(task).plain == words


def test_devices():
    words = words_of(
        report.devices_table(
            [
                DeviceStatus("host", True, "a CPU", "ONNX Runtime", "", ""),
                DeviceStatus("emulator", False, "a CPU", "missing", "No library.", "Install it."),
            ]
        )
    )
    assert "host yes a CPU ONNX Runtime" in words
    assert "emulator no a CPU missing" in words
    assert "emulator: No library. Install it." in words


@pytest.mark.parametrize("width", [80, 110, 200])
def test_numbers_and_names_stay_whole_where_there_is_room(width):
    names, number = [f"a-model-{place}b" for place in range(4)], "1,234.5"
    made = report.table("model", *[f">rate of way {place}" for place in range(6)], "a remark on it")
    for name in names:
        made.add_row(name, *[number] * 6, "some words that say more than fits " * 3)
    lines = report.render(made, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.split()[:7] == [name] + [number] * 6 for line in lines for name in names) == 4


def test_names_are_broken_before_numbers():
    made = report.table("model", *[f">rate {place}" for place in range(6)])
    made.add_row("a-model-with-a-name-of-one-word", *["1,234.5"] * 6)
    for width in (66, 80):
        lines = report.render(made, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert sum(line.split().count("1,234.5") for line in lines) == 6


def test_a_number_stays_with_its_unit_beside_a_long_path():
    made = report.cache_table([CacheKind("weights", "quantised weights", Path("/a" * 60), 1, 2048)])
    assert "2.0 KiB" in report.render(made, width=80)


def test_the_cache_is_summed_up():
    kinds = [
        CacheKind("weights", "w", Path("a"), 2, 3 * 1024**2),
        CacheKind("graphs", "g", Path("b"), 5, 1024**2),
    ]
    words = words_of(report.cache_table(kinds))
    assert "weights w 2 3.0 MiB" in words
    assert "all 7 4.0 MiB" in words


def test_statistics_leave_out_what_was_not_measured():
    device = SimpleNamespace(name="host", time_kind="emulated")
    plan = SimpleNamespace(level="npu", precision="w4a16")
    result = GenerationResult("", (), 4, 0, "cancelled", None, None, None)
    words = words_of(report.statistics_lines(result, device, plan))
    assert words == (
        "4 prompt tokens, 0 new tokens, ended by cancelled device host (emulated time), plan npu, w4a16"
    )


def test_the_demo_says_whether_the_processors_agree():
    device = {
        "device": "host",
        "gpu": "CPU",
        "gpu_driver": "PoCL",
        "npu": "ORT",
        "gpu_threads": 1,
        "npu_threads": 1,
        "time": "emulated",
    }
    assert "stands in for a phone" in words_of(demo_heading(device, 3_672_320, "import os\n"))
    rows = (DemoRow("GPU", 250.0, 9.5), DemoRow("NPU", None, None), DemoRow("both", 300.0, 11.0))
    for agree, words in ((True, "write the same text"), (False, "do NOT write the same text")):
        result = DemoResult(
            *("p", "t", 10, agree, device, "emulated", (), (), "sim:x", "a-model", rows, ("A remark.",))
        )
        shown = words_of(demo_report(result))
        assert words in shown
        assert "sim:x, SIMULATED, nothing measured" in shown
        assert "GPU 250 9.5 NPU failed failed both 300 11.0" in shown
        assert "measured:" not in shown.replace("nothing measured:", "")
        assert "A remark." in shown


def check(part, operator, status, error=None, **texts):
    return Check(part, operator, "1 token", status, error, 1e-10, **texts)


def test_a_diagnosis_shows_support_failures_and_fixes():
    checks = (
        check("GPU", "linear f32", "pass", 2e-14),
        check("GPU", "linear f32", "pass", 7e-14),
        check("NPU", "linear f32", "fail", 3e-2, message="Wrong numbers.", fix="Update the driver."),
        check("NPU", "linear f16", "not offered"),
    )
    warning = Problem("A library is passed over.", "Set a variable.")
    diagnosis = Diagnosis("host", (("python", "3.x"),), checks, (), (warning,))
    words = words_of(diagnosis_report(diagnosis))
    assert "linear f32 pass 7e-14 in 2 FAIL 1 of 1" in words
    assert "linear f16 not offered" in words
    assert "FAIL NPU, linear f32, 1 token: Wrong numbers. Update the driver." in words
    assert "NOTE A library is passed over. Set a variable." in words
    assert "python 3.x" in words
    assert "not usable" in words


def test_a_sound_diagnosis_says_so():
    words = words_of(diagnosis_report(Diagnosis("host", (), (check("GPU", "norm", "pass", 1e-15),), (), ())))
    assert "everything passed" in words
    assert "FAIL" not in words


def test_progress_is_silent_where_there_is_no_terminal(capsys):
    with report.progress_bars() as progress:
        progress("Stage", 0, 2)
        progress("Other", 5, 0)
        progress("Stage", 2, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_progress_ends_with_an_error_too(monkeypatch):
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH)
    monkeypatch.setattr(report, "stderr_console", lambda: console)

    def load():
        with report.progress_bars() as progress:
            progress("A stage [x]", 1, 2)
            raise DeviceError("It broke.")

    with pytest.raises(DeviceError):
        load()
    assert "A stage [x]" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_each_kind_of_layer_has_a_table():
    dense, sparse = PredictedKind("dense", 1, (), 5.0), PredictedKind("sparse", 2, (), 9.0, mixture_us=7.0)
    found = PredictedPass("prefill", 33, (sparse, dense), None, 23.0, experts_us=7.0)
    first, second = map(words_of, pass_tables(found, explain=False))
    assert "2 layers of kind sparse" in first
    assert "experts on the GPU 7" in first
    assert "1 layer of kind dense" in second
    assert "experts" not in second
