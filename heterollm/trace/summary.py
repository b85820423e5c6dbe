"""Summarises a trace: the engine thread's time, the overlap of both processors, and the critical path."""

# Times of the engine thread add up to the wall time. Each span counts without its inner spans; time that no
# span covers is Python's, and time between two passes (sampling, text, the caller) has a name of its own.
#
# The critical path goes back from the end of a pass, each time to the kernel or graph run that ended last
# before. The time between two of them is a gap, and the cost of a hand-over if the processor changes.

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias, get_args

from heterollm.base import bandwidth_gbps
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase
from heterollm.trace.spans import Category, Pass, Span, Trace, Track

PYTHON: Final = "python"
"""Time of the engine thread in a pass that no span covers."""

BETWEEN: Final = "between passes"
HAND_OVER: Final = "hand-over"
SAME_PROCESSOR: Final = "gap within one processor"
ENDS: Final = "start and end of passes"

Intervals: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All runs of one operator on one processor.

    Args:
        track: The processor.
        category: The category.
        operator: The operator.
        count: Number of runs.
        time_us: Total time.
        weight_bytes: Total of the weights that linear layers read.
        flops: Total operations of linear layers.
    """

    track: Track
    category: Category
    operator: str
    count: int
    time_us: float
    weight_bytes: int
    flops: int

    @property
    def gbps(self) -> float | None:
        """Weight bandwidth in 10⁹ bytes a second; None without linear work."""
        return bandwidth_gbps(self.weight_bytes, self.time_us) if self.flops and self.time_us else None

    @property
    def gflops(self) -> float | None:
        """10⁹ operations a second; None without linear work."""
        return self.flops / (self.time_us * 1e3) if self.flops and self.time_us else None


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Totals of some passes.

    Args:
        device: Name of the device.
        time_kind: Whether the times are real, emulated or simulated.
        plan: The plan's level.
        precision: Precision of the linear layers.
        passes: Number of passes.
        failed: Number of passes that an error ended.
        tokens: Number of tokens.
        wall_us: Time of all passes and between consecutive ones.
        between_us: Time between consecutive passes.
        gpu_busy_us: Time in passes while a kernel ran.
        npu_busy_us: Time in passes while an NPU graph ran.
        overlap_us: Time in passes while both ran.
        hand_over_us: Gaps of the critical path at a change of processor, which are the cost of hand-overs.
        hand_overs: Number of those gaps.
        engine_us: Times of the engine thread by category; they add up to ``wall_us``.
        critical_us: Times of the critical path by processor and category, gaps included; they add up to the
            time of the passes.
        operators: Times by processor and operator, the longest first.
        clock_uncertainty_us: Largest shift of kernels against the rest.
        notes: Notes of the trace.
    """

    device: str
    time_kind: TimeKind
    plan: str
    precision: str
    passes: int
    failed: int
    tokens: int
    wall_us: float
    between_us: float
    gpu_busy_us: float
    npu_busy_us: float
    overlap_us: float
    hand_over_us: float
    hand_overs: int
    engine_us: Mapping[str, float]
    critical_us: Mapping[str, float]
    operators: tuple[OperatorTime, ...]
    clock_uncertainty_us: float
    notes: tuple[str, ...]

    @property
    def passes_us(self) -> float:
        """Time in passes."""
        return self.wall_us - self.between_us

    @property
    def gpu_idle_us(self) -> float:
        """Time in passes while no kernel ran."""
        return self.passes_us - self.gpu_busy_us

    @property
    def npu_idle_us(self) -> float:
        """Time in passes while no NPU graph ran."""
        return self.passes_us - self.npu_busy_us

    @property
    def both_idle_us(self) -> float:
        """Time in passes while neither processor worked."""
        return self.passes_us - self.gpu_busy_us - self.npu_busy_us + self.overlap_us

    @property
    def overlap_fraction(self) -> float:
        """Overlap as a fraction of the busy time of the processor that worked less; 0 if it did not work."""
        shorter_us = min(self.gpu_busy_us, self.npu_busy_us)
        return self.overlap_us / shorter_us if shorter_us else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        derived = ("gpu_idle_us", "npu_idle_us", "both_idle_us", "overlap_fraction")
        rows = [asdict(row) | {"gbps": row.gbps, "gflops": row.gflops} for row in self.operators]
        return asdict(self) | {name: getattr(self, name) for name in derived} | {"operators": rows}


def summarise(trace: Trace) -> TraceSummary:
    """Return the totals of a trace; :meth:`Trace.select` first for some of its passes.

    Args:
        trace: Any, of any kind of time.
    """
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        spans[span.number].append(span)
    engine: dict[str, float] = defaultdict(float)
    critical: dict[str, float] = defaultdict(float)
    busy_us = dict.fromkeys(("gpu", "npu", "both"), 0.0)
    hand_overs = 0
    for one in trace.passes:
        own = spans[one.number]
        for category, time_us in _self_times(own):
            engine[category] += time_us
        gpu, npu = (_clipped(busy(own, track), one) for track in ("gpu", "npu"))
        for name, intervals in (("gpu", gpu), ("npu", npu), ("both", _common(gpu, npu))):
            busy_us[name] += sum(end - begin for begin, end in intervals) / 1e3
        for name, time_us in _critical_path(one, own, round(1e3 * trace.clock_uncertainty_us)):
            critical[name] += time_us
            hand_overs += name == HAND_OVER
    between_us = 0.0
    for before, after in itertools.pairwise(trace.passes):
        if after.number == before.number + 1:
            read_us = sum(span.duration_us for span in spans[before.number] if span.category == "tracing")
            engine["tracing"] += read_us
            engine[BETWEEN] += (after.begin_ns - before.end_ns) / 1e3 - read_us
            between_us += (after.begin_ns - before.end_ns) / 1e3
    return TraceSummary(
        device=trace.device,
        time_kind=trace.time_kind,
        plan=trace.plan,
        precision=trace.precision,
        passes=len(trace.passes),
        failed=sum(one.failed for one in trace.passes),
        tokens=sum(one.tokens for one in trace.passes),
        wall_us=sum(one.end_ns - one.begin_ns for one in trace.passes) / 1e3 + between_us,
        between_us=between_us,
        gpu_busy_us=busy_us["gpu"],
        npu_busy_us=busy_us["npu"],
        overlap_us=busy_us["both"],
        hand_over_us=critical.get(HAND_OVER, 0.0),
        hand_overs=hand_overs,
        engine_us=dict(sorted(engine.items(), key=lambda item: -item[1])),
        critical_us=dict(sorted(critical.items(), key=lambda item: -item[1])),
        operators=_operators(trace.spans),
        clock_uncertainty_us=trace.clock_uncertainty_us,
        notes=trace.notes,
    )


def summarise_phases(trace: Trace) -> dict[str, TraceSummary]:
    """Return the summary of each phase that has passes."""
    found: dict[str, TraceSummary] = {}
    for phase in get_args(Phase):
        passes = {one for one in trace.passes if one.phase == phase}
        if passes:
            found[phase] = summarise(trace.select(passes.__contains__))
    return found


# -- helpers -----------------------------------------------------------------------------------------


def busy(spans: Iterable[Span], track: Track) -> Intervals:
    """Return the busy intervals of a track in order, merged, in nanoseconds."""
    merged: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted((span.begin_ns, span.end_ns) for span in spans if span.track == track):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((begin_ns, end_ns))
    return merged


def _self_times(spans: Iterable[Span]) -> Iterator[tuple[str, float]]:
    """Yield the time of each span of the engine thread in its pass, without its inner spans."""
    nested: list[tuple[Span, int]] = []
    for span in [*spans, None]:
        if span is not None and (span.track != "engine" or span.category == "tracing"):
            continue
        while nested and (span is None or nested[-1][0].end_ns <= span.begin_ns):
            closed, inside_ns = nested.pop()
            length_ns = closed.end_ns - closed.begin_ns
            if nested:
                outer, already_ns = nested[-1]
                nested[-1] = outer, already_ns + length_ns
            name = PYTHON if closed.category == "pass" else closed.category
            yield name, (length_ns - inside_ns) / 1e3
        if span is not None:
            nested.append((span, 0))


def _critical_path(one: Pass, spans: Iterable[Span], slack_ns: int) -> Iterator[tuple[str, float]]:
    """Yield the names and times of the critical path from the end of a pass to its beginning.

    Args:
        one: The pass.
        spans: Its spans.
        slack_ns: Largest apparent overlap of a kernel with its successor, from the clocks' uncertainty.
    """
    at_ns = one.end_ns
    after: Track | None = None
    for span in sorted((span for span in spans if span.track != "engine"), key=lambda span: -span.end_ns):
        begin_ns = max(span.begin_ns, one.begin_ns)
        if span.end_ns > at_ns + slack_ns or begin_ns >= at_ns:
            continue
        if span.end_ns < at_ns:
            gap = ENDS if after is None else SAME_PROCESSOR if after == span.track else HAND_OVER
            yield gap, (at_ns - span.end_ns) / 1e3
        yield f"{span.track} {span.category}", (min(span.end_ns, at_ns) - begin_ns) / 1e3
        at_ns, after = begin_ns, span.track
    if at_ns > one.begin_ns:
        yield ENDS, (at_ns - one.begin_ns) / 1e3


def _clipped(intervals: Intervals, one: Pass) -> Intervals:
    """Return the intersection of intervals with a pass; clocks agree only approximately."""
    return _common(intervals, [(one.begin_ns, one.end_ns)])


def _common(first: Intervals, second: Intervals) -> Intervals:
    """Return the intersection of two lists of intervals."""
    found = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _operators(spans: Iterable[Span]) -> tuple[OperatorTime, ...]:
    runs: dict[tuple[Track, Category, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.track != "engine":
            runs[span.track, span.category, span.operator].append(span)
    rows = [
        OperatorTime(
            *key,
            len(found),
            sum(span.end_ns - span.begin_ns for span in found) / 1e3,
            sum(span.work.weight_bytes for span in found if span.work),
            sum(span.work.flops for span in found if span.work),
        )
        for key, found in runs.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_us))
