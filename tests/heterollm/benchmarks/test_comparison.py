"""Two result files side by side, on samples that are made up."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

from heterollm.base import InputError
from heterollm.benchmarks.formats import to_jsonl

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    yield module
    del sys.modules["compare"]


@pytest.fixture
def run(make_rows):
    """A factory of the rows of a run: milliseconds of each level."""

    def make(seed, spread=0.01, **levels):
        draw = random.Random(seed)
        return [
            make_rows([ms * 1e3 * draw.lognormvariate(0, spread) for _ in range(6)], plan_level=level)
            for level, ms in levels.items()
        ]

    return make


def test_changes_are_told_from_noise(compare, run):
    compared = compare.compare_row_sets(
        run(1, gpu=100, npu=100, layer=100), run(2, gpu=100.5, npu=80, layer=125)
    )
    verdicts = {one.label: one.change.verdict for one in compared}
    assert verdicts == {
        "gpu w4a16, 1+1": "noise", "npu auto w4a16, 1+1": "faster", "layer auto w4a16, 1+1": "slower",
    }  # fmt: skip


def test_two_runs_of_the_same_thing_are_noise(compare, run):
    wrong = 0
    for seed in range(100):
        sides = run(2 * seed, spread=0.1, gpu=100), run(2 * seed + 1, spread=0.1, gpu=100)
        [compared] = compare.compare_row_sets(*sides)
        wrong += compared.change.verdict != "noise"
    assert wrong <= 10


def test_what_only_one_run_has_is_named(compare, run):
    before, after = run(1, gpu=1, npu=1), run(1, gpu=1, layer=1)
    assert compare.missing(before, after) == ["pp256, npu auto w4a16, 1+1"]
    assert compare.missing(after, before) == ["pp256, layer auto w4a16, 1+1"]
    assert len(list(compare.compare_row_sets(before, after))) == 1


def test_disturbed_samples_are_left_out_where_enough_are_left(compare, run, changed):
    (row,) = run(1, gpu=100)
    times = (*row.times.samples_ns[:3], *(2 * time for time in row.times.samples_ns[3:]))
    disturbed = changed(row, samples_ns=times, samples_disturbed=(False,) * 3 + (True,) * 3)
    [compared] = compare.compare_row_sets([row], [disturbed])
    assert compared.change.verdict == "noise"
    unknown = changed(disturbed, samples_disturbed=(None,) * 6)
    [compared] = compare.compare_row_sets([row], [unknown])
    assert compared.change.ratio < 0.8


def test_samples_of_several_lines_are_taken_together(compare, run):
    [compared] = compare.compare_row_sets(run(1, gpu=100), [*run(2, gpu=100), *run(3, gpu=200)])
    assert 0.5 < compared.change.ratio < 0.95


def test_failed_and_wrong_rows_are_no_rows(compare, make_rows):
    bad = [make_rows([], error="It failed."), make_rows([1.0] * 3, passed=False)]
    assert list(compare.compare_row_sets(bad, bad)) == compare.missing(bad, []) == []


def test_times_of_different_kinds_are_not_compared(compare, run, changed):
    [real] = run(1, gpu=100)
    modelled, emulated = (changed(real, time_kind=kind) for kind in ("simulated", "emulated"))
    for sides in (([real], [modelled]), ([modelled], [real]), ([real, modelled], []), ([emulated], [real])):
        with pytest.raises(InputError, match="different kinds"):
            list(compare.compare_row_sets(*sides))
    assert list(compare.compare_row_sets([modelled], [modelled]))


def test_other_machines_and_libraries_are_named(compare, make_rows, changed):
    row = make_rows([1.0, 1.0, 1.0])
    other = changed(row, cpu_info="another processor", versions={"numpy": "3"})
    assert compare.differences([row], [other]) == [
        "cpu_info: a processor before, another processor after",
        "numpy: 2 before, 3 after",
    ]
    assert compare.differences([row], [row]) == []


def test_the_script_prints_a_table_and_fails_if_asked_to(run, tmp_path):
    for name, rows in (("before", run(1, gpu=100)), ("after", run(2, gpu=150))):
        (tmp_path / name).write_text(to_jsonl(rows), "utf-8")

    def call(*arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    done = call("before", "after")
    assert done.returncode == 0, done.stderr
    assert "| pp256 | gpu w4a16, 1+1 |" in done.stdout
    assert "| slower |" in done.stdout
    assert "1 compared: 0 faster, 1 slower" in done.stdout
    assert call("before", "after", "--fail-on-slower").returncode == 1
    assert call("after", "before", "--fail-on-slower").returncode == 0
    missing = call("before", "nothing")
    assert missing.returncode == 2
    assert "Cannot read 'nothing': No such file" in missing.stderr
    assert "Traceback" not in missing.stderr
