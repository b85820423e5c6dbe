"""Emits attention: its linears, RoPE, and the attention between them."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from heterollm.engine.blocks.gate import append_gate, append_norm
from heterollm.engine.builder import PassBuilder
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.placed import Begun, Delta, PlacedOp, codes_of, segments_of
from heterollm.engine.step import Buffer
from heterollm.engine.techniques.registry import Techniques
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    ROUNDING,
    GlueKernels,
    HeadShape,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    SharedArray,
)
from heterollm.kernels.operators import attend, rope_and_store
from heterollm.model import AttentionBlock, LatentAttentionBlock, ModelConfig

GATE: Final = 3
"""Place of the gate of the output among the members of the first group."""

PARTIAL = Buffer("attention_partial")
"""GPU memory for the results of attention over each part of the context, before they are joined."""


class AttentionEmitter:
    """Emits blocks of attention."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        context: int,
        linears: LinearEmitter,
        tensors: GlueTensors,
        techniques: Techniques,
    ) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._dtype = np.dtype(device.activation_dtype)
        self._epsilon, self._context = config.inner_norm_eps, context
        self._linears, self._tensors, self._techniques = linears, tensors, techniques

    def begin(self, builder: PassBuilder, layer: int, block: AttentionBlock) -> Begun:
        """Return a layer's attention, whose norm comes next."""
        normed = (layer, "norm_qkv") in builder.placements
        fused = (layer, "o_ffn") in builder.placements
        qkv = self._linears.placed(builder, layer, "norm_qkv" if normed else "qkv")
        o = self._linears.placed(builder, layer, "o_ffn" if fused else "o")
        emit = functools.partial(self._emit, builder, layer, block, qkv, o)
        # One copy of the stream serves both fused operators.
        codes = qkv.input_codes or (o.stream_codes if normed else None)
        return Begun(codes, emit, keeps=False, reads="stream" if normed else "norm")

    def _emit(
        self, builder: PassBuilder, layer: int, block: AttentionBlock, qkv: PlacedOp, o: PlacedOp
    ) -> Delta | None:
        inputs = self._linears.linear(builder, qkv)
        self._rope(builder, layer, block, inputs)
        rounded = None if block.gated or block.inner_norm else o.rounded
        out = builder.lane.shared["attention_output"]
        dense = functools.partial(self._attention, builder, layer, block, out, rounded)
        self._techniques.around(builder, "attention", layer, o).run(dense)
        if block.gated:
            append_gate(
                *(builder, self._kernels, o.source, inputs, GATE, o),
                heads=block.heads,
                bias=self._tensors.bias(layer, "qkv"),
                width=o.spec.input_columns,
            )
        if block.inner_norm:
            norm = self._tensors.norm(layer, "attention_inner")
            append_norm(builder, self._kernels, norm, o, self._epsilon)
        if o.spec.first is not None:
            return None
        return Delta(self._linears.linear(builder, o), self._tensors.bias(layer, "o"))

    def _shape(self, block: AttentionBlock) -> HeadShape:
        shares = isinstance(block, LatentAttentionBlock)
        return HeadShape(block.heads, block.kv_heads, block.head_dim, self._context, shares)

    def _rope(self, builder: PassBuilder, layer: int, block: AttentionBlock, qkv: Segments) -> None:
        """Append RoPE, which also writes keys and values to the cache."""
        query, step, kv = builder.lane.private["query"], builder.lane.step, builder.layer_cache(layer)
        launch = rope_and_store(
            self._kernels,
            qkv,
            self._tensors.bias(layer, "qkv"),
            query,
            kv,
            step,
            shape=self._shape(block),
            rotation=Rotation(
                *self._tensors.rope(block),
                dim=block.rotary_dim if block.rope else 0,
                norms=self._tensors.head_norms(layer),
                epsilon=self._epsilon,
                joint=block.joint_head_norms,
                limit=block.qkv_limit,
                value_norms=block.value_norms,
                norms_last=block.norms_last,
                query_scales=self._tensors.query_scales(block),
            ),
            tokens=builder.tokens,
            row_words=builder.row_words,
        )
        reads, stores = (*segments_of(qkv), step), block.kv_layer is None
        seen, stored = ((), (kv.memory,)) if stores else ((kv.memory,), ())
        builder.kernel("rope", layer, launch, reads=(*reads, *seen), writes=(query, *stored))

    def _attention(
        self,
        builder: PassBuilder,
        layer: int,
        block: AttentionBlock,
        out: SharedArray,
        rounded: RoundedInputs | None,
    ) -> None:
        """Append attention over the cache; a long context has several parts, whose results are joined."""
        lane, kv = builder.lane, builder.layer_cache(layer)
        query = lane.private["query"]
        first, *rest = attend(
            self._kernels,
            query,
            kv,
            out,
            lane.step,
            shape=self._shape(block),
            scores=Scores(block.scale, block.window, block.soft_cap, block.chunked),
            tokens=builder.tokens,
            row_words=builder.row_words,
            sinks=self._tensors.sinks(layer),
            rounded=rounded,
        )
        reads, codes = (query, kv.memory, lane.step), codes_of(rounded)
        if not rest:
            builder.kernel("attention", layer, first, reads=reads, writes=(out, *codes))
        elif rest[0].label == ROUNDING:
            builder.kernel("attention", layer, first, reads=reads, writes=(out,), ends=False)
            builder.kernel("rounding of inputs", layer, rest[0], reads=(out,), writes=codes)
        else:
            builder.kernel("attention", layer, first, reads=reads, writes=(out, PARTIAL), ends=False)
            builder.kernel("attention join", layer, rest[0], reads=(PARTIAL, lane.step), writes=(out, *codes))
