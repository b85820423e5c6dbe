"""Comparison of two profiles: measurements that became faster or slower, beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from msgspec import structs

from heterollm.base import ProfileError
from heterollm.profiler.measure import Measurement
from heterollm.profiler.records import (
    KIND_NAMES,
    DriftKey,
    ExpertsKey,
    GraphKey,
    Key,
    LayerKey,
    LinearKey,
    LinearPoint,
    Profile,
    Record,
    SparseKey,
    SweepKey,
)

PairVerdict: TypeAlias = Literal["no change", "faster", "slower", "only in A", "only in B", "failed"]


@dataclass(frozen=True, slots=True)
class RecordPair:
    """The same measurement in two profiles.

    Args:
        kind: Its kind, as in the file.
        label: The measurement in words.
        first_us: Median in the first; None where it has none.
        second_us: Median in the second.
        ratio: Second divided by first; None where one is missing.
        verdict: ``no change`` where the quartiles overlap, else the direction of the difference.
    """

    kind: str
    label: str
    first_us: float | None
    second_us: float | None
    ratio: float | None
    verdict: PairVerdict


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All measurements of one kind.

    Args:
        kind: Its name in the file.
        both: Number measured in both profiles.
        faster: Number of those that are faster in the second.
        slower: Number of those that are slower in the second.
        ratio: Geometric mean of second divided by first; None where none is in both.
        only_first: Number in the first alone.
        only_second: Number in the second alone.
        failed: Number that failed in one of them or in both.
    """

    kind: str
    both: int
    faster: int
    slower: int
    ratio: float | None
    only_first: int
    only_second: int
    failed: int


@dataclass(frozen=True, slots=True)
class ProfileComparison:
    """Two profiles side by side.

    Args:
        first: Device and fingerprint of the first.
        second: Those of the second.
        differences: Entries in which the devices differ, and their values.
        pairs: The measurements.
        kinds: Their summaries.
    """

    first: str
    second: str
    differences: Mapping[str, tuple[Any, Any]]
    pairs: tuple[RecordPair, ...]
    kinds: tuple[KindSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return asdict(self)


def compare(first: Profile, second: Profile) -> ProfileComparison:
    """Compare the measurements of two profiles.

    Versions of kernels and graph builder do not matter: of several, the one measured last counts.

    Raises:
        ProfileError: The profiles have times of different kinds.
    """
    if first.time_kind != second.time_kind:
        raise ProfileError(
            f"One profile has {first.time_kind} time and the other {second.time_kind} time.",
            fix="Compare profiles of the same kind of time.",
        )
    ours, theirs = _newest(first), _newest(second)
    keys = sorted({*ours, *theirs}, key=lambda key: (list(KIND_NAMES).index(type(key)), structs.astuple(key)))
    pairs = tuple(_pair(key, ours.get(key), theirs.get(key)) for key in keys)
    names = dict.fromkeys([*first.description, *second.description])
    differences = {
        name: (first.description.get(name), second.description.get(name))
        for name in names
        if first.description.get(name) != second.description.get(name)
    }
    labels = [f"{profile.device} {profile.fingerprint}" for profile in (first, second)]
    return ProfileComparison(labels[0], labels[1], differences, pairs, tuple(_kinds(pairs)))


def describe(key: Key) -> str:
    """Return a key in words."""
    values = structs.asdict(key)
    values.pop("code", None)
    point = values.pop("point", None)
    words = [str(values.pop("processor"))] if "processor" in values else []
    if isinstance(point, LinearPoint):
        rows = "+".join(map(str, point.member_rows))
        shape = point.shape if point.is_ffn else f"{rows} x {point.columns}"
        words += [point.group, shape, f"{point.tokens} tokens", str(point.weight)]
        words += [point.form] if point.form else []
        words += ["int8 inputs"] if point.integer_inputs else []
        words += [] if point.streamed else ["cached"]
    for name, value in values.items():
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, str):
            words.append(f"beside {value}" if name == "beside" else value)
        elif value:
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _newest(profile: Profile) -> dict[Key, Record]:
    """Return the records with samples and the failed ones, by keys without versions."""
    found: dict[Key, Record] = {}
    for key, record in profile.records.items():
        if isinstance(key, DriftKey) or not (record.samples_us or record.failed):
            continue
        plain: Key = (
            structs.replace(key, code="")
            if isinstance(key, LinearKey | LayerKey | SparseKey | ExpertsKey | GraphKey | SweepKey)
            else key
        )
        held = found.get(plain)
        if held is None or (held.failed, record.taken_s) >= (record.failed, held.taken_s):
            found[plain] = record
    return found


def _pair(key: Key, first: Record | None, second: Record | None) -> RecordPair:
    kind, label = KIND_NAMES[type(key)], describe(key)
    times = [None if record is None or record.failed else record.median_us for record in (first, second)]
    if first is None or second is None:
        verdict: PairVerdict = "only in B" if first is None else "only in A"
        return RecordPair(kind, label, times[0], times[1], None, verdict)
    if times[0] is None or times[1] is None:
        return RecordPair(kind, label, times[0], times[1], None, "failed")
    low, high = Measurement(first.samples_us).quartiles_us
    other_low, other_high = Measurement(second.samples_us).quartiles_us
    verdict = "slower" if other_low > high else "faster" if other_high < low else "no change"
    return RecordPair(kind, label, times[0], times[1], times[1] / times[0], verdict)


def _kinds(pairs: tuple[RecordPair, ...]) -> Iterator[KindSummary]:
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        own = [pair for pair in pairs if pair.kind == kind]
        ratios = [pair.ratio for pair in own if pair.ratio is not None]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
        verdicts = [pair.verdict for pair in own]
        yield KindSummary(
            kind=kind,
            both=len(ratios),
            faster=verdicts.count("faster"),
            slower=verdicts.count("slower"),
            ratio=mean,
            only_first=verdicts.count("only in A"),
            only_second=verdicts.count("only in B"),
            failed=verdicts.count("failed"),
        )
