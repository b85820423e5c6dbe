"""Emits the glue operators between linears: embedding, norms, RoPE, attention, activation, logits."""

from __future__ import annotations

from typing import Any, Literal

from heterollm.engine.builder import PassBuilder
from heterollm.engine.lanes import Lane
from heterollm.engine.placed import PlacedOp, codes_of, segments_of
from heterollm.engine.step import Buffer
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    ROUNDING,
    GlueKernels,
    GpuLinear,
    HeadShape,
    KvMemory,
    Launch,
    NpuCodes,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
)
from heterollm.kernels.operators import (
    activate,
    add_bias,
    attend,
    final_norm,
    join_logits,
    rms_norm,
    rope_and_store,
    soft_cap,
)
from heterollm.kernels.ops import Group
from heterollm.model import ModelConfig, Norm

PARTIAL = Buffer("attention_partial")
"""GPU memory for the results of attention over each part of the context, before they are joined."""


class GlueEmitter:
    """Emits the operators that the GPU always computes.

    Args:
        device: The device.
        config: The model's configuration.
        lane: Slots, tokens and step buffer.
        tensors: Norms, biases and RoPE tables.
        context: Positions of every session.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        lane: Lane,
        tensors: GlueTensors,
        context: int,
    ) -> None:
        self._layers = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config = config
        self._pool = lane.shared
        self._private = lane.private
        self._tensors = tensors
        self._tokens = lane.tokens
        self._step = lane.step
        self._shape = HeadShape(config.heads, config.kv_heads, config.head_dim, context)

    def embedding(self, builder: PassBuilder, table: GpuLinear) -> None:
        """Append the token embedding, which begins the residual stream."""
        residual, scale = self._private["residual"], self._config.embedding_scale
        launch = table.embed_launch(self._tokens, residual, count=builder.tokens, scale=scale)
        builder.kernel("embedding", None, launch, reads=(self._tokens,), writes=(residual,))

    def norm(
        self,
        builder: PassBuilder,
        layer: int,
        norm: Literal["attention", "feed_forward"],
        delta: Segments | None,
        rounded: RoundedInputs | NpuCodes | None,
    ) -> None:
        """Append the norm before attention or before the feed-forward network.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            norm: The norm.
            delta: Values to add to the residual stream first; None at the start of the model.
            rounded: Buffers for codes of the output, or None.
        """
        residual, out = self._private["residual"], self._pool["linear_input"]
        launch = rms_norm(
            self._layers,
            residual,
            self._tensors.norm(layer, norm),
            out,
            hidden=self._config.hidden_size,
            tokens=builder.tokens,
            epsilon=self._config.rms_norm_eps,
            delta=delta,
            rounded=rounded,
            centered=self._config.centered_norms,
            **(
                self._delta_options(layer, "o")
                if norm == "feed_forward"
                else self._delta_options(layer - 1, "down")
            ),
        )
        reads = (residual, *segments_of(delta))
        updated = () if delta is None else (residual,)
        builder.kernel("norm", layer, launch, reads=reads, writes=(*updated, out, *codes_of(rounded)))

    def add(self, builder: PassBuilder, layer: int, delta: Segments) -> None:
        """Append the addition of values to the residual stream, by a norm whose output nothing reads."""
        residual, out = self._private["residual"], self._pool["linear_input"]
        launch = rms_norm(
            self._layers,
            residual,
            self._tensors.norm(layer, "feed_forward"),
            out,
            hidden=self._config.hidden_size,
            tokens=builder.tokens,
            epsilon=self._config.rms_norm_eps,
            delta=delta,
        )
        reads = (residual, *segments_of(delta))
        builder.kernel("norm", layer, launch, reads=reads, writes=(residual, out))

    def rope(self, builder: PassBuilder, layer: int, qkv: Segments, cache: KvMemory) -> None:
        """Append RoPE, which also writes keys and values to the cache."""
        config, tensors, query = self._config, self._tensors, self._private["query"]
        rope = config.per_layer[layer].rope
        kv = cache.layer(layer)
        launch = rope_and_store(
            self._layers,
            qkv,
            tensors.bias(layer, "qkv"),
            query,
            kv,
            self._step,
            shape=self._shape,
            rotation=Rotation(
                *tensors.rope(rope),
                dim=config.rotary_dim if rope else 0,
                norms=tensors.head_norms(layer),
                epsilon=config.rms_norm_eps,
                joint=config.joint_head_norms,
                limit=config.qkv_limit,
            ),
            tokens=builder.tokens,
        )
        reads = (*segments_of(qkv), self._step)
        builder.kernel("rope", layer, launch, reads=reads, writes=(query, kv.memory))

    def attention(
        self,
        builder: PassBuilder,
        layer: int,
        bucket: int,
        cache: KvMemory,
        rounded: RoundedInputs | None,
    ) -> None:
        """Append attention over the cache; a long context has several parts, whose results are joined.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            bucket: Positions that the grids of a decode pass must cover.
            cache: The KV cache.
            rounded: Buffers for int8 codes of the output, or None.
        """
        config, query, out = self._config, self._private["query"], self._pool["attention_output"]
        kv = cache.layer(layer)
        first, *rest = attend(
            self._layers,
            query,
            kv,
            out,
            self._step,
            shape=self._shape,
            scores=Scores(config.attention_scale, config.per_layer[layer].window, config.attention_soft_cap),
            tokens=builder.tokens,
            bucket=bucket,
            rounded=rounded,
        )
        reads, codes = (query, kv.memory, self._step), codes_of(rounded)
        if not rest:
            builder.kernel("attention", layer, first, reads=reads, writes=(out, *codes))
        elif rest[0].label == ROUNDING:
            builder.kernel("attention", layer, first, reads=reads, writes=(out,), ends=False)
            builder.kernel("rounding of inputs", layer, rest[0], reads=(out,), writes=codes)
        else:
            builder.kernel("attention", layer, first, reads=reads, writes=(out, PARTIAL), ends=False)
            builder.kernel("attention join", layer, rest[0], reads=(PARTIAL,), writes=(out, *codes))

    def activation(
        self, builder: PassBuilder, layer: int, gate_up: Segments, rounded: RoundedInputs | None
    ) -> None:
        """Append the gated activation of the whole feed-forward network."""
        launch = self.activation_launch(builder.tokens, layer, gate_up, rounded)
        writes = (self._pool["activated"], *codes_of(rounded))
        builder.kernel("activation", layer, launch, reads=segments_of(gate_up), writes=writes)

    def activation_launch(
        self, tokens: int, layer: int, gate_up: Segments, rounded: RoundedInputs | None, *, start: int = 0
    ) -> Launch:
        """Return the kernel of the gated activation; ``start`` is the first row of gate and of up."""
        return activate(
            self._layers,
            gate_up,
            self._pool["activated"],
            tokens=tokens,
            intermediate=gate_up.rows[0],
            activation=self._config.activation,
            bias=self._tensors.bias(layer, "gate_up", start),
            rounded=rounded,
        )

    def final_norm(self, builder: PassBuilder, delta: Segments, op: PlacedOp) -> None:
        """Append the norm before the head, for the rows in the step buffer."""
        config, residual = self._config, self._private["residual"]
        rounded = op.rounded or op.codes
        launch = final_norm(
            self._layers,
            residual,
            self._tensors.final_norm,
            op.source,
            self._step,
            rows=builder.tokens,
            epsilon=config.rms_norm_eps,
            delta=delta,
            rounded=rounded,
            centered=config.centered_norms,
            **self._delta_options(config.layers - 1, "down"),
        )
        reads = (residual, *segments_of(delta), self._step)
        builder.kernel("final norm", None, launch, reads=reads, writes=(op.source, *codes_of(rounded)))

    def join(self, builder: PassBuilder, head: Segments) -> None:
        """Append the join of the logits' segments."""
        logits = self._pool["logits"]
        launch = join_logits(self._layers, head, logits, rows=builder.tokens)
        builder.kernel("join", None, launch, reads=segments_of(head), writes=(logits,))

    def finish_logits(self, builder: PassBuilder) -> None:
        """Append the bias of the logits and their soft cap, as far as the model has them."""
        cap, logits = self._config.logit_soft_cap, self._pool["logits"]
        bias, vocabulary = self._tensors.bias(-1, "head"), self._config.vocab_size
        if bias is not None:
            launch = add_bias(self._layers, logits, bias, rows=builder.tokens, vocabulary=vocabulary)
            builder.kernel("head bias", None, launch, reads=(logits,), writes=(logits,), ends=False)
        if cap:
            launch = soft_cap(self._layers, logits, cap, rows=builder.tokens, vocabulary=vocabulary)
            builder.kernel("soft cap", None, launch, reads=(logits,), writes=(logits,), ends=False)

    # -- helpers -------------------------------------------------------------------------------------

    def _delta_options(self, layer: int, group: Group) -> dict[str, Any]:
        """Return the bias and the norm weight of a group's output."""
        norm: Norm = "attention_output" if group == "o" else "feed_forward_output"
        return {"bias": self._tensors.bias(layer, group), "post": self._tensors.norm(layer, norm)}
