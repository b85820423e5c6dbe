"""Summary of a profile: the rows that tables, pages and JSON share."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from msgspec.structs import replace

from heterollm.base import ProfileError
from heterollm.profiler.predict import Predictor, grows_within_tiles
from heterollm.profiler.records import (
    KIND_NAMES,
    BandwidthKey,
    ContentionKey,
    CopyKey,
    ExpertsKey,
    FenceKey,
    GraphKey,
    Key,
    LaunchKey,
    LayerKey,
    LinearKey,
    LinearPoint,
    PowerKey,
    Processor,
    Profile,
    Record,
    SparseKey,
    SweepKey,
)
from heterollm.profiler.summary_rows import (
    AccuracyRow,
    BandwidthRow,
    ContentionRow,
    CopyRow,
    ExpertsRow,
    Failure,
    FenceRow,
    GraphRow,
    LaunchRow,
    LayerRow,
    LinearRow,
    PowerRow,
    ProfileSummary,
    RecordTimes,
    RunRow,
    SparseRow,
    SweepRow,
)

COUNTS: Final = ("measured", "failed", "known", "left")

V = TypeVar("V", LinearKey, LayerKey, SparseKey, ExpertsKey, GraphKey, SweepKey)
K = TypeVar("K", bound=Key)

_Weight: TypeAlias = tuple[object, ...]
_Split: TypeAlias = tuple[_Weight, tuple[int, ...]]


def summarize(profile: Profile, *, accuracy: bool = True) -> ProfileSummary:
    """Summarise a profile.

    Args:
        profile: The profile.
        accuracy: Whether to fit and cross-validate the predictors, which takes seconds on a large profile.
    """
    splits = _splits(profile)
    scores, reason = _accuracy(profile) if accuracy else ((), "it was not asked for")
    sweeps = tuple(_sweeps(profile))
    return ProfileSummary(
        device=profile.device,
        time_kind=profile.time_kind,
        fingerprint=profile.fingerprint,
        description=dict(profile.description),
        runs=tuple(_run(run) for _, run in sorted(profile.runs.items())),
        linear=tuple(_linear(profile, splits)),
        layers=tuple(_layers(profile)),
        bandwidth=tuple(_bandwidth(profile)),
        contention=tuple(
            ContentionRow(key.processor, key.bound, key.beside, record.values["slowdown"])
            for key, record in profile.of_kind(ContentionKey)
            if "slowdown" in record.values
        ),
        launches=tuple(LaunchRow(key.measure, times) for key, _, times in _timed(profile.of_kind(LaunchKey))),
        hand_overs=tuple(
            FenceRow(key.strategy, key.kernel_us, times, record.values.get("processor_fraction"))
            for key, record, times in _timed(profile.of_kind(FenceKey))
        ),
        copies=tuple(
            CopyRow(key.method, key.size_bytes, times) for key, _, times in _timed(profile.of_kind(CopyKey))
        ),
        graphs=tuple(_graphs(profile, splits)),
        power=tuple(
            PowerRow(key.source, key.load, record.values["watts"])
            for key, record in profile.of_kind(PowerKey)
            if "watts" in record.values
        ),
        failures=tuple(_failures(profile.failures())),
        accuracy=scores,
        accuracy_reason=reason,
        sweeps=sweeps,
        grows_within_tiles=grows_within_tiles({row.point: row.cost_us for row in sweeps}),
        sparse=tuple(_sparse(profile)),
        experts=tuple(_experts(profile)),
    )


def _run(run: Mapping[str, Any]) -> RunRow:
    """Return a run's entry; an edited file's value that is no number counts as 0."""
    measured, failed, known, left = (_count(run.get(name)) for name in COUNTS)
    models = run.get("models")
    return RunRow(
        started_s=float(run["started_s"]),
        seconds=_number(run.get("seconds")),
        finished=run["finished"],
        measured=measured,
        failed=failed,
        known=known,
        left=left,
        drift_fraction={str(name): _number(value) for name, value in _entries(run.get("drift_fraction"))},
        skipped={str(name): _count(value) for name, value in _entries(run.get("skipped"))},
        models=tuple(map(str, models)) if isinstance(models, list) else (),
    )


def _entries(value: object) -> Iterable[tuple[object, object]]:
    return value.items() if isinstance(value, dict) else ()


def _number(value: object) -> float:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if sound else 0.0  # type: ignore[arg-type]


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _weight(point: LinearPoint) -> _Weight:
    """Return the fields that all shards of a group share."""
    return point.group, len(point.member_rows), point.columns, point.bits, point.block, point.integer_inputs


def _splits(profile: Profile) -> set[_Split]:
    """Return the shards of splits of which the other shard and the whole group were measured too."""
    rows: dict[Processor, dict[_Weight, set[tuple[int, ...]]]] = {
        "gpu": defaultdict(set),
        "npu": defaultdict(set),
    }
    for key, _ in profile.of_kind(LinearKey):
        rows[key.processor][_weight(key.point)].add(key.point.member_rows)
    found: set[_Split] = set()
    for weight, npu_rows in rows["npu"].items():
        gpu_rows = rows["gpu"][weight]
        for own in npu_rows:
            for rest in gpu_rows:
                both = tuple(a + b for a, b in zip(own, rest, strict=True))
                if both in npu_rows or both in gpu_rows:
                    found |= {(weight, own), (weight, rest)}
    return found | set(_ffn_splits(rows, found))


def _ffn_splits(
    rows: Mapping[Processor, Mapping[_Weight, set[tuple[int, ...]]]], splits: set[_Split]
) -> Iterator[_Split]:
    """Yield the shards of an ffn that are narrower than its gate and up projections."""
    for weight, widths in rows["npu"].items():
        if weight[0] != "ffn":
            continue
        plain: _Weight = ("gate_up", *weight[1:])
        both = {*rows["gpu"].get(plain, ()), *rows["npu"].get(plain, ())}
        whole = {own for own in both if (plain, own) not in splits} or {max(widths)}
        yield from ((weight, own) for own in widths if own not in whole)


def _newest(profile: Profile, kind: type[V]) -> Iterator[tuple[V, Record]]:
    """Yield records with versioned keys; of several versions the one measured last."""
    found: dict[V, tuple[V, Record]] = {}
    for key, record in profile.of_kind(kind):
        plain = replace(key, code="")
        if plain not in found or found[plain][1].taken_s <= record.taken_s:
            found[plain] = key, record
    yield from found.values()


def _timed(found: Iterable[tuple[K, Record]]) -> Iterator[tuple[K, Record, RecordTimes]]:
    """Yield the records that have samples, with the statistics of these."""
    for key, record in found:
        times = RecordTimes.of(record)
        if times is not None:
            yield key, record, times


def _linear(profile: Profile, splits: set[_Split]) -> Iterator[LinearRow]:
    for key, record, times in _timed(_newest(profile, LinearKey)):
        whole = (_weight(key.point), key.point.member_rows) not in splits
        rate = key.point.flops / times.median_us / 1e3
        yield LinearRow(key.processor, key.point, whole, times, rate, record.values.get("cpu_us"))


def _layers(profile: Profile) -> Iterator[LayerRow]:
    for key, _, times in _timed(_newest(profile, LayerKey)):
        sizes = (key.tokens, key.context, key.hidden, key.heads, key.kv_heads, key.head_dim)
        yield LayerRow(key.operator, *sizes, times)


def _sparse(profile: Profile) -> Iterator[SparseRow]:
    for key, _, times in _timed(_newest(profile, SparseKey)):
        sizes = (key.tokens, key.keys, key.heads, key.group, key.head_dim, key.keep)
        yield SparseRow(key.operator, *sizes, times)


def _experts(profile: Profile) -> Iterator[ExpertsRow]:
    for key, _, times in _timed(_newest(profile, ExpertsKey)):
        sizes = key.experts, key.tokens, key.columns, key.width
        yield ExpertsRow(key.operator, *sizes, str(key.weight), key.form, times)


def _bandwidth(profile: Profile) -> Iterator[BandwidthRow]:
    for key, record in profile.of_kind(BandwidthKey):
        if "gbps" in record.values:
            rate = record.values["gbps"]
            yield BandwidthRow(key.processor, key.size_bytes, key.together, rate, RecordTimes.of(record))


def _graphs(profile: Profile, splits: set[_Split]) -> Iterator[GraphRow]:
    for key, record in _newest(profile, GraphKey):
        whole = (_weight(key.point), key.point.member_rows) not in splits
        load_us = record.median_us if record.samples_us else None
        values = record.values
        yield GraphRow(key.point, whole, values.get("build_us"), load_us, values.get("size_bytes"))


def _sweeps(profile: Profile) -> Iterator[SweepRow]:
    for key, record in _newest(profile, SweepKey):
        cpu_us = record.values.get("cpu_us", 0.0)
        if cpu_us > 0 or record.samples_us:
            yield SweepRow(key.point, cpu_us if cpu_us > 0 else record.median_us, cpu_us > 0)


def _failures(records: Iterable[Record]) -> Iterator[Failure]:
    counts = Counter((KIND_NAMES[type(record.key)], record.error) for record in records)
    for (kind, error), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield Failure(kind, error, count)


def _accuracy(profile: Profile) -> tuple[tuple[AccuracyRow, ...], str]:
    try:
        predictor = Predictor.fit(profile)
    except ProfileError as error:
        return (), error.message
    rows = tuple(
        AccuracyRow(score, score.model == held.fit.model.name)
        for held in predictor.processors.values()
        for score in held.fit.scores
    )
    return rows, "" if rows else "there is one weight shape only, and none to be kept out of a fit"
