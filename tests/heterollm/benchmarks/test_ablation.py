"""What the ablation runs, how long it says it takes, and its table from rows."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from heterollm.benchmarks import plugins, to_jsonl
from heterollm.benchmarks.cases import Case

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import ablation
    import ablation_rows
    import random_model
finally:
    sys.path.remove(str(BENCH))

COMMITTED = BENCH / "results" / "ablation.jsonl"


@pytest.fixture(autouse=True)
def engines_of_the_checkout(monkeypatch):
    """A wheel does not know where the checkout is."""
    monkeypatch.setattr(plugins, "CHECKOUT", BENCH / "engines")


def whole_part(precision="w4a16", scale=1.0):
    return ablation.part(precision, (256,), (135, 300), 32, llama_cpp=True, scale=scale)


def test_every_step_of_the_split_is_a_column():
    labels = [one.label for one in whole_part("w4a8").configurations]
    assert labels == [
        "gpu w4a8, 1+1", "npu padding w4a8, 1+1", "npu pipe w4a8, 1+1", "layer padding w4a8, 1+1",
        "tensor sync operator w4a8, 1+1", "tensor w4a8, 1+1", "block w4a8, 1+1", "gpu w4a8, 2+0",
        "llama.cpp 4-bit, 2 threads",
    ]  # fmt: skip


def test_what_decodes_slowly_gets_fewer_tokens_and_says_so():
    this = whole_part()
    slow = next(one for one in this.configurations if one.plan_level == "npu")
    tests = {case for case in this.cases if case.n_gen and (slow, case) not in this.left_out}
    assert tests == {Case(0, 5, 256)}
    for one in this.configurations:
        decodes = [case for case in this.cases if case.n_gen and (one, case) not in this.left_out]
        assert len(decodes) == (one.length_policy != "pipe")
    assert any("5 tokens a sample instead of 32" in remark for remark in this.remarks)
    assert any("left out" in remark for remark in this.remarks)
    # A small model is fast enough.
    assert {case.n_gen for case in whole_part(scale=0.01).cases} == {0, 32}


def test_odd_lengths_are_light_and_cost_less():
    this = whole_part()
    assert this.light == {Case(135, 0), Case(300, 0)}
    light = ablation.estimate_s(this, 3, trace=True, scale=1.0)
    heavy = ablation.estimate_s(replace(this, light=frozenset()), 3, trace=True, scale=1.0)
    assert light < heavy < 10 * light


def test_the_whole_ablation_is_estimated_to_fit_its_window():
    both = 0.0
    for precision in ("w4a16", "w4a8"):
        odd = ablation_rows.ODD_LENGTHS
        this = ablation.part(precision, (256,), odd, 32, llama_cpp=True, scale=1.0)
        both += ablation.estimate_s(this, 3, trace=True, scale=1.0)
    assert both < 28 * 60


@pytest.fixture
def rows(make_rows):
    """Two runs, each with llama.cpp beside it, and decode of different numbers of tokens."""
    made = []
    for precision, ms in (("w4a16", 100.0), ("w4a8", 50.0)):
        run = [
            make_rows([ms * 1e3], Case(256, 0), plan_level="gpu", precision=precision),
            make_rows([ms * 1e3], Case(0, 32, 256), plan_level="gpu", precision=precision),
            make_rows(
                [ms * 1e3], Case(0, 4, 256), plan_level="npu", length_policy="padding", precision=precision
            ),
            make_rows([ms * 1e3], Case(300, 0), plan_level="tensor", sync="operator", precision=precision),
            make_rows([ms * 500], Case(256, 0), plan_level="", engine="llama.cpp", threads=(2, 0)),
        ]
        made += [structs.replace(row, run=precision) for row in run]
    return made


def test_a_table_has_a_line_for_each_length_and_precision(rows):
    lines = ablation_rows.table(rows[::-1])
    assert lines[0] == (
        "| tokens a second | `gpu`, one core | `npu`, padded | `tensor`, clFinish | llama.cpp, both cores |"
    )
    assert lines[2:8] == [
        "| prefill 256, `w4a16` | 2560.0 |  |  | 5120.0 |",
        "| prefill 300, `w4a16` |  |  | 3000.0 |  |",
        "| decode behind 256, `w4a16` | 320.0 | 40.0 |  |  |",
        "| prefill 256, `w4a8` | 5120.0 |  |  | 10240.0 |",
        "| prefill 300, `w4a8` |  |  | 6000.0 |  |",
        "| decode behind 256, `w4a8` | 640.0 | 80.0 |  |  |",
    ]
    assert "real time" in lines[-2]


def test_of_rows_that_were_measured_again_the_last_counts(rows, make_rows):
    newer = structs.replace(make_rows([25e3], plan_level="gpu"), run="later")
    kept = ablation_rows.latest([*rows, newer])
    assert len(kept) == len(rows)
    assert newer in kept
    assert rows[0] not in kept
    # Of the other engine there is one for each precision.
    assert sum(row.engine == "llama.cpp" for row in kept) == 2
    assert [len(run) for run in ablation_rows.by_runs(kept)] == [4, 5, 1]


def test_the_script_prints_the_table_from_a_file(rows, tmp_path):
    file, picture = tmp_path / "rows.jsonl", tmp_path / "report.svg"
    file.write_text(to_jsonl(rows))
    command = [
        sys.executable,
        "-P",
        str(BENCH / "ablation.py"),
        "--from",
        str(file),
        "--picture",
        str(picture),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(BENCH), "PATH": ""}
    )
    assert "| prefill 256, `w4a16` | 2560.0 |" in done.stdout
    assert picture.read_text().startswith("<svg")


def test_committed_rows_can_be_read():
    assert ablation_rows.table([row for row in ablation_rows.latest(_committed()) if row.asked.n_depth != 32])


def _committed():
    from heterollm.benchmarks import read_rows

    return read_rows(COMMITTED)


def test_a_checkpoint_of_somebody_is_not_written_over(tmp_path):
    from heterollm.base import InputError

    config = {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="checkpoint of its own"):
        random_model.write_checkpoint(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("length", "past"), [(135, True), (300, True), (525, True), (600, True), (1000, False), (31, False)]
)
def test_lengths_just_past_a_graph(length, past):
    assert ablation_rows.just_past(length) is past
