"""Emits gated short convolutions: their linears, and the convolution between them."""

from __future__ import annotations

import functools

from heterollm.engine.builder import PassBuilder
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.placed import Begun, Delta, PlacedOp, codes_of, segments_of
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels
from heterollm.kernels.operators import convolve
from heterollm.model import ShortConvBlock


class ShortConvEmitter:
    """Emits short convolutions."""

    def __init__(self, device: Device, linears: LinearEmitter, tensors: GlueTensors) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._linears, self._tensors = linears, tensors

    def begin(self, builder: PassBuilder, layer: int, block: ShortConvBlock) -> Begun:
        """Return a layer's convolution, whose norm comes next."""
        op = self._linears.placed(builder, layer, "conv_in")
        return Begun(op.input_codes, functools.partial(self._emit, builder, layer, block, op))

    def _emit(self, builder: PassBuilder, layer: int, block: ShortConvBlock, op: PlacedOp) -> Delta:
        gates = self._linears.linear(builder, op)
        out = self._linears.placed(builder, layer, "conv_out")
        rounded, state, step = out.rounded, builder.recurrent(layer), builder.lane.step
        launch = convolve(
            self._kernels,
            gates,
            self._tensors.taps(layer),
            out.source,
            state,
            step,
            tokens=builder.tokens,
            width=block.width,
            row_words=builder.row_words,
            rounded=rounded,
        )
        reads = (*segments_of(gates), state.memory, step)
        writes = (out.source, state.memory, *codes_of(rounded))
        builder.kernel("short convolution", layer, launch, reads=reads, writes=writes)
        return Delta(self._linears.linear(builder, out))
