"""Two sets of rows side by side: what became faster or slower beyond the noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heterollm.base import InputError
from heterollm.benchmarks.rows import BenchRow
from heterollm.benchmarks.significance import Change, compare_times

__all__ = ["Compared", "Comparison", "compare_row_sets"]

Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One test with one configuration, in both sets.

    Args:
        label: The configuration.
        test: The test.
        before_ts: Tokens a second of the first set, by the median of the samples that are compared.
        after_ts: Those of the second.
        change: What may be said.
    """

    label: str
    test: str
    before_ts: float
    after_ts: float
    change: Change


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two sets have in common, and what only one has.

    Args:
        compared: The pairs, in the order of the first set.
        only_before: Label and test of what the second lacks.
        only_after: Label and test of what the first lacks.
        differences: In what the two runs differ that should not matter, or does: machine, libraries.
    """

    compared: tuple[Compared, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def slower(self) -> tuple[Compared, ...]:
        """What became slower beyond the noise."""
        return tuple(one for one in self.compared if one.change.verdict == "slower")

    @property
    def faster(self) -> tuple[Compared, ...]:
        """What became faster beyond the noise."""
        return tuple(one for one in self.compared if one.change.verdict == "faster")


def compare_row_sets(before: Sequence[BenchRow], after: Sequence[BenchRow]) -> Comparison:
    """Compare two sets of rows, test by test, by the rule of :mod:`heterollm.benchmarks.significance`.

    Samples of rows that say the same are taken together; samples during which others computed are left out
    where enough undisturbed ones are there on both sides. Rows that failed, or computed something else, are
    no rows here.

    Args:
        before: The rows that are compared with.
        after: The rows that are judged.

    Raises:
        InputError: They have times of different kinds, such as measured and simulated ones.
    """
    kinds = sorted({row.time_kind for row in (*before, *after) if row.usable and row.time_kind})
    if len(kinds) > 1:
        raise InputError(
            f"The rows have times of different kinds ({', '.join(kinds)}), which are not compared.",
            fix="Compare files with times of one kind.",
        )
    first, second = _by_key(before), _by_key(after)
    compared = []
    for key, rows in first.items():
        if key in second:
            others = second[key]
            times = _times(rows, others)
            change = compare_times(*times)
            rates = [rows[0].tokens / statistics.median(side) * 1e6 for side in times]
            compared.append(Compared(rows[0].label, rows[0].test, rates[0], rates[1], change))
    return Comparison(
        tuple(compared),
        tuple(_name(rows[0]) for key, rows in first.items() if key not in second),
        tuple(_name(rows[0]) for key, rows in second.items() if key not in first),
        tuple(_differences(before, after)),
    )


def _by_key(rows: Sequence[BenchRow]) -> dict[Key, list[BenchRow]]:
    found: dict[Key, list[BenchRow]] = {}
    for row in rows:
        if row.usable:
            key = (
                row.label,
                row.test,
                row.engine,
                row.asked.asked_level,
                row.asked.group_size,
                row.setup.model_type,
                row.time_kind,
            )
            found.setdefault(key, []).append(row)
    return found


def _times(before: Sequence[BenchRow], after: Sequence[BenchRow]) -> tuple[list[float], list[float]]:
    def taken(rows: Sequence[BenchRow], *, calm: bool) -> list[float]:
        return [
            time
            for row in rows
            for time, disturbed in zip(row.times_us, row.times.samples_disturbed, strict=True)
            if not (calm and disturbed)
        ]

    calm = taken(before, calm=True), taken(after, calm=True)
    if min(map(len, calm)) >= CALM_SAMPLES:
        return calm
    return taken(before, calm=False), taken(after, calm=False)


CALM_SAMPLES = 3
"""With so many undisturbed samples on either side the others are left out."""


def _name(row: BenchRow) -> str:
    return f"{row.test}, {row.label}"


def _differences(before: Sequence[BenchRow], after: Sequence[BenchRow]) -> list[str]:
    found = []
    for what in ("cpu_info", "heterollm_version", "fingerprint"):
        sides = [sorted({str(getattr(row.setup, what)) for row in rows}) for rows in (before, after)]
        if sides[0] != sides[1]:
            found.append(f"{what}: {', '.join(sides[0])} before, {', '.join(sides[1])} after")
    sides = [sorted({str(row.asked.seed) for row in rows}) for rows in (before, after)]
    if sides[0] != sides[1]:
        found.append(f"seed: {', '.join(sides[0])} before, {', '.join(sides[1])} after")
    for name in sorted({name for row in (*before, *after) for name in row.setup.versions}):
        sides = [sorted({row.setup.versions.get(name, "none") for row in rows}) for rows in (before, after)]
        if sides[0] != sides[1]:
            found.append(f"{name}: {', '.join(sides[0])} before, {', '.join(sides[1])} after")
    return found
