"""Emits several residual streams (AltUp): their start, prediction, correction, and end."""

from __future__ import annotations

from typing import Final

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import Delta, segments_of
from heterollm.engine.slots import STREAMS
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, GlueKernels, GpuLinear, Launch, Segments
from heterollm.kernels.operators import (
    Normed,
    Streams,
    correct_streams,
    fit_stream,
    predict_streams,
    read_stream,
)
from heterollm.model import ModelWeights

TITLE: Final = "streams"


class StreamEmitter:
    """Emits the operators on streams of a model that has several; of another nothing."""

    def __init__(self, device: Device, weights: ModelWeights, tensors: GlueTensors) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config, self._tensors = weights.config, tensors
        self._opens, self._closes = (
            [GpuLinear.pack(device.gpu, [own], activation_dtype=device.activation_dtype) for own in linears]
            for linears in weights.streams
        )

    def clear(self) -> None:
        """Drop the weights; no compiled pass may run afterwards."""
        self._opens.clear()
        self._closes.clear()

    def start(self, builder: PassBuilder) -> None:
        """Append the further streams: linears of the embedding, brought to its size.

        The embedding is in the slot of the linears' input, where layers' embeddings have read it.
        """
        x, out = builder.lane.shared["linear_input"], builder.lane.private["gpu_output"]
        for stream, linear in enumerate(self._opens, 1):
            self._kernel(
                builder, None, linear.launch(x, out, tokens=builder.tokens, label=TITLE), (x,), (out,)
            )
            launch = fit_stream(self._kernels, self._streams(builder), stream, out, opens=True)
            memory = builder.lane.private[STREAMS]
            self._kernel(builder, None, launch, (out, builder.lane.private["residual"]), (memory,))

    def predict(self, builder: PassBuilder, layer: int, added: Delta | None) -> None:
        """Append the prediction of all streams at the start of a layer.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            added: Values to add to all streams but the first before; None at the start of the model.
        """
        streams = self._streams(builder)
        launch = predict_streams(
            self._kernels, streams, self._tensors.streams(layer).predicts, _normed(added)
        )
        memory = streams.memory, streams.residual
        self._kernel(builder, layer, launch, (streams.memory, *_read(added)), memory)

    def correct(self, builder: PassBuilder, layer: int, added: Delta) -> None:
        """Append the correction of all streams behind a layer's network, whose output is added first.

        The first stream, times its factors, goes to the slot of the linears' input.
        """
        streams, out, own = (
            self._streams(builder),
            builder.lane.shared["linear_input"],
            self._tensors.streams(layer),
        )
        normed = Normed(added.segments, added.post)
        launch = correct_streams(self._kernels, streams, own.corrects, normed, own.scale, out)
        memory = streams.memory, streams.residual
        self._kernel(builder, layer, launch, (*memory, *_read(added)), (*memory, out))

    def end(self, builder: PassBuilder, added: Delta) -> Delta:
        """Append the end of the streams, and return the values that make the residual their mean."""
        if not self._closes:
            return added
        lane, streams = builder.lane, self._streams(builder)
        x, out = lane.shared["linear_input"], lane.private["gpu_output"]
        rest: Delta | None = added
        for stream, linear in enumerate(self._closes, 1):
            read = read_stream(self._kernels, streams, stream, _normed(rest), x)
            changed = () if rest is None else (streams.memory,)
            self._kernel(builder, None, read, (streams.memory, *_read(rest)), (x, *changed))
            product = linear.launch(x, out, tokens=builder.tokens, label=TITLE)
            self._kernel(builder, None, product, (x,), (out,))
            fitted = fit_stream(self._kernels, streams, stream, out, opens=False)
            written = (out,) if stream == len(self._closes) else (streams.residual,)
            self._kernel(builder, None, fitted, (streams.memory, streams.residual, out), written)
            rest = None
        columns = (self._config.hidden_size,)
        return Delta(Segments(out, out, columns, (0,)), gain=1 / streams.count)

    def _streams(self, builder: PassBuilder) -> Streams:
        private, config = builder.lane.private, self._config
        memory = private[STREAMS], private["residual"]
        return Streams(*memory, config.streams, config.hidden_size, builder.tokens, config.rms_norm_eps)

    @staticmethod
    def _kernel(
        builder: PassBuilder,
        layer: int | None,
        launch: Launch,
        reads: tuple[DeviceMemory, ...],
        writes: tuple[DeviceMemory, ...],
    ) -> None:
        builder.kernel(TITLE, layer, launch, reads=reads, writes=writes)


def _normed(added: Delta | None) -> Normed | None:
    return None if added is None else Normed(added.segments, added.post)


def _read(added: Delta | None) -> tuple[DeviceMemory, ...]:
    return () if added is None else segments_of(added.segments)
