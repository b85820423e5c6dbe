"""Stages, order and the effect of k in words, tables and pictures."""

import pytest

from heterollm.kernels.npu import K_SPLIT_COLUMNS
from heterollm.profiler import summarize
from heterollm.profiler.records import LinearPoint, Record, SweepKey
from heterollm.report.plots import columns_plot, order_plot, stage_plot
from heterollm.report.profile_files import profile_page
from heterollm.report.tables_npu import npu_sections

FLOATS = {"weight_first": 1.0, "activation_first": 4.0}


def swept(sample_profile, per_weight, *, emulated=False, forms=FLOATS):
    """Return the summary of a profile whose weights cost what is said by their inputs."""
    profile = sample_profile()

    def add(rows, columns, tokens, bits, form, cost):
        point = LinearPoint("o", (rows,), columns, tokens, bits, 32 if bits == 4 else 0, form=form)
        key = SweepKey(point, "graph")
        profile.add(Record(key, values={"cpu_us": cost}) if emulated else Record(key, (cost,)))

    for form, factor in forms.items():
        for tokens in (1, 32, 33, 64, 65):
            add(2048, 2048, tokens, 16, form, factor * 1000 * -(-tokens // 32))
    add(2048, 2048, 32, 4, "matmul_nbits", 500.0)
    for columns, cost in per_weight.items():
        add((3 << 22) // columns, columns, 1, 4, "matmul_nbits", cost * (3 << 22) / 1e6)
    return summarize(profile, accuracy=False)


def test_steps_and_orders_are_told(sample_profile):
    stages, order, _ = npu_sections(swept(sample_profile, {1024: 1.0, 2048: 1.0}))
    assert "f16 weight first: of tokens, 33 cost 2.00 times 32, 65 cost 1.50 times 64." in stages.notes
    assert dict(zip(stages.columns, stages.rows[2], strict=True))[">f16 weight first"] == "2"
    assert [row[1] for row in order.rows] == ["4"] * 5
    [missing] = [note for note in order.notes if "no other order" in note]
    assert missing.startswith("int4 block 32: the NPU offers matmul nbits alone")


@pytest.mark.parametrize(
    ("risen_from", "verdict"),
    [
        (6144, "agree with it"),
        (3072, "are more than it allows"),
        (12288, "are fewer than it needs"),
        (99999, "neither the k-split"),
    ],
)
def test_the_prior_of_k_stands_beside_where_cost_rises(sample_profile, risen_from, verdict):
    columns = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
    costs = {place: 3.0 if place >= risen_from else 1.0 for place in columns}
    if risen_from > 4096:
        costs[2048] = 2.0  # a single slow run is no limit
    *_, section = npu_sections(swept(sample_profile, costs))
    [knee] = [note for note in section.notes if note.startswith("At 1 token")]
    assert verdict in knee
    assert f"{K_SPLIT_COLUMNS} inputs, a prior" in knee
    assert ("3.0 times the least" in knee) == (risen_from < 99999)


def test_a_simulation_checks_nothing_but_its_model(sample_profile):
    summary = swept(sample_profile, {1024: 1.0})
    assert not any("simulated NPU" in note for section in npu_sections(summary) for note in section.notes)
    object.__setattr__(summary, "time_kind", "simulated")
    *_, section = npu_sections(summary)
    assert "A simulated NPU has this limit as a parameter" in section.notes[-1]


def test_cpu_time_is_called_so(sample_profile):
    stages, _, columns = npu_sections(swept(sample_profile, {1024: 1.0}, emulated=True))
    assert "ms, CPU time of emulation" in stages.title
    assert "CPU time of emulation" in columns.title


def test_what_was_not_measured_is_named(sample_profile):
    [section] = npu_sections(summarize(sample_profile(), accuracy=False))
    assert "--characterise" in section.notes[0]
    one = swept(sample_profile, {1024: 1.0}, forms={"weight_first": 1.0})
    _, order, _ = npu_sections(one)
    assert not order.rows
    assert any(note.startswith("f16: the NPU offers weight first alone") for note in order.notes)


def test_three_pictures_and_the_page(sample_profile):
    pytest.importorskip("matplotlib")
    summary = swept(sample_profile, {1024: 1.0, 6144: 3.0})
    [stages] = stage_plot(summary).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in stages.lines}
    assert drawn["f16 weight first"] == [1.0, 1.0, 2.0, 2.0, 3.0]
    [order] = order_plot(summary).axes
    assert list(order.lines[0].get_ydata()) == [4.0] * 5
    [columns] = columns_plot(summary).axes
    assert list(columns.lines[0].get_ydata()) == pytest.approx([1.0, 3.0])
    assert columns_plot(summarize(sample_profile(), accuracy=False)) is None
    page = profile_page(summary)
    for title in ("NPU: stages", "NPU: order of operands", "NPU: effect of k"):
        assert title in page
