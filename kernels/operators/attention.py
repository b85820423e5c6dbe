"""Causal attention over the KV cache, in parts of the context for a few tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import (
    KV_CODES,
    STEP_POSITION,
    WRONG_NMSE,
    Argument,
    AttentionClass,
    AttentionGrid,
    BuildError,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    HeadShape,
    KernelStyle,
    KvLayer,
    Launch,
    OpenClError,
    RoundedInputs,
    Scores,
    SharedArray,
    Variant,
    pages_of,
    pointwise_work,
    suits_coalesced,
)
from heterollm.kernels.operators.attention_work import attention_work
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.logits import exact_soft_cap
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    ModelSizes,
    OperatorCheck,
    OperatorSizes,
    Point,
    Scope,
    StepCategory,
    Timed,
    Values,
    check_case,
)
from heterollm.kernels.ops import WeightFormat

TRIED_TOKENS: Final = (1, 9)
TRIED_POSITIONS: Final = 150
"""Positions of a quick test, more than two passes of 64 keys."""

STEPS: Final[Mapping[str, StepCategory]] = {"attention": "attention", "attention join": "attention"}

LOG2_E: Final = math.log2(math.e)


PARTIAL_BYTES: Final = 4
"""Size of a partial result of one part of the context: float32."""


def attend(
    on: GlueKernels,
    q: DeviceMemory,
    cache: KvLayer,
    out: SharedArray,
    step: SharedArray,
    *,
    shape: HeadShape,
    scores: Scores,
    tokens: int,
    row_words: int = 0,
    parts: int | None = None,
    sinks: Argument = None,
    rounded: RoundedInputs | None = None,
    style: KernelStyle | None = None,
) -> tuple[Launch, ...]:
    """Return the launches of causal attention over the cache; only the first reads the cache.

    Row ``t`` sees at most ``window`` positions up to its own. The online softmax stores no scores. For a
    few tokens, if the heads alone would leave compute units idle, the context is divided into parts and a
    second launch joins them. Another launch rounds the output if the kernel cannot
    (:meth:`AttentionGrid.rounds`).

    Args:
        on: The device's kernels.
        q: float32 ``[tokens, heads * head_dim]``, after RoPE.
        cache: Keys and values, those of this pass included.
        out: ``[tokens, heads * head_dim]`` in the activation type.
        step: The step buffer.
        shape: OperatorSizes of the heads.
        scores: Scale, window and soft cap of the scores.
        tokens: Tokens of the pass.
        row_words: Words of the step buffer for each token, where it belongs to another sequence than the
            others; 0 for one sequence.
        parts: Parts of the context; by default a number that fits the device.
        sinks: float32 ``[heads]``, scores of each head that join its softmax with value zero; None for none.
        rounded: Target of the int8 codes of ``out``; None for no codes.
        style: Kernel style; by default the tuned one or the device's.
    """
    q.require(tokens * shape.query_columns * 4, "attention query")
    out.require(tokens * shape.query_columns * on.item_bytes, "attention output")
    codes = rounded.arguments(tokens, shape.query_columns, "attention") if rounded else ()
    units = on.runtime.traits.compute_units
    grid = AttentionGrid(shape, 1 if row_words else tokens, units, parts, rounded)
    chosen, partial, first = _first(
        *(on, grid, tokens, row_words, q, cache, out, step, scores, sinks, codes, style)
    )
    if grid.parts(chosen) > 1:
        return first, _join(on, grid, tokens, row_words, chosen, partial, out, step, codes)
    if rounded is None or grid.rounds(chosen):
        return (first,)
    return first, on.round_output(out, rounded, tokens, shape.query_columns)


def _first(
    on: GlueKernels,
    grid: AttentionGrid,
    tokens: int,
    row_words: int,
    q: DeviceMemory,
    cache: KvLayer,
    out: SharedArray,
    step: SharedArray,
    scores: Scores,
    sinks: Argument,
    codes: tuple[Argument, ...],
    forced: KernelStyle | None,
) -> tuple[KernelStyle, Argument, Launch]:
    """Return the kernel style, the target of partial results, and the launch that reads the cache."""

    def defines(style: KernelStyle) -> Defines:
        capped: Defines = {"SOFT_CAP": 1} if scores.soft_cap and style != "vector" else {}
        sunk: Defines = {} if sinks is None else {"SINKS": 1}
        chunked: Defines = {"CHUNKED": 1} if scores.chunked else {}
        shared: Defines = {"SHARED_VALUES": 1} if grid.shape.shares_values else {}
        return grid.defines(style) | on.cache_defines | shared | capped | sunk | chunked

    files = ("attention.h", "attention_{style}.cl")
    widths = (grid.shape.head_dim,)
    shape = grid.shape

    def test(variant: Variant) -> None:
        if variant.style == "coalesced" and on.runtime.tests_kernels and forced is None:
            _try_coalesced(on, shape)

    if forced is not None:
        variants: tuple[Variant, ...] = (Variant(forced),)
    else:
        variants = (*_tuned_variants(on, shape, grid.tokens), *on.variants)
    kernel, style, items = on.kernel(
        files, "attention", defines, grid.rounded, grid.rounds, widths, variants=variants, test=test
    )
    parts = grid.parts(style)
    cap, partial = scores.soft_cap, out if parts == 1 else _partials(on, grid, tokens, style)
    factor = scores.scale / cap if cap else scores.scale * LOG2_E
    arguments = (
        *(q, cache.memory, out, partial, step),
        on.table(cache, shape),
        *map(np.int32, (row_words, shape.group, scores.window)),
        *map(np.float32, (factor, cap * LOG2_E)),
        *(() if sinks is None else (sinks,)),
        *(codes if grid.rounds(style) else ()),
    )
    work = functools.partial(
        attention_work,
        shape,
        step.array,
        tokens=tokens,
        row_words=row_words,
        window=scores.window,
        chunked=scores.chunked,
        position_bytes=on.position_bytes(shape),
        output_bytes=on.item_bytes if parts == 1 else PARTIAL_BYTES,
    )
    sequences = tokens if row_words else 1
    size = sequences * grid.tiles(style) * items, shape.kv_heads, parts
    launch = on.runtime.launch(kernel, arguments, size, (items, 1, 1), "attention", work=work)
    return style, partial, launch


def _tuned_variants(on: GlueKernels, shape: HeadShape, tokens: int) -> tuple[Variant, ...]:
    """Return the tuned variant, unless it is the device's own; caches of 8 bits have none."""
    if on.kv_dtype == KV_CODES:
        return ()
    kind = AttentionClass.of(shape.head_dim, shape.group, on.kv_dtype, tokens)
    tuned = on.runtime.tuning.attention_style(kind)
    return (Variant("coalesced"),) if tuned == "coalesced" and suits_coalesced(kind) else ()


def _join(
    on: GlueKernels,
    grid: AttentionGrid,
    tokens: int,
    row_words: int,
    style: KernelStyle,
    partial: Argument,
    out: SharedArray,
    step: SharedArray,
    codes: tuple[Argument, ...],
) -> Launch:
    """Return the launch that joins the parts of the context."""
    shape, together, parts = grid.shape, grid.code_heads, grid.parts(style)
    # attention.h needs ROWS; this kernel does not.
    defines: Defines = {"HEAD_DIM": shape.head_dim, "ROWS": 1, "CODE_HEADS": together}
    files, widths = ("attention.h", "attention_join.cl"), (shape.head_dim,)
    kernel, _, items = on.kernel(files, "attention_join", lambda _: defines, grid.rounded, widths=widths)
    elements = tokens * shape.query_columns
    work = functools.partial(_join_work, step.array, elements, parts, on.item_bytes)
    return on.runtime.launch(
        kernel,
        (partial, out, step, *map(np.int32, (shape.heads, parts, row_words)), *codes),
        (tokens * shape.heads // together * items,),
        (items,),
        "attention join",
        work=work,
    )


def _join_work(step: NDArray[np.int32], elements: int, parts: int, item_bytes: int) -> GpuWork:
    """Return the work of joining the parts that a context has, for an output of so many elements."""
    pages = pages_of(int(step[STEP_POSITION]) + 1)
    written = -(-pages // -(-pages // parts))
    return pointwise_work(elements, 4 * written, PARTIAL_BYTES * written, item_bytes)


def _partials(on: GlueKernels, grid: AttentionGrid, tokens: int, style: KernelStyle) -> Any:  # noqa: ANN401 - pyopencl is not typed
    """Return scratch memory for the partial results: a sum and two numbers per head and part."""
    values = tokens * grid.shape.heads * grid.parts(style) * (grid.shape.head_dim + 2)
    return on.scratch(values * PARTIAL_BYTES)


def exact_attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    position: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: NDArray[Any] | None = None,
    chunked: bool = False,
) -> NDArray[np.float64]:
    """Return causal attention ``[m, heads, head_dim]``.

    Args:
        q: ``[m, heads, head_dim]``; row t is at ``position + t``.
        keys: ``[kv_heads, at least position + m, head_dim]``.
        values: Array of the same shape.
        position: Position of the first row.
        scale: Factor on the scores.
        window: Positions visible to a row, its own included; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
        sinks: Score ``[heads]`` that joins each row's softmax with the value zero; None for none.
        chunked: Whether the visible positions are those of the row's chunk of ``window``.
    """
    rows, heads, _ = q.shape
    length = position + rows
    group = heads // keys.shape[0]
    k = np.repeat(keys[:, :length].astype(np.float64), group, axis=0)
    v = np.repeat(values[:, :length].astype(np.float64), group, axis=0)
    scores = np.einsum("mhd,hkd->hmk", q.astype(np.float64), k) * scale
    if soft_cap:
        scores = exact_soft_cap(scores, soft_cap)
    row, key = np.arange(position, length)[:, None], np.arange(length)[None, :]
    hidden = key > row
    if window > 0:
        hidden |= key // window < row // window if chunked else key <= row - window
    scores = np.where(hidden, -np.inf, scores)
    sunk = np.full((heads, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64).reshape(-1, 1, 1)
    largest = np.maximum(scores.max(axis=2, keepdims=True), sunk)
    weights = np.exp(scores - largest)
    weights /= weights.sum(axis=2, keepdims=True) + np.exp(sunk - largest)
    output: NDArray[np.float64] = np.einsum("hmk,hkd->mhd", weights, v)
    return output


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attention to a cache that is NaN behind the last position.

    ``spread`` counts decades between the queries of the first head and those of the last. By default the
    kernel chooses its parts and style. ``rounds`` is the format of a linear that reads int8 codes, ``pages``
    are those of :meth:`heterollm.kernels.operators.data.Data.cache`. ``sinks`` has one of each head; empty
    for none.
    """

    tokens: int
    position: int
    shape: HeadShape
    scores: Scores | None = None
    spread: float = 0.0
    parts: int | None = None
    style: KernelStyle | None = None
    rounds: WeightFormat | None = None
    pages: tuple[int, ...] = ()
    sinks: tuple[float, ...] = ()

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch, ...]:
        shape, tokens, columns = self.shape, self.tokens, self.shape.query_columns
        sizes = np.repeat(np.logspace(-self.spread, self.spread / 2, shape.heads), shape.head_dim)
        return attend(
            on,
            data.floats("queries", tokens, columns, scale=2.0 * sizes),
            data.cache(shape, self.position + tokens, pages=self.pages),
            data.output("attended", tokens, columns),
            data.step(self.position, tokens),
            shape=shape,
            scores=self.scores or Scores(shape.head_dim**-0.5),
            tokens=tokens,
            parts=self.parts,
            sinks=data.put("sinks", np.array(self.sinks, np.float32)) if self.sinks else None,
            rounded=data.int8(self.rounds, tokens, columns),
            style=self.style,
        )

    def exact(self, data: Values) -> Exact:
        scores = self.scores or Scores(self.shape.head_dim**-0.5)
        attended = exact_attention(
            data["queries"].reshape(self.tokens, -1, self.shape.head_dim),
            data["keys"],
            data["values"],
            position=self.position,
            scale=scores.scale,
            window=scores.window,
            soft_cap=scores.soft_cap,
            sinks=data.get("sinks"),
            chunked=scores.chunked,
        )
        return {"attended": attended.reshape(self.tokens, -1)}


_HEADS: Final = HeadShape(heads=4, kv_heads=2, head_dim=32, capacity=80)
_PAGED: Final = AttentionCase(3, 75, _HEADS, Scores(_HEADS.head_dim**-0.5, window=30), pages=(2, 1))
_SUNK: Final = AttentionCase(
    3, 70, _HEADS, Scores(_HEADS.head_dim**-0.5, window=30), sinks=(3.0, -1.0, 0.5, -np.inf)
)
_CHUNKED: Final = AttentionCase(37, 11, _HEADS, Scores(_HEADS.head_dim**-0.5, window=20, chunked=True))
_CAPPED: Final = AttentionCase(1, 70, _HEADS, Scores(_HEADS.head_dim**-0.5, soft_cap=0.5))
CHECKS: Final = (
    OperatorCheck("attention, prefill", "37 tokens at 11", AttentionCase(37, 11, _HEADS), "attended"),
    OperatorCheck("attention, decode", "1 token at 70", AttentionCase(1, 70, _HEADS), "attended"),
    OperatorCheck("attention, decode", "3 tokens at 75, window of two pages", _PAGED, "attended"),
    OperatorCheck("attention, prefill", "37 tokens at 11, chunks of 20", _CHUNKED, "attended"),
    OperatorCheck("attention, decode", "1 token at 70, capped", _CAPPED, "attended"),
    OperatorCheck("attention, decode", "3 tokens at 70, window, sinks", _SUNK, "attended"),
)


def _points(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
    places = [(tokens, position) for tokens in scope.tokens for position in scope.positions]
    for tokens, position in (*places, *((tokens, keys - tokens) for tokens, keys in scope.sparse)):
        yield Form(), timed.sizes(model, tokens, position)


def _measured(at: Point) -> AttentionCase:
    tokens, context, _, heads, kv_heads, head_dim = at.sizes
    shape = HeadShape(heads, kv_heads, head_dim, at.capacity)
    return AttentionCase(tokens, context - tokens, shape, rounds=at.int8("o"))


ATTENTION: Final = Timed(
    forms={Form(): "attention", Form(codes="int8"): "attention_int8"},
    case=_measured,
    has_heads=True,
    reads_cache=True,
    points=_points,
)


def _try_coalesced(on: GlueKernels, heads: HeadShape) -> None:
    """Compute the attention of one token and of some by the style ``coalesced``.

    Raises:
        BuildError: The kernel does not build or run, or its numbers are wrong.
    """
    shape = HeadShape(2 * heads.group, 2, heads.head_dim, TRIED_POSITIONS)
    for tokens in TRIED_TOKENS:
        case = AttentionCase(tokens, TRIED_POSITIONS - tokens, shape, style="coalesced")
        try:
            numbers = check_case(case, on, np.random.default_rng(0))["attended"]
        except OpenClError as error:
            raise BuildError(f"it does not run ({error}).") from error
        nmse = linear_errors(*numbers).nmse
        if not nmse <= WRONG_NMSE:
            raise BuildError(f"it computes wrong numbers (NMSE {nmse:.1e}).")
