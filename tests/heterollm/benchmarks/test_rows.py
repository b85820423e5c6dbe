"""Rows: their schema, and the texts that they become."""

import csv
import io
import json
import math

import pytest

from heterollm.base import InputError
from heterollm.benchmarks import (
    FORMATS,
    BenchResult,
    BenchRow,
    RowFile,
    read_rows,
)
from heterollm.benchmarks.assemble import TRACED
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.formats import to_csv, to_json, to_jsonl, to_markdown
from heterollm.benchmarks.rows import GROUPS, Modelled, flat
from heterollm.report import bench_page
from heterollm.report.bench import bench_report
from heterollm.report.console import render

LLAMA_BENCH = (
    "build_commit", "cpu_info", "model_filename", "model_type", "model_size", "model_n_params", "n_threads",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns",
    "samples_ts",
)  # fmt: skip
OURS = (
    "plan_level", "device", "precision", "engine", "sync", "length_policy", "gpu_threads", "npu_threads",
    "versions", "fingerprint", "seed", "time_kind", "gpu_share", "padded_tokens", "predicted_ms",
    "overlap_fraction", "hand_over_ms", "achieved_gbps", "achieved_gflops", "gbps_fraction",
    "gflops_fraction", "energy", "logits_sqnr_db", "samples_disturbed", "error",
)  # fmt: skip


FIELD_NAMES = tuple(
    leaf
    for name in BenchRow.__struct_fields__
    for leaf in (GROUPS[name].__struct_fields__ if name in GROUPS else (name,))
)
MEASURED_NAMES = tuple(name for name in FIELD_NAMES if name not in Modelled.__struct_fields__)


def test_names_are_those_of_llama_bench_with_ours_beside(make_rows):
    row = flat(make_rows([1000.0, 2000.0]))
    assert not {*LLAMA_BENCH, *OURS} - row.keys()
    assert tuple(row) == FIELD_NAMES
    assert len(set(FIELD_NAMES)) == len(FIELD_NAMES)


def test_rates_are_of_all_tokens_of_a_sample(make_rows):
    row = make_rows([1e6, 2e6, 4e6], Case(100, 20, 30))
    assert row.times.samples_ns == (10**9, 2 * 10**9, 4 * 10**9)
    assert row.times.samples_ts == pytest.approx((120.0, 60.0, 30.0))
    assert row.times.avg_ts == pytest.approx(70.0)
    assert row.times.stddev_ts == pytest.approx(math.sqrt((50**2 + 10**2 + 40**2) / 2))
    assert row.times.median_ts == pytest.approx(60.0)
    assert row.times.measured_ms == pytest.approx(2000.0)
    assert row.test == "pp100+tg20 @ d30"


def test_what_is_missing_has_a_reason(make_rows):
    row = make_rows([1.0], fields={"reasons": {"predicted_ms": "no profile"}})
    assert row.account.predicted_ms is None
    assert row.reasons["predicted_ms"] == "no profile"
    assert all(getattr(row.trace, name) is None and row.reasons[name] for name in TRACED)
    assert (row.account.energy, row.account.energy_j) == ("absent", None)


@pytest.mark.parametrize("write", [to_json, to_jsonl])
def test_rows_survive_a_file(make_rows, tmp_path, write):
    fields = {
        "operators": [{"part": "gpu", "operator": "norm", "time_ms": 1}],
        "cut_groups": ["qkv"],
        "read_bytes": 1e9,
        "flops": 2e9,
    }
    rows = [make_rows([1.0, 2.0], fields=fields), make_rows([], error="It failed.")]
    path = tmp_path / "rows"
    path.write_text(write(rows), "utf-8")
    assert read_rows(path) == rows


def test_lines_are_appended(make_rows, tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    RowFile(path).add(make_rows([1.0]))
    RowFile(path).add(make_rows([2.0]))
    assert [row.times.samples_ns for row in read_rows(path)] == [(1000,), (2000,)]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "[1]", "{}", '{"engine": "self"}', '["a"]', "null"],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "rows"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError):
        read_rows(path)


@pytest.mark.parametrize("samples", [[-1], [0], ["a"], [None], [float("inf")]])
def test_samples_that_are_no_times_are_refused(make_rows, samples):
    with pytest.raises(InputError, match=r"times\.samples_ns\[0\]: "):
        BenchRow.from_dict(with_field(make_rows([1.0]), "samples_ns", samples))


WRONG = (None, "a", -1.5, float("nan"), 10**400, True, [], [None], [[]], {}, {"a": {}}, [{"a": object()}])


def with_field(row, name, value):
    """Return the JSON of a row in which a field, wherever it is, has another value."""
    data = row.to_dict()
    group = next((one for one, kind in GROUPS.items() if name in kind.__struct_fields__), None)
    (data if group is None else data[group])[name] = value
    return data


@pytest.mark.parametrize("name", [*MEASURED_NAMES, *GROUPS])
def test_fields_of_other_types_are_refused_by_name(make_rows, name):
    """Whatever is let through can be shown: a file of rows comes from anywhere."""
    row = make_rows([1.0, 2.0])
    refused, last = 0, row
    for value in WRONG:
        try:
            read = BenchRow.from_dict(with_field(row, name, value))
        except InputError:
            refused += 1
        else:
            assert bench_page([(read,)])
            last = read
    render(bench_report(BenchResult((last,), ())))
    assert refused >= len(WRONG) - 6


@pytest.mark.parametrize(
    ("group", "name", "value", "place"),
    [
        ("times", "samples_ns", [1, -1], "times.samples_ns[1]: "),
        ("times", "samples_disturbed", [False] * 2, "times: samples_disturbed has more items"),
        ("asked", "n_prompt", -1, "asked.n_prompt: "),
        ("asked", "n_prompt", 0, "asked: a test has no tokens"),
        ("account", "bound", "luck", "account.bound: "),
        ("account", "bound", "memory", "account: the bound "),
        ("quality", "quality_gate_db", None, "quality: quality_passed is false without quality_gate_db"),
        ("trace", "operators", [{"part": "gpu", "operator": "norm"}], "trace.operators[0]: "),
        ("setup", "remark", "mine", "setup: "),
        ("setup", "description", {"gpu": float("nan")}, "setup: "),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(make_rows, group, name, value, place):
    row = make_rows([1.0], passed=False).to_dict()
    row[group][name] = value
    with pytest.raises(InputError) as found:
        BenchRow.from_dict(row)
    assert place in found.value.message


def test_repeated_and_unknown_fields_are_refused(make_rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    line = to_jsonl([make_rows([1.0])])
    for text in (
        line.replace('{"label"', '{"label": "x", "label"'),
        line.replace('{"label"', '{"x": 1, "label"'),
    ):
        path.write_text(text, "utf-8")
        with pytest.raises(InputError, match=r"twice|unknown field"):
            read_rows(path)


def test_an_error_names_the_file_and_the_row(make_rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        to_jsonl([make_rows([1.0]), make_rows([1.0])]).replace('"samples_ns": [1000]', '"samples_ns": 1')
    )
    with pytest.raises(InputError, match=r"rows\.jsonl: row 1 is no row of .*times\.samples_ns: Expected"):
        read_rows(path)


def test_fields_with_a_default_may_be_missing(make_rows):
    row = make_rows([1.0]).to_dict()
    for name in ("setup", "account", "trace", "quality", "notes", "reasons", "error", "run"):
        short = {key: value for key, value in row.items() if key != name}
        assert BenchRow.from_dict(short).usable


def test_markdown_says_what_an_interrupted_row_lacks(make_rows, changed):
    row = changed(make_rows([1e6]), repetitions=5, interrupted="Ctrl-C")
    assert "(1 of 5 samples)" in to_markdown([row])


def test_csv_has_every_field_of_every_row(make_rows):
    rows = [make_rows([1.0, 2.0]), make_rows([], error='A "quoted", broken\nline')]
    lines = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["error"] for line in lines] == ["", 'A "quoted", broken\nline']
    assert json.loads(lines[0]["samples_ns"]) == [1000, 2000]
    assert tuple(lines[0]) == MEASURED_NAMES


def test_markdown_is_a_table_with_the_columns_that_tell_rows_apart(make_rows):
    plain = to_markdown([make_rows([1e6, 1e6])])
    assert (
        plain.splitlines()[0]
        == "| model | size | params | engine | level | precision | threads | test | t/s |"
    )
    assert "| 1+1 | pp256 | 256.00 ± 0.00 |" in plain
    varied = to_markdown(
        [
            make_rows([1e6], plan_level="npu", length_policy="pipe"),
            make_rows([], error="a | b"),
            make_rows([1.0], passed=False),
        ]
    )
    assert "| lengths |" in varied
    assert "| pipe |" in varied
    assert "error: a / b" in varied
    assert "(wrong logits)" in varied
    assert len({line.count("|") for line in varied.splitlines()}) == 1


def test_every_format_writes_failed_rows_too(make_rows):
    for write in FORMATS.values():
        assert write([make_rows([], error="It failed.")])
