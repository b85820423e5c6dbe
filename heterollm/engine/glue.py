"""Emits the operators around a layer's blocks: embedding, norms with what they add, logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import Delta, codes_of, segments_of
from heterollm.engine.step import Step
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    DeviceMemory,
    GlueKernels,
    GpuLinear,
    NpuCodes,
    RoundedInputs,
    Segments,
    SharedArray,
)
from heterollm.kernels.operators import (
    add_bias,
    add_positions,
    final_norm,
    join_logits,
    norm_output,
    norm_residual,
    rms_norm,
    soft_cap,
    write_codes,
)
from heterollm.kernels.ops import STREAM_INPUT
from heterollm.model import LayerStage, ModelConfig, Norm


class GlueEmitter:
    """Emits the operators between blocks, before the first and behind the last.

    Args:
        device: The device.
        config: The model's configuration.
        tensors: Norms and biases.
    """

    def __init__(self, device: Device, config: ModelConfig, tensors: GlueTensors) -> None:
        self._layers = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config = config
        self._tensors = tensors

    def embedding(self, builder: PassBuilder, table: GpuLinear) -> None:
        """Append the embedding of tokens, and of learned positions, which begins the residual stream."""
        tokens, residual = builder.lane.tokens, builder.lane.private["residual"]
        launch = table.embed_launch(
            tokens, residual, count=builder.tokens, scale=self._config.embedding_scale
        )
        builder.kernel("embedding", None, launch, reads=(tokens,), writes=(residual,))
        if self._config.norms_embedding:
            hidden, epsilon = self._config.hidden_size, self._config.rms_norm_eps
            launch = norm_residual(
                self._layers, residual, hidden=hidden, tokens=builder.tokens, epsilon=epsilon
            )
            builder.kernel("norm of the embedding", None, launch, reads=(residual,), writes=(residual,))
        if self._tensors.positions is not None:
            step = builder.lane.step
            launch = add_positions(
                *(self._layers, residual, self._tensors.positions, step),
                hidden=self._config.hidden_size,
                tokens=builder.tokens,
            )
            builder.kernel("positions", None, launch, reads=(residual, step), writes=(residual,))

    def norm(
        self,
        builder: PassBuilder,
        layer: int,
        norm: Norm | None,
        delta: Delta | None,
        codes: RoundedInputs | NpuCodes | None,
    ) -> None:
        """Append the norm before a stage, or without one the copy of the residual stream for its linears.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            norm: The norm; None for the stream itself.
            delta: Values to add to the residual stream first; None at the start of the model.
            codes: Buffers for codes of the output, or None.
        """
        self._append(builder, self.prepared_norm(builder, layer, norm, delta, codes))

    def copy_stream(
        self, builder: PassBuilder, layer: int, delta: Delta | None, codes: RoundedInputs | NpuCodes | None
    ) -> None:
        """Append the copy of the residual stream that fused operators read; arguments as of :meth:`norm`."""
        step = self.prepared_norm(builder, layer, None, delta, codes, target=STREAM_INPUT)
        self._append(builder, step)

    def _append(self, builder: PassBuilder, step: Step) -> None:
        builder.steps.append(step)
        builder.end_operator(step.operator, step.layer)

    def prepared_norm(
        self,
        builder: PassBuilder,
        layer: int,
        norm: Norm | None,
        delta: Delta | None,
        codes: RoundedInputs | NpuCodes | None = None,
        *,
        target: str = "linear_input",
    ) -> Step:
        """Return the step of :meth:`norm`, with its output in the slot ``target``, without appending it."""
        residual, out = builder.lane.private["residual"], builder.lane.shared[target]
        launch = rms_norm(
            self._layers,
            residual,
            self._tensors.norm(layer, norm),
            out,
            hidden=self._config.hidden_size,
            tokens=builder.tokens,
            epsilon=self._config.rms_norm_eps,
            rounded=codes,
            centered=self._config.centered_norms,
            **self._added(delta),
        )
        reads = (residual, *_read(delta))
        updated = () if delta is None else (residual,)
        name = "residual" if norm is None else "norm"
        return builder.prepared(name, layer, launch, reads, (*updated, out, *codes_of(codes)))

    def summed(self, builder: PassBuilder, layer: int, stage: LayerStage, outputs: Sequence[Delta]) -> Delta:
        """Return the sum of the outputs of a stage's blocks, as far as the next norm can add them."""
        *others, last = outputs
        for other in others:
            first, second = other.segments, last.segments
            if second.a is second.b:
                joined = Segments(first.a, second.a, second.rows, second.rows, join="sum")
                last = replace(last, segments=joined)
            else:
                # The next norm adds two arrays at most.
                self.add(builder, layer, stage.norm, other, builder.lane.shared["linear_input"])
        return replace(last, post=self._tensors.norm(layer, stage.output_norm))

    def normed(self, builder: PassBuilder, layer: int, norm: Norm, output: Delta, out: DeviceMemory) -> Delta:
        """Append the norm of a block's output alone, and return the values that it writes."""
        segments = output.segments
        launch = norm_output(
            self._layers,
            segments,
            self._tensors.norm(layer, norm),
            out,
            tokens=builder.tokens,
            epsilon=self._config.output_norm_eps,
            bias=output.bias,
        )
        builder.kernel("norm of an output", layer, launch, reads=segments_of(segments), writes=(out,))
        return Delta(Segments(out, out, segments.rows, segments.rows))

    def codes(self, builder: PassBuilder, layer: int, codes: RoundedInputs | NpuCodes) -> None:
        """Append the rounding of the last norm's output for a further block that reads it."""
        out, tokens, hidden = builder.lane.shared["linear_input"], builder.tokens, self._config.hidden_size
        if isinstance(codes, NpuCodes):
            launch = write_codes(self._layers, out, codes, tokens=tokens, columns=hidden)
        else:
            launch = self._layers.round_output(out, codes, tokens, hidden)
        builder.kernel("rounding of inputs", layer, launch, reads=(out,), writes=codes_of(codes))

    def add(
        self, builder: PassBuilder, layer: int, norm: Norm | None, delta: Delta, out: SharedArray
    ) -> None:
        """Append the addition of values to the residual stream, by a norm whose output nothing reads."""
        residual = builder.lane.private["residual"]
        launch = rms_norm(
            self._layers,
            residual,
            self._tensors.norm(layer, norm),
            out,
            hidden=self._config.hidden_size,
            tokens=builder.tokens,
            epsilon=self._config.rms_norm_eps,
            **self._added(delta),
        )
        reads = (residual, *_read(delta))
        builder.kernel("norm", layer, launch, reads=reads, writes=(residual, out))

    def final_norm(
        self, builder: PassBuilder, delta: Delta, out: SharedArray, codes: RoundedInputs | NpuCodes | None
    ) -> None:
        """Append the norm before the head, for the rows in the step buffer.

        Args:
            builder: The pass so far.
            delta: Output of the last layer's block.
            out: Slot of the result.
            codes: Target of the result's codes, if the head reads some.
        """
        config, residual, step = self._config, builder.lane.private["residual"], builder.lane.step
        launch = final_norm(
            self._layers,
            residual,
            self._tensors.final_norm,
            out,
            step,
            rows=builder.tokens,
            epsilon=config.rms_norm_eps,
            rounded=codes,
            centered=config.centered_norms,
            **self._added(delta),
        )
        reads, writes = (residual, *_read(delta), step), (out, *codes_of(codes))
        builder.kernel("final norm", None, launch, reads=reads, writes=writes)

    def join(self, builder: PassBuilder, head: Segments) -> None:
        """Append the join of the logits' segments."""
        logits = builder.lane.shared["logits"]
        launch = join_logits(self._layers, head, logits, rows=builder.tokens)
        builder.kernel("join", None, launch, reads=segments_of(head), writes=(logits,))

    def finish_logits(self, builder: PassBuilder) -> None:
        """Append the bias of the logits and their soft cap, as far as the model has them."""
        cap, logits = self._config.logit_soft_cap, builder.lane.shared["logits"]
        bias, vocabulary = self._tensors.bias(-1, "head"), self._config.vocab_size
        if bias is not None:
            launch = add_bias(self._layers, logits, bias, rows=builder.tokens, vocabulary=vocabulary)
            builder.kernel("head bias", None, launch, reads=(logits,), writes=(logits,), ends=False)
        if cap:
            launch = soft_cap(self._layers, logits, cap, rows=builder.tokens, vocabulary=vocabulary)
            builder.kernel("soft cap", None, launch, reads=(logits,), writes=(logits,), ends=False)

    def _added(self, delta: Delta | None) -> dict[str, Any]:
        """Return the arguments of a norm that adds values first."""
        if delta is None:
            return {}
        own = {"delta": delta.segments, "bias": delta.bias, "post": delta.post, "gain": delta.gain}
        return {**own, "post_epsilon": self._config.output_norm_eps}


def _read(delta: Delta | None) -> tuple[DeviceMemory, ...]:
    return () if delta is None else segments_of(delta.segments)
