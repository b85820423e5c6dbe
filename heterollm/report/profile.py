"""Profiles on the terminal."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.progress import TextColumn
from rich.text import Text

from heterollm.base import Progress, format_bytes, format_duration, format_moment
from heterollm.profiler import WIDE_FRACTION
from heterollm.report.console import bars_with, note, pairs_table, section_table, show, table
from heterollm.report.stage_lines import stage_lines
from heterollm.report.tables_profile import sections

if TYPE_CHECKING:
    from heterollm.planning import KeptRecords, ProfilingResult
    from heterollm.profiler import ProfileComparison, ProfileSummary, RunSummary
    from heterollm.profiler.records import StoredProfile

LISTED_CHANGES: Final = 40

DRIFT_FRACTION: Final = 0.25
"""A larger drift of the reference operator shows that other work disturbed the processor."""

WIDE_SHARE: Final = 0.1
"""So many measurements whose samples lie far apart show the same, even if the reference met quiet moments."""

TRUSTED_FRACTION: Final = 0.02
"""Fraction of the work after which its pace predicts the time left."""

OVER_S: Final = 1.0
"""The report mentions a budget that was exceeded by so much."""

SKIPPED_FRACTION: Final = 0.1
"""Work that took less than this fraction of its estimate was skipped."""


@contextlib.contextmanager
def time_bar() -> Iterator[Progress]:
    """Show one bar with the time left, or lines. Steps are milliseconds of estimated work."""
    bars = bars_with(TextColumn("{task.fields[left]}", markup=False))
    if bars.disable:
        with stage_lines(lambda text: show(note(text))) as lines:
            yield lines
        return
    task = bars.add_task("Profiling", total=None, left="")
    pace = Pace()

    def report(stage: str, done: int, total: int) -> None:
        left = f"{format_duration(pace.left_s(done, total, time.monotonic()))} left"
        bars.update(task, description=stage, completed=done, total=max(total, 1), left=left)
        bars.start()

    try:
        yield report
    finally:
        bars.stop()


class Pace:
    """Predicts the time left from the estimates and from the pace of earlier work."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._estimated_s = self._taken_s = 0.0

    def left_s(self, done_ms: int, total_ms: int, now_s: float) -> float:
        """Return the seconds that are left.

        Args:
            done_ms: Estimated milliseconds of finished work.
            total_ms: Estimated milliseconds of all work.
            now_s: Time of any clock.
        """
        if self._last is not None:
            estimated_s, taken_s = (done_ms - self._last[0]) / 1e3, now_s - self._last[1]
            # Known points take no time, and a smaller count is other work: neither shows the pace.
            if 0 < estimated_s * SKIPPED_FRACTION <= taken_s:
                self._estimated_s += estimated_s
                self._taken_s += taken_s
        self._last = done_ms, now_s
        rest_s = max(0, total_ms - done_ms) / 1e3
        trusted = self._estimated_s >= TRUSTED_FRACTION * total_ms / 1e3 and self._estimated_s > 0
        return rest_s * self._taken_s / self._estimated_s if trusted else rest_s


# -- runs --------------------------------------------------------------------------------------------


def run_report(result: ProfilingResult) -> Group:
    """Return counts, times and the file of a run, and the next commands."""
    summary, profile = result.summary, result.profile
    rows = {
        "device": f"{profile.device}, {profile.time_kind} time, fingerprint {profile.fingerprint}",
        "models": ", ".join(result.models),
        "measured": f"{summary.measured} in {format_duration(summary.seconds)}",
        "failed": f"{summary.failed}" + (", kept with their errors" if summary.failed else ""),
        "known before": str(summary.known),
        "NPU graphs": f"{summary.graphs} built in {format_duration(summary.build_seconds)}",
        "left out by budget": left_words(summary),
        "skipped by rule": skipped_words(summary.skipped),
        "drift": drift_words(summary.drift_fraction),
        "measured again": again_words(summary),
        "file": str(result.path),
    }
    parts: list[RenderableType] = [
        pairs_table(rows.items()),
        Text("`heterollm profile show` prints the profile; `heterollm plan MODEL` plans with it."),
    ]
    if summary.over_seconds >= OVER_S:
        parts.append(
            note(
                f"Needed measurements took {format_duration(summary.over_seconds)} more than the budget; "
                f"building NPU graphs took {format_duration(summary.build_seconds)} of the run."
            )
        )
    if disturbed := disturbed_words(summary.drift_fraction, _spreads(result)):
        parts.append(Text(disturbed, "yellow"))
    if summary.left:
        parts.append(note("`heterollm profile --update` with a longer --budget measures the rest."))
    return Group(*parts)


def left_words(summary: RunSummary) -> str:
    """Return the measurements that the budget left out, by group and processor."""
    if not summary.left:
        return "nothing"
    names = ", ".join(f"{name} {count}" for name, count in summary.left_out.items())
    return f"{sum(summary.left_out.values())} measurements ({names})"


def again_words(summary: RunSummary) -> str:
    """Return the number of points that were measured again, and of those that stay disturbed."""
    if not summary.again and not summary.disturbed:
        return "nothing"
    words = f"{summary.again} points far off their neighbours"
    if summary.disturbed:
        words += f", {summary.disturbed} stay disturbed: `--update` measures them first"
    return words


def skipped_words(skipped: object) -> str:
    """Return the number of skipped points by rule."""
    counts = dict(skipped) if isinstance(skipped, dict) else {}
    if not counts:
        return "nothing"
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.items())
    return f"{sum(counts.values())} points ({reasons})"


def drift_words(drift: object) -> str:
    """Return the drift of each processor's speed during a run."""
    fractions = dict(drift) if isinstance(drift, dict) else {}
    if not fractions:
        return "not measured"
    words = ", ".join(f"{processor} {fraction:.0%}" for processor, fraction in fractions.items())
    return f"{words}: the slowest run of the reference operator over the fastest"


def disturbed_words(drift: Mapping[str, float], spreads: Sequence[float]) -> str:
    """Return the advice to repeat a profile that other load disturbed; empty if none did.

    Args:
        drift: Drift of each processor's reference operator, as a fraction.
        spreads: Spread of each measurement's samples, as a fraction of their median.
    """
    worst = max(drift.values(), default=0.0)
    wide = sum(spread > WIDE_FRACTION for spread in spreads)
    reasons = []
    if worst > DRIFT_FRACTION:
        reasons.append(f"the reference operator took up to {1 + worst:.2g} times as long as at best")
    if wide > WIDE_SHARE * len(spreads):
        reasons.append(f"{wide} of {len(spreads)} measurements lie more than ±{WIDE_FRACTION / 2:.0%} apart")
    if not reasons:
        return ""
    return (
        f"Disturbed: {', and '.join(reasons)}. Plans from this profile may be poor. "
        "Close other programs and run the same command again."
    )


def _spreads(result: ProfilingResult) -> list[float]:
    """Return the spread of each measurement of a run: interquartile range over median."""
    spreads = []
    for record in result.profile.records.values():
        if len(record.samples_us) >= 3 and record.taken_s >= result.summary.since_s:
            low, middle, high = statistics.quantiles(record.samples_us, n=4)
            spreads.append((high - low) / middle)
    return spreads


def interrupted_note(kept: KeptRecords) -> Text:
    """Return the number of kept measurements of a stopped run, and how to continue it."""
    if not kept.measured:
        return note("Stopped before anything was measured.")
    return note(
        f"Stopped. {kept.measured} measurements of this run are kept in {kept.path}.\n"
        "The same command continues there."
    )


# -- files -------------------------------------------------------------------------------------------


def profiles_table(stored: Sequence[StoredProfile]) -> RenderableType:
    """Return the profiles of the cache, and the problems of damaged ones."""
    if not stored:
        return Text("There is no profile yet. Run `heterollm profile`.")
    made = table("device", "time", "fingerprint", ">records", ">failed", ">runs", "newest", ">size")
    for entry in stored:
        size = format_bytes(entry.size_bytes)
        if entry.problem:
            made.add_row(Text("damaged", "red"), "", entry.path.name, "", "", "", "", size)
            continue
        counts = [str(count) for count in (entry.records, entry.failed, entry.runs)]
        newest = format_moment(entry.newest_s) if entry.newest_s else "never"
        made.add_row(entry.device, entry.time_kind, entry.fingerprint, *counts, newest, size)
    problems = [Text(entry.problem, "red") for entry in stored if entry.problem]
    return Group(made, *problems)


# -- one profile -------------------------------------------------------------------------------------


def profile_report(summary: ProfileSummary, *, everything: bool = False) -> Group:
    """Return a profile as tables.

    Args:
        summary: The profile.
        everything: Whether to list splits of groups and their graphs, too.
    """
    parts: list[RenderableType] = []
    for section in sections(summary, everything=everything):
        parts.append(Text(f"\n{section.title}", "bold"))
        if section.rows and section.columns:
            parts.append(section_table(replace(section, title="")))
        elif section.rows:
            parts.append(pairs_table((name, value) for name, value in section.rows))
        parts += map(note, section.notes)
    return Group(*parts)


# -- two profiles ------------------------------------------------------------------------------------


def comparison_report(comparison: ProfileComparison) -> Group:
    """Return two profiles side by side: summaries, then the largest changes."""
    parts: list[RenderableType] = [Text(f"A  {comparison.first}"), Text(f"B  {comparison.second}")]
    for name, (ours, theirs) in comparison.differences.items():
        parts.append(note(f"{name}: A {ours!s:.80}, B {theirs!s:.80}"))
    made = table("kind", ">in both", ">B / A", ">faster", ">slower", ">only A", ">only B", ">failed")
    for kind in comparison.kinds:
        ratio = "" if kind.ratio is None else f"{kind.ratio:.2f}"
        counts = (kind.faster, kind.slower, kind.only_first, kind.only_second, kind.failed)
        made.add_row(kind.kind, str(kind.both), ratio, *map(str, counts))
    parts.append(made)
    changed = [pair for pair in comparison.pairs if pair.verdict in ("faster", "slower") and pair.ratio]
    changed.sort(key=lambda pair: -max(pair.ratio or 1.0, 1 / (pair.ratio or 1.0)))
    if changed:
        details = table("point", ">A us", ">B us", ">B / A", "B is")
        for pair in changed[:LISTED_CHANGES]:
            times = [f"{pair.first_us:.1f}", f"{pair.second_us:.1f}", f"{pair.ratio:.2f}"]
            details.add_row(f"{pair.kind}: {pair.label}", *times, pair.verdict)
        parts.append(details)
    if len(changed) > LISTED_CHANGES:
        parts.append(note(f"{len(changed) - LISTED_CHANGES} smaller changes are left out; --json lists all."))
    same = sum(pair.verdict == "no change" for pair in comparison.pairs)
    parts.append(note(f"{same} did not change: their quartiles overlap. B / A is the geometric mean."))
    return Group(*parts)
