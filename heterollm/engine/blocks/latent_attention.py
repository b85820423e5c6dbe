"""Emits latent attention (MLA): its linears, and attention to one key of all heads between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from heterollm.engine.blocks.attention import AttentionEmitter
from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import Begun, Delta, PlacedOp, codes_of, segments_of
from heterollm.engine.slots import LATENT_OUTPUT
from heterollm.kernels.gpu import DeviceMemory, Launch, Rotation, Segments
from heterollm.kernels.operators import multiply_heads, norm_member, turn
from heterollm.model import LatentAttentionBlock

EPSILON: Final = 1e-6
"""Added to the mean square in the norms of vectors, whatever a configuration says of others."""


class LatentAttentionEmitter(AttentionEmitter):
    """Emits blocks of latent attention."""

    def begin(self, builder: PassBuilder, layer: int, block: LatentAttentionBlock) -> Begun:  # type: ignore[override]
        """Return a layer's attention, whose norm comes next."""
        first = self._linears.placed(builder, layer, "latent_in")
        emit = functools.partial(self._emit_latent, builder, layer, block, first)
        return Begun(first.input_codes, emit, keeps=False)

    def _emit_latent(
        self, builder: PassBuilder, layer: int, block: LatentAttentionBlock, first: PlacedOp
    ) -> Delta:
        kernels, tokens, private = self._kernels, builder.tokens, builder.lane.private
        query, summed = private["query"], builder.lane.shared[LATENT_OUTPUT]
        absorbed, expanded, norm, query_norm = self._tensors.latent(layer, self._dtype)
        keys = queries = self._linears.linear(builder, first)
        if block.query_rank:
            # What follows overwrites the output of these linears.
            self._turn(builder, layer, block, keys, 1, norm)
            queries = self._queries(builder, layer, keys, query_norm)
        launch = multiply_heads(
            *(kernels, queries, 0, absorbed, query),
            heads=block.heads,
            sizes=(block.plain_dim, block.latent_dim),
            strides=(block.plain_dim, block.head_dim),
            tokens=tokens,
            floats=True,
        )
        builder.kernel(launch.label, layer, launch, reads=segments_of(queries), writes=(query,))
        if not block.query_rank:
            self._turn(builder, layer, block, keys, 2, norm)
        out = self._linears.placed(builder, layer, "latent_out")

        self._turn(builder, layer, block, queries, 1, None)
        self._attention(builder, layer, block, summed, None)
        launch = multiply_heads(
            *(
                kernels,
                Segments(summed, summed, (block.heads * block.head_dim,), (0,)),
                0,
                expanded,
                out.source,
            ),
            heads=block.heads,
            sizes=(block.latent_dim, block.value_dim),
            strides=(block.head_dim, block.value_dim),
            tokens=tokens,
        )
        self._append_rounded(builder, layer, launch, (summed,), out)
        return Delta(self._linears.linear(builder, out))

    def _queries(self, builder: PassBuilder, layer: int, inputs: Segments, norm: Any) -> Segments:  # noqa: ANN401
        """Append the norm of the vectors that queries are made from, and the linears that make them."""
        op = self._linears.placed(builder, layer, "latent_query")
        launch = norm_member(
            self._kernels, inputs, 0, norm, op.source, tokens=builder.tokens, epsilon=EPSILON
        )
        self._append_rounded(builder, layer, launch, segments_of(inputs), op)
        return self._linears.linear(builder, op)

    def _append_rounded(
        self, builder: PassBuilder, layer: int, launch: Launch, reads: Sequence[DeviceMemory], op: PlacedOp
    ) -> None:
        """Append what writes the input of linears, and its rounding for those that read codes."""
        rounded = op.rounded
        builder.kernel(launch.label, layer, launch, reads=reads, writes=(op.source,), ends=rounded is None)
        if rounded is not None:
            rounding = self._kernels.round_output(op.source, rounded, builder.tokens, op.spec.columns)
            writes = codes_of(rounded)
            builder.kernel("rounding of inputs", layer, rounding, reads=(op.source,), writes=writes)

    def _turn(
        self,
        builder: PassBuilder,
        layer: int,
        block: LatentAttentionBlock,
        linear: Segments,
        member: int,
        norm: Any,  # noqa: ANN401
    ) -> None:
        """Append the rotation of queries, or with a norm the store of the key."""
        query, step, kv = builder.lane.private["query"], builder.lane.step, builder.layer_cache(layer)
        launch = turn(
            *(self._kernels, linear, member, query, kv, step),
            shape=self._shape(block),
            rotation=Rotation(*self._tensors.rope(block), dim=block.rotary_dim, norms=norm, epsilon=EPSILON),
            tokens=builder.tokens,
            row_words=builder.row_words,
        )
        written = query if norm is None else kv.memory
        builder.kernel(launch.label, layer, launch, reads=(*segments_of(linear), step), writes=(written,))
