"""Rotary positions with the KV write, and attention over the cache, as prepared OpenCL launches."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.attention_grid import AttentionGrid
from heterollm.kernels.gpu.attention_tuning import AttentionClass, suits_coalesced
from heterollm.kernels.gpu.cache_layout import KV_CODES, position_bytes, scales_start
from heterollm.kernels.gpu.glue_kernels import Defines, GlueKernels, Segments
from heterollm.kernels.gpu.heads import HeadShape, KvLayer, Rotation, Scores
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.rounding import RoundedInputs, rounding_launch
from heterollm.kernels.gpu.self_test import try_attention
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.gpu.work import attention_work, pointwise_work, rope_work

LOG2_E: Final = math.log2(math.e)

PARTIAL_BYTES: Final = 4
"""Size of a partial result of one part of the context: float32."""


class GpuAttention(GlueKernels):
    """Makes the launches of RoPE with the KV write and of attention; see :class:`GlueKernels`."""

    @functools.cached_property
    def _scratch(self) -> dict[int, Any]:
        return {}

    def rope_and_store(
        self,
        qkv: Segments,
        bias: Argument,
        q_out: DeviceMemory,
        cache: KvLayer,
        step: SharedArray,
        *,
        shape: HeadShape,
        rotation: Rotation,
        tokens: int,
    ) -> Launch:
        """Return the launch that adds biases, rotates q and k and writes k and v to the KV cache.

        Tokens past the step's length or the capacity are dropped.

        Args:
            qkv: Output of the group, three members.
            bias: float32 of q, then k, then v; or None.
            q_out: float32 ``[tokens, heads * head_dim]``.
            cache: Target of keys and values.
            step: The step buffer.
            shape: Sizes of the heads.
            rotation: Rotation and norms of q and k.
            tokens: Tokens of the pass.
        """
        head_dim, turned = shape.head_dim, shape.head_dim if rotation.dim is None else rotation.dim
        if qkv.rows != shape.rows:
            raise KernelError(
                f"rope: members of {qkv.rows} rows are not {shape.heads} and {shape.kv_heads} heads."
            )
        if head_dim % 2 or turned % 2 or not 0 <= turned <= head_dim:
            raise KernelError(f"rope: {turned} of {head_dim} elements cannot turn; both must be even.")
        q_out.require(tokens * shape.query_columns * 4, "rope query")
        offsets = self._cache_offsets(cache, shape)
        pieces = max(-(-turned // 16) + -(-(head_dim - turned) // 16), -(-head_dim // 16))

        def defines(style: KernelStyle) -> Defines:
            own: Defines = {"PIECES": pieces} if style == "simt" else {}
            own |= {"JOINT_NORM": 1} if rotation.joint else {}
            return self._kv_defines | own | ({"LIMITED": 1} if rotation.limit else {})

        widths = (head_dim // 2, turned // 2, *qkv.splits)
        kernel, style, items = self._kernel(
            ("rope.cl",), "rope_and_store", defines, widths=widths, segments=qkv
        )
        sizes = [*qkv.splits, shape.heads, shape.kv_heads, head_dim, turned, shape.capacity]
        sizes += [bias is not None, rotation.norms is not None]
        # Absent memory is never read, but OpenCL needs a valid argument.
        extra = (rotation.cos if memory is None else memory for memory in (bias, rotation.norms))
        memory = (qkv.a, qkv.b, *extra, rotation.cos, rotation.sin, q_out, cache.memory, step)
        heads = shape.heads + 2 * shape.kv_heads
        width = 1 if style == "vector" else round_up(pieces * heads, items)
        limit = (np.float32(rotation.limit),) if rotation.limit else ()
        arguments = (*memory, *offsets, *map(np.int32, sizes), np.float32(rotation.epsilon), *limit)
        read_bytes = self._item_bytes * qkv.reads
        work = functools.partial(rope_work, shape, tokens, read_bytes, self._position_bytes(shape))
        return self._runtime.launch(kernel, arguments, (width, tokens), (items, 1), "rope", work=work)

    def attention(
        self,
        q: DeviceMemory,
        cache: KvLayer,
        out: SharedArray,
        step: SharedArray,
        *,
        shape: HeadShape,
        scores: Scores,
        tokens: int,
        bucket: int,
        parts: int | None = None,
        rounded: RoundedInputs | None = None,
        style: KernelStyle | None = None,
    ) -> tuple[Launch, ...]:
        """Return the launches of causal attention over the cache; only the first reads the cache.

        Row ``t`` sees at most ``window`` positions up to its own. The online softmax stores no scores. For a
        few tokens, if the heads alone would leave compute units idle, the context is divided into parts and a
        second launch joins them. Another launch rounds the output if the kernel cannot
        (:meth:`AttentionGrid.rounds`).

        Args:
            q: float32 ``[tokens, heads * head_dim]``, after RoPE.
            cache: Keys and values, those of this pass included.
            out: ``[tokens, heads * head_dim]`` in the activation type.
            step: The step buffer.
            shape: Sizes of the heads.
            scores: Scale, window and soft cap of the scores.
            tokens: Tokens of the pass.
            bucket: Largest context length of this launch.
            parts: Parts of the context; by default a number that fits the device.
            rounded: Target of the int8 codes of ``out``; None for no codes.
            style: Kernel style; by default the tuned one or the device's.
        """
        q.require(tokens * shape.query_columns * 4, "attention query")
        out.require(tokens * shape.query_columns * self._item_bytes, "attention output")
        codes = rounded.arguments(tokens, shape.query_columns, "attention") if rounded else ()
        units = self._runtime.traits.compute_units
        grid = AttentionGrid(shape, tokens, bucket, units, parts, rounded)
        chosen, partial, first = self._first(grid, q, cache, out, step, scores, codes, style)
        if grid.parts(chosen) > 1:
            return first, self._join(grid, chosen, partial, out, codes)
        if rounded is None or grid.rounds(chosen):
            return (first,)
        return first, self._round(out, rounded, tokens, shape.query_columns)

    def _first(
        self,
        grid: AttentionGrid,
        q: DeviceMemory,
        cache: KvLayer,
        out: SharedArray,
        step: SharedArray,
        scores: Scores,
        codes: tuple[Argument, ...],
        forced: KernelStyle | None,
    ) -> tuple[KernelStyle, Argument, Launch]:
        """Return the kernel style, the target of partial results, and the launch that reads the cache."""

        def defines(style: KernelStyle) -> Defines:
            capped: Defines = {"SOFT_CAP": 1} if scores.soft_cap and style != "vector" else {}
            return grid.defines(style) | self._kv_defines | capped

        files = ("attention.h", "attention_{style}.cl")
        widths = (grid.shape.head_dim,)
        shape = grid.shape

        def test(variant: Variant) -> None:
            if variant.style == "coalesced" and self._runtime.tests_kernels and forced is None:
                try_attention(self.attention, self._runtime, shape, self._kv_dtype, self._item_bytes)

        if forced is not None:
            variants: tuple[Variant, ...] = (Variant(forced),)
        else:
            variants = (*self._tuned_variants(shape, grid.tokens), *self._variants)
        kernel, style, items = self._kernel(
            files, "attention", defines, grid.rounded, grid.rounds, widths, variants=variants, test=test
        )
        parts = grid.parts(style)
        cap, partial = scores.soft_cap, out if parts == 1 else self._partials(grid, style)
        factor = scores.scale / cap if cap else scores.scale * LOG2_E
        arguments = (
            *(q, cache.memory, out, partial, step),
            *self._cache_offsets(cache, shape),
            *map(np.int32, (shape.group, scores.window, grid.part_keys(style))),
            *map(np.float32, (factor, cap * LOG2_E)),
            *(codes if grid.rounds(style) else ()),
        )
        work = functools.partial(
            attention_work,
            shape,
            step.array,
            tokens=grid.tokens,
            window=scores.window,
            position_bytes=self._position_bytes(shape),
            output_bytes=self._item_bytes if parts == 1 else PARTIAL_BYTES,
        )
        size = grid.tiles(style) * items, shape.kv_heads, parts
        launch = self._runtime.launch(kernel, arguments, size, (items, 1, 1), "attention", work=work)
        return style, partial, launch

    def _tuned_variants(self, shape: HeadShape, tokens: int) -> tuple[Variant, ...]:
        """Return the tuned variant, unless it is the device's own; caches of 8 bits have none."""
        if self._kv_dtype == KV_CODES:
            return ()
        kind = AttentionClass.of(shape.head_dim, shape.group, self._kv_dtype, tokens)
        tuned = self._runtime.tuning.attention_style(kind)
        return (Variant("coalesced"),) if tuned == "coalesced" and suits_coalesced(kind) else ()

    def _join(
        self,
        grid: AttentionGrid,
        style: KernelStyle,
        partial: Argument,
        out: SharedArray,
        codes: tuple[Argument, ...],
    ) -> Launch:
        """Return the launch that joins the parts of the context."""
        shape, together, parts = grid.shape, grid.code_heads, grid.parts(style)
        # attention.h needs ROWS; this kernel does not.
        defines: Defines = {"HEAD_DIM": shape.head_dim, "ROWS": 1, "CODE_HEADS": together}
        files, widths = ("attention.h", "attention_join.cl"), (shape.head_dim,)
        kernel, _, items = self._kernel(
            files, "attention_join", lambda _: defines, grid.rounded, widths=widths
        )
        elements = grid.tokens * shape.query_columns
        work = functools.partial(pointwise_work, elements, 4 * parts, PARTIAL_BYTES * parts, self._item_bytes)
        return self._runtime.launch(
            kernel,
            (partial, out, np.int32(parts), *codes),
            (grid.tokens * shape.heads // together * items,),
            (items,),
            "attention join",
            work=work,
        )

    def _round(self, out: SharedArray, rounded: RoundedInputs, tokens: int, columns: int) -> Launch:
        """Return the launch that rounds the output."""

        def build(variant: Variant) -> Launch:
            return rounding_launch(
                self._runtime,
                out,
                rounded,
                columns=columns,
                tokens=tokens,
                half=self._item_bytes == 2,
                variant=variant,
            )

        return self._runtime.variants.first("rounding of inputs", self._variants, build)

    def _partials(self, grid: AttentionGrid, style: KernelStyle) -> Any:  # noqa: ANN401 - pyopencl is not typed
        """Return scratch memory for the partial results: a sum and two numbers per head and part."""
        values = grid.tokens * grid.shape.heads * grid.parts(style) * (grid.shape.head_dim + 2)
        return self._partial(values * PARTIAL_BYTES)

    def _partial(self, size_bytes: int) -> Any:  # noqa: ANN401
        # The queue is in order, so launches share one scratch buffer per size.
        if size_bytes not in self._scratch:
            self._scratch[size_bytes] = self._runtime.scratch(size_bytes)
        return self._scratch[size_bytes]

    def _position_bytes(self, shape: HeadShape) -> int:
        return position_bytes(shape.head_dim, self._kv_dtype)

    def _cache_offsets(self, cache: KvLayer, shape: HeadShape) -> tuple[np.uint64, ...]:
        keys, values, stride, end = shape.layer_offsets(cache.layer, self._kv_dtype)
        cache.memory.require(end * self._kv_dtype.itemsize, f"KV cache of layer {cache.layer}")
        scales = (scales_start(shape.capacity, shape.head_dim),) if self._kv_dtype == KV_CODES else ()
        return tuple(map(np.uint64, (keys, values, stride, *scales)))
