"""The table of aims: every one is judged from rows, in words that follow from the numbers."""

import importlib.util
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from heterollm.benchmarks.cases import Case

BENCH = Path(__file__).resolve().parents[3] / "bench"
NOISE = (1.0, 1.001, 0.999, 1.0005, 0.9995)


@pytest.fixture(scope="module")
def aims():
    spec = importlib.util.spec_from_file_location("aims", BENCH / "aims.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["aims"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["aims"]


@pytest.fixture
def row(make_rows):
    """A factory: milliseconds, test and what else tells rows apart."""

    def make(ms, case, level, *, fields=None, **options):
        options = {"plan_level": level, **options}
        noises = NOISE[::-1] if level == "tensor" else NOISE  # no two rows have the same
        return make_rows([ms * 1e3 * noise for noise in noises], case, fields=fields, **options)

    return make


def everything(row, precision, tensor_ms):
    cases = [Case(length, 0) for length in (256, 135, 300, 525, 600, 1000)] + [Case(0, 32, 256)]
    rows = []
    for case in cases:
        common = {"precision": precision}
        predicted = {"predicted_ms": 1.1 * tensor_ms, "cut_groups": ["qkv"]}
        rows += [
            row(100, case, "gpu", **common),
            row(60, case, "gpu", threads=(2, 0), **common),
            row(130, case, "npu", length_policy="padding", **common),
            row(110, case, "npu", length_policy="pipe", **common),
            row(105, case, "layer", length_policy="padding", **common),
            row(300, case, "tensor", sync="operator", **common),
            row(tensor_ms, case, "tensor", fields=predicted, **common),
            row(70, case, "", engine="llama.cpp", threads=(2, 0)),
        ]
    return rows


def find(lines, *words):
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


def test_every_aim_of_the_issue_is_judged(aims, row):
    rows = everything(row, "w4a16", 50) + everything(row, "w4a8", 50)
    rows += [
        row(ms, Case(0, 64, 32), "npu", length_policy="padding", sync=sync)
        for sync, ms in (("operator", 20), ("auto", 10))
    ]
    lines = aims.judge_aims(rows)
    assert not [line for line in lines if line.startswith("not measured")]
    words = ("reached", "missed")
    assert all(line.startswith(words) for line in lines if " | " in line)
    # Three ratios of 50 against 100, and 70 of llama.cpp against 50, and predictions 10 % off.
    assert find(lines, "w4a8 tg: both parts against the better").startswith("reached |")
    assert "2.00 x" in find(lines, "w4a16 pp256: both parts against the better")
    assert "1.40 x" in find(lines, "w4a8 pp256: both parts against llama.cpp")
    assert find(lines, "w4a16 pp135: against padding").startswith("reached |")
    assert "2.60 x" in find(lines, "w4a16 pp135: against padding")
    assert len([line for line in lines if "+10%" in line]) == 4
    assert "2.00 x" in find(lines, "clFinish")


def test_what_is_missed_is_said(aims, row):
    lines = aims.judge_aims(everything(row, "w4a16", 99.95) + everything(row, "w4a8", 120))
    assert find(lines, "w4a16 pp256: both parts against the better").startswith("missed by 39% |")
    # 100 against 99.95, with a spread of more than that.
    assert find(lines, "w4a16 tg: not slower than the GPU").startswith("reached, within the noise |")
    assert find(lines, "w4a8 tg: both parts against the better").startswith("missed by ")
    assert find(lines, "w4a8 pp1000: not slower").startswith("missed by ")
    assert find(lines, "w4a8 pp256: both parts against gpu on all cores").startswith("missed by ")
    assert find(lines, "clFinish").startswith("not measured")


def test_rows_of_another_run_of_an_engine_are_not_compared_with(aims, row):
    """llama.cpp takes turns with each precision, and counts beside that one alone."""
    rows = [
        replace(one, run=precision)
        for precision, ms in (("w4a16", 70), ("w4a8", 7))
        for one in (
            row(50, Case(256, 0), "tensor", precision=precision),
            row(ms, Case(256, 0), "", engine="llama.cpp", threads=(2, 0)),
        )
    ]
    lines = aims.judge_aims(rows)
    assert "1.40 x" in find(lines, "w4a16 pp256: both parts against llama.cpp")
    assert "0.14 x" in find(lines, "w4a8 pp256: both parts against llama.cpp")


def test_decode_of_fewer_tokens_is_compared_by_the_token(aims, row):
    rows = [row(100, Case(0, 4, 256), "npu"), row(400, Case(0, 32, 256), "tensor", precision="w4a8")]
    rows += [row(400, Case(0, 32, 256), "gpu", precision="w4a8")]
    rows += [row(100, Case(0, 4, 256), "npu", precision="w4a8")]
    found = find(aims.judge_aims(rows), "w4a8 tg: both parts against the better")
    assert "1.00 x" in found
    assert "gpu w4a8" in found


def test_failed_and_wrong_rows_reach_nothing(aims, make_rows, row):
    rows = [row(100, Case(256, 0), "gpu"), make_rows([], plan_level="tensor", error="It failed.")]
    rows.append(make_rows([1.0] * 5, plan_level="block", passed=False))
    lines = aims.judge_aims(rows)
    assert all(line.startswith("not measured") for line in lines if " | " in line)


@pytest.mark.parametrize(
    ("length", "past"), [(135, True), (300, True), (525, True), (600, True), (1000, False), (31, False)]
)
def test_lengths_just_past_a_graph(aims, length, past):
    assert aims.just_past(length) is past
