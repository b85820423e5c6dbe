"""Records the latest passes of a model in preallocated memory.

Only a model that was loaded with tracing uses this module. Wrappers of the prepared calls read the clock
before and after each call. The times of kernels are read from their events at the end of the pass.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from heterollm.base import KernelError
from heterollm.engine import Call, LinearWork
from heterollm.kernels.gpu import HostClock, kernel_times_ns
from heterollm.kernels.ops import Phase
from heterollm.trace.spans import Category, Pass, ProcessorCategory, Span, Track

ToHostClock: TypeAlias = Callable[[int], int]
"""Converts nanoseconds of the GPU's clock to the host's clock."""

SPANS_KEPT: Final = 1 << 18
"""Enough for some hundred tokens of a model with thirty layers; 6 MiB."""

PASSES_KEPT: Final = 1 << 14
PASS_FIELDS: Final = 9
KERNELS_OF_A_PASS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class SpanTemplate:
    """A span without its times, made when a pass is compiled; ``npu`` is the category of a graph's run."""

    track: Track
    category: Category
    operator: str
    layer: int | None = None
    work: LinearWork | None = None
    merged: tuple[str, ...] = ()
    polls: bool = False
    npu: ProcessorCategory = "linear"

    def span(self, begin_ns: int, end_ns: int, number: int) -> Span:
        """Return the span with times and the number of its pass."""
        return Span(
            self.track,
            self.category,
            self.operator,
            begin_ns,
            end_ns,
            number,
            self.layer,
            self.work,
            self.merged,
        )


BUILD: Final = SpanTemplate("engine", "build", "compile")
BIND: Final = SpanTemplate("engine", "bind", "bind")
STEP: Final = SpanTemplate("engine", "bind", "step")
SLEEP: Final = SpanTemplate("engine", "sleep", "sleep")
TRACING: Final = SpanTemplate("engine", "tracing", "read times")


class Recorder:
    """Keeps the spans of the latest passes; used on the engine thread alone.

    Args:
        now_ns: The host's clock, or a simulated one.
        kernel_times: Returns the begin and end of a kernel on the GPU's clock, in nanoseconds, from the
            event that its launch returned.
        spans_kept: Capacity in spans.
    """

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        kernel_times: Callable[[Any], tuple[int, int]] | None = None,
        spans_kept: int | None = None,
    ) -> None:
        self.now_ns = now_ns
        self._kernel_times = kernel_times or _times_of_event
        self._capacity = spans_kept or SPANS_KEPT
        self._templates = [TRACING] * self._capacity
        self._begins, self._ends = _zeros(self._capacity), _zeros(self._capacity)
        self._count = 0
        self._events: list[Any] = [None] * KERNELS_OF_A_PASS
        self._event_templates = [TRACING] * KERNELS_OF_A_PASS
        self._event_count = 0
        self._passes = _zeros(PASSES_KEPT * PASS_FIELDS)
        self._pass_count = 0
        self._pass = (0, 0, 0, 0, 0)
        self._taken = 0
        self._open = False
        self._lost_kernels = 0

    # -- recording -----------------------------------------------------------------------------------

    def add(self, template: SpanTemplate, begin_ns: int, end_ns: int) -> None:
        """Keep a span of the open pass, if there is one, in place of the oldest span if memory is full."""
        if self._open:
            place = self._count % self._capacity
            self._templates[place] = template
            self._begins[place] = begin_ns
            self._ends[place] = end_ns
            self._count += 1

    def keep_event(self, template: SpanTemplate, event: Any) -> None:  # noqa: ANN401 - an OpenCL event
        """Keep the event of a launch until the end of the pass."""
        place = self._event_count
        if self._open and place < KERNELS_OF_A_PASS:
            self._events[place] = event
            self._event_templates[place] = template
            self._event_count = place + 1
        elif self._open:
            self._lost_kernels += 1

    def begin_pass(self, phase: Phase, tokens: int, position: int) -> None:
        """Begin the pass of all spans until :meth:`end_pass`."""
        self._pass = (int(phase == "decode"), tokens, position, self.now_ns(), self._count)
        self._event_count = 0
        self._open = True

    def end_pass(self, *, failed: bool) -> None:
        """End a pass and read its kernels' times, which is a span of its own after the pass."""
        end_ns = self.now_ns()
        decode, tokens, position, begin_ns, start = self._pass
        # The spans of the engine precede those of kernels.
        middle = self._count
        for index in range(self._event_count):
            event, self._events[index] = self._events[index], None
            try:
                times = self._kernel_times(event)
            except KernelError:
                self._lost_kernels += 1
                continue
            self.add(self._event_templates[index], *times)
        self._event_count = 0
        self.add(TRACING, end_ns, self.now_ns())
        self._open = False
        row = (decode, tokens, position, begin_ns, end_ns, start, middle, self._count, int(failed))
        place = self._pass_count % PASSES_KEPT * PASS_FIELDS
        self._passes[place : place + PASS_FIELDS] = array("q", row)
        self._pass_count += 1

    def host_clock(self, clock: HostClock) -> HostClock:
        """Return a clock for waits that records its sleeps."""
        return replace(clock, sleep_s=self.timed(clock.sleep_s, SLEEP))

    def timed(self, call: Callable[..., Any], template: SpanTemplate) -> Callable[..., Any]:
        """Return a wrapper that records a span of each call."""
        now_ns, add = self.now_ns, self.add

        def traced(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the call
            begin_ns = now_ns()
            try:
                return call(*arguments, **options)
            finally:
                add(template, begin_ns, now_ns())

        return traced

    def launch(self, call: Call, engine: SpanTemplate, kernel: SpanTemplate) -> Call:
        """Return a wrapper that records the spans of a launch and of its kernel."""
        now_ns, add, keep_event = self.now_ns, self.add, self.keep_event

        def traced() -> None:
            begin_ns = now_ns()
            event = call()
            add(engine, begin_ns, now_ns())
            keep_event(kernel, event)

        return traced

    # -- reading -------------------------------------------------------------------------------------

    def take(self, to_host: ToHostClock) -> tuple[tuple[Pass, ...], tuple[Span, ...], tuple[str, ...]]:
        """Return the passes, spans and notes since the last call, and forget them.

        Args:
            to_host: Converts the kernels' times to the host's clock.
        """
        passes: list[Pass] = []
        spans: list[Span] = []
        first = max(self._taken, self._pass_count - PASSES_KEPT)
        for number in range(first, self._pass_count):
            place = number % PASSES_KEPT * PASS_FIELDS
            row = self._passes[place : place + PASS_FIELDS]
            decode, tokens, position, begin_ns, end_ns, start, middle, stop, failed = row
            if start < self._count - self._capacity:
                continue
            phase: Phase = "decode" if decode else "prefill"
            passes.append(Pass(number, phase, tokens, position, begin_ns, end_ns, bool(failed)))
            spans += self._spans(passes[-1], start, middle, stop, to_host)
        notes = self._notes(self._pass_count - self._taken - len(passes))
        self._taken = self._pass_count
        self._lost_kernels = 0
        spans.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
        return tuple(passes), tuple(spans), notes

    def _spans(self, parent: Pass, start: int, middle: int, stop: int, to_host: ToHostClock) -> list[Span]:
        engine = [self._span(place, parent.number) for place in range(start, middle)]
        found = [Span("engine", "pass", parent.phase, parent.begin_ns, parent.end_ns, parent.number)]
        sleeps = [span for span, _ in engine if span.category == "sleep"]
        # An outer span is added after its inner ones. It must come first even if both have the same times,
        # which a simulated clock can give.
        for span, template in reversed(engine):
            if span.category == "graph":
                found.append(replace(span, track="npu", category=template.npu))
            if span.category == "sleep":
                continue
            found.append(span)
            if template.polls:
                found += _sleeps_and_polls(span, sleeps)
        for place in range(middle, stop):
            span, _ = self._span(place, parent.number)
            if span.track == "gpu":
                span = replace(span, begin_ns=to_host(span.begin_ns), end_ns=to_host(span.end_ns))
            found.append(span)
        return found

    def _span(self, place: int, number: int) -> tuple[Span, SpanTemplate]:
        place %= self._capacity
        template = self._templates[place]
        return template.span(self._begins[place], self._ends[place], number), template

    def _notes(self, lost_passes: int) -> tuple[str, ...]:
        notes = []
        if lost_passes:
            notes.append(
                f"The first {lost_passes} passes are not here: "
                f"a trace keeps the latest {self._capacity} spans."
            )
        if self._lost_kernels:
            notes.append(f"{self._lost_kernels} kernels have no times.")
        return tuple(notes)


class PassRecorder:
    """A context manager that records a pass, reused for all passes of a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next: tuple[Phase, int, int] = ("decode", 0, 0)

    def announce(self, phase: Phase, tokens: int, position: int) -> None:
        """Set the pass that the next entry begins."""
        self._next = phase, tokens, position

    def __enter__(self) -> None:
        self._recorder.begin_pass(*self._next)

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        self._recorder.end_pass(failed=kind is not None)


class SpanRecorder:
    """A context manager that records a span, reused for all spans of a template that never nest."""

    def __init__(self, recorder: Recorder, template: SpanTemplate) -> None:
        self._recorder = recorder
        self._template = template
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._recorder.now_ns()

    def __exit__(self, *_error: object) -> None:
        self._recorder.add(self._template, self._begin_ns, self._recorder.now_ns())


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _times_of_event(event: Any) -> tuple[int, int]:  # noqa: ANN401 - an OpenCL event
    times = kernel_times_ns(event)
    return times.start, times.end


def _sleeps_and_polls(wait: Span, sleeps: Sequence[Span]) -> list[Span]:
    """Return the sleeps of a wait, with its layer, and the polling between them."""
    found = []
    at_ns = wait.begin_ns
    inside = [span for span in sleeps if wait.begin_ns <= span.begin_ns and span.end_ns <= wait.end_ns]
    for sleep in sorted(inside, key=lambda span: span.begin_ns):
        if sleep.begin_ns > at_ns:
            found.append(_poll(wait, at_ns, sleep.begin_ns))
        found.append(replace(sleep, layer=wait.layer))
        at_ns = sleep.end_ns
    if wait.end_ns > at_ns:
        found.append(_poll(wait, at_ns, wait.end_ns))
    return found


def _poll(wait: Span, begin_ns: int, end_ns: int) -> Span:
    return replace(wait, category="poll", operator="poll", begin_ns=begin_ns, end_ns=end_ns)
