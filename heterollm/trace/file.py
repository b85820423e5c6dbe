"""Traces in files: the trace-event format of Chrome and Perfetto, which opens in either as it is.

Beside what these show, an event's ``args`` hold what a trace's records hold, so that a file can be read back.
Times are microseconds from the trace's beginning with three decimals. See
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the format) and
https://ui.perfetto.dev.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from heterollm.base import CacheError, OptionError, TraceError, atomic_path, parse_json
from heterollm.engine import LinearWork
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase
from heterollm.trace.spans import (
    ENGINE_CATEGORIES,
    PART_CATEGORIES,
    TRACKS,
    Category,
    Pass,
    Span,
    Trace,
    Track,
)

__all__ = ["load_trace", "save_trace", "trace_from_json", "trace_lines"]

SCHEMA_VERSION: Final = 1
PROCESS: Final = 1
TRACK_NAMES: Final[dict[Track, str]] = {"gpu": "GPU queue", "npu": "NPU", "engine": "engine thread"}
LARGEST_FILE_BYTES: Final = 1 << 30
LONGEST_US: Final = 1e12
"""Eleven days: what is further off was never a time."""

LARGEST_COUNT: Final = 1 << 62
LONGEST_WORD: Final = 500
FIX: Final = "Record it again: `heterollm generate --trace FILE`."

T = TypeVar("T")


# -- writing -----------------------------------------------------------------------------------------


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace; the file is replaced once it is whole.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(trace_lines(trace))
    except CacheError as error:
        raise OptionError(error.message, fix="Name another place for the trace.") from error


def trace_lines(trace: Trace) -> Iterator[str]:
    """Yield the lines of a trace's file."""
    start_ns = min((span.begin_ns for span in trace.spans), default=0)
    about = {
        "heterollm_trace": SCHEMA_VERSION,
        "device": trace.device,
        "time_kind": trace.time_kind,
        "plan": trace.plan,
        "precision": trace.precision,
        "clock_uncertainty_us": trace.clock_uncertainty_us,
        "notes": list(trace.notes),
    }
    yield f'{{"displayTimeUnit": "ns",\n"otherData": {_dumped(about)},\n"traceEvents": [\n'
    title = f"heterollm on {trace.device}, {trace.time_kind} time"
    yield _dumped({"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_name", "args": {"name": title}})
    for thread, track in enumerate(TRACKS, 1):
        event = {"ph": "M", "pid": PROCESS, "tid": thread}
        yield ",\n" + _dumped({**event, "name": "thread_name", "args": {"name": TRACK_NAMES[track]}})
        yield ",\n" + _dumped({**event, "name": "thread_sort_index", "args": {"sort_index": thread}})
    passes = {one.number: one for one in trace.passes}
    for span in trace.spans:
        yield ",\n" + _dumped(_event(span, passes, start_ns))
    yield "\n]}\n"


def _event(span: Span, passes: dict[int, Pass], start_ns: int) -> dict[str, Any]:
    about: dict[str, Any] = {"pass": span.number, "operator": span.operator}
    if span.layer is not None:
        about["layer"] = span.layer
    if span.work is not None:
        work = span.work
        about |= {"m": work.tokens, "k": work.columns, "n": work.rows}
        about |= {"flops": work.flops, "weight_bytes": work.weight_bytes}
        # For those who look at it: a reader computes them again.
        about |= {"gbps": round(span.gbps or 0.0, 3), "gflops": round(span.gflops or 0.0, 3)}
    if span.merged:
        about["merged"] = list(span.merged)
    if span.category == "pass":
        one = passes[span.number]
        about |= {"phase": one.phase, "tokens": one.tokens, "position": one.position, "failed": one.failed}
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": TRACKS.index(span.track) + 1,
        "ts": (span.begin_ns - start_ns) / 1000,
        "dur": (span.end_ns - span.begin_ns) / 1000,
        "name": span.name,
        "cat": span.category,
        "args": about,
    }


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# -- reading -----------------------------------------------------------------------------------------


def load_trace(path: Path) -> Trace:
    """Read a trace's file.

    Raises:
        TraceError: It cannot be read, is damaged, or is no trace of heterollm.
    """
    try:
        if not path.is_file():
            raise TraceError(f"There is no file {path}.", fix=FIX)
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise TraceError(f"{path} has {size} bytes, more than a trace can have.", fix=FIX)
        text = path.read_bytes()
    except OSError as error:
        raise TraceError(f"Cannot read the trace {path}: {error.strerror or error}.", fix=FIX) from error
    return trace_from_json(text, source=str(path))


def trace_from_json(text: str | bytes, *, source: str = "the trace") -> Trace:
    """Read a trace.

    Raises:
        TraceError: The text is not a whole trace of this schema version.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise TraceError(f"{source} is not JSON: {error}.", fix=FIX) from error
    about = data.get("otherData") if isinstance(data, dict) else None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(about, dict) or not isinstance(events, list) or "heterollm_trace" not in about:
        raise TraceError(f"{source} is no trace of heterollm.", fix=FIX)
    version = about["heterollm_trace"]
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{source} has schema version {version!r:.40}, and this version of heterollm reads "
            f"{SCHEMA_VERSION}.",
            fix=FIX,
        )
    fields = _Fields(about, f"{source}: otherData")
    notes = fields.words("notes")
    spans, passes = _records(events, source)
    return Trace(
        fields.word("device"),
        fields.one_of("time_kind", get_args(TimeKind)),
        fields.word("plan"),
        fields.word("precision"),
        passes,
        spans,
        fields.number("clock_uncertainty_us", LONGEST_US),
        notes,
    )


def _records(events: list[Any], source: str) -> tuple[tuple[Span, ...], tuple[Pass, ...]]:
    spans: list[Span] = []
    passes: dict[int, Pass] = {}
    for number, event in enumerate(events):
        where = f"{source}: event {number}"
        if not isinstance(event, dict) or event.get("ph") not in ("M", "X"):
            raise TraceError(f"{where} is no span and no name.", fix=FIX)
        if event["ph"] == "M":
            continue
        span, fields = _span(event, where)
        spans.append(span)
        if span.category == "pass":
            if span.number in passes:
                raise TraceError(f"{where} is a second pass {span.number}.", fix=FIX)
            passes[span.number] = _pass(span, fields)
    for span in spans:
        if span.number not in passes:
            raise TraceError(
                f"{source}: {span.name!r:.80} names pass {span.number}, which is not there.", fix=FIX
            )
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
    ordered = tuple(sorted(passes.values(), key=lambda one: one.number))
    _check_order(ordered, spans, source)
    return tuple(spans), ordered


def _span(event: dict[str, Any], where: str) -> tuple[Span, _Fields]:
    outer = _Fields(event, where)
    thread = outer.count("tid", len(TRACKS))
    if thread < 1:
        raise outer.fail("tid", f"a number from 1 to {len(TRACKS)}")
    track = TRACKS[thread - 1]
    categories: tuple[Category, ...] = ENGINE_CATEGORIES if track == "engine" else PART_CATEGORIES
    begin_ns = round(outer.number("ts", LONGEST_US) * 1000)
    length_ns = round(outer.number("dur", LONGEST_US) * 1000)
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        raise outer.fail("args", "an object")
    fields = _Fields(arguments, f"{where}: args")
    work = None
    if "flops" in arguments:
        shape = (fields.count(name, LARGEST_COUNT) for name in ("m", "k", "n", "flops", "weight_bytes"))
        work = LinearWork(*shape)
    span = Span(
        track,
        outer.one_of("cat", categories),
        fields.word("operator"),
        begin_ns,
        begin_ns + length_ns,
        fields.count("pass", LARGEST_COUNT),
        fields.count("layer", LARGEST_COUNT) if "layer" in arguments else None,
        work,
        fields.words("merged") if "merged" in arguments else (),
    )
    return span, fields


def _pass(span: Span, fields: _Fields) -> Pass:
    return Pass(
        span.number,
        fields.one_of("phase", get_args(Phase)),
        fields.count("tokens", LARGEST_COUNT),
        fields.count("position", LARGEST_COUNT),
        span.begin_ns,
        span.end_ns,
        fields.flag("failed"),
    )


def _check_order(passes: tuple[Pass, ...], spans: list[Span], source: str) -> None:
    """Refuse passes and spans of the thread that overlap, and such that lie outside of their pass.

    Kernels may overlap: a device may begin one before the one before has ended.
    """
    for before, after in itertools.pairwise(passes):
        if after.begin_ns < before.end_ns:
            raise TraceError(f"{source}: passes {before.number} and {after.number} overlap.", fix=FIX)
    windows = {one.number: one for one in passes}
    open_ends: list[int] = []
    for span in spans:
        if span.track != "engine":
            continue
        window = windows[span.number]
        inside = window.begin_ns <= span.begin_ns and span.end_ns <= window.end_ns
        if not inside and (span.category != "tracing" or span.begin_ns < window.end_ns):
            raise TraceError(f"{source}: {span.name!r:.80} lies outside of its pass.", fix=FIX)
        while open_ends and open_ends[-1] <= span.begin_ns:
            open_ends.pop()
        if open_ends and span.end_ns > open_ends[-1]:
            raise TraceError(f"{source}: {span.name!r:.80} of the engine thread overlaps another.", fix=FIX)
        open_ends.append(span.end_ns)


class _Fields:
    """Typed access to an object of the file; every complaint says where and what."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def fail(self, name: str, expected: str) -> TraceError:
        value = self._values.get(name)
        said = "is missing" if value is None else f"is {value!r:.80}"
        return TraceError(f"{self._where}: {name} {said}; expected {expected}.", fix=FIX)

    def word(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or len(value) > LONGEST_WORD:
            raise self.fail(name, "a text")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(name, "a list of texts")
        return tuple(value)

    def one_of(self, name: str, choices: tuple[T, ...]) -> T:
        value = self._values.get(name)
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise self.fail(name, " or ".join(map(str, choices)))

    def count(self, name: str, limit: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not 0 <= value <= limit:
            raise self.fail(name, "a whole number of at least 0")
        return value

    def number(self, name: str, limit: float) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
            raise self.fail(name, f"a number from 0 to {limit:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value
