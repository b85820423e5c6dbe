"""Sweeps over simulations: a grid, alike however it is run, labelled, and never read as measured."""

import csv
import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import joblib
import pytest
from joblib.parallel import ThreadingBackend

from heterollm.base import InputError, OptionError
from heterollm.benchmarks import BenchRow, RowFile, expand_simulated, read_rows, run_sweep
from heterollm.benchmarks.formats import table_of
from heterollm.benchmarks.sweep import run_case
from heterollm.cli import main
from heterollm.kernels.sim import GpuLoad
from heterollm.report import bench_page
from heterollm.report.console import render
from heterollm.report.simulate import sweep_report
from heterollm.simulate import SimulationRequest

BENCH = Path(__file__).resolve().parents[3] / "bench"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("sweep")))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture(scope="module")
def grid(tiny):
    """Three levels at two lengths, one of them odd, and a model that is not there."""
    base = SimulationRequest(tiny, decode=1)
    good = expand_simulated(
        base, prompt=[32, 45], level=["gpu", "layer", "tensor"], length_policy=["padding", "online"]
    )
    return (*good, replace(base, model="no-such-model"))


@pytest.fixture(scope="module")
def rows(grid):
    return run_sweep(grid, jobs=1)


def test_an_interrupted_sweep_keeps_the_rows_that_it_has(grid, rows, tmp_path):
    path, done = tmp_path / "simulated.jsonl", []

    def keep(row):
        RowFile(path).add(row)
        done.append(row)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, jobs=1, keep=keep)
    assert read_rows(path) == rows[:2]


def test_a_grid_has_each_case_once(tiny):
    base = SimulationRequest(tiny, decode=1)
    found = expand_simulated(
        base,
        prompt=[32, 64, 32],
        level=["gpu", "layer", "tensor"],
        length_policy=["padding", "online"],
        sync=["predict", "finish"],
        load=[None, GpuLoad(60.0, 2000.0)],
    )
    # gpu waits for nobody, and only layer pads: 1, 4 and 2 ways, at two lengths, with and without a game.
    assert len(found) == 2 * 2 * (1 + 4 + 2)
    assert len({repr(one) for one in found}) == len(found)
    assert [one.prompt for one in found] == sorted(one.prompt for one in found)
    assert expand_simulated(base, level=["tensor"], length_policy=["online"])[0].length_policy == "auto"
    with pytest.raises(OptionError, match="--length-policy online changes nothing"):
        expand_simulated(base, {"length_policy": "online"}, level=["tensor"], length_policy=["online"])
    with pytest.raises(OptionError, match="more than"):
        expand_simulated(base, prompt=range(1, 1000), decode=range(1000))
    with pytest.raises(OptionError, match="plan level"):
        expand_simulated(base, level=["gpu", "none"])


def test_requests_and_rows_can_be_sent_to_other_processes(grid, rows):
    assert pickle.loads(pickle.dumps(grid)) == grid
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_every_row_is_labelled_and_a_failure_says_why(grid, rows):
    assert [(row.setup.model_filename, row.asked.n_prompt, row.asked.asked_level) for row in rows] == [
        (one.model, one.prompt, one.level) for one in grid
    ]
    for row in rows[:-1]:
        data = json.loads(json.dumps(row.to_dict()))
        assert (data["time_kind"], data["error"]) == ("simulated", None)
        assert data["modelled"]["prefill_tokens_per_second"] > 0
        assert set(data["modelled"]["cuts"]["prefill"]) in (
            {"qkv", "o", "gate_up", "down", "head"},
            {"qkv", "o", "ffn", "head"},
        )
        assert BenchRow.from_dict(data) == row
    assert "no-such-model" in rows[-1].error
    assert rows[-1].modelled.ttft_ms is None
    assert rows[-1].time_kind == "simulated"
    online = {row.plan_level: row for row in rows[:-1] if row.asked.length_policy == "online"}
    assert online["layer"].asked.n_prompt == 45
    assert online["layer"].modelled.cuts["prefill"]["qkv"] == "N"
    levels = {row.asked.asked_level for row in rows[:-1] if row.asked.length_policy == "auto"}
    assert levels == {"gpu", "tensor"}
    padded = next(row for row in rows if row.asked.length_policy == "padding" and row.asked.n_prompt == 45)
    assert padded.plan_level == "layer"
    assert padded.modelled.cuts["prefill"]["qkv"] == "N@64"
    assert rows[0].modelled.cuts["decode"]["head"] == "G"


def test_serial_and_parallel_agree_in_order(grid, rows):
    some = [grid[0], grid[3], grid[-1], grid[1]]
    expected = [rows[0], rows[3], rows[-1], rows[1]]
    seen = []
    assert run_sweep(some, jobs=2, progress=lambda *step: seen.append(step)) == expected
    assert ("simulating", 4, 4) in seen


def test_a_cluster_computes_the_same_rows(grid, rows, monkeypatch):
    """Each cluster's package is replaced by a module that gives its work to joblib's threads."""
    some, expected, opened = [grid[0], grid[-1], grid[1]], [rows[0], rows[-1], rows[1]], []

    class Client:
        def __enter__(self):
            opened.append("dask")
            joblib.register_parallel_backend("dask", ThreadingBackend)

        def __exit__(self, *_error):
            opened.append("closed")

    def register_ray():
        opened.append("ray")
        joblib.register_parallel_backend("ray", ThreadingBackend)

    monkeypatch.setitem(joblib.parallel.BACKENDS, "dask", None)
    monkeypatch.setitem(joblib.parallel.BACKENDS, "ray", None)
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=Client))
    for name in ("ray", "ray.util", "ray.util.joblib"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(register_ray=register_ray))
    kept = []
    for cluster in ("dask", "ray"):
        assert run_sweep(some, cluster=cluster, keep=kept.append) == expected
    assert kept == [*expected, *expected]
    assert opened == ["dask", "closed", "ray"]


@pytest.mark.parametrize(
    ("cluster", "missing", "fix"),
    [
        ("dask", "joblib", "pip install 'heterollm[cluster]' distributed"),
        ("dask", "distributed", "pip install 'heterollm[cluster]' distributed"),
        ("ray", "ray", "pip install 'heterollm[cluster]' ray"),
    ],
)
def test_a_cluster_without_its_packages(grid, monkeypatch, cluster, missing, fix):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OptionError, match=f"needs {missing}") as caught:
        run_sweep(grid[:1], cluster=cluster)
    assert fix in caught.value.fix


def test_one_machine_needs_no_joblib(grid, rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    assert run_sweep(grid[:1]) == rows[:1]


def test_a_script_without_a_guard_is_told(tiny, tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        "import sys\nfrom heterollm.benchmarks import run_sweep\n"
        "from heterollm.simulate import SimulationRequest\n"
        "run_sweep([SimulationRequest(sys.argv[1], prompt=32, decode=0, level='gpu')], jobs=2)\n"
    )
    done = subprocess.run([sys.executable, str(script), tiny], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "A process of the sweep ended" in done.stderr.splitlines()[-1]
    assert "__main__" in done.stderr.splitlines()[-1]


def test_a_bug_in_one_case_is_a_row(grid, monkeypatch):
    def broken(_request, **_options):
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("heterollm.benchmarks.sweep.simulated", broken)
    assert run_case(grid[0]).error == "Unexpected ZeroDivisionError: by hand. This is a bug."


def test_what_a_sweep_cannot_do(grid):
    for jobs in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match="processes"):
            run_sweep(grid, jobs=jobs)
    with pytest.raises(OptionError, match="no cluster 'slurm'"):
        run_sweep(grid, cluster="slurm")
    with pytest.raises(OptionError, match="timeline"):
        run_sweep([replace(grid[0], trace=True)])
    assert run_sweep([]) == []


@pytest.mark.parametrize(
    ("name", "value"), [("ttft_ms", "fast"), ("ttft_ms", -1.0), ("cuts", []), ("prefill", 3)]
)
def test_rows_are_read_strictly(rows, name, value):
    good = rows[0].to_dict()
    with pytest.raises(InputError, match=rf"modelled\.{name}"):
        BenchRow.from_dict({**good, "modelled": {**good["modelled"], name: value}})


def test_simulated_rows_are_never_compared_with_measured_ones(rows, tmp_path, make_bench_row):
    path, measured = tmp_path / "simulated_rows.jsonl", tmp_path / "measured.jsonl"
    for row in rows:
        RowFile(path).add(row)
    measured.write_text(json.dumps(make_bench_row("real").to_dict()) + "\n")
    script = [sys.executable, str(BENCH / "compare.py")]
    for files in ((measured, path), (path, measured)):
        done = subprocess.run([*script, *map(str, files)], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert "simulated" in done.stderr
    columns, cells = table_of([make_bench_row("real"), rows[0]])
    both = [dict(zip(columns, line, strict=True)) for line in cells]
    assert [(line["time"], bool(line["t/s"]), bool(line["prefill t/s"])) for line in both] == [
        ("", True, False),
        ("simulated", False, True),
    ]


def test_rows_of_an_older_version_are_refused(tmp_path):
    path = tmp_path / "simulated.jsonl"
    path.write_text('{"simulated": true}\n')
    with pytest.raises(InputError, match="an older version simulated"):
        read_rows(path)


@pytest.fixture(scope="module")
def make_bench_row():
    def make(kind):
        path = BENCH / "results" / "ablation.jsonl"
        row = next(row for row in read_rows(path) if row.usable)
        return BenchRow.from_dict({**row.to_dict(), "time_kind": kind})

    return make


def test_the_command_takes_lists(tiny, capfd, tmp_path):
    given = ["simulate", tiny, "--prompt", "32,45", "--decode", "1", "--plan", "gpu,layer"]
    out = tmp_path / "simulated.jsonl"
    assert main([*given, "--jobs", "1", "-o", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "Simulated, nothing here was measured" in shown
    kept = read_rows(out)
    assert [(row.asked.n_prompt, row.plan_level) for row in kept] == [
        (32, "gpu"),
        (32, "layer"),
        (45, "gpu"),
        (45, "layer"),
    ]
    one = [*given[:3], "32", *given[4:-1], "gpu"]
    for form, read in (
        ("jsonl", lambda text: [json.loads(line) for line in text.splitlines()]),
        ("csv", lambda text: list(csv.DictReader(io.StringIO(text)))),
    ):
        assert main([*given, "--jobs", "1", "--format", form]) == 0
        found = read(capfd.readouterr().out)
        assert len(found) == 4
        assert all(line["time_kind"] == "simulated" for line in found)
    # A single case prints what it always printed.
    assert main([*one, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["plan_level"] == "gpu"


def test_a_failed_case_is_a_row_and_the_command_fails(tiny, capfd):
    given = ["simulate", f"{tiny},no-such-model", "--prompt", "32", "--decode", "0"]
    assert main([*given, "--plan", "gpu", "--jobs", "1", "--format", "md"]) == 1
    captured = capfd.readouterr()
    assert "| simulated" in captured.out
    assert "There is no folder 'no-such-model'." in captured.out
    assert "1 of 2 cases failed" in captured.err


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", "32,x"],
        ["--plan", "gpu,none"],
        ["--sync", ","],
        ["--jobs", "0"],
        ["--gpu-load", "60fps:5ms,60fps"],
        ["--timeline", "simulated.json"],
    ],
)
def test_bad_sweeps_give_one_error(options, tiny, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["simulate", tiny, "--prompt", "32,64", "--plan", "gpu", "--json", *options]
    assert main(given) == (1 if "--timeline" in options else 2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


def test_columns_that_are_empty_in_all_rows_are_left_out(rows):
    columns, cells = table_of(rows[:-1])
    assert {"time", "level", "prefill t/s", "W"} <= set(columns)
    assert not {"technique", "game", "at once", "t/s", "threads"} & set(columns)
    assert len(cells) == len(rows) - 1
    shown = render(sweep_report(rows[:-1]), width=200)
    title, head = shown.splitlines()[0], shown.splitlines()[1:4]
    assert "sync predict" in title
    assert not any("sync" in line for line in head)
    assert sweep_report(rows[-1:])


def test_a_page_of_simulated_rows_has_both_rates_and_no_joint_one(rows):
    page = bench_page([rows])
    assert all(f"{name}</th>" in page for name in ("ttft ms", "prefill t/s", "decode t/s"))
    assert "tokens/s" not in page
    assert "1 failed: There is no folder" in page
