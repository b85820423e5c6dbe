"""Emits Laurel: two linears of low rank beside attention, with a norm behind, added to their input."""

from __future__ import annotations

import functools

import numpy as np

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import Begun, Delta
from heterollm.engine.slots import GATED_OUTPUT
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, GpuLinear, Segments
from heterollm.kernels.operators import apply_laurel
from heterollm.model import LaurelBlock, ModelWeights


class LaurelEmitter:
    """Emits the branches, whose linears the GPU computes in the activation type."""

    def __init__(self, device: Device, weights: ModelWeights, tensors: GlueTensors) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._tensors, self._epsilon = tensors, weights.config.inner_norm_eps
        dtype = np.dtype(device.activation_dtype)
        self._linears = {
            layer: [
                GpuLinear.pack(device.gpu, [weights.other(layer, role).astype(dtype)], activation_dtype=dtype)
                for role in ("laurel_left", "laurel_right")
            ]
            for layer in weights.config.blocks(LaurelBlock)
        }

    def clear(self) -> None:
        """Drop the weights; no compiled pass may run afterwards."""
        self._linears.clear()

    def begin(self, builder: PassBuilder, layer: int, block: LaurelBlock) -> Begun:
        """Return a layer's branch, whose norm comes next."""
        return Begun(None, functools.partial(self._emit, builder, layer, block), keeps=False)

    def _emit(self, builder: PassBuilder, layer: int, block: LaurelBlock) -> Delta:
        lane, tokens, columns = builder.lane, builder.tokens, (block.width,)
        x, inner, out = lane.shared["linear_input"], lane.private["gpu_output"], lane.private[GATED_OUTPUT]
        left, right, normed = apply_laurel(
            self._kernels,
            self._linears[layer],
            self._tensors.norm(layer, "laurel_output"),
            *(x, inner, out),
            tokens=tokens,
            epsilon=self._epsilon,
        )
        for launch, reads in ((left, x), (right, inner), (normed, out)):
            writes = (inner,) if reads is x else (out,)
            builder.kernel("laurel", layer, launch, reads=(reads,), writes=writes, ends=launch is normed)
        return Delta(Segments(out, x, columns, columns, join="sum"))
