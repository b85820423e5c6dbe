"""Rows of the ablation, their table, and its random checkpoint."""

import json
import sys
from pathlib import Path

import pytest
from msgspec import structs

from heterollm.benchmarks.cases import Case

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import random_model
    from tables import host
finally:
    sys.path.remove(str(BENCH))

COMMITTED = BENCH / "results" / "ablation.jsonl"


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
    lines = host.table(rows[::-1])
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
    assert len(lines) == 8


def test_of_rows_that_were_measured_again_the_last_counts(rows, make_rows):
    newer = structs.replace(make_rows([25e3], plan_level="gpu"), run="later")
    kept = host.latest([*rows, newer])
    assert len(kept) == len(rows)
    assert newer in kept
    assert rows[0] not in kept
    # Of the other engine there is one for each precision.
    assert sum(row.engine == "llama.cpp" for row in kept) == 2


def test_committed_rows_can_be_read():
    assert host.table([row for row in host.latest(_committed()) if row.asked.n_depth != 32])


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
    assert host.just_past(length) is past
