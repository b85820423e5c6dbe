"""Emits what layers add for their own embeddings of tokens: those embeddings, and a layer's network."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from heterollm.engine.builder import PassBuilder
from heterollm.engine.lanes import Lane
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.placed import Begun, Delta, PlacedOp, codes_of, segments_of
from heterollm.engine.slots import LAYER_INPUTS, LAYER_ROWS
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, GpuLinear, Segments
from heterollm.kernels.operators import TokenFactors, activate, rms_norm
from heterollm.model import LayerInputBlock, ModelWeights

HALF_POWER: Final = 0.5**0.5
"""Factor of the sum of a token's row and the linear of its embedding."""


class LayerInputEmitter:
    """Emits the networks of layers on their own embeddings, and those embeddings at the start of a pass."""

    def __init__(
        self, device: Device, weights: ModelWeights, linears: LinearEmitter, tensors: GlueTensors
    ) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config, self._linears, self._tensors = weights.config, linears, tensors
        self._rows = weights.layer_rows
        self._projection: GpuLinear | None = None
        self._norm: Any = None  # pyopencl is not typed
        if self._config.layer_vocabulary:
            self._projection = GpuLinear.pack(
                device.gpu, [weights.layer_projection], activation_dtype=device.activation_dtype
            )
            self._norm = device.gpu.upload(weights.layer_norm * np.float32(HALF_POWER))

    def clear(self) -> None:
        """Drop the weights; no compiled pass may run afterwards."""
        self._rows, self._projection, self._norm = None, None, None

    def write(self, lane: Lane, count: int) -> None:
        """Write the rows of the first tokens of a lane, where the model has them; kernels read them later.

        Raises:
            CheckpointError: A row has values that are not finite.
        """
        if self._rows is None:
            return
        slot = lane.shared[LAYER_ROWS]
        slot.acquire()
        try:
            rows = slot.view(np.float32, (count, self._config.layer_input_columns))
            ids = lane.tokens.array[:count]
            # Tokens behind the table read its first row, as in transformers.
            self._rows.read(np.where(ids < self._config.layer_vocabulary, ids, 0), rows)
            rows *= np.float32((self._config.layer_input_width / 2) ** 0.5)
        finally:
            slot.release()

    def start(self, builder: PassBuilder) -> None:
        """Append the embeddings of all layers: rows of a table, and a normed linear of the stream."""
        if self._projection is None:
            return
        lane, tokens, config = builder.lane, builder.tokens, self._config
        residual, x = lane.private["residual"], lane.shared["linear_input"]
        rows, out, width = lane.shared[LAYER_ROWS], lane.private[LAYER_INPUTS], config.layer_input_width
        plain = rms_norm(
            *(self._kernels, residual, None, x),
            hidden=config.hidden_size,
            tokens=tokens,
            epsilon=config.rms_norm_eps,
        )
        product = self._projection.launch(x, out, tokens=tokens, label="layer inputs")
        added = rms_norm(
            *(self._kernels, rows, None, out),
            hidden=width,
            tokens=tokens * config.layers,
            # The linear's output is divided by the root of the width of its input before its norm.
            epsilon=config.rms_norm_eps * config.hidden_size,
            delta=Segments(out, out, (width,), (0,)),
            post=self._norm,
        )
        for launch, reads, writes in (
            (plain, (residual,), (x,)),
            (product, (x,), (out,)),
            (added, (rows, out), (rows, out)),
        ):
            builder.kernel("layer inputs", None, launch, reads=reads, writes=writes, ends=launch is added)

    def begin(self, builder: PassBuilder, layer: int, block: LayerInputBlock) -> Begun:
        """Return a layer's network, which reads the stream next."""
        op = self._linears.placed(builder, layer, "layer_gate")
        return Begun(op.input_codes, functools.partial(self._emit, builder, layer, block, op))

    def _emit(self, builder: PassBuilder, layer: int, block: LayerInputBlock, op: PlacedOp) -> Delta:
        gate = self._linears.linear(builder, op)
        out = self._linears.placed(builder, layer, "layer_out")
        inputs = builder.lane.private[LAYER_INPUTS]
        launch = activate(
            self._kernels,
            gate,
            out.source,
            tokens=builder.tokens,
            intermediate=block.width,
            activation=block.activation,
            rounded=out.rounded,
            factors=TokenFactors(inputs, self._config.layer_input_columns, layer * block.width),
        )
        reads, writes = (*segments_of(gate), inputs), (out.source, *codes_of(out.rounded))
        builder.kernel("activation", layer, launch, reads=reads, writes=writes)
        return Delta(self._linears.linear(builder, out))
