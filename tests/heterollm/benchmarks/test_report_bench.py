"""Benches on the terminal, at a fixed width."""

import pytest
from msgspec.structs import replace

from heterollm.benchmarks import BenchResult
from heterollm.benchmarks.cases import Case
from heterollm.report.bench import bars, bench_report, rows_table
from heterollm.report.console import render

FIELDS = {"gpu_share": 0.25, "padded_tokens": 212, "predicted_ms": 110.0, "cut_groups": ["qkv"]}
FIELDS |= {"read_bytes": 1e9, "flops": 1e10, "ceiling_gbps": 12.5, "ceiling_gflops": 1000.0}
TRACE = {"traced_ms": 120.0, "gpu_busy_ms": 90.0, "npu_busy_ms": 80.0, "overlap_ms": 70.0}
TRACE |= {"overlap_fraction": 0.875, "hand_over_ms": 2.5, "hand_overs": 44}
TRACE["operators"] = [
    {"part": "npu", "operator": "gate_up", "count": 22, "time_ms": 33.0, "gbps": 4.0, "gflops": 50.0},
    {"part": "gpu", "operator": "norm", "count": 45, "time_ms": 1.5, "gbps": None, "gflops": None},
]


@pytest.fixture
def rows(make_rows):
    return (
        make_rows([2e5, 2e5, 2.1e5], plan_level="gpu"),
        make_rows([1e5, 1e5, 1.1e5], plan_level="tensor", fields=FIELDS | TRACE),
        make_rows([5e4, 5e4, 5.1e4], plan_level="gpu", threads=(2, 0), baseline=True),
        make_rows([], plan_level="block", error="It is not built."),
        make_rows([1e4] * 3, Case(0, 8), plan_level="gpu", passed=False),
    )


def test_a_table_fits_a_pipe_and_has_every_number(rows):
    text = render(rows_table(rows[:4], title="pp256, w4a16"))
    assert max(map(len, text.splitlines())) <= 110
    line = next(line for line in text.splitlines() if "tensor" in line)
    for word in ("2560.0", "0.50", "25%", "212", "110.0 (+10%)", "10.0 (80%)", "100.0 (10%)", "100 dB"):
        assert word in line, (word, line)
    wide = render(rows_table([replace(row, label=f"{row.label} {'long ' * 6}") for row in rows[:4]]))
    assert "110.0 (+10%)" in wide
    assert "100 dB" in wide
    assert "failed" in next(line for line in text.splitlines() if "block" in line)


def test_bars_are_as_long_as_their_rates(rows):
    lengths = [line.count("█") for line in render(bars(rows[:3])).splitlines()]
    assert lengths == [10, 20, 40]


def test_a_report_has_all_its_parts(rows):
    text = render(bench_report(BenchResult(rows, ("All models fit.",))), width=110)
    for words in (
        "pp256, w4a16",
        "tg8, w4a16",
        "One traced run of each",
        "88% 44 2.50",
        "Operators of pp256, tensor w4a16, 1+1",
        "gate_up",
        "Prefill (pp256 w4a16, tensor w4a16, 1+1): bound by reading memory",
        "Splitting does not pay here",
        "is left out: its logits agree",
        "block w4a16, 1+1: It is not built.",
        "All models fit.",
        "Energy: absent",
    ):
        assert words in " ".join(text.split()), words
    assert max(map(len, text.splitlines())) <= 110


def test_a_report_of_failures_alone_says_why(make_rows):
    rows = (make_rows([], error="Nothing works."),)
    text = render(bench_report(BenchResult(rows, ())), width=110)
    assert "Nothing works." in text
    assert "nothing ran" in text
