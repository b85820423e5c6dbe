"""What lies between the linear layers, as prepared launches on the OpenCL device.

Norms, rotary positions with the KV write, attention, the gated activation and the join of the logits. Each
kernel that reads a linear's output takes the two segments of a row cut (:class:`Segments`), and each that
writes a linear's input writes the type that the linear reads on either part.

Kernels read the position, the length and the head's first row of a pass from the step buffer, so that a
launch serves every pass of its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from heterollm.errors import KernelError
from heterollm.kernels.opencl_runtime import Argument, Launch, OpenClRuntime, SharedArray
from heterollm.kernels.ops import Activation
from heterollm.kernels.variants import KernelStyle, Variant, variants_for
from heterollm.units import PAGE_BYTES, round_up

__all__ = [
    "STEP_HEAD_ROW",
    "STEP_LENGTH",
    "STEP_POSITION",
    "STEP_WORDS",
    "GpuLayers",
    "Segments",
    "head_stride",
]

ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh")
"""In the order of pointwise.cl's numbers."""

STEP_POSITION: Final = 0
"""Index in the step buffer (int32) of the position of the pass's first token."""
STEP_LENGTH: Final = 1
"""Index of the tokens of the pass; what lies behind them is neither read nor written."""
STEP_HEAD_ROW: Final = 2
"""Index of the first row that the head reads."""
STEP_WORDS: Final = 16
"""Words of the step buffer."""

Defines: TypeAlias = dict[str, str | int]

SIMT_ITEMS: Final = 64
VECTOR_COLUMNS: Final = 2048
PREFILL_ROWS: Final[dict[KernelStyle, int]] = {"vector": 32, "simt": 16}
DECODE_ROWS: Final = 8
FEW_TOKENS: Final = 8
DECODE_PART_KEYS: Final = 128
ONE_PART: Final = 2**31 - 1
LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Segments:
    """The output of a linear group under a row cut.

    Of member ``j`` the first ``splits[j]`` rows (output columns of the activation) lie in ``a``, the rest in
    ``b``; in each segment the members follow one another. A segment that no member uses may be any memory.

    Args:
        a: ``[m_padded, sum(splits)]`` in the activation type.
        b: ``[m, sum(rows) - sum(splits)]`` in the activation type.
        rows: Output rows of each member.
        splits: How many of them lie in ``a``.
    """

    a: SharedArray
    b: SharedArray
    rows: tuple[int, ...]
    splits: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.splits) or not all(
            0 <= split <= rows for split, rows in zip(self.splits, self.rows, strict=True)
        ):
            raise KernelError(f"Splits {self.splits} do not lie inside members of {self.rows} rows.")


def head_stride(capacity: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the elements from one head's block of the KV cache to the next; blocks start on pages."""
    item_bytes = np.dtype(kv_dtype).itemsize
    return round_up(capacity * head_dim * item_bytes, PAGE_BYTES) // item_bytes


class GpuLayers:
    """Makes the launches between the linear layers.

    Args:
        runtime: The OpenCL device.
        activation_dtype: float32 or float16, of what linears read and write.
        kv_dtype: float32 or float16, of the KV cache.
        style: Kernel family: explicit vectors (CPUs) or work-items in lockstep (GPUs); default by the device.

    Raises:
        KernelError: From here and from every method: a type, shape or slot that the kernels cannot take.
    """

    def __init__(
        self,
        runtime: OpenClRuntime,
        activation_dtype: DTypeLike,
        kv_dtype: DTypeLike,
        *,
        style: KernelStyle | None = None,
    ) -> None:
        self._runtime = runtime
        self._item_bytes = _float_bytes(activation_dtype, "Activations")
        self._kv_dtype = np.dtype(kv_dtype)
        self._variants = variants_for(is_cpu=runtime.traits.is_cpu, style=style)
        self._defines: dict[str, str | int] = {"ACT_HALF": 1} if self._item_bytes == 2 else {}
        self._kv_defines: dict[str, str | int] = (
            {"KV_HALF": 1} if _float_bytes(kv_dtype, "The KV cache") == 2 else {}
        )
        # The queue is in order, so all launches with parts of the context share one scratch buffer each size.
        self._partials: dict[int, Any] = {}

    # -- norms ---------------------------------------------------------------------------------------

    def rms_norm(
        self,
        residual: SharedArray,
        weight: Argument,
        out: SharedArray,
        *,
        hidden: int,
        tokens: int,
        epsilon: float,
        delta: Segments | None = None,
        bias: Argument = None,
        post: Argument = None,
        label: str = "norm",
    ) -> Launch:
        """Return the launch of ``residual += delta; out = residual / rms(residual) * weight``.

        With a bias the delta is ``delta + bias``; with ``post`` that, normed: ``delta / rms(delta) * post``.

        Args:
            residual: float32 ``[tokens, hidden]``, updated in place where there is a delta.
            weight: float32 ``[hidden]``.
            out: ``[tokens, hidden]`` in the activation type.
            hidden: Width of the model.
            tokens: Rows.
            epsilon: Added to the mean square.
            delta: Output of the linear before, one member; None at the start of the model.
            bias: float32 ``[hidden]`` of that linear, or None.
            post: float32 ``[hidden]``, weight of the norm of the delta, or None.
            label: Name for traces and errors.
        """
        arguments = self._norm_arguments(residual, weight, out, hidden, delta, bias, post, residual)
        self._check(residual, tokens * hidden, 4, f"{label} residual")
        flags = delta is not None, bias is not None, post is not None
        return self._norm(arguments, epsilon, flags, tokens, out, hidden, label)

    def final_norm(
        self,
        residual: SharedArray,
        weight: Argument,
        out: SharedArray,
        step: SharedArray,
        *,
        hidden: int,
        rows: int,
        epsilon: float,
        delta: Segments,
        bias: Argument = None,
        post: Argument = None,
        label: str = "final norm",
    ) -> Launch:
        """Return the launch of the norm before the head, of ``rows`` rows from the step's head row on.

        As :meth:`rms_norm`, but the sum is not stored back, so that it may run again for other rows of the
        pass; output row i is residual row ``step[STEP_HEAD_ROW] + i``, which must exist.
        """
        arguments = self._norm_arguments(residual, weight, out, hidden, delta, bias, post, step)
        flags = 2, bias is not None, post is not None
        return self._norm(arguments, epsilon, flags, rows, out, hidden, label)

    def _norm_arguments(
        self,
        residual: SharedArray,
        weight: Argument,
        out: SharedArray,
        hidden: int,
        delta: Segments | None,
        bias: Argument,
        post: Argument,
        step: SharedArray,
    ) -> tuple[Argument, ...]:
        if delta is None:
            delta = Segments(out, out, (hidden,), (0,))
        elif delta.rows != (hidden,):
            raise KernelError(f"A norm over {hidden} columns cannot add members of {delta.rows} rows.")
        # What is not there is never read, but an argument must be some memory.
        extra = (weight if memory is None else memory for memory in (bias, post))
        sizes = (np.int32(delta.splits[0]), np.int32(hidden))
        return (residual, weight, out, delta.a, delta.b, *extra, step, *sizes)

    def _norm(
        self,
        arguments: tuple[Argument, ...],
        epsilon: float,
        flags: tuple[int, ...],
        rows: int,
        out: SharedArray,
        hidden: int,
        label: str,
    ) -> Launch:
        self._check(out, rows * hidden, self._item_bytes, f"{label} output")
        kernel, _, items = self._kernel(("rms_norm.cl",), "rms_norm")
        values = (*arguments, np.float32(epsilon), *map(np.int32, flags))
        return self._runtime.launch(kernel, values, (rows * items,), (items,), label)

    def _kernel(
        self, files: Sequence[str], name: str, defines: Callable[[KernelStyle], Defines] = lambda _: {}
    ) -> tuple[Any, KernelStyle, int]:
        """Return a kernel of the first variant that builds, its style and its work-group's items.

        Args:
            files: Source files beside the common ones; ``{style}`` stands for the style.
            name: Kernel function.
            defines: What a style defines beside what all kernels do.
        """

        def build(variant: Variant) -> tuple[Any, KernelStyle, int]:
            style = variant.style
            items = 1 if style == "vector" else SIMT_ITEMS
            named = tuple(file.replace("{style}", style) for file in files)
            own = self._defines | variant.defines | {"WG": items} | defines(style)
            return self._runtime.kernel(("common.h", "layers.h", *named), name, own), style, items

        return self._runtime.variants.first(name.replace("_", " "), self._variants, build)

    # -- attention -----------------------------------------------------------------------------------

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
        label: str = "attention",
    ) -> tuple[Launch, ...]:
        """Return the launches of causal attention over the cache; the first one alone names the cache.

        Row ``t`` sees positions up to its own, and of these the last ``window``. The online softmax never
        stores the scores. Few tokens are split over the context where the heads alone would leave the device
        idle; a second launch then puts the parts together.

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
            label: Name for traces and errors.
        """
        if heads % kv_heads:
            raise KernelError(f"{label}: {heads} query heads cannot share {kv_heads} key heads.")
        group = heads // kv_heads

        def shape(style: KernelStyle) -> Defines:
            return {"HEAD_DIM": head_dim, "ROWS": _row_tile(style, tokens, group, head_dim)[0]}

        def tile(style: KernelStyle) -> Defines:
            _, micro, vectors = _row_tile(style, tokens, group, head_dim)
            registers: Defines = {"MICRO": micro, "VECTORS": vectors} if style == "vector" else {}
            return shape(style) | self._kv_defines | registers

        kernel, style, items = self._kernel(("attention.h", "attention_{style}.cl"), "attention", tile)
        tiles = -(-tokens * group // _row_tile(style, tokens, group, head_dim)[0])
        if parts is None:
            parts = self._choose_parts(style, tiles * kv_heads, bucket) if tokens <= FEW_TOKENS else 1
        self._check(q, tokens * heads * head_dim, 4, f"{label} query")
        self._check(out, tokens * heads * head_dim, self._item_bytes, f"{label} output")
        part_keys = ONE_PART if parts == 1 else -(-bucket // parts)
        partial = out if parts == 1 else self._partial(tokens * heads * parts * (head_dim + 2) * 4)
        factor = scale / soft_cap if soft_cap else scale * LOG2_E
        first = self._runtime.launch(
            kernel,
            (
                *(q, cache, out, partial, step),
                *self._cache_offsets(cache, layer, kv_heads, head_dim, capacity),
                *(np.int32(group), np.int32(window), np.int32(part_keys)),
                *(np.float32(factor), np.float32(soft_cap * LOG2_E)),
            ),
            (tiles * items, kv_heads, parts),
            (items, 1, 1),
            label,
        )
        if parts == 1:
            return (first,)
        kernel, _, items = self._kernel(("attention.h", "attention_join.cl"), "attention_join", shape)
        join = self._runtime.launch(
            kernel,
            (partial, out, np.int32(parts)),
            (tokens * heads * items,),
            (items,),
            f"{label} join",
        )
        return first, join

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

    # -- point by point ------------------------------------------------------------------------------

    def gated_activation(
        self,
        gate_up: Segments,
        out: SharedArray,
        *,
        tokens: int,
        intermediate: int,
        activation: Activation = "silu",
        bias: Argument = None,
        label: str = "activation",
    ) -> Launch:
        """Return the launch of ``out = activation(gate) * up``.

        Args:
            gate_up: Output of the group, two members of ``intermediate`` rows.
            out: ``[tokens, intermediate]`` in the activation type.
            tokens: Rows.
            intermediate: Width of the feed-forward network.
            activation: Of the gate.
            bias: float32 of gate and up one after the other, added first, or None.
            label: Name for traces and errors.
        """
        if gate_up.rows != (intermediate, intermediate):
            raise KernelError(f"{label}: members of {gate_up.rows} rows are not two of {intermediate}.")
        self._check(out, tokens * intermediate, self._item_bytes, f"{label} output")
        memory = (gate_up.a, gate_up.b, out, gate_up.b if bias is None else bias)
        sizes = (ACTIVATIONS.index(activation), bias is not None, *gate_up.splits, intermediate)
        return self._pointwise("gated_activation", memory, sizes, tokens, label)

    def join_logits(self, head: Segments, out: SharedArray, *, rows: int, label: str = "join") -> Launch:
        """Return the launch that puts the head's segments together as float32 ``[rows, vocabulary]``."""
        if len(head.rows) != 1:
            raise KernelError(f"{label}: the head is one member, not {len(head.rows)}.")
        self._check(out, rows * head.rows[0], 4, f"{label} output")
        sizes = (head.splits[0], head.rows[0])
        return self._pointwise("join_logits", (head.a, head.b, out), sizes, rows, label)

    def soft_cap(
        self, logits: SharedArray, cap: float, *, rows: int, vocabulary: int, label: str = "soft cap"
    ) -> Launch:
        """Return the launch of ``logits = cap * tanh(logits / cap)``, in place.

        Args:
            logits: float32 ``[rows, vocabulary]``.
            cap: Above every magnitude that comes out.
            rows: Rows.
            vocabulary: Columns.
            label: Name for traces and errors.
        """
        self._check(logits, rows * vocabulary, 4, f"{label} logits")
        return self._pointwise("soft_cap", (logits, np.float32(cap)), (vocabulary,), rows, label)

    def _pointwise(
        self, name: str, memory: tuple[Argument, ...], sizes: tuple[int, ...], rows: int, label: str
    ) -> Launch:
        columns = sizes[-1]
        kernel, style, items = self._kernel(("pointwise.cl",), name)
        span = VECTOR_COLUMNS if style == "vector" else 8
        width = round_up(-(-columns // span), items)
        arguments = (*memory, *map(np.int32, sizes), np.int32(span))
        return self._runtime.launch(kernel, arguments, (width, rows), (items, 1), label)

    @staticmethod
    def _check(slot: SharedArray, elements: int, item_bytes: int, what: str) -> None:
        if slot.array.nbytes < elements * item_bytes:
            raise KernelError(
                f"The {what} slot has {slot.array.nbytes} bytes, {elements * item_bytes} are needed."
            )


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


def _float_bytes(dtype: DTypeLike, what: str) -> int:
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float16):
        raise KernelError(f"{what} must be float32 or float16, not {kind}.")
    return kind.itemsize
