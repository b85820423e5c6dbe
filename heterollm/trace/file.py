"""Trace files in the trace-event format, which Chrome and https://ui.perfetto.dev open.

An event's ``args`` hold the rest of a record, so that a file can be read back. Times are microseconds from
the beginning of the trace with three decimals. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from heterollm.base import (
    Amount,
    CacheError,
    Count,
    OptionError,
    TraceError,
    atomic_path,
    decode,
    decode_json,
    read_file,
)
from heterollm.engine import LinearWork
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase
from heterollm.trace.spans import (
    ENGINE_CATEGORIES,
    PROCESSOR_CATEGORIES,
    TRACKS,
    Category,
    Pass,
    Span,
    Trace,
    Track,
)

SCHEMA_VERSION: Final = 1
PROCESS: Final = 1
TRACK_NAMES: Final[dict[Track, str]] = {"gpu": "GPU queue", "npu": "NPU", "engine": "engine thread"}
LARGEST_FILE_BYTES: Final = 1 << 30
FIX: Final = "Record it again: `heterollm generate --trace FILE`."

Microseconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A time of at most eleven days."""

Word = Annotated[str, Meta(max_length=500)]
WORK: Final = ("m", "k", "n", "flops", "weight_bytes")
"""Fields of an event with linear work, in the order of :class:`LinearWork`."""


class TraceHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a file that concern the whole trace."""

    heterollm_trace: Literal[1]
    device: Word
    time_kind: TimeKind
    plan: Word
    precision: Word
    clock_uncertainty_us: Microseconds
    notes: tuple[str, ...]


class NameEvent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="ph", tag="M"):
    """Name or sort index of a track, for viewers."""

    pid: Count
    tid: Count
    name: str
    args: dict[str, str | int]


class Arguments(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An event's fields beside its time; the rates are for viewers."""

    number: Count = msgspec.field(name="pass")
    operator: Word
    layer: Count | None = None
    m: Count | None = None
    k: Count | None = None
    n: Count | None = None
    flops: Count | None = None
    weight_bytes: Count | None = None
    gbps: Amount | None = None
    gflops: Amount | None = None
    merged: tuple[str, ...] = ()
    phase: Phase | None = None
    tokens: Count | None = None
    position: Count | None = None
    failed: bool | None = None

    def work(self) -> LinearWork | None:
        """Return the linear work; None without it."""
        present = [value for name in WORK if (value := getattr(self, name)) is not None]
        return LinearWork(*present) if present else None

    def __post_init__(self) -> None:
        """Refuse incomplete work."""
        missing = [name for name in WORK if getattr(self, name) is None]
        if 0 < len(missing) < len(WORK):
            raise ValueError(f"{missing[0]} is missing")


class SpanEvent(Struct, frozen=True, forbid_unknown_fields=True, tag_field="ph", tag="X"):
    """A span."""

    pid: Count
    tid: Annotated[int, Meta(ge=1, le=3)]
    ts: Microseconds
    dur: Microseconds
    name: str
    cat: Category
    args: Arguments

    def __post_init__(self) -> None:
        """Refuse a category of another track."""
        if self.cat not in (ENGINE_CATEGORIES if self.track == "engine" else PROCESSOR_CATEGORIES):
            raise ValueError(f"cat is {self.cat!r}, which is not on the track of the {self.track}")

    @property
    def track(self) -> Track:
        """The track."""
        return TRACKS[self.tid - 1]


class TraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a trace file."""

    otherData: TraceHeader  # noqa: N815 - the format's name
    traceEvents: tuple[NameEvent | SpanEvent, ...]  # noqa: N815
    displayTimeUnit: str = "ns"  # noqa: N815


# -- writing -----------------------------------------------------------------------------------------


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace file atomically.

    Raises:
        OptionError: The file cannot be written.
    """
    try:
        with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(trace_lines(trace))
    except CacheError as error:
        raise OptionError(error.message, fix="Name another place for the trace.") from error


def trace_lines(trace: Trace) -> Iterator[str]:
    """Yield the lines of a trace file."""
    start_ns = min((span.begin_ns for span in trace.spans), default=0)
    header = TraceHeader(
        SCHEMA_VERSION,
        trace.device,
        trace.time_kind,
        trace.plan,
        trace.precision,
        trace.clock_uncertainty_us,
        trace.notes,
    )
    yield f'{{"displayTimeUnit": "ns",\n"otherData": {_dumped(header)},\n"traceEvents": [\n'
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


def _event(span: Span, passes: dict[int, Pass], start_ns: int) -> SpanEvent:
    fields: dict[str, Any] = {}
    if span.work is not None:
        fields = dict(zip(WORK, astuple(span.work), strict=True))
        fields |= {"gbps": round(span.gbps or 0.0, 3), "gflops": round(span.gflops or 0.0, 3)}
    if span.category == "pass":
        one = passes[span.number]
        fields |= {"phase": one.phase, "tokens": one.tokens, "position": one.position, "failed": one.failed}
    arguments = Arguments(span.number, span.operator, span.layer, merged=span.merged, **fields)
    begin_us, length_us = (span.begin_ns - start_ns) / 1000, (span.end_ns - span.begin_ns) / 1000
    track = TRACKS.index(span.track) + 1
    return SpanEvent(PROCESS, track, begin_us, length_us, span.name, span.category, arguments)


def _dumped(value: object) -> str:
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False, allow_nan=False)


# -- reading -----------------------------------------------------------------------------------------


def load_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: The file cannot be read, is damaged, or is no trace of heterollm.
    """
    try:
        if not path.is_file():
            raise TraceError(f"There is no file {path}.", fix=FIX)
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise TraceError(f"{path} has {size} bytes, more than a trace can have.", fix=FIX)
        text = read_file(path, LARGEST_FILE_BYTES)
    except OSError as error:
        raise TraceError(f"Cannot read the trace {path}: {error.strerror or error}.", fix=FIX) from error
    return trace_from_json(text, source=str(path))


def trace_from_json(text: str | bytes, *, source: str = "the trace") -> Trace:
    """Return the trace in the text of a trace file.

    Raises:
        TraceError: The text is not a complete trace of this schema version.
    """
    data = decode_json(text, source=source, error=TraceError, fix=FIX)
    header = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(header, dict) or "traceEvents" not in data or "heterollm_trace" not in header:
        raise TraceError(f"{source} is no trace of heterollm.", fix=FIX)
    version = header["heterollm_trace"]
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{source} has schema version {version!r:.40}, and this version of heterollm reads "
            f"{SCHEMA_VERSION}.",
            fix=FIX,
        )
    file = decode(data, TraceFile, source=f"{source} is damaged", error=TraceError, fix=FIX)
    spans, passes = _records(file.traceEvents, source)
    whole = file.otherData
    return Trace(
        device=whole.device,
        time_kind=whole.time_kind,
        plan=whole.plan,
        precision=whole.precision,
        passes=passes,
        spans=spans,
        clock_uncertainty_us=whole.clock_uncertainty_us,
        notes=whole.notes,
    )


def _records(
    events: tuple[NameEvent | SpanEvent, ...], source: str
) -> tuple[tuple[Span, ...], tuple[Pass, ...]]:
    spans: list[Span] = []
    passes: dict[int, Pass] = {}
    for number, event in enumerate(events):
        if isinstance(event, NameEvent):
            continue
        where, arguments, begin_ns = f"{source}: traceEvents[{number}]", event.args, round(event.ts * 1000)
        span = Span(
            event.track,
            event.cat,
            arguments.operator,
            begin_ns,
            begin_ns + round(event.dur * 1000),
            arguments.number,
            arguments.layer,
            arguments.work(),
            arguments.merged,
        )
        spans.append(span)
        if span.category == "pass":
            if span.number in passes:
                raise TraceError(f"{where} is a second pass {span.number}.", fix=FIX)
            passes[span.number] = _pass(span, arguments, where)
    for span in spans:
        if span.number not in passes:
            raise TraceError(
                f"{source}: {span.name!r:.80} names pass {span.number}, which is not there.", fix=FIX
            )
    spans.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
    ordered = tuple(sorted(passes.values(), key=lambda one: one.number))
    _check_order(ordered, spans, source)
    return tuple(spans), ordered


def _pass(span: Span, stated: Arguments, where: str) -> Pass:
    phase, tokens, position, failed = stated.phase, stated.tokens, stated.position, stated.failed
    if phase is None or tokens is None or position is None or failed is None:
        raise TraceError(f"{where} is a pass without phase, tokens, position or failed.", fix=FIX)
    return Pass(span.number, phase, tokens, position, span.begin_ns, span.end_ns, failed)


def _check_order(passes: tuple[Pass, ...], spans: list[Span], source: str) -> None:
    """Refuse overlapping passes, and spans of the engine thread that overlap or leave their pass.

    Kernels may overlap: a device may begin one before its predecessor has ended.
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
