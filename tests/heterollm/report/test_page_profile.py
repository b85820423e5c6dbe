"""Tables, page and pictures of a profile, from data."""

import io
import itertools
import re
from pathlib import Path

import pytest

from heterollm.base import CheckpointError, OptionError, format_duration, format_moment, parse_duration
from heterollm.model import default_shapes, model_shape, read_config
from heterollm.planning import KeptRecords
from heterollm.profiler import RunSummary, compare, summarize
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record, SparseKey
from heterollm.report import console as report
from heterollm.report import figures, plots
from heterollm.report.plots import PLOTS, draw
from heterollm.report.profile import (
    comparison_report,
    interrupted_note,
    left_words,
    profile_report,
    skipped_words,
)
from heterollm.report.profile_files import profile_page
from heterollm.report.tables_profile import format_us, sections

WIDTH = 80
PNG = b"\x89PNG\r\n\x1a\n"


def text_of(renderable, width=WIDTH):
    text = report.render(renderable, width=width)
    assert max(map(len, text.splitlines())) <= width
    return text


# -- tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_profile_on_a_terminal(sample_profile, width):
    text = text_of(profile_report(summarize(sample_profile())), width)
    assert "Linear layers, GPU, int4 block 32" in text
    assert "Memory bandwidth" in text


def test_every_section_says_something(sample_profile):
    empty = summarize(Profile({"device": "host", "time": "real", "cache_bytes": 0}))
    for section in sections(empty):
        assert section.rows or section.notes, section.title
    for section in sections(summarize(sample_profile()), everything=True):
        assert all(len(row) == len(section.columns or row) for row in section.rows), section.title


def test_sparse_attention_has_a_table_where_it_was_measured(sample_profile):
    plain, measured = sample_profile(), sample_profile()
    for heads, time_us in ((1, 2000.0), (2, 3000.0)):
        measured.add(Record(SparseKey("scores", 256, 2048, heads, 3, 64, 0.0, "graph"), (time_us,)))
    measured.add(Record(SparseKey("sparse_attention", 256, 2048, 1, 3, 64, 0.2, "kernel"), (500.0,)))
    titles = [section.title for section in sections(summarize(plain, accuracy=False))]
    assert "Attention, sparse or on the NPU" not in titles
    made = {section.title: section for section in sections(summarize(measured, accuracy=False))}
    assert made["Attention, sparse or on the NPU"].rows == (
        ("scores", "3/1 heads of 64", "", "2048", "2.0 ms ±0%"),
        ("scores", "6/2 heads of 64", "", "2048", "3.0 ms ±0%"),
        ("sparse attention", "3/1 heads of 64", "20%", "2048", "500 us ±0%"),
    )
    compared = compare(plain, measured)
    assert [(kind.kind, kind.only_second) for kind in compared.kinds if kind.only_second] == [("sparse", 3)]


def test_numbers_of_a_profile_are_in_its_tables(sample_profile):
    made = {section.title: section for section in sections(summarize(sample_profile()))}
    assert ("GPU", "alone", "256.0 MiB", "20 GB/s", "±1%") in made["Memory bandwidth"].rows
    assert "Both at once read 35 GB/s in total." in made["Memory bandwidth"].notes
    assert made["Contention"].rows[0] == ("GPU", "memory-bound", "compute-bound", "1.25 x")
    [hand_over] = made["Synchronisation, GPU to host"].rows
    assert hand_over == ("sleep poll", "300 us", "41 us", "40.6 us to 41.4 us", "41.7 us", "25%")
    [run] = made["Runs"].rows
    assert run[1:8] == ("2 min 5 s", "70", "1", "2", "3", "42", "gpu 5%, npu 2%")
    assert "12 points of splits are left out;" in " ".join(
        made["Linear layers, GPU, int4 block 32, weights from memory"].notes
    )


def test_times_that_are_not_real_are_said_to_be_none(sample_profile):
    first = next(sections(summarize(sample_profile(time="emulated"), accuracy=False)))
    assert "no claim about a real device" in first.notes[0]


def test_many_lengths_are_thinned_out_and_the_others_named(sample_profile):
    profile = sample_profile()
    for tokens in range(2, 20):
        point = LinearPoint("o", (512,), 512, tokens, 4, 32)
        profile.add(Record(LinearKey("gpu", point, "kernels"), (10.0 * tokens,), taken_s=1e9))
    made = {section.title: section for section in sections(summarize(profile, accuracy=False))}
    table = made["Linear layers, GPU, int4 block 32, weights from memory"]
    assert table.columns[2:] == (">1", ">8", ">32", ">64", ">256")
    assert any("Also measured at 2, 3," in note for note in table.notes)


def test_a_comparison_lists_the_largest_changes(sample_profile):
    text = text_of(comparison_report(compare(sample_profile(), sample_profile(0.5))))
    assert "0.50" in text
    assert "faster" in text
    assert "smaller changes are left out" in text
    calm = text_of(comparison_report(compare(sample_profile(), sample_profile())))
    assert "smaller changes" not in calm


def test_words_of_a_run():
    assert skipped_words({}) == "nothing"
    assert skipped_words({"stage": 3, "linear": 4}) == "7 points (stage 3, linear 4)"
    ran = RunSummary(1.0, 1.0, left=2, left_out={"o on the NPU": 3, "Copies": 1})
    assert left_words(ran) == "4 measurements (o on the NPU 3, Copies 1)"
    kept = text_of(interrupted_note(KeptRecords(Path("profile.json"), 4, 9)))
    assert "4 measurements of this run are kept in profile.json" in kept


# -- the page ----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_but_itself(sample_profile, read_page):
    text = profile_page(summarize(sample_profile()))
    page = read_page(text)
    assert not page.links
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert "script-src" not in text
    assert page.tags.count("caption") == page.tags.count("table")
    assert "".join(page.words).count("measured") > page.tags.count("table")
    assert "url(" not in text
    assert "script" not in page.tags
    assert page.tags.count("table") >= 10
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_draws_rates_bandwidths_and_predictions(sample_profile, read_page):
    summary = summarize(sample_profile())
    text = profile_page(summary)
    page = read_page(text)
    words = " ".join(page.words)
    for caption in (
        *("GPU: rates of linear layers", "NPU: rates of linear layers", "Memory bandwidth, measured"),
        "Predicted against measured",
    ):
        assert caption in words, caption
    assert page.tags.count("polyline") > 3
    # A point for each length of each whole group on the GPU, of those with a curve.
    [first] = re.findall(r'<svg class="chart".*?aria-label="GPU: rates.*?</svg>', text, re.DOTALL)
    whole = {(row.point.group, row.point.shape, row.point.tokens) for row in summary.linear if row.whole}
    assert 0 < first.count("<circle") <= len(whole)
    empty = summarize(Profile({"device": "host", "time": "real", "cache_bytes": 0}))
    assert "svg" not in read_page(profile_page(empty)).tags


def test_the_page_escapes_what_a_profile_says(sample_profile, read_page):
    evil = "<script>alert('x')</script>\x00\ud800&"
    profile = sample_profile(gpu=evil)
    profile.add(Record(LinearKey("gpu", LinearPoint("o", (1,), 1, 1, 32, 0), "c"), error=evil))
    text = profile_page(summarize(profile, accuracy=False))
    page = read_page(text)
    assert "script" not in page.tags
    assert sum("<script>alert('x')</script>\ufffd\ufffd&" in words for words in page.words) == 2
    assert text.encode("utf-8")


def test_the_page_of_an_empty_profile():
    assert "Not judged" in profile_page(
        summarize(Profile({"device": "host", "time": "real", "cache_bytes": 0}))
    )


# -- plots -------------------------------------------------------------------------------------------


def words_in(figure):
    axes = figure.get_axes()
    titles = [figure.get_suptitle()]
    return titles + [label for panel in axes for label in (panel.get_xlabel(), panel.get_ylabel())]


def test_every_plot_is_a_picture_that_says_whose_times_it_shows(sample_profile):
    summary = summarize(sample_profile())
    for name, (_, make) in PLOTS.items():
        figure = make(summary)
        if name == "columns":  # what `--characterise` measures is not in this profile
            assert figure is None
            continue
        assert "host, real time" in figure.get_suptitle(), name
        file = io.BytesIO()
        figures.save_png(figure, file)
        content = file.getvalue()
        assert content.startswith(PNG)
        assert 5_000 < len(content) < 100_000, name


def test_an_emulator_s_plots_have_cpu_time(sample_profile):
    summary = summarize(sample_profile(device="emulator", time="emulated"))
    assert "CPU time of emulation, ms" in words_in(plots.stage_plot(summary))
    words = words_in(plots.order_plot(summary))
    assert "emulator, emulated time" in words[0]
    assert "CPU time of x·W over W·x" in words
    assert "real time, ms" in words_in(plots.stage_plot(summarize(sample_profile())))


def test_an_order_that_costs_more_is_drawn_so(sample_profile):
    [ratios, _] = plots.order_plot(summarize(sample_profile(), accuracy=False)).get_axes()
    curves = [line for line in ratios.get_lines() if line.get_marker() not in ("None", None, "")]
    assert len(curves) == 3
    assert all(value == pytest.approx(3.0) for line in curves for value in line.get_ydata())


def test_the_gpu_s_time_is_drawn_against_rows_where_cuts_were_measured(sample_profile):
    profile = sample_profile()
    assert len(plots.gpu_linearity_plot(summarize(profile, accuracy=False)).get_axes()) == 1
    for rows in (128, 384):
        point = LinearPoint("o", (rows,), 512, 64, 4, 32)
        profile.add(Record(LinearKey("gpu", point, "kernels"), (20 + 1.6 * rows,), taken_s=1e9))
    [_, axes] = plots.gpu_linearity_plot(summarize(profile, accuracy=False)).get_axes()
    [line] = axes.get_lines()
    assert list(line.get_xdata()) == [128, 256, 384, 512]
    assert axes.get_ylabel() == "ms at 64 tokens"


@pytest.mark.parametrize("count", [3, 4, 6])
def test_names_of_many_curves_stand_beside_the_axes(count):
    figure, [axes] = figures.new_figure("Rates")
    curves = {f"curve {name}": {1: 1.0 + name, 256: 50.0 + name} for name in range(count)}
    figures.step_curves(axes, curves, "ms")
    figure.draw_without_rendering()
    names, within = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert names.overlaps(within) == (count == 3)
    whole = figure.bbox
    assert (names.x0 >= 0) & (names.x1 <= whole.x1) & (names.y1 <= whole.y1)


def test_rows_far_apart_are_readable(sample_profile):
    """Of a head with 151936 rows and of a small layer, on one axis."""
    profile = sample_profile()
    for rows in (64, 128, 75968, 151936):
        point = LinearPoint("o", (rows,), 512, 64, 4, 32)
        profile.add(Record(LinearKey("gpu", point, "kernels"), (20 + 1.6 * rows,), taken_s=1e9))
    figure = plots.gpu_linearity_plot(summarize(profile, accuracy=False))
    figure.draw_without_rendering()
    [_, axes] = figure.get_axes()
    low, high = axes.get_xlim()
    places = [label.get_window_extent() for label in axes.get_xticklabels()]
    shown = [place for place, at in zip(places, axes.get_xticks(), strict=True) if low <= at <= high]
    assert len(shown) >= 3
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(shown))


def test_processors_and_extrapolated_points_look_different(sample_profile):
    profile = sample_profile()
    far = LinearPoint("down", (64000,), 64000, 64, 4, 32)
    profile.add(Record(LinearKey("gpu", far, "kernels"), (1e6,) * 5, taken_s=1e9))
    summary = summarize(profile)
    [axes] = PLOTS["accuracy"][1](summary).get_axes()
    names = axes.get_legend_handles_labels()[1]
    assert {"GPU", "GPU, extrapolated", "equal"} <= set(names)


def test_where_there_is_nothing_there_is_no_plot():
    empty = summarize(Profile({"device": "host", "time": "real", "cache_bytes": 0}))
    assert [png for _, _, png in draw(empty)] == [None] * len(PLOTS)


# -- times in words, and shapes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h30m", 5400), ("2.5m", 150), (" 1H ", 3600), ("0.5s", 0.5), ("7m5s", 425)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text, "--budget") == seconds


def test_no_duration():
    assert parse_duration("None", "--budget") is None
    for text in ("", "s", "5", "5s4m", "-1s", "0m", "1d", "1e3s", "inf", "169h", "1_0s"):
        with pytest.raises(OptionError, match="--budget is"):
            parse_duration(text, "--budget")


def test_times_are_written_for_people():
    assert [format_duration(s) for s in (0.04, 9.94, 59.6, 60, 200, 7500)] == [
        "0.0 s",
        "9.9 s",
        "1 min",
        "1 min",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert [format_us(t) for t in (0.5, 99, 950, 1234, 123456, 2.5e6, None)] == [
        "0.5 us",
        "99 us",
        "950 us",
        "1.2 ms",
        "123 ms",
        "2.5 s",
        "",
    ]
    assert re.fullmatch(r"2001-09-0[89] \d\d:\d\d", format_moment(1e9))
    assert format_moment(1e300) == "at no date"


def test_a_model_s_shape_is_that_of_the_default_set(model_fields, tmp_path):
    import json

    published = default_shapes("w4a16")[0]
    fields = model_fields(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = model_shape(read_config(tmp_path), published.name)
    assert shape.weight_bytes == published.weight_bytes
    assert [(spec.group, spec.member_rows, spec.columns, spec.weight) for spec in shape.specs] == [
        (spec.group, spec.member_rows, spec.columns, spec.weight) for spec in published.specs
    ]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (22, 32, 4, 64)


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "none", tmp_path / "file", "x" * 5000, "~nobody-has-this-name/x"):
        with pytest.raises(CheckpointError):
            read_config(name)
