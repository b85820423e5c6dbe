"""Records as lines of JSON and back, every field checked."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from heterollm.profiler.records.records import KINDS, GraphKey, Key, LinearKey, LinearPoint, Record, SweepKey

__all__ = ["record_from_dict", "record_line"]

KIND_NAMES: Final[dict[type[Key], str]] = {kind: name for name, kind in KINDS.items()}
LINE_FIELDS: Final = frozenset(
    {"kind", "key", "median_us", "samples_us", "warmup_us", "values", "error", "taken_s"}
)
MAX_TEXT: Final = 4000
WEIGHT_BITS: Final = (4, 8, 16, 32)
LARGEST_CODE_BITS: Final = 8
MOST_FLOPS: Final = 1e18
"""Of one slice, a day's work of a phone: sizes beyond are no sizes."""

DIGITS: Final = 3
"""Decimals of a time: nanoseconds."""

T = TypeVar("T")


def record_line(record: Record) -> str:
    """Return a record as one line of JSON; the median and the spread are there for people."""
    samples = [round(sample, DIGITS) for sample in record.samples_us]
    line: dict[str, Any] = {"kind": KIND_NAMES[type(record.key)], "key": _plain(record.key)}
    if samples:
        line["median_us"] = round(statistics.median(samples), DIGITS)
        line["samples_us"] = samples
    if record.warmup_us:
        line["warmup_us"] = [round(sample, DIGITS) for sample in record.warmup_us]
    if record.values:
        line["values"] = {name: float(value) for name, value in record.values.items()}
    if record.error:
        line["error"] = record.error[:MAX_TEXT]
    line["taken_s"] = float(record.taken_s)
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def record_from_dict(line: object) -> Record:
    """Return the record that :func:`record_line` wrote.

    Raises:
        ValueError: Something is missing, unknown, or of the wrong type or range.
    """
    if not isinstance(line, dict):
        raise ValueError(f"{line!r:.80} is not an object")
    unknown = set(line) - {
        "kind",
        "key",
        "median_us",
        "samples_us",
        "warmup_us",
        "values",
        "error",
        "taken_s",
    }
    if unknown:
        raise ValueError(f"there is no field {min(unknown)!r:.80}")
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is {kind!r:.80}")
    values = line.get("values", {})
    error = line.get("error", "")
    if not isinstance(values, dict) or not isinstance(error, str):
        raise ValueError(f"values {values!r:.80} or error {error!r:.80} has the wrong type")
    key = _read(KINDS[kind], line.get("key"))
    if isinstance(key, LinearKey | GraphKey | SweepKey) and not _possible(key.point):
        raise ValueError(f"there cannot be a linear layer {key.point}")
    record = Record(
        key=key,
        samples_us=_times(line.get("samples_us", [])),
        warmup_us=_times(line.get("warmup_us", [])),
        values={name: _number(value) for name, value in values.items()},
        error=error,
        taken_s=_number(line.get("taken_s")),
    )
    if not (record.samples_us or record.values or record.error):
        raise ValueError("there is neither a measurement nor an error")
    return record


def _possible(point: LinearPoint) -> bool:
    """Whether a slice can have been measured: it has a size, and its weights a format."""
    sized = min(point.tokens, point.rows, point.columns) > 0 and point.flops < MOST_FLOPS
    blocks = point.block > 0 if point.bits <= LARGEST_CODE_BITS else point.block == 0
    # Gate and up are as wide as each other.
    matched = not point.is_block or (len(point.member_rows) == 2 and len(set(point.member_rows)) == 1)
    return sized and blocks and matched and point.bits in WEIGHT_BITS


def _plain(value: Any) -> Any:  # noqa: ANN401 - a key or a part of one
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    return list(value) if isinstance(value, tuple) else value


@cache
def _hints(kind: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a dataclass
    return get_type_hints(kind)


def _read(kind: type[T], value: object) -> T:
    """Build a key from JSON by the types of its fields."""
    hints = _hints(cast("Hashable", kind))
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"a {kind.__name__} has the fields {', '.join(hints)}, not {value!r:.160}")
    return kind(**{name: _field(name, hint, value[name]) for name, hint in hints.items()})


def _field(name: str, hint: Any, value: Any) -> Any:  # noqa: ANN401 - as many types as fields
    if isinstance(hint, type) and is_dataclass(hint):
        return _read(hint, value)
    if get_origin(hint) is Literal:
        sound = value in get_args(hint) and isinstance(value, str)
    elif get_origin(hint) is tuple:
        sound = isinstance(value, list) and bool(value) and all(_is_count(item) for item in value)
        value = tuple(value) if sound else value
    elif hint is int:
        sound = _is_count(value)
    else:
        sound = type(value) is hint
    if not sound:
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _times(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list of times")
    times = tuple(_number(item) for item in value)
    if any(item <= 0 for item in times):
        raise ValueError(f"a time is {min(times)} microseconds")
    return times


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.80} is not a number")
    return float(value)
