"""The pages of a plan and of a trace: who computes what, and a timeline that a browser zooms."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from heterollm.base import silent
from heterollm.cli import main
from heterollm.data import bundled_model
from heterollm.engine import LinearWork
from heterollm.loading import plan_for
from heterollm.planning import LoadOptions, ProfilingSession
from heterollm.profiler import SessionOptions
from heterollm.report import plan_page, trace_page
from heterollm.report.page_trace import DEEPEST, timeline_data
from heterollm.trace import TRACKS, Pass, Span, Trace, save_trace

SIMULATED = "sim:snapdragon-8gen3"
EVIL = "</script><script>alert('x')</script>\x00\ud800<b>&"


@pytest.fixture(scope="module")
def solved():
    with ProfilingSession(SIMULATED, models=(bundled_model(),)) as profiling:
        profiling.run(SessionOptions.of(quick=True, tune=False), silent)
    return plan_for(bundled_model(), LoadOptions(device=SIMULATED))


def strips(text, phase):
    """Return first length, last length and the NPU's share in percent of each piece, by the strip's name."""
    [figure] = re.findall(
        rf'<figure><div class="bars strips">(?:(?!<figure).)*?<figcaption>{phase}:', text, re.DOTALL
    )
    found = {}
    for name, drawn in re.findall(r'aria-label="([^"]*)">(.*?)</svg>', figure, re.DOTALL):
        pieces = re.findall(r"<title>(\d+)(?: to (\d+))? tokens: .*?, NPU (\d+)%</title>", drawn)
        found[unescape(name)] = [
            (int(first), int(last or first), int(share)) for first, last, share in pieces
        ]
    return found


def test_the_page_of_a_plan_shows_every_linear_at_every_length(solved, read_page):
    model, plan = solved.model, solved.plan
    text = plan_page(f"model{EVIL}", solved, (1, 64, 256), 8)
    page = read_page(text)
    assert "script" not in page.tags
    assert not page.links
    assert "://" not in text
    assert "default-src 'none'" in text
    words = " ".join(page.words)
    assert "model</script><script>alert('x')" in words
    assert "simulated" in words
    for expected in (
        "Who computes what",
        "this plan",
        "only the NPU does",
        "prefill, 64 tokens",
        "The NPU's graphs",
    ):
        assert expected in words, expected
    layers = model.config.layers
    for phase, longest in (("prefill", plan.chunk_length), ("decode", 16)):
        found = strips(text, phase)
        assert set(found) == {
            *(f"{group} \N{MULTIPLICATION SIGN} {layers}" for group in ("qkv", "o", "gate_up", "down")),
            "head",
        }
        for pieces in found.values():
            assert [first for first, _, _ in pieces] == [1, *(last + 1 for _, last, _ in pieces[:-1])]
            assert pieces[-1][1] == longest
        for tokens in (1, 8, 64 if longest > 64 else 5, longest):
            for spec, placement in plan.operators(phase, tokens, [s for s in model.specs if s.layer == 0]):
                if spec.group in ("qkv", "o"):
                    covered = min(tokens, sum(placement.npu_lengths))
                    share = 100 * sum(placement.npu_rows) / spec.rows * covered / tokens
                    [drawn] = [
                        one
                        for first, last, one in found[f"{spec.group} \N{MULTIPLICATION SIGN} {layers}"]
                        if first <= tokens <= last
                    ]
                    assert abs(drawn - share) <= 1.5, (phase, tokens, spec.group)


def test_layers_that_are_placed_apart_have_rows_of_their_own(solved):
    plan, layers = solved.plan, solved.model.config.layers
    last = layers - 1
    gpu = plan.without_npu().entries
    own = [
        structs.replace(entry, layers=(0, 0))
        for entry in gpu
        if entry.group == "qkv" and entry.phase == "prefill"
    ]
    changed = structs.replace(plan, entries=(*own, *plan.entries))
    found = strips(plan_page("m", type(solved)(changed, model=solved.model), (64,), 1), "prefill")
    rows = {name: pieces for name, pieces in found.items() if name.startswith("qkv")}
    sign = "\N{MULTIPLICATION SIGN}"
    assert set(rows) == {f"qkv {sign} 1 from layer 0", f"qkv {sign} {last} from layer 1"}
    assert rows[f"qkv {sign} 1 from layer 0"] == [(1, plan.chunk_length, 0)]
    assert set(found) - set(rows) == {
        *(f"{group} {sign} {layers}" for group in ("o", "gate_up", "down")),
        "head",
    }


def test_plan_writes_a_page_under_a_name_that_says_simulated(solved, run, tmp_path):
    page = tmp_path / "new" / "plan.html"
    code, out, err = run("plan", bundled_model(), "--device", SIMULATED, "--html", page, "--json")
    assert code == 0, err
    assert json.loads(out)
    written = page.with_name("plan.simulated.html")
    assert f"Wrote {written}." in err
    before = written.read_bytes()
    assert run("plan", bundled_model(), "--device", SIMULATED, "--html", page)[0] == 0  # replaced
    assert written.read_bytes() == before
    assert [path.name for path in page.parent.iterdir()] == [written.name]
    code, _, err = run("plan", bundled_model(), "--device", SIMULATED, "--html", tmp_path)
    assert code == 1
    assert "is a folder" in err


# -- traces ------------------------------------------------------------------------------------------


def traced(spans, passes=(), **more):
    every = sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns, span.track))
    return Trace("host", "real", "tensor", "w4a16", tuple(passes), tuple(every), **more)


SPANS = st.lists(
    st.builds(
        lambda track, begin, time, name: Span(track, "other", name, begin, begin + time, 0),
        st.sampled_from(TRACKS),
        st.integers(0, 50),
        st.integers(0, 20),
        st.sampled_from(("a", "b", EVIL)),
    ),
    max_size=12,
)


@given(SPANS)
def test_the_timeline_has_every_span_in_rows_that_do_not_overlap(spans):
    data = timeline_data(traced(spans))
    begin_ns = min((span.begin_ns for span in spans), default=0)
    found, track = [], ""
    for row in data["rows"]:
        track, at = row["track"] or track, 0
        for gap, time, name in zip(row["gap"], row["time"], row["name"], strict=True):
            assert gap >= 0
            found.append((track, at + gap + begin_ns, time, data["names"][name]))
            at += gap + time
    named = {"gpu": "GPU queue", "npu": "NPU", "engine": "engine thread"}
    wanted = [(named[one.track], one.begin_ns, one.end_ns - one.begin_ns, one.name) for one in spans]
    left = len(wanted) - len(found)
    assert left == 0 or len(data["rows"]) >= DEEPEST
    assert set(found) <= set(wanted)
    if not left:
        assert sorted(found) == sorted(wanted)


def test_spans_within_too_many_others_are_counted():
    spans = [Span("engine", "call", "call", at, 100 - at, 0) for at in range(DEEPEST + 3)]
    assert "3 spans lie within 8 others, and are not drawn." in trace_page(traced(spans))


def test_the_page_of_a_trace_lets_its_own_script_run_alone(read_page):
    spans = [
        Span("gpu", "linear", EVIL, 0, 5000, 0, 3, LinearWork(1, 8, 4, 128, 32)),
        Span("npu", "linear", "qkv", 1000, 4000, 0, 3),
    ]
    text = trace_page(traced(spans, [Pass(0, "decode", 1, 0, 0, 6000)], notes=(EVIL,)))
    page = read_page(text)
    assert page.tags.count("script") == 2
    assert not page.links
    assert "://" not in text
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert json.loads(data)["names"][0] == f"3.{EVIL}"
    assert "<" not in data
    assert text.encode()
    assert trace_page(traced([]))


def test_trace_writes_a_page(tmp_path, run):
    spans = [Span("engine", "pass", "decode", 0, 60, 0), Span("gpu", "norm", "norm", 0, 10, 0)]
    trace = traced(spans, [Pass(0, "decode", 1, 0, 0, 60)])
    save_trace(trace, tmp_path / "run.json")
    page = tmp_path / "run.html"
    code, _, err = run("trace", tmp_path / "run.json", "--html", page)
    assert (code, f"Wrote {page}." in err) == (0, True)
    assert "Timeline of 1 passes, measured" in page.read_text("utf-8")
    assert main(["trace", str(tmp_path / "run.json"), "--html", str(tmp_path)]) == 1


def browser():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


ACT = """
addEventListener("load", () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument;
  const canvas = page.querySelector("canvas"), box = canvas.getBoundingClientRect();
  const view = document.querySelector("iframe").contentWindow;
  const middle = box.left + 96 + (box.width - 96) / 2;
  const at = {clientX: middle, clientY: box.top + 67, bubbles: true, cancelable: true};
  const said = [];
  const point = () => {
    canvas.dispatchEvent(new view.PointerEvent("pointermove", at));
    said.push(page.querySelector("output").textContent);
  };
  point();
  const wheel = {...at, deltaY: -100};
  for (let turn = 0; turn < 60; turn++) canvas.dispatchEvent(new view.WheelEvent("wheel", wheel));
  point();
  canvas.dispatchEvent(new view.KeyboardEvent("keydown", {key: "0"}));
  for (let turn = 0; turn < 3; turn++) canvas.dispatchEvent(new view.KeyboardEvent("keydown", {key: "n"}));
  point();
  page.querySelector("button[data-act=whole]").click();
  point();
  const wide = page.documentElement.scrollWidth <= page.documentElement.clientWidth;
  document.getElementById("result").textContent = JSON.stringify({said, wide});
}, 300));
"""


@pytest.mark.skipif(browser() is None, reason="no Chromium to look at the page with")
def test_a_browser_zooms_into_a_hundred_thousand_spans(tmp_path):
    passes = [Pass(at, "decode", 1, at, at * 1_000_000, at * 1_000_000 + 900_000) for at in range(1001)]
    spans = [
        Span(
            "gpu",
            "norm",
            f"kernel {one.number}",
            one.begin_ns + place * 9000,
            one.begin_ns + place * 9000 + 8000,
            one.number,
        )
        for one in passes
        for place in range(100)
    ]
    text = trace_page(traced(spans, passes))
    (tmp_path / "outer.html").write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><script>{ACT}</script><pre id="result"></pre>'
        f'<iframe style="width: 800px; height: 700px" srcdoc="{escape(text)}"></iframe>',
        "utf-8",
    )
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1000,900"),
        *("--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom"),
        (tmp_path / "outer.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr
    found = json.loads(unescape(result[1]))
    assert found["wide"]
    whole, near, third, again = found["said"]
    # The middle of 1001 passes is pass 500; wheels keep what is under the pointer.
    numbers = [
        int(re.match(r"kernel (\d+), norm: 8.000 us at \d+", words)[1]) for words in (whole, near, third)
    ]
    assert abs(numbers[0] - 500) <= 3
    assert abs(numbers[1] - numbers[0]) <= 3
    assert 500 < numbers[2] <= 506  # three passes on
    assert again == whole
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
