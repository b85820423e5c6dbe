"""The pages of benches and profiles: whole without a browser, and as a phone and a desk see them with one."""

import json
import re
import shutil
import subprocess
from html import escape

import pytest

from heterollm.base import OptionError, check_folder, save_file
from heterollm.benchmarks import RowFile
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.rows import OperatorRow
from heterollm.cli import main
from heterollm.profiler import summarize
from heterollm.report import bench_page, runs_of
from heterollm.report.profile_files import profile_page

EVIL = "<script>alert('x')</script>&\x00\ud800\"><img src=x onerror=1>"
FIELDS = {
    "gpu_share": 0.25,
    "padded_tokens": 212,
    "predicted_ms": 110.0,
    "cut_groups": ["qkv"],
    "read_bytes": 1e9,
    "flops": 1e10,
    "ceiling_gbps": 12.5,
    "ceiling_gflops": 1000.0,
    "traced_ms": 120.0,
    "gpu_busy_ms": 90.0,
    "npu_busy_ms": 80.0,
    "overlap_ms": 70.0,
    "overlap_fraction": 0.875,
    "hand_over_ms": 2.5,
    "hand_overs": 44,
    "operators": [
        {"part": "npu", "operator": "gate_up", "count": 22, "time_ms": 33.0, "gbps": 4.0, "gflops": 50.0},
        {"part": "gpu", "operator": "norm", "count": 45, "time_ms": 1.5, "gbps": None, "gflops": None},
    ],
}


@pytest.fixture
def rows(make_rows):
    simulated = Facts("1.0", "npu", "sim:a phone", "simulated", "f00d", "Llama int4", 1000, 2000, {})
    return [
        make_rows([2e5, 2e5, 2.1e5], plan_level="gpu"),
        make_rows([1e5, 1e5, 1.1e5], plan_level="tensor", fields=FIELDS),
        make_rows([5e4, 5e4, 5.1e4], plan_level="gpu", threads=(2, 0), baseline=True),
        make_rows([], plan_level="block", error="It is not built."),
        make_rows([1e4] * 3, Case(0, 8), plan_level="gpu", passed=False),
        make_rows([1e3] * 3, plan_level="npu", facts=simulated),
    ]


# -- the page of a bench, without a browser ----------------------------------------------------------


def test_the_page_needs_nothing_but_itself(rows, read_page):
    text = bench_page([rows], ["A note."])
    page = read_page(text)
    assert page.links == []
    assert not re.search(r"https?:|url\(|@import|<script|<link|<iframe", text)
    assert "default-src 'none'" in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_what_the_terminal_has(rows, read_page):
    words = " ".join(read_page(bench_page([rows], ["A note."])).words)
    for expected in (
        *("Verdict", "Splitting does not pay here", "is left out: its logits agree"),
        *("2560.0", "0.50", "25%", "212", "110.0 (+10%)", "10.0 (80%)", "100 dB", "failed"),
        *("One traced run of each: measured", "88%", "Operators of pp256, tensor w4a16, 1+1", "gate_up"),
        *("bound by reading memory", "block w4a16, 1+1, pp256: It is not built.", "A note."),
        *("Conditions", "/a/model", "a processor", "1000 B", "numpy 2"),
    ):
        assert expected in words, expected


def test_kinds_of_time_stand_in_the_title_and_over_every_table_and_never_meet(rows, read_page):
    text = bench_page([rows])
    page = read_page(text)
    assert "<title>Bench of model: measured and simulated</title>" in text
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    assert len(tables) == page.tags.count("caption") > 4
    captions = [re.search("<caption>(.*?)</caption>", table)[1] for table in tables]
    assert {*captions[:-1]} == {"measured", "simulated"}
    simulated = next(table for table in tables if "<caption>simulated" in table)
    assert "npu" in simulated
    assert "gpu, 2+0" not in simulated
    charts = re.findall(r"<figcaption>(.*?)<", text)
    assert any("second, simulated" in chart for chart in charts)
    assert all("measured" in chart or "simulated" in chart for chart in charts)


def test_bars_are_as_long_as_their_rates(rows):
    widths = re.findall(r'class="(?:gpu|both)" x="0.00" width="([\d.]+)"', bench_page([rows]))
    assert [float(width) for width in widths[:3]] == pytest.approx([25, 50, 100], abs=1)


def test_hostile_names_are_words(make_rows, changed, read_page):
    evil = make_rows([1.0, 2.0], fields=FIELDS, error=EVIL)
    evil = changed(evil, model_filename=EVIL, model_type=EVIL, device=EVIL, plan_level=EVIL)
    operators = (OperatorRow(part=EVIL, operator=EVIL, time_ms=1.0),)
    evil = changed(
        evil, label=EVIL, test=EVIL, time_kind=EVIL, operators=operators, notes=(EVIL,), bound=None
    )
    text = bench_page([[evil], [changed(evil, error=None, quality_passed=None)]], [EVIL])
    page = read_page(text)
    assert not {"script", "img"} & set(page.tags)
    assert "\x00" not in text
    text.encode("utf-8")


def test_rows_that_all_failed_make_a_page(make_rows, changed, read_page):
    failed = make_rows([], error="Nothing works.")
    page = read_page(bench_page([[changed(failed, time_kind=None, device=None, description={})]]))
    words = " ".join(page.words)
    assert "Nothing works." in words
    assert "nothing ran" in words


def test_runs_are_told_apart(rows, changed):
    other = [changed(one, model_filename="/another") for one in rows[:2]]
    mixed = [rows[0], other[0], rows[1], other[1], rows[0]]
    assert runs_of(mixed) == [rows[:2], other, [rows[0]]]
    assert "Run 3 of 3" in bench_page(runs_of(mixed))
    named = [changed(one, run=name) for one, name in zip(rows[:3], "aba", strict=True)]
    assert runs_of(named) == [[named[0], named[2]], [named[1]]]


def test_saved_rows_become_a_page(rows, tmp_path, capsys):
    saved, page = tmp_path / "rows é.jsonl", tmp_path / "page é x.simulated.html"
    asked = page.with_name("page é x.html")  # one of its rows is of a simulated device
    for row in rows:
        RowFile(saved).add(row)
    assert main(["bench", "--from", str(saved), "--html", str(asked), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(json.dumps(one.to_dict())) for one in rows] == json.loads(out)
    assert "Wrote" in err
    assert page.read_text("utf-8") == bench_page(runs_of(rows))
    assert main(["bench", "--from", str(saved), "-n", "4"]) == 1
    assert "--decode is for a measurement" in capsys.readouterr().err
    assert main(["bench", str(tmp_path), "--from", str(saved)]) == 1
    assert main(["bench"]) == 2
    assert "--from" in capsys.readouterr().err
    assert main(["bench", "--from", str(page)]) == 1
    assert main(["bench", "--from", str(tmp_path / "none")]) == 1
    assert main(["bench", "--from", str(saved), "--html", str(tmp_path / "none" / "x.html")]) == 1


def test_where_no_page_can_be(rows, tmp_path):
    for path in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(OptionError, match="cannot be written"):
            check_folder(path, "page")
    with pytest.raises(OptionError, match="another place"):
        save_file(tmp_path, bench_page([rows]).encode())


# -- both pages, in a browser ------------------------------------------------------------------------

WIDTHS = (390, 1280)
MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    return {
      name: frame.title,
      width: root.clientWidth,
      content: root.scrollWidth,
      bars: page.querySelectorAll("svg rect").length,
      tables: page.querySelectorAll("table").length,
      tallest: Math.max(...[...page.querySelectorAll("h1")].map(title => title.offsetHeight)),
    };
  });
  document.getElementById("result").textContent = JSON.stringify(found);
});
"""


def browser():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium to look at the pages with")
def test_pages_fit_a_phone_and_a_desk(rows, changed, sample_profile, tmp_path):
    long = [changed(one, model_filename="/a/" + "x" * 90, label=f"{one.label} {'y' * 60}") for one in rows]
    summary = summarize(sample_profile(gpu="g" * 90))
    pages = {"bench": bench_page([rows, long]), "profile": profile_page(summary)}
    frames = "".join(
        f'<iframe title="{name} {width}" style="width: {width}px; height: 800px; border: 0" '
        f'srcdoc="{escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    # The script is in a page around them: the pages themselves let none run.
    (tmp_path / "all.html").write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><script>{MEASURE}</script>{frames}<pre id="result"></pre>',
        "utf-8",
    )
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1400,900", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"),
        (tmp_path / "all.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr
    found = {item["name"]: item for item in json.loads(result[1])}
    assert list(found) == [f"{name} {width}" for name in pages for width in WIDTHS]
    for name, item in found.items():
        assert item["width"] == int(name.split()[1]), name
        assert item["content"] <= item["width"], f"{name} is {item['content']} pixels wide"
        assert item["tables"] > 4, name
        assert 0 < item["tallest"] < 400, name
    assert found["bench 390"]["bars"] > 10
    assert found["profile 390"]["bars"] > 5
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
