"""Records what a loaded model does, in memory that is laid out before: the latest passes are kept.

Nothing here is reached unless a model was loaded to be traced. Then every prepared call is put into one that
reads the clock before and after it; the times of kernels are read from their events when a pass is over.
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
from heterollm.trace.spans import Category, Pass, Span, Track

__all__ = ["HostTime", "PassTime", "Recorder", "SectionTime", "Site"]

HostTime: TypeAlias = Callable[[int], int]
"""Returns a moment of the GPU's clock on the host's, both in nanoseconds."""

SPANS_KEPT: Final = 1 << 18
"""Some hundred tokens of a model with thirty layers; 6 MiB."""

PASSES_KEPT: Final = 1 << 14
KERNELS_OF_A_PASS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Site:
    """What a span will say apart from when it was: made when calls are compiled."""

    track: Track
    category: Category
    operator: str
    layer: int | None = None
    work: LinearWork | None = None
    merged: tuple[str, ...] = ()
    polls: bool = False

    def span(self, begin_ns: int, end_ns: int, number: int) -> Span:
        """Return a span of this site."""
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


BUILD: Final = Site("engine", "build", "compile")
BIND: Final = Site("engine", "bind", "bind")
STEP: Final = Site("engine", "bind", "step")
SLEEP: Final = Site("engine", "sleep", "sleep")
TRACING: Final = Site("engine", "tracing", "read times")


class Recorder:
    """Keeps the spans of the latest passes; used on the engine thread alone.

    Args:
        now_ns: The host's clock, or a simulated one.
        kernel_times: Returns when a kernel began and ended from what its launch returned, in nanoseconds of
            the GPU's clock.
        spans_kept: How many spans at most.
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
        self._sites: list[Site] = []
        self._numbers: dict[Site, int] = {}
        self._capacity = spans_kept or SPANS_KEPT
        self._what, self._begins, self._ends = (_zeros(self._capacity) for _ in range(3))
        self._count = 0
        self._events: list[Any] = [None] * KERNELS_OF_A_PASS
        self._event_sites = _zeros(KERNELS_OF_A_PASS)
        self._event_count = 0
        self._passes = tuple(_zeros(PASSES_KEPT) for _ in range(len(_PASS_FIELDS)))
        self._pass_count = 0
        self._taken = 0
        self._open = False
        self._lost_kernels = 0
        for site in (BUILD, BIND, STEP, SLEEP, TRACING):
            self.number_of(site)
        self._sleep = self.number_of(SLEEP)
        self._tracing = self.number_of(TRACING)

    # -- recording -----------------------------------------------------------------------------------

    def number_of(self, site: Site) -> int:
        """Return the number by which spans of a site are added."""
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = len(self._sites)
            self._sites.append(site)
        return number

    def add(self, site: int, begin_ns: int, end_ns: int) -> None:
        """Keep a span, in the place of the oldest if there is no other; outside of passes nothing is kept."""
        if self._open:
            place = self._count % self._capacity
            self._what[place] = site
            self._begins[place] = begin_ns
            self._ends[place] = end_ns
            self._count += 1

    def keep_event(self, site: int, event: Any) -> None:  # noqa: ANN401 - an OpenCL event
        """Keep what a launch returned until the pass is over."""
        place = self._event_count
        if self._open and place < KERNELS_OF_A_PASS:
            self._events[place] = event
            self._event_sites[place] = site
            self._event_count = place + 1
        elif self._open:
            self._lost_kernels += 1

    def begin_pass(self, phase: Phase, tokens: int, position: int) -> None:
        """Begin a pass; what is added belongs to it until :meth:`end_pass`."""
        place = self._pass_count % PASSES_KEPT
        first = self._count
        values = (phase == "decode", tokens, position, self.now_ns(), 0, first, first, 0, 0)
        for column, value in zip(self._passes, values, strict=True):
            column[place] = value
        self._event_count = 0
        self._open = True

    def end_pass(self, *, failed: bool) -> None:
        """End a pass and read its kernels' times, which takes a span of its own behind it."""
        end_ns = self.now_ns()
        place = self._pass_count % PASSES_KEPT
        # The engine's spans come first and the kernels' after them.
        middle = self._count
        for index in range(self._event_count):
            event, self._events[index] = self._events[index], None
            try:
                begin_ns, stop_ns = self._kernel_times(event)
            except KernelError:
                self._lost_kernels += 1
                continue
            self.add(self._event_sites[index], begin_ns, stop_ns)
        self._event_count = 0
        self.add(self._tracing, end_ns, self.now_ns())
        self._open = False
        for field, value in zip(_END_FIELDS, (end_ns, middle, self._count, failed), strict=True):
            self._passes[field][place] = value
        self._pass_count += 1

    def host_clock(self, clock: HostClock) -> HostClock:
        """Return a wait's clock whose sleeps are recorded."""
        return replace(clock, sleep_s=self.timed(clock.sleep_s, self._sleep))

    def timed(self, call: Callable[..., Any], site: int) -> Callable[..., Any]:
        """Return a call that does the same and is recorded."""
        now_ns, add = self.now_ns, self.add

        def traced(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the call
            begin_ns = now_ns()
            try:
                return call(*arguments, **options)
            finally:
                add(site, begin_ns, now_ns())

        return traced

    def launch(self, call: Call, engine: int, kernel: int) -> Call:
        """Return a launch that is recorded, and its kernel with it."""
        now_ns, add, keep_event = self.now_ns, self.add, self.keep_event

        def traced() -> None:
            begin_ns = now_ns()
            event = call()
            add(engine, begin_ns, now_ns())
            keep_event(kernel, event)

        return traced

    # -- what was recorded ---------------------------------------------------------------------------

    def take(self, host_time: HostTime) -> tuple[tuple[Pass, ...], tuple[Span, ...], tuple[str, ...]]:
        """Return passes, spans and notes since the last call, and forget them.

        Args:
            host_time: Relates the kernels' times to the host's clock.
        """
        passes: list[Pass] = []
        spans: list[Span] = []
        first = max(self._taken, self._pass_count - PASSES_KEPT)
        for number in range(first, self._pass_count):
            row = [int(column[number % PASSES_KEPT]) for column in self._passes]
            decode, tokens, position, begin_ns, end_ns, start, middle, stop, failed = row
            if start < self._count - self._capacity:
                continue
            one = Pass(
                number, "decode" if decode else "prefill", tokens, position, begin_ns, end_ns, bool(failed)
            )
            passes.append(one)
            spans += self._spans(one, start, middle, stop, host_time)
        notes = self._notes(self._pass_count - self._taken - len(passes))
        self._taken = self._pass_count
        self._lost_kernels = 0
        spans.sort(key=lambda span: (span.begin_ns, -span.end_ns, span.track))
        return tuple(passes), tuple(spans), notes

    def _spans(self, one: Pass, start: int, middle: int, stop: int, host_time: HostTime) -> list[Span]:
        engine = [self._span(place, one.number) for place in range(start, middle)]
        found = [Span("engine", "pass", one.phase, one.begin_ns, one.end_ns, one.number)]
        sleeps = [span for span, _ in engine if span.category == "sleep"]
        # A span is added when it ends, after those in it: of two that took the same time, which happens on
        # a simulated clock, the later is the outer one and comes first.
        for span, site in reversed(engine):
            if span.category == "graph":
                found.append(replace(span, track="npu", category="linear"))
            if span.category == "sleep":
                continue
            found.append(span)
            if site.polls:
                found += _looks(span, sleeps)
        for place in range(middle, stop):
            span, _ = self._span(place, one.number)
            if span.track == "gpu":
                span = replace(span, begin_ns=host_time(span.begin_ns), end_ns=host_time(span.end_ns))
            found.append(span)
        return found

    def _span(self, place: int, number: int) -> tuple[Span, Site]:
        place %= self._capacity
        site = self._sites[self._what[place]]
        return site.span(int(self._begins[place]), int(self._ends[place]), number), site

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


class PassTime:
    """Records a pass from entering to leaving; made once for a recorder, as passes follow one another."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next: tuple[Phase, int, int] = ("decode", 0, 0)

    def announce(self, phase: Phase, tokens: int, position: int) -> None:
        """Say which pass is entered next."""
        self._next = phase, tokens, position

    def __enter__(self) -> None:
        self._recorder.begin_pass(*self._next)

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        self._recorder.end_pass(failed=kind is not None)


class SectionTime:
    """Records a span of a site from entering to leaving; made once for a site that never lies in itself."""

    def __init__(self, recorder: Recorder, site: Site) -> None:
        self._recorder = recorder
        self._number = recorder.number_of(site)
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = self._recorder.now_ns()

    def __exit__(self, *_error: object) -> None:
        self._recorder.add(self._number, self._begin_ns, self._recorder.now_ns())


_PASS_FIELDS: Final = (
    "decode",
    "tokens",
    "position",
    "begin",
    "end",
    "start",
    "middle",
    "stop",
    "failed",
)
_END_FIELDS: Final = tuple(_PASS_FIELDS.index(name) for name in ("end", "middle", "stop", "failed"))


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _times_of_event(event: Any) -> tuple[int, int]:  # noqa: ANN401 - an OpenCL event
    times = kernel_times_ns(event)
    return times.start, times.end


def _looks(wait: Span, sleeps: Sequence[Span]) -> list[Span]:
    """Return the sleeps of a wait, with its layer, and as polling what lies between them."""
    found = []
    at_ns = wait.begin_ns
    inside = [one for one in sleeps if wait.begin_ns <= one.begin_ns and one.end_ns <= wait.end_ns]
    for sleep in sorted(inside, key=lambda one: one.begin_ns):
        if sleep.begin_ns > at_ns:
            found.append(_poll(wait, at_ns, sleep.begin_ns))
        found.append(replace(sleep, layer=wait.layer))
        at_ns = sleep.end_ns
    if wait.end_ns > at_ns:
        found.append(_poll(wait, at_ns, wait.end_ns))
    return found


def _poll(wait: Span, begin_ns: int, end_ns: int) -> Span:
    return replace(wait, category="poll", operator="poll", begin_ns=begin_ns, end_ns=end_ns)
