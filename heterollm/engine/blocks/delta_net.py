"""Emits gated delta nets and state spaces: their linears, and what lies between them.

That is a convolution, the delta rule or a selective scan, and a gated norm.
"""

from __future__ import annotations

import functools
from typing import Final

from heterollm.engine.blocks.gate import append_gate
from heterollm.engine.builder import PassBuilder
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.placed import Begun, Delta, PlacedOp, segments_of
from heterollm.engine.slots import DELTA_FACTORS, DELTA_MIXED, DELTA_OUTPUT
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, Segments
from heterollm.kernels.operators import apply_delta_rule, convolve_inputs
from heterollm.model import DeltaNetBlock, ModelConfig

Z: Final = 3
"""Place of the gate among the members of the first group."""


class DeltaNetEmitter:
    """Emits delta nets and state spaces."""

    def __init__(
        self, device: Device, config: ModelConfig, linears: LinearEmitter, tensors: GlueTensors
    ) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._epsilon, self._linears, self._tensors = config.inner_norm_eps, linears, tensors

    def begin(self, builder: PassBuilder, layer: int, block: DeltaNetBlock) -> Begun:
        """Return a layer's delta net, whose norm comes next."""
        op = self._linears.placed(builder, layer, block.GROUPS[0])
        return Begun(op.input_codes, functools.partial(self._emit, builder, layer, block, op), keeps=False)

    def _emit(self, builder: PassBuilder, layer: int, block: DeltaNetBlock, op: PlacedOp) -> Delta:
        inputs = self._linears.linear(builder, op)
        out = self._linears.placed(builder, layer, block.GROUPS[1])
        self._own(layer, block, inputs, builder)
        append_gate(
            *(builder, self._kernels, builder.lane.private[DELTA_OUTPUT], inputs, Z, out),
            heads=block.normed_parts,
            norm=self._tensors.net(layer)[1],
            epsilon=self._epsilon,
            silu=True,
            gate_first=block.gate_first,
            weights_by_head=not block.shape.recalls,
        )
        return Delta(self._linears.linear(builder, out))

    def _own(self, layer: int, block: DeltaNetBlock, inputs: Segments, builder: PassBuilder) -> None:
        """Append what reads and writes state: the convolution and the delta rule."""
        private, step, state = builder.lane.private, builder.lane.step, builder.recurrent(layer)
        mixed, factors, output = private[DELTA_MIXED], private[DELTA_FACTORS], private[DELTA_OUTPUT]
        taps, rates = self._tensors.taps(layer), self._tensors.net(layer)[0]
        shape, tokens, row_words = block.shape, builder.tokens, builder.row_words
        convolution = convolve_inputs(
            *(self._kernels, inputs, taps, rates, mixed, factors, state, step),
            shape=shape,
            tokens=tokens,
            row_words=row_words,
        )
        reads = (*segments_of(inputs), state.memory, step)
        writes = (mixed, factors, state.memory)
        builder.kernel(convolution.label, layer, convolution, reads=reads, writes=writes)
        rule = apply_delta_rule(
            *(self._kernels, mixed, factors, rates, output, state, step),
            shape=shape,
            tokens=tokens,
            row_words=row_words,
        )
        read = (mixed, factors, state.memory, step)
        builder.kernel(rule.label, layer, rule, reads=read, writes=(output, state.memory))
