"""The simulated evaluation: all of its cases, published numbers with a source, and a page of its rows."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from heterollm.benchmarks import modelled_row
from heterollm.kernels.devices import open_device

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    paper = importlib.import_module("paper")
    from paper_cases import (
        BOTH,
        DRIVER,
        GPU,
        LAYER,
        LENGTHS,
        LOADS,
        ODD_LENGTHS,
        ODD_WAYS,
        OWN_WAYS,
        PAPER_MODELS,
        PAPER_WAYS,
        TENSOR,
        PaperRows,
        paper_cases,
    )
    from paper_published import PUBLISHED, comparisons
    from paper_tables import paper_page, paper_tables
    from rungs import rung_row
    from simulated_rows import Simulated, lines, read, view
finally:
    sys.path.remove(str(BENCH))

ROWS = BENCH / "results" / "simulated_paper.jsonl"
PAGE = BENCH.parent / "docs" / "simulated-paper-tables.md"
AGAIN = f"python bench/paper.py --out bench/results/simulated_paper.jsonl --page docs/{PAGE.name}"


@pytest.fixture(scope="module")
def committed():
    return read(ROWS)


def test_the_page_is_what_its_rows_render_to(committed):
    assert PAGE.read_text("utf-8") == paper_page(committed), f"Run `{AGAIN}`."


def test_the_rows_are_those_of_the_committed_model(committed):
    """Parameters that were fitted anew leave the page behind until it is written again."""
    fingerprint = open_device("sim:snapdragon-8gen3-paper").fingerprint()
    exact = {row.fingerprint for row in committed if not row.every_form and row.length_policy != "online"}
    assert len(exact) == 1
    forms = {row.fingerprint for row in committed if row.every_form}
    assert fingerprint in exact | forms, f"Run `{AGAIN}`."


def test_every_case_is_there_once_and_none_failed(committed):
    assert [view(rung_row(case, modelled_row(case))) | FOUND for case in paper_cases()] == [
        view(row.raw) | FOUND for row in committed
    ]
    assert not [row.error for row in committed if row.error]
    for model in PAPER_MODELS:
        rows = PaperRows([row for row in committed if row.model == model])
        assert all(rows.get(model, length, way) for length in LENGTHS for way in (*PAPER_WAYS, *OWN_WAYS))
        assert all(rows.get(model, length, way) for length in ODD_LENGTHS for way in ODD_WAYS)
        assert all(rows.get(model, 256, way, load) for load in LOADS for way in (GPU, LAYER, TENSOR))


FOUND = dict.fromkeys(
    [
        *("device", "fingerprint", "note", "ttft_ms", "prefill_tokens_per_second", "prefill"),
        *("decode_tokens_per_second", "prefill_joules", "decode_joules_per_token", "average_watts", "decode"),
        *(
            "npu_graphs",
            "npu_gib",
            "npu_limit_gib",
            "npu_opening_s",
            "slowdown",
            "cuts",
            "chunk_tokens",
            "lanes",
        ),
        "outlier_share",  # without shadows no time depends on it, and older rows do not name it
    ]
)


def test_the_orderings_of_the_paper(committed):
    rows = PaperRows(committed)
    for model in PAPER_MODELS:
        for length in LENGTHS:
            gpu, npu, layer, tensor = (rows.prefill(model, length, way) for way in PAPER_WAYS)
            assert gpu < layer < tensor, (model, length)
            assert npu < tensor, (model, length)
            assert tensor < rows.prefill(model, length, BOTH), (model, length)
            assert rows.prefill(model, length, DRIVER) < tensor
        for length in ODD_LENGTHS:
            waits = [rows.ttft_ms(model, length, way) for way in ODD_WAYS]
            assert min(waits[:3]) > waits[3], (model, length)
        gpu, npu, layer, tensor = (rows.decode(model, way) for way in PAPER_WAYS)
        assert npu < gpu < tensor
        assert layer == pytest.approx(gpu, rel=0.03)  # which waits for its tokens by the driver
        assert rows.decode(model, DRIVER) < gpu


def test_published_numbers_have_a_source_and_a_use(committed):
    found = list(comparisons(PaperRows(committed)))
    assert len(found) == len(PUBLISHED) == len({one.published.name for one in found})
    for one in found:
        assert one.published.source.startswith("HeteroLLM, section 5.")
        assert (one.simulated is None) == (one.published.use in ("not simulated", "input")), (
            one.published.name
        )
        if one.simulated is not None and one.published.value:
            assert one.ratio == pytest.approx(one.simulated / one.published.value)
    used = {use: {one.published.value for one in found if one.published.use == use} for use in USES}
    # Every number of section 5 that the parameters were fitted to; bench/soc_chain.py has the list.
    assert used["fitted"] == {236.92, 196.44, 1.244, 247.9, 14.01, 1.234, 43.3, 59.1}
    assert used["chose a parameter"] == {4.01}
    assert used["power only"] == {2.23, 5.87}
    assert used["input"] == {408.4, 2050}
    assert len(used["predicted"]) >= 25


USES = ("fitted", "input", "chose a parameter", "power only", "predicted", "not simulated")


def test_what_the_model_gets_wrong_is_said(committed):
    wrong = {one.published.name: one.wrong for one in comparisons(PaperRows(committed)) if one.wrong}
    assert {name for name, how in wrong.items() if how == "order reversed"} == {
        "the second over the first",  # tensor level beside a game, over layer level
        "power, tensor level over GPU",
    }
    off = {name for name, how in wrong.items() if how.startswith("off")}
    assert "online-prepare over tensor level, 525 tokens, 8B" in off
    assert {
        f"fast over driver's synchronisation, decode, {name}" for name in ("7B", "3B", "InternLM-1.8B")
    } <= off
    assert len(wrong) == 11
    page = PAGE.read_text("utf-8")
    assert all(f"| {how} |" in page for how in wrong.values())


def test_every_table_says_that_it_is_simulated(committed):
    tables = list(paper_tables(PaperRows(committed)))
    assert len(tables) == 11
    for table in tables:
        assert "simulated" in table.title.lower()
        assert table.rows
        assert all(len(line) == len(table.columns) for line in table.rows)
        assert len(set(table.columns)) == len(table.columns)
    assert "Nothing here was measured" in paper_page(committed)


def test_rows_that_are_missing_or_failed_leave_cells_empty(committed):
    some = [row for row in committed if row.model == PAPER_MODELS[0] and row.plan_level == "gpu"]
    failed = Simulated.of(modelled_row(paper_cases()[3], error="no reason").to_dict())
    for rows in ([], some, [*some, failed]):
        assert "# HeteroLLM's evaluation, simulated" in paper_page(rows)
    assert "1 of which failed" in paper_page([*some, failed])


def test_frames_beside_a_game_are_told_by_phase():
    case = next(case for case in paper_cases() if case.load is not None)
    phases = {
        "prefill": {"frames": {"due": 8, "drawn": 4, "in_time": 2, "slowest_ms": 80.0}},
        "decode": {"frames": {"due": 0, "drawn": 0, "in_time": 0, "slowest_ms": 0.0}},
        "slowdown": {"prefill": 1.05, "decode": 1.2},
    }
    row = Simulated(**view(modelled_row(case).to_dict()) | phases)
    table = next(table for table in paper_tables(PaperRows([row])) if "with a game" in table.title)
    assert [line[2:5] for line in table.rows[:2]] == [("prefill", "5.0 %", "25 %"), ("decode", "20.0 %", "")]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_script_shows_committed_rows(committed, form, capfd, tmp_path):
    path = tmp_path / "simulated_few.jsonl"
    path.write_text(lines(row.raw for row in committed[:8]), "utf-8")
    page = tmp_path / "page.md"
    assert paper.main(["--from", str(path), "--page", str(page), *form]) == 0
    assert (tmp_path / "page.simulated.md").read_text("utf-8") == paper_page(committed[:8])
    shown = capfd.readouterr().out
    assert "imulated" in shown
    if form:
        data = json.loads(shown)
        assert data["simulated"] is True
        assert len(data["rows"]) == 8
        assert {"published", "simulated", "ratio", "use", "source"} <= set(data["comparisons"][0])


@pytest.mark.parametrize(
    "options",
    [
        ["--out", "."],
        ["--out", "/proc/simulated"],
        ["--from", "no-such-file"],
        ["--model", ","],
        ["--model", "llama-3-8b,no-such-model"],
        ["--soc", "no-such-soc"],
        ["--from", __file__],
    ],
)
def test_bad_input_gives_one_error(options, capfd):
    assert paper.main(options) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.strip()


def test_failed_cases_are_counted(tmp_path, capfd):
    path = tmp_path / "simulated.jsonl"
    path.write_text(lines([modelled_row(paper_cases()[0], error="no reason").to_dict()]), "utf-8")
    assert paper.main(["--from", str(path)]) == 1
    assert "1 failed: no reason" in capfd.readouterr().err


def test_the_script_simulates(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    cases = [case for case in paper_cases(["internlm2-1.8b"]) if case.level == "gpu"][:1]
    monkeypatch.setattr(paper, "paper_cases", lambda *_: tuple(cases))
    out = tmp_path / "simulated_one.jsonl"
    assert paper.main(["--jobs", "1", "--out", str(out), "--json"]) == 0
    assert len(read(out)) == 1
    assert json.loads(capfd.readouterr().out)["rows"][0]["modelled"]["prefill_tokens_per_second"] > 0
