"""What is measured of linear groups: the models whose shapes count, and the points of each shape.

A point is worth measuring where a plan can use it: standard lengths on the NPU, rows on its alignment, forms
that it offers. The rest is left out and counted (design, section 8: "pruned by the stage rule").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal, TypeAlias

from heterollm.kernels.npu import NpuBackend
from heterollm.kernels.ops import GROUPS, Group, Member, OpSpec, Precision, WeightFormat
from heterollm.kernels.quantize import effective_block
from heterollm.profiler.records import LinearPoint, Part
from heterollm.units import round_up

__all__ = [
    "DEFAULT_SHAPES",
    "GPU_TOKENS",
    "HEAD_TOKENS",
    "NPU_FRACTIONS",
    "ModelShape",
    "Sizes",
    "SkipReason",
    "Skipped",
    "Tier",
    "WorkPoint",
    "cut_rows",
    "default_shapes",
    "enumerate_points",
    "rest_rows",
    "shape_of",
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

GPU_TOKENS: Final[Mapping[int, Tier]] = {
    **dict.fromkeys((1, 64, 256), 0),
    **dict.fromkeys((2, 4, 8, 16, 32, 128, 512), 1),
    **dict.fromkeys((6, 12, 24, 44, 96, 192, 384, 1024), 2),
}
"""Tokens at which a whole group is measured on the GPU. Up to 8 a kernel has steps of its own; above, time is
near linear."""

HEAD_TOKENS: Final = 32
"""Most positions that the head computes at a time; more than one only where all logits are asked for."""

CUT_TOKENS: Final = (1, 64, 256)
"""Tokens at which the default run measures cuts, and sees whether time is linear in rows."""

NPU_FIRST_LENGTHS: Final = (1, 256)
"""Lengths that no plan can do without: decode, and a prompt."""

LONGEST_DEFAULT: Final = 1024
"""Length above which the NPU is left to the full grid: time grows with length there."""

STAGE_ROWS: Final = 32
"""Output rows of a tile of the NPU: between multiples of it time moves in whole stages
(HeteroLLM, section 3, "stage performance")."""

EMBEDDING_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The cuts of a group: the NPU's rows with their tiers, and how many were not taken and why."""

    tiers: Mapping[tuple[int, ...], Tier]
    unaligned: int = 0
    between: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the time of a model depends on.

    Args:
        name: What to call it in reports.
        layer: The groups of one decoder layer, in order.
        head: The LM head.
        layers: Decoder layers.
        hidden_size: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        intermediate_size: Width of the feed-forward network.
        vocab_size: Rows of the head.
        weight_bytes: Bytes of all weights, embedding included.
    """

    name: str
    layer: tuple[OpSpec, ...]
    head: OpSpec
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    weight_bytes: int

    @property
    def specs(self) -> tuple[OpSpec, ...]:
        """One layer's groups and the head."""
        return (*self.layer, self.head)

    def streamed(self, cache_bytes: int) -> bool:
        """Whether weights come from memory in every pass: the layers do not fit in the last-level cache."""
        layers = self.layers * sum(spec.weight_bytes() for spec in self.layer)
        return layers + self.head.weight_bytes() > cache_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a configuration: its name, sizes, and whether the head is the embedding."""

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool


PUBLISHED: Final = (
    # https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0/blob/main/config.json
    Sizes("TinyLlama-1.1B", 22, 2048, 32, 4, 64, 5632, 32000, False),
    # https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
    Sizes("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, True),
    # https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/config.json
    Sizes("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, True),
)


def default_shapes(
    precision: Precision = "w4a16", *, block: int = 32, float_bits: Literal[16, 32] = 16
) -> tuple[ModelShape, ...]:
    """Return the shapes that are measured where no model is named, smallest claims on a device first.

    TinyLlama-1.1B, Qwen2.5-0.5B and Llama-3.2-3B: narrow and wide layers, few and many rows in the head,
    inputs of 896 that the larger blocks do not divide evenly into tiles.

    Args:
        precision: Of weights and activations.
        block: Inputs that share a scale.
        float_bits: Of the weights at precision ``fp16``: 32 where the device computes in float32.
    """
    return tuple(shape_of(sizes, precision, block, float_bits) for sizes in PUBLISHED)


def shape_of(
    sizes: Sizes, precision: Precision = "w4a16", block: int = 32, float_bits: Literal[16, 32] = 16
) -> ModelShape:
    """Return a configuration's model at a precision: layers in 4 bits and the head in 8, or all in floats.

    Args:
        sizes: Its numbers.
        precision: Of weights and activations.
        block: Inputs that share a scale; the largest power of two below it where it does not divide them.
        float_bits: Of the weights at precision ``fp16``.

    Raises:
        OptionError: No legal block divides the inputs of some group.
    """
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    hidden, wide = sizes.hidden_size, sizes.intermediate_size
    members: dict[Group, tuple[tuple[Member, ...], int]] = {
        "qkv": ((Member("q", queries), Member("k", keys), Member("v", keys)), hidden),
        "o": ((Member("o", hidden),), queries),
        "gate_up": ((Member("gate", wide), Member("up", wide)), hidden),
        "down": ((Member("down", hidden),), wide),
        "head": ((Member("head", sizes.vocab_size),), hidden),
    }

    def spec(group: Group) -> OpSpec:
        rows, columns = members[group]
        weight = WeightFormat(float_bits)
        if precision != "fp16":
            bits: Literal[4, 8] = EMBEDDING_BITS if group == "head" else 4
            weight = WeightFormat(bits, effective_block(columns, block))
        layer = -1 if group == "head" else 0
        rounded = precision == "w4a8"
        return OpSpec(group, layer, rows, columns, weight, f"{group}_input", group, integer_inputs=rounded)

    layer = tuple(spec(group) for group in GROUPS if group != "head")
    head = spec("head")
    tables = 1 if sizes.tied else 2
    size = sizes.layers * sum(group.weight_bytes() for group in layer) + tables * head.weight_bytes()
    return ModelShape(
        sizes.name,
        layer,
        head,
        sizes.layers,
        hidden,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        wide,
        sizes.vocab_size,
        size,
    )


DEFAULT_SHAPES: Final = default_shapes()
"""The default set at ``w4a16``: 4-bit layers in blocks of 32, embedding and head in 8 bits."""


@dataclass(slots=True)
class Skipped:
    """How many points were left out, by reason."""

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


def cut_rows(member_rows: Sequence[int], fraction: float, alignment: int) -> tuple[int, ...]:
    """Return the leading rows of each member that the NPU takes at a fraction.

    Members are cut at the same fraction, rounded to the nearest multiple of the alignment. A member shorter
    than the alignment is not cut: it stays on the GPU unless the NPU takes all.

    Args:
        member_rows: Output rows of each member.
        fraction: Share of the NPU, 0 to 1.
        alignment: Multiple that a cut must lie on.
    """
    if fraction >= 1.0:
        return tuple(member_rows)
    return tuple(
        min(int(fraction * rows / alignment + 0.5), rows // alignment) * alignment for rows in member_rows
    )


def rest_rows(member_rows: Sequence[int], npu_rows: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of each member that the GPU computes beside the NPU's."""
    return tuple(rows - taken for rows, taken in zip(member_rows, npu_rows, strict=True))


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
        for spec in shape.specs:
            cuts = _Cuts({}) if npu is None else _cuts(spec, npu.row_alignment)
            points = _gpu_points(spec, cuts, max_buffer_bytes, skipped)
            if npu is not None:
                points = chain(points, _npu_points(spec, npu, cuts, skipped))
            for point in points:
                own = replace(point, point=replace(point.point, streamed=streamed))
                key = (own.part, own.point)
                held = found.setdefault(key, own)
                found[key] = replace(held, tier=min(held.tier, own.tier))
    return sorted(found.values(), key=lambda point: point.tier), skipped


def _cuts(spec: OpSpec, alignment: int) -> _Cuts:
    """Return the distinct legal cuts of a group."""
    tiers: dict[tuple[int, ...], Tier] = {}
    # The lowest tier first: it keeps a cut that several fractions come down to.
    for fraction, tier in sorted(NPU_FRACTIONS.items(), key=lambda item: item[1]):
        rows = cut_rows(spec.member_rows, fraction, alignment)
        if any(rows) and rows != spec.member_rows:
            tiers.setdefault(rows, tier)
    possible = (max(spec.member_rows) - 1) // alignment
    return _Cuts(dict(sorted(tiers.items())), len(NPU_FRACTIONS) - len(tiers), max(0, possible - len(tiers)))


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
