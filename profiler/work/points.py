"""Points to measure of linear groups and ffns, for the shapes of each model.

A point is worth measuring where a plan can use it: standard lengths on the NPU, rows on its alignment, forms
that it offers. The rest is left out and counted (design, section 8: "pruned by the stage rule").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from msgspec import structs

from heterollm.kernels.npu import (
    INTEGER_FORMS,
    K_SPLIT_COLUMNS,
    TILE_OF_INTEGERS,
    FfnShape,
    GraphForm,
    LinearShape,
    NpuBackend,
)
from heterollm.kernels.ops import Activation, OpSpec
from heterollm.model import ModelShape
from heterollm.profiler.records import LinearPoint, Processor
from heterollm.profiler.work.workload import HEAD_TOKENS, ffn_alignment, rest_rows, split_rows

Tier: TypeAlias = Literal[0, 1, 2]
"""0: without it no plan can be made. 1: measured by default. 2: the full grid."""

SkipReason: TypeAlias = Literal["alignment", "stage", "linear", "unsupported", "buffer", "form", "hopeless"]
"""Why a point is not measured.

``alignment``: its rows, once aligned, are none, all, or another split's. ``stage``: it lies between measured
splits that are whole stages of the NPU. ``linear``: it lies between measured splits of the GPU.
``unsupported``: the NPU has no form for it. ``buffer``: it exceeds the largest one. ``form``: its form was
poor elsewhere. ``hopeless``: the NPU is so much slower than the GPU that no split can pay.
"""

NPU_FRACTIONS: Final[Mapping[float, Tier]] = {
    **dict.fromkeys((0.5,), 0),
    **dict.fromkeys((0.25, 0.75, 0.875), 1),
    **dict.fromkeys((0.125, 0.375, 0.625), 2),
}
"""Shares of each member's rows that the NPU takes in a split, and the first tier that measures them."""

FFN_FRACTIONS: Final[Mapping[float, Tier]] = {
    **dict.fromkeys((0.5,), 0),
    **dict.fromkeys((0.25, 0.75), 1),
    **dict.fromkeys((0.125, 0.375, 0.625, 0.875), 2),
}
"""Shares of an ffn's width that the NPU takes in a split, and the first tier that measures them."""

FIRST_DECODE_FRACTION: Final = 0.25
"""Measured from the first tier on in decode, where splits of an ffn gain most and a run is short."""

FFN_ACTIVATION: Final[Activation] = "silu"
"""Activation of measured ffns: beside three products the choice hardly changes the time."""

GPU_TOKENS: Final[Mapping[int, Tier]] = {
    **dict.fromkeys((1, 64, 256), 0),
    **dict.fromkeys((2, 3, 4, 8, 16, 32, 128, 512), 1),
    **dict.fromkeys((6, 12, 24, 44, 96, 192, 384, 1024), 2),
}
"""Tokens at which a whole group is measured on the GPU. Up to 8 a kernel has steps of its own, and from some
of them on computing takes longer than reading weights; above, time is near linear."""

SPLIT_TOKENS: Final = (1, 64, 256)
"""Tokens at which the default run measures splits, and sees whether time is linear in rows. The narrowest
split is among them, so that times of others lie between measured ones."""

NPU_FIRST_LENGTHS: Final = (1, 256)
"""Lengths that no plan can do without: decode, and a prompt."""

INTEGER_FIRST_LENGTH: Final = 256
"""The same of integer forms, beside their shortest graph. They count like the default form, since
nothing else needs stepped scales, or one for a tensor."""

NPU_SPLIT_LENGTHS: Final = (*SPLIT_TOKENS, 32)
FFN_SPLIT_LENGTHS: Final = (*NPU_FIRST_LENGTHS, 32)
"""The same on the NPU: a graph of 32 tokens runs decode of a few tokens and short prompts."""

LONGEST_DEFAULT: Final = 1024
"""Length above which the NPU is left to the full grid: time grows with length there."""

LONGEST_DEFAULT_FFN: Final = 512
"""The same for an ffn, three times as large as most groups."""

STAGE_ROWS: Final = 32
"""Output rows of a tile of the NPU: between multiples of it time moves in whole stages
(HeteroLLM, section 3, "stage performance")."""


@dataclass(frozen=True, slots=True)
class _Splits:
    """The splits of a group: the NPU's rows with their tiers, and the numbers of splits left out."""

    tiers: Mapping[tuple[int, ...], Tier]
    unaligned: int = 0
    between: int = 0


@dataclass(slots=True)
class SkippedPoints:
    """Numbers of points left out, by reason."""

    counts: Counter[SkipReason] = field(default_factory=Counter)

    def add(self, reason: SkipReason, count: int = 1) -> None:
        """Count points that are left out."""
        if count:
            self.counts[reason] += count

    @property
    def total(self) -> int:
        """Points left out for any reason."""
        return self.counts.total()

    def to_dict(self) -> dict[str, int]:
        """Return the counts by reason, for the run's entry in a profile."""
        return dict(sorted(self.counts.items()))


@dataclass(frozen=True, slots=True)
class WorkPoint:
    """A point to measure.

    Args:
        processor: The processor.
        point: The shard.
        tier: The tier.
        spec: The whole group.
    """

    processor: Processor
    point: LinearPoint
    tier: Tier
    spec: OpSpec

    @property
    def is_core(self) -> bool:
        """Whether a plan needs it even where time is short: a whole group, and on the NPU not the head."""
        whole = self.point.member_rows == self.spec.member_rows and not self.point.is_ffn
        return self.tier == 0 and whole and (self.processor == "gpu" or self.spec.group != "head")


def enumerate_points(
    shapes: Iterable[ModelShape],
    npu: NpuBackend | None,
    *,
    cache_bytes: int,
    max_buffer_bytes: int,
) -> tuple[list[WorkPoint], SkippedPoints]:
    """List the points of every shape, coarse ones first, each once.

    Args:
        shapes: The models.
        npu: The device's NPU, if it has one: its lengths, alignment and forms decide.
        cache_bytes: Last-level cache; models that do not fit have their weights streamed.
        max_buffer_bytes: Largest buffer of the GPU.

    Returns:
        The points in order of tier, then model and group, so that an interrupted run covers every shape on
        both processors; and the skipped points.
    """
    skipped = SkippedPoints()
    found: dict[tuple[Processor, LinearPoint], WorkPoint] = {}
    for shape in shapes:
        streamed = shape.streamed(cache_bytes)
        for point in _shape_points(shape, npu, max_buffer_bytes, skipped):
            own = replace(point, point=structs.replace(point.point, streamed=streamed))
            key = (own.processor, own.point)
            held = found.setdefault(key, own)
            found[key] = replace(held, tier=min(held.tier, own.tier))
    return sorted(found.values(), key=lambda point: point.tier), skipped


def _shape_points(
    shape: ModelShape, npu: NpuBackend | None, max_buffer_bytes: int, skipped: SkippedPoints
) -> Iterator[WorkPoint]:
    for spec in shape.specs:
        splits = _Splits({}) if npu is None else _splits_of(spec, npu.row_alignment, NPU_FRACTIONS)
        yield from _gpu_points(spec, splits, max_buffer_bytes, skipped)
        if npu is not None:
            yield from _npu_points(spec, npu, splits, skipped)
    if npu is not None:
        for spec in shape.blocks:
            yield from _ffn_points(spec, npu, skipped)


def _splits_of(
    spec: OpSpec, alignment: int, fractions: Mapping[float, Tier], widths: Sequence[int] = ()
) -> _Splits:
    """Return the distinct legal splits of a group: at fractions, the narrowest, and those of more widths."""
    tiers: dict[tuple[int, ...], Tier] = {}
    longest = max(spec.member_rows)
    # The lowest tier first: it keeps a split that several fractions round to.
    for fraction, tier in sorted(fractions.items(), key=lambda item: item[1]):
        rows = split_rows(spec.member_rows, fraction, alignment)
        if any(rows) and rows != spec.member_rows:
            tiers.setdefault(rows, tier)
    unaligned = len(fractions) - len(tiers)
    for width in (alignment, *widths):
        if width < longest:
            rows = split_rows(spec.member_rows, width / longest, alignment)
            tiers[rows] = min(tiers.get(rows, 1), 1)
    possible = (longest - 1) // alignment
    return _Splits(dict(sorted(tiers.items())), unaligned, max(0, possible - len(tiers)))


def _gpu_points(
    spec: OpSpec, splits: _Splits, max_buffer_bytes: int, skipped: SkippedPoints
) -> Iterator[WorkPoint]:
    # Larger weights are in several buffers, of whole tiles of 64 rows.
    fits = spec.weight.weight_bytes(64, spec.columns) <= max_buffer_bytes
    for tokens, tier in _gpu_tokens(spec).items():
        if not fits:
            skipped.add("buffer", 1 + len(splits.tiers))
            continue
        yield WorkPoint("gpu", LinearPoint.of(spec, tokens), tier, spec)
        skipped.add("linear", splits.between)
        for npu_rows, split_tier in splits.tiers.items():
            if tier == 2:
                skipped.add("linear")
                continue
            point = LinearPoint.of(spec, tokens, member_rows=rest_rows(spec.member_rows, npu_rows))
            own_tier = max(tier, split_tier) if tokens in SPLIT_TOKENS else 2
            yield WorkPoint("gpu", point, own_tier, spec)


def _gpu_tokens(spec: OpSpec) -> Mapping[int, Tier]:
    """Return the tokens of a group; the head's are one, or as many as it takes at a time."""
    if spec.group != "head":
        return GPU_TOKENS
    tiers: dict[int, Tier] = {tokens: 2 for tokens in GPU_TOKENS if tokens <= HEAD_TOKENS}
    # A few tokens at once: speculative decoding, and the steps of kernels up to 8 tokens.
    return tiers | {1: 0, 8: 1, HEAD_TOKENS: 1}


def _npu_points(
    spec: OpSpec, npu: NpuBackend, splits: _Splits, skipped: SkippedPoints
) -> Iterator[WorkPoint]:
    lengths = [length for length in npu.standard_lengths if spec.group != "head" or length <= HEAD_TOKENS]
    # Between whole stages of the NPU time is linear in rows.
    between = splits.between if npu.row_alignment % STAGE_ROWS == 0 else 0
    for length in lengths:
        forms = npu.forms(LinearShape(spec.weight, spec.columns, spec.integer_inputs), length)
        if not forms:
            skipped.add("unsupported", 1 + len(splits.tiers))
        for form in forms:
            default = form == forms[0] or form in INTEGER_FORMS
            tier: Tier = 0 if length in _first_lengths(form) else 1 if length <= LONGEST_DEFAULT else 2
            # Plans can do without the other forms, and without most of their splits.
            tier = tier if default else max(tier, 1)
            yield WorkPoint("npu", LinearPoint.of(spec, length, form=form), tier, spec)
            skipped.add("alignment", splits.unaligned)
            skipped.add("stage", between)
            for npu_rows, split_tier in splits.tiers.items():
                point = LinearPoint.of(spec, length, member_rows=npu_rows, form=form)
                wanted = length in NPU_SPLIT_LENGTHS and (default or split_tier == 0)
                yield WorkPoint("npu", point, max(tier, split_tier) if wanted else 2, spec)


def _ffn_points(spec: OpSpec, npu: NpuBackend, skipped: SkippedPoints) -> Iterator[WorkPoint]:
    """Yield an ffn's widths on the NPU; the GPU's shard is several operators, each measured by itself."""
    alignment = ffn_alignment(spec.weight, npu.row_alignment)
    # The width is the number of inputs of the down projection.
    splits = _splits_of(spec, alignment, FFN_FRACTIONS, (K_SPLIT_COLUMNS, K_SPLIT_COLUMNS + alignment))
    small = split_rows(spec.member_rows, FIRST_DECODE_FRACTION, alignment)
    widths: dict[tuple[int, ...], Tier] = {spec.member_rows: 0, **splits.tiers}
    between = splits.between if alignment % STAGE_ROWS == 0 else 0
    for length in npu.standard_lengths:
        for rows, split_tier in widths.items():
            shape = FfnShape.of(spec, rows[0], FFN_ACTIVATION)
            forms = npu.forms(shape, length)
            if not forms:
                skipped.add("unsupported")
            elif rows == spec.member_rows:
                skipped.add("alignment", len(forms) * splits.unaligned)
                skipped.add("stage", len(forms) * between)
            for form in forms:
                first = length in _first_lengths(form)
                tier: Tier = 0 if first else 1 if length <= LONGEST_DEFAULT_FFN else 2
                if rows != spec.member_rows:
                    tier = max(tier, split_tier) if length in FFN_SPLIT_LENGTHS else 2
                    if length == min(_first_lengths(form)) and rows == small:
                        tier = 0
                # Plans can do without the other forms.
                if form != forms[0] and form not in INTEGER_FORMS:
                    tier = 1 if first and tier == 0 and form == forms[1] else 2
                yield WorkPoint("npu", LinearPoint.of(spec, length, member_rows=rows, form=form), tier, spec)


def _first_lengths(form: GraphForm) -> tuple[int, ...]:
    tile = TILE_OF_INTEGERS.get(form)
    return NPU_FIRST_LENGTHS if tile is None else (tile, INTEGER_FIRST_LENGTH)
