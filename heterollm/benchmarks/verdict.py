"""Verdicts in words: the fastest configuration, its lead, and whether splitting operators pays.

On ``host`` splitting pays only if it beats ``gpu`` on all cores: GPU and NPU are cores of one CPU, so that
beating half of the cores is no gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from heterollm.benchmarks.rows import BenchRow
from heterollm.benchmarks.significance import Change, compare_times
from heterollm.kernels.devices import shares_cores

COMPARED: Final = ("real", "simulated")
"""Kinds of time that measure speed; an emulator's does not."""


def is_split(row: BenchRow) -> bool:
    """Whether a row's level may split operators."""
    return (
        row.engine == "self" and row.plan_level not in ("gpu", "npu", "layer") and row.asked.npu_threads != 0
    )


def compare_rows(before: BenchRow, after: BenchRow) -> Change:
    """Compare the times per token of two rows: round by round if they took turns in one run."""
    paired = before.run == after.run and len(before.times.samples_ns) == len(after.times.samples_ns)
    times = [[time_us / row.tokens for time_us in row.times_us] for row in (before, after)]
    return compare_times(*times, paired=paired)


def best_of(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Return the fastest row by medians; None of no rows."""
    return max(rows, key=lambda row: row.times.median_ts or 0.0, default=None)


def whole_device(rows: Sequence[BenchRow], row: BenchRow) -> BenchRow | None:
    """Return the row of ``gpu`` with all threads of another row's GPU and NPU."""
    described = row.setup.description
    threads = row.asked.n_threads or sum(described.get(f"{name}_threads", 0) for name in ("gpu", "npu"))
    alike = (
        other
        for other in rows
        if other.engine == "self"
        and other.plan_level == "gpu"
        and other.asked.npu_threads == 0
        and other.asked.gpu_threads == threads
        and other.precision == row.precision
    )
    return next(alike, None)


def groups_of(rows: Sequence[BenchRow]) -> dict[tuple[str, str], list[BenchRow]]:
    """Return the rows by test and precision, in order; other engines are in each precision's group."""
    found: dict[tuple[str, str], list[BenchRow]] = {}
    for row in rows:
        if row.engine == "self":
            found.setdefault((row.test, row.precision), []).append(row)
    for row in rows:
        if row.engine != "self":
            keys = [key for key in found if key[0] == row.test]
            for key in keys or [(row.test, row.precision)]:
                found.setdefault(key, []).append(row)
    return found


def verdicts(rows: Sequence[BenchRow]) -> list[str]:
    """Return verdicts on rows: a few sentences for each test and precision."""
    said: list[str] = []
    for (test, precision), group in groups_of(rows).items():
        # No sentence compares measured with modelled times.
        kinds = dict.fromkeys(row.time_kind for row in group if row.usable)
        for kind in kinds:
            usable = [row for row in group if row.usable and row.time_kind == kind]
            name = f"{test} {precision}" if kind == "real" else f"{test} {precision}, {kind} time"
            parts = _of_group(usable) if kind in COMPARED else ["no speeds are compared."]
            said.append(f"{name}: {' '.join(parts)}")
        if not kinds:
            said.append(f"{test} {precision}: nothing ran.")
    for row in rows:
        found = row.quality
        if found.quality_passed is False:
            said.append(
                f"{row.label} is left out: its logits agree with {found.quality_reference} to "
                f"{found.logits_sqnr_db or 0.0:.0f} dB, and it takes {found.quality_gate_db:.0f} dB."
            )
    return list(dict.fromkeys(said))


def _of_group(rows: Sequence[BenchRow]) -> Iterator[str]:
    best = best_of(rows)
    assert best is not None
    others = [row for row in rows if row is not best]
    rate = f"{best.times.median_ts:.1f} tokens/s"
    if not others:
        yield f"{best.label} runs {rate}."
        return
    second = best_of(others)
    assert second is not None
    change = compare_rows(second, best)
    if change.verdict == "faster":
        yield f"{best.label} is fastest with {rate}, {change} as fast as {second.label}."
    elif change.verdict == "too few samples":
        yield f"{best.label} has the best median, {rate}; more repetitions would tell whether it is fastest."
    else:
        yield f"{best.label} ({rate}) and {second.label} do not differ beyond the noise, {change}."
    yield from _of_splits(rows)


def _of_splits(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield sentences on whether splitting pays, for the best split of each division of the threads."""
    threads = dict.fromkeys((row.asked.gpu_threads, row.asked.npu_threads) for row in rows if is_split(row))
    for own in threads:
        alike = [
            row
            for row in rows
            if row.engine == "self" and (row.asked.gpu_threads, row.asked.npu_threads) == own
        ]
        split = best_of([row for row in alike if is_split(row)])
        assert split is not None
        single = best_of([row for row in alike if not is_split(row)])
        whole = whole_device(rows, split)
        names = split.label, "" if whole is None else f"{whole.label}, all cores,"
        if split.account.cut_groups == ():
            yield f"The solver splits no operator at {split.label}."
            continue
        against = "" if single is None else _against(single, split)
        if whole is not None:
            change = compare_rows(whole, split)
            if change.verdict == "faster":
                yield f"Splitting pays: {names[0]} is {change} as fast as {names[1].rstrip(',')}.{against}"
            elif change.verdict == "slower":
                back = compare_rows(split, whole)
                yield f"Splitting does not pay here: {names[1]} is {back} as fast as {names[0]}.{against}"
            elif change.verdict == "too few samples":
                yield f"{names[0]} is {change} as fast as {names[1].rstrip(',')}.{against}"
            else:
                yield f"{names[0]} and {names[1]} do not differ beyond the noise, {change}.{against}"
        elif shares_cores(split.setup.device or ""):
            yield f"Whether splitting pays is open: gpu on all cores was not measured.{against}"
        elif single is not None:
            change = compare_rows(single, split)
            words = {"faster": "pays", "slower": "does not pay"}.get(
                change.verdict, "makes no clear difference"
            )
            yield f"Splitting {words}: {split.label} against {single.label}, {change}."


def _against(single: BenchRow, split: BenchRow) -> str:
    change = compare_rows(single, split)
    return f" Against {single.label}, the best without a split on the same threads: {change}."
