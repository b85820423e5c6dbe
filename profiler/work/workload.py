"""The models whose shapes are measured, and how their groups can be cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import GROUPS, Group, Member, OpSpec, Precision, WeightFormat, feed_forward_blocks

__all__ = [
    "DEFAULT_SHAPES",
    "HEAD_TOKENS",
    "ModelShape",
    "Sizes",
    "block_alignment",
    "cut_rows",
    "default_shapes",
    "rest_rows",
    "shape_of",
]

HEAD_TOKENS: Final = 32
"""Most positions that the head computes at a time; more than one only where all logits are asked for."""

GPU_ROW_ALIGNMENT: Final = 64
"""Multiple at which the GPU's rows may begin: ``heterollm.kernels.gpu.linear.ROW_ALIGNMENT``, which cannot be
imported without OpenCL."""

EMBEDDING_BITS: Final = 8


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

    @property
    def blocks(self) -> tuple[OpSpec, ...]:
        """The feed-forward network of a layer as one group, where its linears can be."""
        return feed_forward_blocks(self.layer)

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


def block_alignment(weight: WeightFormat, row_alignment: int) -> int:
    """Return what the NPU's width of a feed-forward block must be a multiple of, unless it is all of it.

    Rows of gate and up are cut on both parts' alignments, and columns of down between pairs of blocks: the
    4-bit zero points of a pair share a byte.

    Args:
        weight: Number format of all three linears.
        row_alignment: The NPU's.
    """
    return math.lcm(row_alignment, GPU_ROW_ALIGNMENT, 2 * weight.block if weight.quantized else 1)
