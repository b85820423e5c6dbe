"""Reports on terminals of 60, 80 and 120 columns: words, headings and values are whole, on lines that fit."""

import json
import os
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from heterollm.base import silent
from heterollm.benchmarks import BenchResult, DemoResult, DemoRow
from heterollm.benchmarks.cases import Case
from heterollm.data import bundled_model
from heterollm.doctor import Check, Diagnosis
from heterollm.doctor.run import Problem
from heterollm.kernels.device import DeviceStatus
from heterollm.kernels.sim import simulated_devices
from heterollm.loading import plan_for
from heterollm.planning import LoadOptions, ProfilingSession
from heterollm.profiler import SessionOptions, summarize
from heterollm.report import bench_reports, console, demo_report, diagnosis_report, plan_report
from heterollm.report import profile as report_profile

WIDE = 1000
FIELDS = {"gpu_share": 0.25, "padded_tokens": 212, "predicted_ms": 110.0, "cut_groups": ["qkv"]}
FIELDS |= {"read_bytes": 1e9, "flops": 1e10, "ceiling_gbps": 12.5, "ceiling_gflops": 1000.0}
FIELDS |= {"traced_ms": 120.0, "gpu_busy_ms": 90.0, "npu_busy_ms": 80.0, "overlap_ms": 70.0}
FIELDS |= {"overlap_fraction": 0.875, "hand_over_ms": 2.5, "hand_overs": 44}
FIELDS["operators"] = [
    {"part": "npu", "operator": "gate_up", "count": 22, "time_ms": 33.0, "gbps": 4.0, "gflops": 50.0}
]
DESCRIPTION = {
    "device": "host",
    "gpu": "cpu-haswell-Intel(R) Xeon(R) Processor",
    "gpu_driver": "Portable Computing Language 7.1",
    "npu": "ONNX Runtime CPU",
    "gpu_threads": 1,
    "npu_threads": 1,
}


@pytest.fixture
def rows(make_rows):
    levels = ("gpu", "npu", "layer", "tensor", "block")
    prefill = [make_rows([1e5, 1e5, 1.1e5], plan_level=level, fields=FIELDS) for level in levels]
    prefill.append(make_rows([5e4] * 3, plan_level="gpu", threads=(2, 0), baseline=True))
    decode = [make_rows([1e4] * 3, Case(0, 8), plan_level=level, fields=FIELDS) for level in levels]
    marks = (True, False, None)
    return tuple(
        replace(row, times=replace(row.times, samples_disturbed=marks)) for row in (*prefill, *decode)
    )


@pytest.fixture(scope="module")
def solved():
    """A plan for the bundled model on a simulated phone, which takes no device and no time to profile."""
    with ProfilingSession("sim:snapdragon-8gen3", models=(bundled_model(),)) as profiling:
        profiling.run(SessionOptions.of(quick=True, tune=False), silent)
    return plan_for(bundled_model(), LoadOptions(device="sim:snapdragon-8gen3"))


@pytest.fixture
def reports(rows, sample_profile, solved):
    bench = BenchResult(rows, ("All models fit.",))
    shown = tuple(DemoRow(name, 521.0, 182.0) for name in ("GPU", "NPU", "both"))
    said = ("Prefill: both are 1.05 x (0.61 to 2.63) as fast as the GPU alone: splitting pays.",)
    phone = ("sim:snapdragon-8gen3", "llama-3.2-3b", shown, ("A remark.",))
    checks = (
        Check("GPU", "linear f32", "1 token", "pass", 2e-14, 1e-10),
        Check("NPU", "linear w4a8 of a sliding window", "1 token", "fail", 3e-2, 1e-10, "Wrong.", "Update."),
    )
    facts = (("python", "3.11"), ("GPU driver", DESCRIPTION["gpu_driver"]))
    status = DeviceStatus("host", False, DESCRIPTION["gpu"], "ONNX Runtime CPU", "No library.", "Install it.")
    return {
        "bench": bench_reports([bench, bench]),
        "demo": demo_report(DemoResult("p", "t", 9, True, DESCRIPTION, "real", shown, said, *phone)),
        "doctor": diagnosis_report(Diagnosis("host", facts, checks, (), (Problem("A note.", "Do it."),))),
        "devices": console.devices_table([status, *simulated_devices()]),
        "profile": report_profile.profile_report(summarize(sample_profile()), everything=True),
        "plan": plan_report(solved, (1, 300), 8, explain=True),
    }


def words_of(text):
    """Return the words of a report; a heading before a value has a colon, and rules have none."""
    return {word.rstrip(":") for word in re.sub("[─•█▉▊▋▌▍▎▏]", " ", text).split()}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["bench", "demo", "doctor", "devices", "profile", "plan"])
def test_a_report_fits_the_terminal_and_breaks_no_word(reports, name, width):
    text = console.render(reports[name], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert words_of(text) == words_of(console.render(reports[name], width=WIDE))


def test_a_narrow_terminal_shows_a_row_on_lines_and_a_wide_one_in_columns():
    made = console.table("configuration", ">tokens/s", ">predicted", title="pp256")
    made.add_row("tensor 1+1", "2560.0", "")
    narrow = [line.rstrip() for line in console.render(made, width=28).splitlines()]
    assert narrow == ["pp256", "configuration: tensor 1+1", "  tokens/s: 2560.0"]
    wide = [line.split() for line in console.render(made, width=60).splitlines()]
    assert ["configuration", "tokens/s", "predicted"] in wide
    assert ["tensor", "1+1", "2560.0"] in wide


def test_a_long_path_goes_on_in_the_next_line_of_its_cell():
    made = console.table("kind", "folder", ">size")
    made.add_row("weights", "/a" * 60, "2.0 KiB")
    lines = console.render(made, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(re.findall(r"[/a]{2,}", "\n".join(lines))) == "/a" * 60
    assert sum("2.0 KiB" in line for line in lines) == 1


# -- control characters ------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def test_control_characters_of_names_are_shown_and_not_obeyed():
    made = console.table("name", title=f"title {ESCAPE}")
    made.add_row(f"row {ESCAPE}")
    made.add_row(console.note(f"text {ESCAPE}"))
    text = console.render(made, width=60)
    assert "\x1b" not in text
    assert text.count("␛]0;owned") == 3


def test_a_terminal_shows_control_characters_and_a_pipe_gets_them(monkeypatch, capsys):
    from heterollm.base import write

    write(f"{ESCAPE}\n")
    assert capsys.readouterr().out == f"{ESCAPE}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    write(f"a\t{ESCAPE}\x9b\u202e\n")
    assert capsys.readouterr().out == "a\t␛]0;owned␇␛[31m\ufffd\ufffd\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.parametrize("what", ["folder", "config", "option"])
def test_a_hostile_name_does_not_reach_the_terminal(tmp_path, what):
    folder = tmp_path / (f"model {ESCAPE}" if what == "folder" else "model")
    folder.mkdir()
    if what == "config":
        (folder / "config.json").write_text(json.dumps({"model_type": ESCAPE, "architectures": [ESCAPE]}))
    options = ["--precision", ESCAPE] if what == "option" else []
    command = [sys.executable, "-m", "heterollm", "generate", str(folder), "hello", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == (2 if what == "option" else 1)
    assert b"\x1b" not in done.stderr
    assert b"\x07" not in done.stderr
    assert b"owned" in done.stderr
