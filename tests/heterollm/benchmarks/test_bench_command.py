"""The command itself, with real processes on the bundled model."""

import json
import os
import signal

import pytest

from heterollm.base import PARTLY
from heterollm.benchmarks import BenchOptions, Configuration, cases_of, expand, run_bench
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.children import Child
from heterollm.benchmarks.profile_first import profile_command
from heterollm.benchmarks.quality import HALF_CACHE_DB
from heterollm.benchmarks.rows import BenchRow
from heterollm.calibration import Policy, calibrate
from heterollm.cli import main
from heterollm.kernels.threads import allowed_cores

two_cores = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores to split")


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


@two_cores
def test_a_small_bench_from_end_to_end(bundled_model, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["-p", 20, "-n", 0, "-pg", "5,2", "-r", 2, "--device", "host", "--threads", "1+1"]
    levels = ["--plan", "gpu,npu,tensor", "--length-policy", "pipe", "--seed", 7]
    page = tmp_path / "page.html"
    assert bench(bundled_model, *options, *levels, "--json", "-o", out, "--html", page) == PARTLY
    assert "measured</title>" in page.read_text("utf-8")
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    # Each as soon as it was whole: what cannot run at once, then in the order of the last round.
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(written, key=rows.index) == rows
    assert written[0]["error"]
    assert [(row["label"], row["test"]) for row in rows] == [
        (label, test)
        for test in ("pp20", "pp5+tg2")
        for label in ("gpu w4a16, 1+1", "npu pipe w4a16, 1+1", "tensor w4a16, 1+1", "gpu w4a16, 2+0")
    ]
    for row in rows:
        assert tuple(row) == BenchRow.__struct_fields__
        if row["plan_level"] == "tensor":
            assert "needs a profile" in row["error"]
            continue
        assert row["error"] is None
        assert len(row["times"]["samples_ns"]) == 2
        assert row["times"]["avg_ts"] > 0
        assert row["quality"]["quality_passed"] is True
        assert row["asked"]["seed"] == 7
        assert row["time_kind"] == "real"
        assert row["setup"]["device"] == "host"
        assert row["trace"]["traced_ms"] > 0
        assert row["account"]["predicted_ms"] is None
        assert "no profile" in row["reasons"]["predicted_ms"]
        assert 0 < row["account"]["achieved_gflops"] < 1e5
    # What to do about it, with a command that can be copied.
    note = " ".join(shown.err.split())
    assert "tensor w4a16, 1+1 needs a profile: add --profile-first, or run `heterollm profile " in note
    shares = {(row["label"], row["test"]): row["account"]["gpu_share"] for row in rows}
    assert shares["gpu w4a16, 1+1", "pp20"] == 1.0
    assert shares["npu pipe w4a16, 1+1", "pp20"] == 0.0
    whole = [row for row in rows if row["asked"]["baseline"]]
    assert [(row["asked"]["gpu_threads"], row["asked"]["npu_threads"]) for row in whole] == [(2, 0)] * 2
    assert len({row["setup"]["fingerprint"] for row in rows if not row["error"]}) == 2
    npu = rows[1]
    assert npu["trace"]["npu_busy_ms"] > 0
    assert npu["trace"]["hand_overs"] > 0
    assert npu["account"]["padded_tokens"] == 12


@pytest.mark.slow
@two_cores
def test_rows_name_the_calibration_of_their_integers(bundled_model, capsys, tmp_path):
    file = tmp_path / "calibration.json"
    policy = Policy(pruned=1.0)
    made = calibrate(bundled_model, output=file, precision="w8a8", windows=2, gpu_threads=1, policy=policy)
    options = ["-p", 64, "-n", 0, "-r", 1, "--device", "host", "--no-trace", "--plan", "gpu,layer", "--json"]
    assert bench(bundled_model, *options, "--precision", "w8a8", "--calibration", file) == 0
    rows = {row["asked"]["asked_level"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["layer"]["setup"]["calibration"] == made.key
    assert rows["layer"]["quality"]["quality_passed"]
    assert rows["gpu"]["setup"]["calibration"] is None


def test_a_bench_in_which_nothing_works_fails(bundled_model, capsys):
    assert bench(bundled_model, "-p", 8, "-n", 0, "-r", 1, "--device", "snapdragon", "--no-trace") == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["--threads", "1"], "--threads is '1'"),
        (["--threads", "1+0", "--gpu-threads", "1"], "already names GPU and NPU"),
        (["--precision", "w8a8", "--plan", "layer"], "heterollm calibrate MODEL --precision w8a8 -o FILE"),
        (["--plan", "fast"], "no plan level or plan file"),
        (["--engine", "self,vllm"], "no engine 'vllm'"),
        (["-p", "99999"], "the model has only"),
        (["-r", "0"], "Repeat at least once"),
    ],
)
def test_wrong_options_are_one_error(bundled_model, capsys, options, words):
    assert bench(bundled_model, *options) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert "Traceback" not in shown.err


def test_a_killed_process_is_an_error_in_its_rows(bundled_model, monkeypatch):
    """The process of the second configuration is killed in the middle of a sample."""
    asked = Child.ask
    samples = []

    def ask(self, method, *arguments):
        if method == "sample":
            samples.append(arguments)
            if len(samples) == 4:
                os.kill(self._process.pid, signal.SIGKILL)
        return asked(self, method, *arguments)

    monkeypatch.setattr(Child, "ask", ask)
    configurations = expand(Configuration(device="host"), plan_level=["gpu"], sync=["auto", "operator"])
    options = BenchOptions(bundled_model, configurations, (Case(4, 0),), repetitions=2, trace=False)
    first, second = run_bench(options).rows
    assert first.error is None
    assert len(first.times.samples_ns) == 2
    assert first.account.loads == 1
    assert "signal 9" in second.error
    assert "memory" in second.error


@pytest.mark.slow  # test_engines.py compares the engines in this process
def test_transformers_computes_the_same(bundled_model):
    pytest.importorskip("torch")
    configurations = expand(Configuration(device="host"), engine=["self", "transformers"], plan_level=["gpu"])
    options = BenchOptions(
        bundled_model, configurations, cases_of([6], [], [(3, 2)], depths=[5]), repetitions=1, trace=False
    )
    rows = run_bench(options).rows
    assert all(row.error is None for row in rows)
    assert {row.quality.quality_reference for row in rows} == {
        next(r.label for r in rows if r.engine == "transformers")
    }
    own = next(row for row in rows if row.engine == "self")
    assert own.quality.logits_sqnr_db > own.quality.quality_gate_db == HALF_CACHE_DB
    assert own.setup.description["kv_bits"] == 16


def test_profiles_are_made_by_a_command_that_a_person_can_run():
    one = Configuration(plan_level="tensor", precision="w4a8", threads=(1, 1), device="host")
    command = " ".join(profile_command("a/model", one))
    assert command == (
        "profile a/model --quick --update --device host --precision w4a8 --group-size 32 "
        "--gpu-threads 1 --npu-threads 1"
    )
