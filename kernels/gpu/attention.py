"""Rotary positions with the KV write, and attention over the cache, as prepared OpenCL launches."""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import PAGE_BYTES, KernelError, round_up
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.layer_kernels import Defines, LayerKernels, Segments
from heterollm.kernels.gpu.memory import SharedArray
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.rounding import RoundedInputs, rounding_launch
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.gpu.work import attention_work, pointwise_work, rope_work

__all__ = ["GpuAttention", "head_stride"]

PREFILL_ROWS: Final[dict[KernelStyle, int]] = {"vector": 32, "simt": 16}
DECODE_ROWS: Final = 8
FEW_TOKENS: Final = 8
DECODE_PART_KEYS: Final = 128
ONE_PART: Final = 2**31 - 1
LOG2_E: Final = math.log2(math.e)


def head_stride(capacity: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the elements from one head's block of the KV cache to the next; blocks start on pages."""
    item_bytes = np.dtype(kv_dtype).itemsize
    return round_up(capacity * head_dim * item_bytes, PAGE_BYTES) // item_bytes


class GpuAttention(LayerKernels):
    """Makes the launches from a linear's queries, keys and values to the output of attention.

    Args:
        runtime: The OpenCL device.
        activation_dtype: float32 or float16, of what linears read and write.
        kv_dtype: float32 or float16, of the KV cache.
        style: Kernel family: explicit vectors (CPUs) or work-items in lockstep (GPUs); default by the device.

    Raises:
        KernelError: From here and from every method: a type, shape or slot that the kernels cannot take.
    """

    @functools.cached_property
    def _partials(self) -> dict[int, Any]:
        # The queue is in order, so all launches with parts of the context share one scratch buffer each size.
        return {}

    def rope_and_store(
        self,
        qkv: Segments,
        bias: Argument,
        cos: Argument,
        sin: Argument,
        q_out: SharedArray,
        cache: SharedArray,
        step: SharedArray,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        tokens: int,
        rotary_dim: int | None = None,
        norms: Argument = None,
        epsilon: float = 0.0,
        label: str = "rope",
    ) -> Launch:
        """Return the launch that adds biases, rotates q and k and writes k and v to the KV cache.

        With ``norms`` each head of q and k is divided by its root mean square and weighted before it turns.

        Element i of a head's first ``rotary_dim`` turns with element ``i + rotary_dim / 2`` (the half-split
        convention of Hugging Face checkpoints). Tokens past the step's length or the capacity are dropped.

        Args:
            qkv: Output of the group, three members.
            bias: float32 of q, k and v one after the other, or None.
            cos: float32 ``[context, rotary_dim / 2]``.
            sin: The same.
            q_out: float32 ``[tokens, heads * head_dim]``.
            cache: ``[layer][k|v][kv_head][capacity][head_dim]``, heads :func:`head_stride` apart.
            step: The step buffer.
            layer: Layer of the cache.
            heads: Query heads.
            kv_heads: Key and value heads.
            head_dim: Elements of a head, even.
            capacity: Positions that the cache and the tables hold.
            tokens: Tokens of the pass.
            rotary_dim: Elements of a head that turn, even; default all.
            norms: float32 ``[2 * head_dim]``, weights of q's norm and of k's, or None.
            epsilon: Added to the mean square in those norms.
            label: Name for traces and errors.
        """
        qkv.require_concatenated(label)
        rotary = head_dim if rotary_dim is None else rotary_dim
        if qkv.rows != (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim):
            raise KernelError(f"{label}: members of {qkv.rows} rows are not {heads} and {kv_heads} heads.")
        if head_dim % 2 or rotary % 2 or not 0 <= rotary <= head_dim:
            raise KernelError(f"{label}: {rotary} of {head_dim} elements cannot turn; both must be even.")
        self._check(q_out, tokens * heads * head_dim, 4, f"{label} query")
        offsets = self._cache_offsets(cache, layer, kv_heads, head_dim, capacity)
        kernel, style, items = self._kernel(("rope.cl",), "rope_and_store", lambda _: self._kv_defines)
        sizes = [*qkv.splits, heads, kv_heads, head_dim, rotary, capacity]
        sizes += [bias is not None, norms is not None]
        # What is not there is never read, but an argument must be some memory.
        extra = (cos if memory is None else memory for memory in (bias, norms))
        pieces = max(-(-rotary // 16) + -(-(head_dim - rotary) // 16), -(-head_dim // 16))
        width = 1 if style == "vector" else round_up(pieces * (heads + 2 * kv_heads), items)
        queries, keys = tokens * heads * head_dim, 2 * tokens * kv_heads * head_dim
        work = functools.partial(rope_work, queries, keys, self._item_bytes, self._kv_dtype.itemsize)
        return self._runtime.launch(
            kernel,
            (
                *(qkv.a, qkv.b, *extra, cos, sin, q_out, cache, step),
                *offsets,
                *map(np.int32, sizes),
                np.float32(epsilon),
            ),
            (width, tokens),
            (items, 1),
            label,
            work=work,
        )

    def attention(
        self,
        q: SharedArray,
        cache: SharedArray,
        out: SharedArray,
        step: SharedArray,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        tokens: int,
        bucket: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        parts: int | None = None,
        rounded: RoundedInputs | None = None,
        label: str = "attention",
    ) -> tuple[Launch, ...]:
        """Return the launches of causal attention over the cache; the first one alone names the cache.

        Row ``t`` sees positions up to its own, and of these the last ``window``. The online softmax never
        stores the scores. Few tokens are split over the context where the heads alone would leave the device
        idle; a second launch then puts the parts together.

        Where blocks of codes lie across what two work-groups write (:func:`_rounds`), a launch of its own
        rounds the output.

        Args:
            q: float32 ``[tokens, heads * head_dim]``, after RoPE.
            cache: As for :meth:`rope_and_store`.
            out: ``[tokens, heads * head_dim]`` in the activation type.
            step: The step buffer.
            layer: Layer of the cache.
            heads: Query heads, a multiple of ``kv_heads``.
            kv_heads: Key and value heads.
            head_dim: Elements of a head.
            capacity: Positions that the cache holds.
            tokens: Tokens of the pass.
            bucket: Positions that the context has at most when this launch runs.
            scale: Factor on the scores.
            window: Positions that a token sees, itself included; 0 for all.
            soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
            parts: Parts of the context; default by the device.
            rounded: Where the int8 codes of ``out`` go as well, or None.
            label: Name for traces and errors.
        """
        if heads % kv_heads:
            raise KernelError(f"{label}: {heads} query heads cannot share {kv_heads} key heads.")
        group = heads // kv_heads

        def cut(style: KernelStyle) -> tuple[int, int]:
            """Return the row tiles and the parts of the context."""
            tiles = -(-tokens * group // _row_tile(style, tokens, group, head_dim)[0])
            if parts is None and tokens <= FEW_TOKENS:
                return tiles, self._choose_parts(style, tiles * kv_heads, bucket)
            return tiles, parts or 1

        def rounds(style: KernelStyle) -> bool:
            return cut(style)[1] == 1 and _rounds(rounded, style, tokens, group, head_dim)

        def tile(style: KernelStyle) -> Defines:
            rows, micro, vectors = _row_tile(style, tokens, group, head_dim)
            own = {"HEAD_DIM": head_dim, "ROWS": rows} | self._kv_defines
            own |= {"MICRO": micro, "VECTORS": vectors} if style == "vector" else {}
            return own | ({"CODE_HEADS": _code_heads(rounded, head_dim)} if rounds(style) else {})

        files = ("attention.h", "attention_{style}.cl")
        kernel, style, items = self._kernel(files, "attention", tile, rounded, rounds)
        tiles, part_count = cut(style)
        self._check(q, tokens * heads * head_dim, 4, f"{label} query")
        self._check(out, tokens * heads * head_dim, self._item_bytes, f"{label} output")
        codes = rounded.arguments(tokens, heads * head_dim, label) if rounded else ()
        part_keys = ONE_PART if part_count == 1 else -(-bucket // part_count)
        partial = out if part_count == 1 else self._partial(tokens * heads * part_count * (head_dim + 2) * 4)
        factor = scale / soft_cap if soft_cap else scale * LOG2_E
        work = functools.partial(
            attention_work,
            step.array,
            heads,
            kv_heads,
            head_dim,
            tokens=tokens,
            window=window,
            kv_bytes=self._kv_dtype.itemsize,
            output_bytes=self._item_bytes if part_count == 1 else 4,
        )
        first = self._runtime.launch(
            kernel,
            (
                *(q, cache, out, partial, step),
                *self._cache_offsets(cache, layer, kv_heads, head_dim, capacity),
                *(np.int32(group), np.int32(window), np.int32(part_keys)),
                *(np.float32(factor), np.float32(soft_cap * LOG2_E)),
                *(codes if rounds(style) else ()),
            ),
            (tiles * items, kv_heads, part_count),
            (items, 1, 1),
            label,
            work=work,
        )
        if part_count > 1:
            return first, self._join(partial, out, tokens, heads, head_dim, part_count, rounded, label)
        if rounded is None or rounds(style):
            return (first,)
        return first, self._round(out, rounded, tokens, heads * head_dim)

    def _join(
        self,
        partial: Argument,
        out: SharedArray,
        tokens: int,
        heads: int,
        head_dim: int,
        parts: int,
        rounded: RoundedInputs | None,
        label: str,
    ) -> Launch:
        """Return the launch that puts the parts of the context together."""
        together = _code_heads(rounded, head_dim)

        # The rows of a tile mean nothing here, but the common file asks for them.
        shape: Defines = {"HEAD_DIM": head_dim, "ROWS": 1, "CODE_HEADS": together}
        files = ("attention.h", "attention_join.cl")
        kernel, _, items = self._kernel(files, "attention_join", lambda _: shape, rounded)
        codes = rounded.arguments(tokens, heads * head_dim, label) if rounded else ()
        work = functools.partial(
            pointwise_work, tokens * heads * head_dim, 4 * parts, 4 * parts, self._item_bytes
        )
        return self._runtime.launch(
            kernel,
            (partial, out, np.int32(parts), *codes),
            (tokens * heads // together * items,),
            (items,),
            f"{label} join",
            work=work,
        )

    def _round(self, out: SharedArray, rounded: RoundedInputs, tokens: int, columns: int) -> Launch:
        """Return the launch that rounds what was written."""

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

    def _choose_parts(self, style: KernelStyle, groups: int, bucket: int) -> int:
        units = self._runtime.traits.compute_units
        if style == "vector":
            # A core is busy with one work-group; several for each even out what they have to do.
            wanted = 1 if groups % units == 0 else -(-4 * units // groups)
        else:
            wanted = -(-8 * units // groups)
        return max(1, min(wanted, bucket // DECODE_PART_KEYS))

    def _partial(self, size_bytes: int) -> Any:  # noqa: ANN401 - pyopencl is not typed
        if size_bytes not in self._partials:
            self._partials[size_bytes] = self._runtime.scratch(size_bytes)
        return self._partials[size_bytes]

    def _cache_offsets(
        self, cache: SharedArray, layer: int, kv_heads: int, head_dim: int, capacity: int
    ) -> tuple[np.uint64, np.uint64, np.uint64]:
        stride = head_stride(capacity, head_dim, self._kv_dtype)
        keys = layer * 2 * kv_heads * stride
        # The last block may be cut to what it holds.
        end = keys + (2 * kv_heads - 1) * stride + capacity * head_dim
        self._check(cache, end, self._kv_dtype.itemsize, f"KV cache of layer {layer}")
        return np.uint64(keys), np.uint64(keys + kv_heads * stride), np.uint64(stride)


def _row_tile(style: KernelStyle, tokens: int, group: int, head_dim: int) -> tuple[int, int, int]:
    """Return the query rows of a work-group and, for vectors, the rows and vectors of a register tile.

    Eight sums or more must be under way to keep two multiply-add units with a latency of four busy; how the
    16 registers are best shared was measured.
    """
    if tokens > 1:
        return PREFILL_ROWS[style], 4, 2
    rows = min(group, DECODE_ROWS)
    vectors = 4 if rows <= 2 and head_dim % 32 == 0 else 2 if rows <= 6 else 1
    return rows, rows, vectors


def _code_heads(rounded: RoundedInputs | None, head_dim: int) -> int:
    """Return the fewest heads that are whole blocks of codes."""
    return math.lcm(head_dim, rounded.block) // head_dim if rounded else 1


def _rounds(
    rounded: RoundedInputs | None, style: KernelStyle, tokens: int, group: int, head_dim: int
) -> bool:
    """Whether what a work-group writes of a token is whole blocks of codes.

    It is with blocks that divide a head. Otherwise a block takes several heads; they must share a key head
    and a row tile, since those of another key head are another work-group's.
    """
    heads = _code_heads(rounded, head_dim)
    rows = _row_tile(style, tokens, group, head_dim)[0]
    return rounded is not None and group % heads == 0 and rows % heads == 0
