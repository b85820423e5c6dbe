"""Points to measure of linear groups and ffns, for the shapes of each model.

A point is worth measuring where a plan can use it: standard lengths on the NPU, rows on its alignment, forms
that it offers. The rest is left out and counted (design, section 8: "pruned by the stage rule").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from msgspec import structs

from heterollm.base import round_up
from heterollm.kernels.npu import NpuBackend
from heterollm.kernels.ops import Activation, OpSpec
from heterollm.model import ModelShape
from heterollm.profiler.records import LinearPoint, Part
from heterollm.profiler.work.workload import HEAD_TOKENS, ffn_alignment, rest_rows, split_rows

__all__ = [
    "BLOCK_FRACTIONS",
    "CUT_TOKENS",
    "FFN_ACTIVATION",
    "GPU_TOKENS",
    "NPU_FIRST_LENGTHS",
    "NPU_FRACTIONS",
    "SkipReason",
    "Skipped",
    "Tier",
    "WorkPoint",
    "enumerate_points",
]

Tier: TypeAlias = Literal[0, 1, 2]
"""0: without it no plan can be made. 1: measured by default. 2: the full grid."""

SkipReason: TypeAlias = Literal["alignment", "stage", "linear", "unsupported", "buffer", "form", "hopeless"]
"""Why a point is not measured.

``alignment``: its rows, once aligned, are none, all, or another cut's. ``stage``: it lies between measured
cuts that are whole stages of the NPU. ``linear``: it lies between measured cuts of the GPU. ``unsupported``:
the NPU has no form for it. ``buffer``: it exceeds the largest one. ``form``: its form was poor elsewhere.
``hopeless``: the NPU is so much slower than the GPU that no cut can pay.
"""

NPU_FRACTIONS: Final[Mapping[float, Tier]] = {
    **dict.fromkeys((0.5,), 0),
    **dict.fromkeys((0.25, 0.75, 0.875), 1),
    **dict.fromkeys((0.125, 0.375, 0.625), 2),
}
"""Shares of each member's rows that the NPU takes in a cut, and from which tier on they are measured."""

BLOCK_FRACTIONS: Final[Mapping[float, Tier]] = {
    **dict.fromkeys((0.5,), 0),
    **dict.fromkeys((0.25, 0.75), 1),
    **dict.fromkeys((0.125, 0.375, 0.625, 0.875), 2),
}
"""Shares of a feed-forward block's width that the NPU takes in a cut, and from which tier on."""

FIRST_DECODE_FRACTION: Final = 0.25
"""Measured from the first tier on in decode, where blocks promise most and a run costs little."""

FFN_ACTIVATION: Final[Activation] = "silu"
"""Of the blocks that are measured: next to three products it costs too little to measure another."""

GPU_TOKENS: Final[Mapping[int, Tier]] = {
    **dict.fromkeys((1, 64, 256), 0),
    **dict.fromkeys((2, 4, 8, 16, 32, 128, 512), 1),
    **dict.fromkeys((6, 12, 24, 44, 96, 192, 384, 1024), 2),
}
"""Tokens at which a whole group is measured on the GPU. Up to 8 a kernel has steps of its own; above, time is
near linear."""

CUT_TOKENS: Final = (1, 64, 256)
"""Tokens at which the default run measures cuts, and sees whether time is linear in rows."""

NPU_FIRST_LENGTHS: Final = (1, 256)
"""Lengths that no plan can do without: decode, and a prompt."""

LONGEST_DEFAULT: Final = 1024
"""Length above which the NPU is left to the full grid: time grows with length there."""

LONGEST_DEFAULT_BLOCK: Final = 512
"""The same for feed-forward blocks, three times as large as most groups."""

STAGE_ROWS: Final = 32
"""Output rows of a tile of the NPU: between multiples of it time moves in whole stages
(HeteroLLM, section 3, "stage performance")."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The cuts of a group: the NPU's rows with their tiers, and how many were not taken and why."""

    tiers: Mapping[tuple[int, ...], Tier]
    unaligned: int = 0
    between: int = 0


@dataclass(slots=True)
class Skipped:
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
        part: Where.
        point: What.
        tier: How much it is needed.
        spec: The whole group that it is a slice of.
    """

    part: Part
    point: LinearPoint
    tier: Tier
    spec: OpSpec

    @property
    def is_core(self) -> bool:
        """Whether a plan needs it even where time is short: a whole group, and on the NPU not the head."""
        whole = self.point.member_rows == self.spec.member_rows and not self.point.is_block
        return self.tier == 0 and whole and (self.part == "gpu" or self.spec.group != "head")


def enumerate_points(
    shapes: Iterable[ModelShape],
    npu: NpuBackend | None,
    *,
    cache_bytes: int,
    max_buffer_bytes: int,
) -> tuple[list[WorkPoint], Skipped]:
    """List the points of every shape, coarse ones first, each once.

    Args:
        shapes: The models.
        npu: The device's NPU part, if it has one: its lengths, alignment and forms decide.
        cache_bytes: Last-level cache; models that do not fit have their weights streamed.
        max_buffer_bytes: Largest buffer of the GPU part.

    Returns:
        The points in order of tier, then model and group, so that a run cut short covers every shape on both
        parts; and what was left out.
    """
    skipped = Skipped()
    found: dict[tuple[Part, LinearPoint], WorkPoint] = {}
    for shape in shapes:
        streamed = shape.streamed(cache_bytes)
        for point in _shape_points(shape, npu, max_buffer_bytes, skipped):
            own = replace(point, point=structs.replace(point.point, streamed=streamed))
            key = (own.part, own.point)
            held = found.setdefault(key, own)
            found[key] = replace(held, tier=min(held.tier, own.tier))
    return sorted(found.values(), key=lambda point: point.tier), skipped


def _shape_points(
    shape: ModelShape, npu: NpuBackend | None, max_buffer_bytes: int, skipped: Skipped
) -> Iterator[WorkPoint]:
    for spec in shape.specs:
        cuts = _Cuts({}) if npu is None else _cuts(spec, npu.row_alignment, NPU_FRACTIONS)
        yield from _gpu_points(spec, cuts, max_buffer_bytes, skipped)
        if npu is not None:
            yield from _npu_points(spec, npu, cuts, skipped)
    if npu is not None:
        for spec in shape.blocks:
            yield from _block_points(spec, npu, skipped)


def _cuts(spec: OpSpec, alignment: int, fractions: Mapping[float, Tier]) -> _Cuts:
    """Return the distinct legal cuts of a group."""
    tiers: dict[tuple[int, ...], Tier] = {}
    # The lowest tier first: it keeps a cut that several fractions come down to.
    for fraction, tier in sorted(fractions.items(), key=lambda item: item[1]):
        rows = split_rows(spec.member_rows, fraction, alignment)
        if any(rows) and rows != spec.member_rows:
            tiers.setdefault(rows, tier)
    possible = (max(spec.member_rows) - 1) // alignment
    return _Cuts(dict(sorted(tiers.items())), len(fractions) - len(tiers), max(0, possible - len(tiers)))


def _gpu_points(spec: OpSpec, cuts: _Cuts, max_buffer_bytes: int, skipped: Skipped) -> Iterator[WorkPoint]:
    # Packed in blocks of 64 rows a member.
    packed_rows = sum(round_up(rows, 64) for rows in spec.member_rows)
    fits = spec.weight.weight_bytes(packed_rows, spec.columns) <= max_buffer_bytes
    for tokens, tier in _gpu_tokens(spec).items():
        if not fits:
            skipped.add("buffer", 1 + len(cuts.tiers))
            continue
        yield WorkPoint("gpu", LinearPoint.of(spec, tokens), tier, spec)
        skipped.add("linear", cuts.between)
        for npu_rows, cut_tier in cuts.tiers.items():
            if tier == 2:
                skipped.add("linear")
                continue
            point = LinearPoint.of(spec, tokens, member_rows=rest_rows(spec.member_rows, npu_rows))
            own_tier = max(tier, cut_tier) if tokens in CUT_TOKENS else 2
            yield WorkPoint("gpu", point, own_tier, spec)


def _gpu_tokens(spec: OpSpec) -> Mapping[int, Tier]:
    """Return the tokens of a group; the head's are one, or as many as it takes at a time."""
    if spec.group != "head":
        return GPU_TOKENS
    tiers: dict[int, Tier] = {tokens: 2 for tokens in GPU_TOKENS if tokens <= HEAD_TOKENS}
    return tiers | {1: 0, HEAD_TOKENS: 1}


def _npu_points(spec: OpSpec, npu: NpuBackend, cuts: _Cuts, skipped: Skipped) -> Iterator[WorkPoint]:
    lengths = [length for length in npu.standard_lengths if spec.group != "head" or length <= HEAD_TOKENS]
    # Between whole stages of the NPU time is linear in rows.
    between = cuts.between if npu.row_alignment % STAGE_ROWS == 0 else 0
    for length in lengths:
        forms = npu.forms(
            spec.weight, columns=spec.columns, length=length, integer_inputs=spec.integer_inputs
        )
        if not forms:
            skipped.add("unsupported", 1 + len(cuts.tiers))
        for form in forms:
            tier: Tier = 0 if length in NPU_FIRST_LENGTHS else 1 if length <= LONGEST_DEFAULT else 2
            # Plans can do without the other forms, and without most of their cuts.
            tier = tier if form == forms[0] else max(tier, 1)
            yield WorkPoint("npu", LinearPoint.of(spec, length, form=form), tier, spec)
            skipped.add("alignment", cuts.unaligned)
            skipped.add("stage", between)
            for npu_rows, cut_tier in cuts.tiers.items():
                point = LinearPoint.of(spec, length, member_rows=npu_rows, form=form)
                wanted = length in CUT_TOKENS and (form == forms[0] or cut_tier == 0)
                yield WorkPoint("npu", point, max(tier, cut_tier) if wanted else 2, spec)


def _block_points(spec: OpSpec, npu: NpuBackend, skipped: Skipped) -> Iterator[WorkPoint]:
    """Yield a feed-forward block's widths on the NPU; the GPU's part of a cut is operators measured apart."""
    alignment = ffn_alignment(spec.weight, npu.row_alignment)
    cuts = _cuts(spec, alignment, BLOCK_FRACTIONS)
    small = split_rows(spec.member_rows, FIRST_DECODE_FRACTION, alignment)
    widths: dict[tuple[int, ...], Tier] = {spec.member_rows: 0, **cuts.tiers}
    between = cuts.between if alignment % STAGE_ROWS == 0 else 0
    for length in npu.standard_lengths:
        first = length in NPU_FIRST_LENGTHS
        whole_tier: Tier = 0 if first else 1 if length <= LONGEST_DEFAULT_BLOCK else 2
        for rows, cut_tier in widths.items():
            forms = npu.ffn_forms(
                spec.weight,
                width=rows[0],
                columns=spec.columns,
                length=length,
                integer_inputs=spec.integer_inputs,
                activation=FFN_ACTIVATION,
            )
            if not forms:
                skipped.add("unsupported")
            elif rows == spec.member_rows:
                skipped.add("alignment", len(forms) * cuts.unaligned)
                skipped.add("stage", len(forms) * between)
            tier: Tier = whole_tier
            if rows != spec.member_rows:
                tier = 2 if not first else 0 if length == 1 and rows == small else cut_tier
            for form in forms:
                # Plans can do without the other forms.
                if form != forms[0]:
                    tier = 1 if first and tier == 0 else 2
                yield WorkPoint("npu", LinearPoint.of(spec, length, member_rows=rows, form=form), tier, spec)
