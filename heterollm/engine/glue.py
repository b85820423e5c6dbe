"""Emits what a decoder layer has between its linears: norms, positions, attention, activation, logits."""

from __future__ import annotations

from typing import Any, Literal

from heterollm.engine.builder import PassBuilder, PlacedOperator, codes_of, segments_of
from heterollm.engine.step import Buffer
from heterollm.engine.tensors import SmallTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    ROUNDING,
    GpuGlue,
    GpuLinear,
    HeadShape,
    KvLayer,
    Launch,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    SharedArray,
)
from heterollm.kernels.ops import Group
from heterollm.kernels.sync import Pool
from heterollm.model import ModelConfig, Norm

__all__ = ["GlueEmitter"]

PARTIAL = Buffer("attention_partial")
"""Memory of the GPU's own: what attention finds in each part of the context, before they are joined."""


class GlueEmitter:
    """Emits the operators that the GPU always computes.

    Args:
        device: The opened device.
        config: The model.
        pool: The slots.
        small: Norms, biases and tables of positions.
        tokens: Token ids of a pass.
        step: The step buffer.
        context: Positions of a session.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        pool: Pool,
        small: SmallTensors,
        tokens: SharedArray,
        step: SharedArray,
        context: int,
    ) -> None:
        self._layers = GpuGlue(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config = config
        self._pool = pool
        self._small = small
        self._tokens = tokens
        self._step = step
        self._shape = HeadShape(config.heads, config.kv_heads, config.head_dim, context)

    def embedding(self, steps: PassBuilder, table: GpuLinear) -> None:
        """Append the look-up of the tokens, which begins the residual stream."""
        residual, scale = self._pool["residual"], self._config.embedding_scale
        launch = table.embed_launch(self._tokens, residual, count=steps.tokens, scale=scale)
        steps.kernel("embedding", None, launch, reads=(self._tokens,), writes=(residual,))

    def norm(
        self,
        steps: PassBuilder,
        layer: int,
        norm: Literal["attention", "feed_forward"],
        delta: Segments | None,
        rounded: RoundedInputs | None,
    ) -> None:
        """Append the norm before attention or before the feed-forward network.

        Args:
            steps: Those of the pass so far.
            layer: Decoder layer.
            norm: Which of the two.
            delta: What is added to the residual stream first; None at the start of the model.
            rounded: Where the int8 codes of the output go as well, or None.
        """
        residual, out = self._pool["residual"], self._pool["linear_input"]
        launch = self._layers.rms_norm(
            residual,
            self._small.norm(layer, norm),
            out,
            hidden=self._config.hidden_size,
            tokens=steps.tokens,
            epsilon=self._config.rms_norm_eps,
            delta=delta,
            rounded=rounded,
            **(
                self._delta_options(layer, "o")
                if norm == "feed_forward"
                else self._delta_options(layer - 1, "down")
            ),
        )
        reads = (residual, *segments_of(delta))
        updated = () if delta is None else (residual,)
        steps.kernel("norm", layer, launch, reads=reads, writes=(*updated, out, *codes_of(rounded)))

    def rope(self, steps: PassBuilder, layer: int, qkv: Segments, cache: SharedArray) -> None:
        """Append rotary positions, and the writing of keys and values to the cache."""
        config, small, query = self._config, self._small, self._pool["query"]
        rope = config.per_layer[layer].rope
        launch = self._layers.rope_and_store(
            qkv,
            small.bias(layer, "qkv"),
            query,
            KvLayer(cache, layer),
            self._step,
            shape=self._shape,
            rotation=Rotation(
                *small.rope(rope),
                dim=config.rotary_dim if rope else 0,
                norms=small.head_norms(layer),
                epsilon=config.rms_norm_eps,
            ),
            tokens=steps.tokens,
        )
        reads = (*segments_of(qkv), self._step)
        steps.kernel("rope", layer, launch, reads=reads, writes=(query, cache))

    def attention(
        self, steps: PassBuilder, layer: int, bucket: int, cache: SharedArray, rounded: RoundedInputs | None
    ) -> None:
        """Append attention over the cache; a long context is attended in parts that are joined.

        Args:
            steps: Those of the pass so far.
            layer: Decoder layer.
            bucket: Positions that the grids of a decode pass must cover.
            cache: The KV cache.
            rounded: Where the int8 codes of the output go as well, or None.
        """
        config, query, out = self._config, self._pool["query"], self._pool["attention_output"]
        first, *rest = self._layers.attention(
            query,
            KvLayer(cache, layer),
            out,
            self._step,
            shape=self._shape,
            scores=Scores(config.attention_scale, config.per_layer[layer].window, config.attention_soft_cap),
            tokens=steps.tokens,
            bucket=bucket,
            rounded=rounded,
        )
        reads, codes = (query, cache, self._step), codes_of(rounded)
        if not rest:
            steps.kernel("attention", layer, first, reads=reads, writes=(out, *codes))
        elif rest[0].label == ROUNDING:
            steps.kernel("attention", layer, first, reads=reads, writes=(out,), ends=False)
            steps.kernel("rounding of inputs", layer, rest[0], reads=(out,), writes=codes)
        else:
            steps.kernel("attention", layer, first, reads=reads, writes=(out, PARTIAL), ends=False)
            steps.kernel("attention join", layer, rest[0], reads=(PARTIAL,), writes=(out, *codes))

    def activation(
        self, steps: PassBuilder, layer: int, gate_up: Segments, rounded: RoundedInputs | None
    ) -> None:
        """Append the gated activation of the whole feed-forward network."""
        launch = self.activation_launch(steps.tokens, layer, gate_up, rounded)
        writes = (self._pool["activated"], *codes_of(rounded))
        steps.kernel("activation", layer, launch, reads=segments_of(gate_up), writes=writes)

    def activation_launch(
        self, tokens: int, layer: int, gate_up: Segments, rounded: RoundedInputs | None, *, start: int = 0
    ) -> Launch:
        """Return the kernel of the gated activation of the rows of gate and up from one on."""
        return self._layers.gated_activation(
            gate_up,
            self._pool["activated"],
            tokens=tokens,
            intermediate=gate_up.rows[0],
            activation=self._config.activation,
            bias=self._small.gate_up_bias(layer, start),
            rounded=rounded,
        )

    def final_norm(self, steps: PassBuilder, delta: Segments, here: PlacedOperator) -> None:
        """Append the norm before the head, of the rows that the step buffer names."""
        config, residual = self._config, self._pool["residual"]
        launch = self._layers.final_norm(
            residual,
            self._small.final_norm,
            here.source,
            self._step,
            rows=steps.tokens,
            epsilon=config.rms_norm_eps,
            delta=delta,
            rounded=here.rounded,
            **self._delta_options(config.layers - 1, "down"),
        )
        reads = (residual, *segments_of(delta), self._step)
        steps.kernel("final norm", None, launch, reads=reads, writes=(here.source, *codes_of(here.rounded)))

    def join(self, steps: PassBuilder, head: Segments) -> None:
        """Append what puts the segments of the logits together."""
        logits = self._pool["logits"]
        launch = self._layers.join_logits(head, logits, rows=steps.tokens)
        steps.kernel("join", None, launch, reads=segments_of(head), writes=(logits,))

    def soft_cap(self, steps: PassBuilder) -> None:
        """Append the soft cap of the logits, where the model has one."""
        cap, logits = self._config.logit_soft_cap, self._pool["logits"]
        if cap:
            vocabulary = self._config.vocab_size
            launch = self._layers.soft_cap(logits, cap, rows=steps.tokens, vocabulary=vocabulary)
            steps.kernel("soft cap", None, launch, reads=(logits,), writes=(logits,), ends=False)

    # -- pieces --------------------------------------------------------------------------------------

    def _delta_options(self, layer: int, group: Group) -> dict[str, Any]:
        """Return the bias of what a group adds to the residual and the weight of its norm."""
        norm: Norm = "attention_output" if group == "o" else "feed_forward_output"
        return {"bias": self._small.bias(layer, group), "post": self._small.norm(layer, norm)}
