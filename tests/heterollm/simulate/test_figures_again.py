"""Published simulated rows are taken again by ``bench/figures.py --run``, which says what differs."""

import json
import sys
from pathlib import Path

from heterollm.base import silent
from heterollm.benchmarks import modelled_row

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "bench"))
try:
    import figures_run
    import rungs
    import simulated_rows
finally:
    sys.path.remove(str(ROOT / "bench"))

RESULTS = (
    *("device", "fingerprint", "note", "lanes", "chunk_tokens", "npu_graphs", "npu_gib", "npu_limit_gib"),
    *("npu_opening_s", "ttft_ms", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("prefill_joules", "decode_joules_per_token", "average_watts", "prefill", "decode", "error", "cuts"),
    *("predicted_npu_idle_fraction", "in_order", "slowdown", "experts", "tokens"),
)
"""Fields of a row that are no part of its request."""


def rows_of(name):
    """Return the rows of a file in bench/results."""
    text = (ROOT / "bench" / "results" / f"{name}.jsonl").read_text("utf-8")
    return [simulated_rows.view(json.loads(line)) for line in text.splitlines()]


def test_each_row_holds_its_whole_request():
    for name in figures_run.REPEATABLE:
        for row in rows_of(name):
            request = figures_run.request_of(row)
            made = simulated_rows.view(rungs.rung_row(request, modelled_row(request)))
            ours = {field: value for field, value in made.items() if field not in RESULTS}
            # Rows of older versions lack options that came later.
            theirs = {field: row[field] for field in ours if field in row}
            if theirs.get("outlier_share", 0) is None:
                del theirs["outlier_share"]
            assert {field: ours[field] for field in theirs} == theirs, name


def test_a_row_taken_again_is_the_same_and_a_changed_one_is_named():
    row = next(row for row in rows_of("simulated_prior") if row["plan_level"] == "block")
    fresh = figures_run.rows_again([row], 1, silent)
    assert list(figures_run.row_differences("simulated_prior", [row], fresh)) == []
    old = {**row, "prefill_tokens_per_second": 1.1 * row["prefill_tokens_per_second"]}
    (said,) = figures_run.row_differences("simulated_prior", [old], fresh)
    assert "prefill_tokens_per_second" in said
    assert "llama-3-8b, block, 256" in said
    (said,) = figures_run.row_differences("simulated_prior", [{**row, "error": "refused"}], fresh)
    assert "refused before" in said


def test_a_cell_that_differs_is_named():
    page = "| rates | 64 | 256 |\n|---|---:|---:|\n| `gpu` | 39 | 58 |\n"
    assert list(figures_run.cell_differences("page, rates", page, page)) == []
    (said,) = figures_run.cell_differences("page, rates", page, page.replace("58", "59"))
    assert said == "page, rates, `gpu`, 256: 58 on the page, 59 now"
    (said,) = figures_run.cell_differences("page, rates", page, page + "| `npu` | 1 | 2 |\n")
    assert "rows or columns" in said
