"""The glue operators of a layer that the profiler measures: their names, keys and sizes.

In a :class:`heterollm.profiler.records.LayerKey`, ``context`` counts the positions that the last token of the
pass attends to, its own included, :data:`OPERATORS` defines ``hidden``, and sizes that an operator does not
depend on are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import kernel_source_hash
from heterollm.kernels.npu import INTEGER_FORMS, LinearShape
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelShape
from heterollm.profiler.measure.sparse_cases import ESSENTIAL_SIZES, sparse_sizes
from heterollm.profiler.records import LayerKey
from heterollm.profiler.work import HEAD_TOKENS

GlueOperator: TypeAlias = Literal[
    "embedding",
    "rms_norm",
    "rms_norm_int8",
    "rope_and_store",
    "attention",
    "attention_int8",
    "gated_activation",
    "gated_activation_int8",
    "final_norm",
    "final_norm_int8",
    "join_logits",
    "rms_norm_uint16",
    "final_norm_uint16",
    "write_codes",
    "read_codes",
    "rms_norm_uint8",
    "write_codes_uint8",
    "read_codes_uint8",
    "rms_norm_sum",
    "rope_and_store_sum",
    "gated_activation_sum",
    "find_outliers",
    "multiply_outliers",
]

OPERATORS: Final[dict[GlueOperator, str]] = {
    "embedding": "the residual stream",
    "rms_norm": "the residual stream; the sum with the linear before it included",
    "rms_norm_int8": "the same, with the inputs of the next linear rounded to int8",
    "rope_and_store": "nothing",
    "attention": "nothing",
    "attention_int8": "nothing",
    "gated_activation": "the width of the feed-forward network",
    "gated_activation_int8": "the same",
    "final_norm": "the residual stream",
    "final_norm_int8": "the same",
    "join_logits": "the vocabulary",
    "rms_norm_uint16": "the residual stream; the input codes of an integer NPU graph included",
    "final_norm_uint16": "the residual stream; such codes included",
    "write_codes": "the inputs of a linear whose codes no norm writes",
    "read_codes": "the outputs of an integer NPU graph",
    "rms_norm_uint8": "the residual stream; input codes of 8 bits included",
    "write_codes_uint8": "the inputs of a linear whose codes of 8 bits no norm writes",
    "read_codes_uint8": "the outputs of an NPU graph on codes of 8 bits",
    "rms_norm_sum": "the residual stream; the linear's output is a sum of two arrays, as shadows make it",
    "rope_and_store_sum": "nothing; such a sum is read",
    "gated_activation_sum": "the width of the feed-forward network; such a sum is read",
    "find_outliers": "the inputs of a linear, whose channels with outliers are found and listed",
    "multiply_outliers": "the outputs; ``context`` counts the channels that are multiplied",
}
"""The operators by name, and the size that ``hidden`` states for each."""

TOKENS: Final = (1, 32, 256, 512)
QUICK_TOKENS: Final = (1, 256)
ATTENTION_POSITIONS: Final = (0, 256, 1024, 2048)
OUTLIER_CHANNELS: Final = (16, 128)

ROUNDING: Final[dict[GlueOperator, GlueOperator]] = {
    "rms_norm": "rms_norm_int8",
    "attention": "attention_int8",
    "gated_activation": "gated_activation_int8",
    "final_norm": "final_norm_int8",
}
"""Operators that write a linear's input, and their names where they round it to int8 as well."""

CODES_OF_8_BITS: Final[tuple[GlueOperator, ...]] = ("rms_norm_uint8", "write_codes_uint8", "read_codes_uint8")
CODES_OF_16_BITS: Final[tuple[GlueOperator, ...]] = ("rms_norm_uint16", "write_codes", "read_codes")
"""Operators on the codes of integer NPU graphs: a norm, and kernels of their own."""

SUMS: Final[dict[GlueOperator, GlueOperator]] = {
    "rms_norm": "rms_norm_sum",
    "rope_and_store": "rope_and_store_sum",
    "gated_activation": "gated_activation_sum",
}
"""Operators that read a linear's output, and their names where it is a sum."""


@dataclass(frozen=True, slots=True)
class GlueCase:
    """One operator of a model at one size; see :func:`layer_key`. A quick run can do without some sizes."""

    shape: ModelShape
    operator: GlueOperator
    tokens: int
    position: int = 0
    width: int | None = None
    channels: int = 0
    essential: bool = True

    @property
    def key(self) -> LayerKey:
        """Key of the measurement."""
        return layer_key(
            self.shape, self.operator, self.tokens, self.position, width=self.width, channels=self.channels
        )


def layer_key(
    shape: ModelShape,
    operator: GlueOperator,
    tokens: int,
    position: int = 0,
    *,
    width: int | None = None,
    channels: int = 0,
) -> LayerKey:
    """Return the key of an operator in a model.

    Args:
        shape: The model; where its linears read int8 inputs, so does the operator that writes them.
        operator: Its plain name.
        tokens: Rows of the pass.
        position: Tokens of the session before it, which only attention depends on.
        width: Inputs or outputs of each token, for kernels on codes and outliers.
        channels: Channels that are multiplied.
    """
    context = position + tokens if operator == "attention" else channels
    hidden = heads = kv_heads = head_dim = 0
    plain = operator.removesuffix("_sum")
    if plain in ("attention", "rope_and_store"):
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    elif plain == "gated_activation":
        hidden = shape.intermediate_size
    elif operator == "join_logits":
        hidden = shape.vocab_size
    elif width is not None:
        hidden = width
    else:
        hidden = shape.hidden_size
    name = ROUNDING.get(operator, operator) if shape.head.integer_inputs else operator
    return LayerKey(name, tokens, context, hidden, heads, kv_heads, head_dim, kernel_source_hash())


def layer_cases(
    device: Device, shape: ModelShape, *, quick: bool, sparse: bool = False
) -> Iterator[GlueCase]:
    """Yield every operator of a model at the sizes to measure.

    Args:
        device: The device.
        shape: The model.
        quick: Whether to yield only sizes that every plan needs.
        sparse: Whether to yield attention at the sizes of sparse attention, too.
    """
    yield from _cases(shape, quick=quick)
    yield from _code_cases(device, shape, quick=quick)
    for tokens, keys in sparse_sizes(quick=quick) if sparse else ():
        needed = (tokens, keys) in ESSENTIAL_SIZES
        yield GlueCase(shape, "attention", tokens, keys - tokens, essential=needed)


def _cases(shape: ModelShape, *, quick: bool) -> Iterator[GlueCase]:
    sizes = QUICK_TOKENS if quick else TOKENS
    plain: list[GlueOperator] = ["embedding", "rms_norm", "rope_and_store"]
    if shape.intermediate_size:
        plain.append("gated_activation")
    for operator in plain:
        for tokens in sizes:
            yield GlueCase(shape, operator, tokens)
    for tokens in sizes:
        for position in ATTENTION_POSITIONS[:: 2 if quick else 1]:
            yield GlueCase(shape, "attention", tokens, position)
    head: tuple[GlueOperator, ...] = ("final_norm", "join_logits")
    for operator in head:
        for tokens in (1,) if quick else (1, HEAD_TOKENS):
            yield GlueCase(shape, operator, tokens)


def _code_cases(device: Device, shape: ModelShape, *, quick: bool) -> Iterator[GlueCase]:
    """Yield the operators that write and read codes, where the NPU has integer graphs of these weights."""
    own = [spec for spec in (*shape.layer, shape.head) if _has_integer_graphs(device, spec)]
    groups = {spec.group: spec for spec in own}
    layer = [spec for spec in own if spec.group != "head"]
    # Weights with one scale are multiplied by codes of 8 bits, and may have shadows.
    one_scale = any(spec.weight.scales == "tensor" for spec in layer)
    norm, write, read = CODES_OF_8_BITS if one_scale else CODES_OF_16_BITS
    for tokens in QUICK_TOKENS if quick else TOKENS:
        if "qkv" in groups:
            yield GlueCase(shape, norm, tokens)
        # The outputs of an ffn are those of its last linear.
        for columns in sorted({spec.columns for spec in layer if spec.group in ("o", "down")}):
            yield GlueCase(shape, write, tokens, width=columns)
        for rows in sorted({spec.rows for spec in layer}):
            yield GlueCase(shape, read, tokens, width=rows)
        if one_scale:
            yield from _shadow_cases(shape, layer, tokens)
    if "head" in groups:
        for tokens in (1,) if quick else (1, HEAD_TOKENS):
            yield GlueCase(shape, "final_norm_uint16", tokens)


def _shadow_cases(shape: ModelShape, layer: Iterable[OpSpec], tokens: int) -> Iterator[GlueCase]:
    """Yield the kernels of shadow outliers."""
    for plain, reader in SUMS.items():
        if plain != "gated_activation" or shape.intermediate_size:
            yield GlueCase(shape, reader, tokens)
    for columns in sorted({spec.columns for spec in layer}):
        yield GlueCase(shape, "find_outliers", tokens, width=columns)
    for rows in sorted({spec.rows for spec in layer}):
        for channels in sorted({min(count, shape.hidden_size) for count in OUTLIER_CHANNELS}):
            yield GlueCase(shape, "multiply_outliers", tokens, width=rows, channels=channels)


def _has_integer_graphs(device: Device, spec: OpSpec) -> bool:
    npu = device.npu
    return npu is not None and any(
        not INTEGER_FORMS.isdisjoint(
            npu.forms(LinearShape(spec.weight, spec.columns, spec.integer_inputs), length)
        )
        for length in npu.standard_lengths
    )


def cache_positions(cases: Iterable[GlueCase] = ()) -> int:
    """Return the positions of the KV cache that all sizes need, those of some cases among them."""
    usual = max(ATTENTION_POSITIONS) + max(TOKENS)
    return max(usual, *(case.position + case.tokens for case in cases), 0)
