"""Verdicts: sentences that follow from numbers, and never call a split faster than it is."""

import pytest
from msgspec.structs import replace

from heterollm.benchmarks import groups_of, verdicts
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.formats import to_markdown
from heterollm.benchmarks.verdict import compare_rows, is_split
from heterollm.report.tables_bench import rates_section

NOISE = (1.0, 1.002, 0.998, 1.001, 0.999)
CUT = {"cut_groups": ["qkv", "down"], "gpu_share": 0.5}


def times(milliseconds):
    return [milliseconds * 1e3 * factor for factor in NOISE]


@pytest.fixture
def levels(make_rows):
    """A factory of the rows of one test: times in ms of gpu, npu, tensor on 1+1 and gpu on both cores."""

    def make(gpu, npu, tensor, both, cut=CUT):
        rows = [
            make_rows(times(gpu), plan_level="gpu"),
            make_rows(times(npu), plan_level="npu", length_policy="padding"),
            make_rows(times(tensor), plan_level="tensor", fields=cut),
        ]
        if both is not None:
            rows.append(make_rows(times(both), plan_level="gpu", threads=(2, 0), baseline=True))
        return rows

    return make


def test_a_split_that_loses_to_all_cores_is_never_called_faster(levels):
    (said,) = verdicts(levels(gpu=100, npu=110, tensor=60, both=50))
    assert "gpu w4a16, 2+0 is fastest" in said
    assert "Splitting does not pay here" in said
    assert "pays" not in said
    assert "tensor w4a16, 1+1 is fastest" not in said
    # What it gains against one core is told as what it is.
    assert "Against gpu w4a16, 1+1, the best without a split on the same threads: 1.67 x" in said


def test_a_split_that_beats_all_cores_pays(levels):
    (said,) = verdicts(levels(gpu=100, npu=110, tensor=45, both=50))
    assert "tensor w4a16, 1+1 is fastest" in said
    assert "Splitting pays: tensor w4a16, 1+1 is 1.11 x" in said


def test_table_markdown_and_verdict_print_one_figure(make_rows):
    """Medians, and the ratio of them: means of the same times would give 1.4 and other rates."""
    fast, slow = [50e3, 51e3, 52e3, 53e3, 90e3], [80e3, 100e3, 104e3, 108e3, 112e3]
    rows = [
        make_rows(slow, plan_level="gpu", threads=(2, 0), baseline=True),
        make_rows(fast, plan_level="npu"),
    ]
    section = rates_section(rows)
    assert [line[1] for line in section.rows] == ["2461.5", "4923.1"]
    assert section.rows[1][3] == "2.00"
    markdown = to_markdown(rows)
    assert "| 2461.54 ± " in markdown
    assert "| 4923.08 ± " in markdown
    assert compare_rows(*rows).ratio == pytest.approx(2.0)
    (said,) = verdicts(rows)
    assert "2.00 x (" in said


def test_what_cannot_be_told_apart_is_not_told_apart(levels):
    (said,) = verdicts(levels(gpu=100, npu=110, tensor=50.1, both=50))
    assert "do not differ beyond the noise" in said
    assert "pays" not in said
    assert "is fastest" not in said


def test_without_the_row_of_all_cores_nothing_is_claimed(levels):
    (said,) = verdicts(levels(gpu=100, npu=110, tensor=60, both=None))
    assert "Whether splitting pays is open" in said


def test_a_solver_that_cuts_nothing_is_said_so(levels):
    (said,) = verdicts(levels(gpu=100, npu=110, tensor=100, both=50, cut={"cut_groups": []}))
    assert "The solver splits no operator at tensor w4a16, 1+1." in said
    assert "Splitting" not in said


def test_on_two_processors_the_better_part_alone_is_the_measure(changed, levels):
    two = {"device": "snapdragon", "gpu_threads": None, "npu_threads": None, "n_threads": None}
    rows = [changed(row, **two) for row in levels(gpu=100, npu=110, tensor=60, both=None)]
    (said,) = verdicts(rows)
    assert "Splitting pays: tensor" in said


def test_wrong_and_failed_rows_do_not_count(make_rows):
    rows = [
        make_rows(times(100), plan_level="gpu"),
        make_rows(times(10), plan_level="npu", passed=False),
        make_rows([], plan_level="tensor", error="It failed."),
    ]
    said = verdicts(rows)
    assert said[0] == "pp256 w4a16: gpu w4a16, 1+1 runs 2560.0 tokens/s."
    assert "npu auto w4a16, 1+1 is left out" in said[1]
    assert "3 dB" in said[1]


def test_emulated_times_are_not_compared(make_rows):
    rows = [replace(row, time_kind="emulated") for row in (make_rows(times(5)), make_rows(times(9)))]
    assert verdicts(rows) == ["pp256 w4a16, emulated time: no speeds are compared."]


def test_modelled_times_are_compared_with_their_like_only(make_rows):
    modelled = [make_rows(times(5), plan_level="gpu"), make_rows(times(9), plan_level="npu")]
    rows = [
        make_rows(times(1), plan_level="layer"),
        *(replace(row, time_kind="simulated") for row in modelled),
    ]
    measured, simulated = verdicts(rows)
    assert measured == "pp256 w4a16: layer auto w4a16, 1+1 runs 256000.0 tokens/s."
    assert simulated.startswith("pp256 w4a16, simulated time: gpu w4a16, 1+1 is fastest")


def test_few_repetitions_decide_nothing(make_rows):
    said = verdicts([make_rows([1e3, 1e3], plan_level="gpu"), make_rows([9e3, 9e3], plan_level="npu")])
    assert "more repetitions" in said[0]


def test_other_engines_stand_beside_every_precision(make_rows):
    rows = [
        make_rows(times(3), precision="w4a16", plan_level="gpu"),
        make_rows(times(2), precision="w4a8", plan_level="gpu"),
        make_rows(times(1), engine="llama.cpp", plan_level="", threads=(2, 0)),
        make_rows(times(1), Case(0, 8), plan_level="gpu"),
    ]
    found = groups_of(rows)
    assert [(key, len(group)) for key, group in found.items()] == [
        (("pp256", "w4a16"), 2),
        (("pp256", "w4a8"), 2),
        (("tg8", "w4a16"), 1),
    ]
    assert not any(is_split(row) for row in rows)
