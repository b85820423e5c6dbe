"""Traces in files: what was written is read back, opens in Perfetto, and damage is refused with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import HeteroLLMError, OptionError, TraceError, check_target, save_file
from heterollm.engine.step import LinearWork
from heterollm.report import trace_png
from heterollm.report.console import render
from heterollm.report.trace import trace_report
from heterollm.trace import Pass, Span, Trace, load_trace, save_trace, summarise
from heterollm.trace.file import trace_from_json, trace_lines

US = 1000


def example(time_kind: Any = "simulated", start_us: int = 5_000) -> Trace:
    """Return a prefill of one layer, a decoded token, and what the thread did."""
    work = LinearWork(4, 64, 32, 2 * 4 * 64 * 32, 1024)
    spans, passes = [], []
    for number, (phase, tokens, begin) in enumerate([("prefill", 4, 0), ("decode", 1, 250)]):
        base = start_us + begin

        def add(
            track: Any, category: Any, operator: str, first: float, last: float, base: int = base, **more: Any
        ) -> None:
            begin_ns, end_ns = round((base + first) * US), round((base + last) * US)
            spans.append(Span(track, category, operator, begin_ns, end_ns, number, **more))  # noqa: B023

        add("engine", "pass", phase, 0, 200)
        add("engine", "launch", "norm", 2, 10, layer=0)
        add("gpu", "norm", "norm", 5, 20, layer=0)
        add("engine", "wait", "before qkv", 10, 22, layer=0)
        add("engine", "poll", "poll", 10, 22, layer=0)
        add("engine", "graph", "qkv", 25, 100, layer=0, work=work)
        add("npu", "linear", "qkv", 25, 100, layer=0, work=work)
        add("gpu", "linear", "qkv", 20, 90.125, layer=0, work=work)
        add("gpu", "merged", "0.rope to 0.o", 110, 190, merged=("0.rope", "0.attention", "0.o"))
        add("engine", "wait", "finish", 105, 195)
        add("engine", "tracing", "read times", 200, 204)
        passes.append(Pass(number, phase, tokens, 0, base * US, (base + 200) * US, failed=number == 1))  # type: ignore[arg-type]
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
    return Trace("sim:soc", time_kind, "tensor", "w4a16", tuple(passes), tuple(spans), 1.5, ("A note.",))


def text_of(trace: Trace) -> str:
    return "".join(trace_lines(trace))


def test_a_trace_is_read_back_as_it_was(tmp_path: Path) -> None:
    trace = example(start_us=0)
    save_trace(trace, tmp_path / "run.json")
    assert load_trace(tmp_path / "run.json") == trace
    # Elsewhere on the clock it is the same trace.
    moved = example(start_us=7_000_000)
    assert text_of(moved) == text_of(trace)


def test_the_file_is_a_trace_event_file() -> None:
    data = json.loads(text_of(example()))
    assert isinstance(data["traceEvents"], list)
    names = {event["name"]: event["args"] for event in data["traceEvents"] if event["ph"] == "M"}
    assert names["process_name"] == {"name": "heterollm on sim:soc, simulated time"}
    threads = [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"]
    assert threads == ["GPU queue", "NPU", "engine thread"]
    for event in data["traceEvents"]:
        assert set(event) >= {"ph", "pid", "tid", "name"}
        if event["ph"] == "X":
            assert type(event["ts"]) in (int, float)
            assert event["dur"] >= 0
            assert event["cat"]
            assert event["tid"] in (1, 2, 3)
    linear = next(event for event in data["traceEvents"] if event.get("cat") == "linear")
    assert linear["args"]["gbps"] == pytest.approx(1024 / linear["dur"] / 1e3, abs=1e-3)
    assert linear["args"]["gflops"] == pytest.approx(2 * 4 * 64 * 32 / linear["dur"] / 1e3, abs=1e-3)


@pytest.mark.parametrize("kind", ["real", "emulated", "simulated"])
def test_the_kind_of_time_is_everywhere(kind: str) -> None:
    trace = trace_from_json(text_of(example(kind)))
    assert trace.time_kind == kind
    assert summarise(trace).time_kind == kind
    shown = render(trace_report(trace))
    titles = [line for line in shown.splitlines() if "time" in line and "us" not in line]
    assert sum(f"{kind} time" in line for line in titles) >= 5
    assert "A note." in shown
    assert "(1 failed)" in shown
    assert trace_png(trace).startswith(b"\x89PNG")


def test_a_trace_without_passes_is_said_to_be_empty() -> None:
    empty = Trace("host", "real", "gpu", "w4a16", (), ())
    assert trace_from_json(text_of(empty)) == empty
    assert "No pass" in render(trace_report(empty))
    assert summarise(empty).wall_us == 0
    with pytest.raises(OptionError, match="no pass"):
        trace_png(empty)


# -- damage -----------------------------------------------------------------------------------------------


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(text_of(example()))
    change(data)
    return json.dumps(data)


def span(data: dict[str, Any], category: str) -> dict[str, Any]:
    return next(event for event in data["traceEvents"] if event.get("cat") == category)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another schema": (lambda data: data["otherData"].update(heterollm_trace=99), "schema version 99"),
    "another program's": (lambda data: data["otherData"].pop("heterollm_trace"), "no trace of heterollm"),
    "no events": (lambda data: data.pop("traceEvents"), "no trace of heterollm"),
    "events that are none": (lambda data: data["traceEvents"].append(3), "object"),
    "another kind of event": (lambda data: span(data, "norm").update(ph="B"), r"\]\.ph: "),
    "another kind of time": (
        lambda data: data["otherData"].update(time_kind="guessed"),
        "time_kind: ",
    ),
    "no notes": (lambda data: data["otherData"].pop("notes"), "otherData: .*notes"),
    "a time before the beginning": (lambda data: span(data, "norm").update(ts=-3), r"\]\.ts: "),
    "no number": (lambda data: span(data, "norm").update(dur=float("nan")), r"\]\.dur: "),
    "an endless span": (lambda data: span(data, "norm").update(dur=1e300), r"\]\.dur: "),
    "a huge number": (lambda data: span(data, "norm").update(dur=10**400), r"\]\.dur: "),
    "a truth for a number": (lambda data: span(data, "norm").update(dur=True), r"\]\.dur: "),
    "no track": (lambda data: span(data, "norm").update(tid=9), r"\]\.tid: "),
    "the wrong track": (lambda data: span(data, "norm").update(tid=3), "cat is 'norm'"),
    "no arguments": (lambda data: span(data, "norm").pop("args"), r"\]: .*args"),
    "a layer that is none": (lambda data: span(data, "norm")["args"].update(layer=-2), r"\]\.args\.layer: "),
    "half a shape": (lambda data: span(data, "linear")["args"].pop("k"), "k is missing"),
    "a name that is none": (
        lambda data: span(data, "norm")["args"].update(operator=7),
        "args.operator: ",
    ),
    "a pass that is missing": (lambda data: span(data, "norm")["args"].update({"pass": 5}), "pass 5"),
    "a pass that is there twice": (
        lambda data: data["traceEvents"].append(span(data, "pass")),
        "second pass 0",
    ),
    "a phase that is none": (
        lambda data: span(data, "pass")["args"].update(phase="training"),
        "args.phase: ",
    ),
    "passes that overlap": (lambda data: span(data, "pass").update(dur=255), "overlap"),
    "a span outside of its pass": (lambda data: span(data, "wait").update(dur=900), "outside"),
    "spans that cross": (lambda data: span(data, "launch").update(dur=15), "overlaps another"),
    "merged what are no names": (
        lambda data: span(data, "merged")["args"].update(merged=[1]),
        "args.merged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_with_its_place(damage: str) -> None:
    change, said = DAMAGE[damage]
    with pytest.raises(TraceError, match=said) as caught:
        trace_from_json(damaged(change), source="run.json")
    assert caught.value.message.startswith("run.json")
    assert "generate --trace" in caught.value.fix


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "nonsense", b"\xff\xfe", '{"a": 1, "a": 2}', "[" * 200_000, "3", "null"]
)
def test_what_is_no_trace_is_refused(text: str | bytes) -> None:
    with pytest.raises(TraceError):
        trace_from_json(text)


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True), junk=st.text(max_size=8))
def test_a_cut_or_mangled_file_is_refused_or_read(cut: float, junk: str) -> None:
    text = text_of(example())
    place = int(cut * len(text.rstrip()))
    with pytest.raises(TraceError):
        trace_from_json(text[:place])
    try:
        found = trace_from_json(text[:place] + junk + text[place + len(junk) :])
    except TraceError:
        return
    # What is read can be summed up, shown and written.
    render(trace_report(found))
    trace_from_json(text_of(found))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_value_anywhere_is_refused_or_read(data: st.DataObject) -> None:
    content = json.loads(text_of(example()))
    event = data.draw(st.sampled_from([content["otherData"], *content["traceEvents"]]))
    target = event["args"] if "args" in event and data.draw(st.booleans()) else event
    name = data.draw(st.sampled_from(sorted(target)))
    target[name] = data.draw(JSON_VALUES)
    try:
        found = trace_from_json(json.dumps(content))
    except TraceError:
        return
    render(trace_report(found))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("/dev/zero"), tmp_path / ("x" * 5000)):
        with pytest.raises(TraceError):
            load_trace(path)


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("as it was")
    for path in (tmp_path, tmp_path / "file" / "run.json", tmp_path / ("x" * 5000)):
        with pytest.raises(OptionError):
            check_target(path)
        with pytest.raises(HeteroLLMError):
            save_trace(example(), path)
        with pytest.raises(HeteroLLMError):
            save_file(path, b"")
    assert (tmp_path / "file").read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    check_target(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "as it was"
