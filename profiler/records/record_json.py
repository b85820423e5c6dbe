"""Records as lines of JSON and back, every field checked."""

from __future__ import annotations

import json
import statistics
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from heterollm.base import Amount, Number
from heterollm.profiler.records.records import (
    KINDS,
    ExpertsKey,
    GraphKey,
    Key,
    LinearKey,
    LinearPoint,
    Record,
    SweepKey,
)

KIND_NAMES: Final[dict[type[Key], str]] = {kind: name for name, kind in KINDS.items()}
MAX_TEXT: Final = 4000
LARGEST_CODE_BITS: Final = 8
MOST_FLOPS: Final = 1e18
"""Largest work of one shard, a day's work of a phone: the reader refuses larger sizes."""

DIGITS: Final = 3
"""Decimals of a time: nanoseconds."""

Time = Annotated[float, Meta(gt=0, le=1e300)]


class _Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A record as its line has it; :data:`RecordLine` is one class for each kind of key."""

    key: Any
    median_us: Amount | None = None
    samples_us: tuple[Time, ...] = ()
    warmup_us: tuple[Time, ...] = ()
    values: dict[str, Number] = {}
    error: str = ""
    taken_s: Number
    expected_us: Amount = 0.0

    def __post_init__(self) -> None:
        if not (self.samples_us or self.values or self.error):
            raise ValueError("there is neither a measurement nor an error")
        if isinstance(self.key, LinearKey | GraphKey | SweepKey) and not _possible(self.key.point):
            raise ValueError(f"there cannot be a linear layer {self.key.point}")
        if isinstance(self.key, ExpertsKey) and not _possible_experts(self.key):
            raise ValueError(f"there cannot be experts {self.key}")

    def record(self) -> Record:
        """Return the record."""
        taken = self.samples_us, self.warmup_us, self.values, self.error, self.taken_s
        return Record(self.key, *taken, self.expected_us)


RecordLine: Final[Any] = reduce(
    or_,
    (
        msgspec.defstruct(
            f"{kind.__name__.removesuffix('Key')}Record",
            [("key", kind)],
            bases=(_Line,),
            tag=name,
            frozen=True,
            kw_only=True,
            forbid_unknown_fields=True,
        )
        for name, kind in KINDS.items()
    ),
)
"""A line of a profile, told apart by ``kind``."""


def record_line(record: Record) -> str:
    """Return a record as one line of JSON; the median and the spread are there for people."""
    samples = [round(sample, DIGITS) for sample in record.samples_us]
    line: dict[str, Any] = {"kind": KIND_NAMES[type(record.key)], "key": msgspec.to_builtins(record.key)}
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
    if record.disturbed:
        line["expected_us"] = round(record.expected_us, DIGITS)
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def _possible(point: LinearPoint) -> bool:
    """Whether a shard can have been measured: it has a size, and its weights a format."""
    blocks = _has_blocks(point)
    # Gate, if there is one, and up are as wide as each other.
    matched = not point.is_ffn or (len(point.member_rows) <= 2 and len(set(point.member_rows)) == 1)
    return point.rows > 0 and point.flops < MOST_FLOPS and blocks and matched


def _possible_experts(key: ExpertsKey) -> bool:
    return key.flops < MOST_FLOPS and _has_blocks(key) and key.chosen <= key.experts


def _has_blocks(key: LinearPoint | ExpertsKey) -> bool:
    """Whether weights have blocks as their bits demand."""
    return (key.block > 0) == (key.bits <= LARGEST_CODE_BITS)
