"""Published simulated rows are taken again by ``bench/figures.py --run``, which says what differs."""

import json
import sys
from pathlib import Path

import pytest

from heterollm.base import silent
from heterollm.simulate import SimulatedRow

ROOT = Path(__file__).resolve().parents[3]
RESULTS = (
    *("device", "fingerprint", "note", "lanes", "chunk_tokens", "npu_graphs", "npu_gib", "npu_limit_gib"),
    *("npu_opening_s", "ttft_ms", "prefill_ms", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("prefill_joules", "decode_joules_per_token", "average_watts", "prefill", "decode", "error", "cuts"),
    *("predicted_npu_idle_fraction", "in_order", "slowdown", "experts"),
)
"""Fields of a row that are no part of its request."""


@pytest.fixture
def again(monkeypatch):
    """Return the module of the bench that takes rows again."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import figures_run

    yield figures_run
    sys.modules.pop("figures_run", None)


def rows_of(name):
    """Return the rows of a file in bench/results."""
    text = (ROOT / "bench" / "results" / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_each_row_holds_its_whole_request(again):
    for name in again.REPEATABLE:
        for row in rows_of(name):
            request = again.request_of(again.RungRow.from_dict(row))
            made = again.RungRow.of_case(request, SimulatedRow.of(request)).to_dict()
            ours = {field: value for field, value in made.items() if field not in RESULTS}
            # Rows of older versions lack options that came later.
            theirs = {field: row[field] for field in ours if field in row}
            if theirs.get("outlier_share", 0) is None:
                del theirs["outlier_share"]
            assert {field: ours[field] for field in theirs} == theirs, name


def test_a_row_taken_again_is_the_same_and_a_changed_one_is_named(again):
    row = next(
        row for row in rows_of("simulated_path") if (row["plan_level"], row["prompt_tokens"]) == ("gpu", 64)
    )
    fresh = again.rows_again([row], 1, silent)
    assert list(again.row_differences("simulated_path", [row], fresh)) == []
    old = {**row, "prefill_tokens_per_second": 1.1 * row["prefill_tokens_per_second"]}
    (said,) = again.row_differences("simulated_path", [old], fresh)
    assert "prefill_tokens_per_second" in said
    assert "llama-3-8b, gpu, 64" in said
    (said,) = again.row_differences("simulated_path", [{**row, "error": "refused"}], fresh)
    assert "refused before" in said


def test_a_cell_that_differs_is_named(again):
    page = "| rates | 64 | 256 |\n|---|---:|---:|\n| `gpu` | 39 | 58 |\n"
    assert list(again.cell_differences("page, rates", page, page)) == []
    (said,) = again.cell_differences("page, rates", page, page.replace("58", "59"))
    assert said == "page, rates, `gpu`, 256: 58 on the page, 59 now"
    (said,) = again.cell_differences("page, rates", page, page + "| `npu` | 1 | 2 |\n")
    assert "rows or columns" in said
