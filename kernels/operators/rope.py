"""RoPE of queries and keys, with the head norms before it, and the write of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu import (
    Argument,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    HeadShape,
    KernelStyle,
    KvLayer,
    Launch,
    Rotated,
    Rotation,
    Segments,
    SharedArray,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.norm import exact_rms_norm
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    Point,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import Join

EPSILON: Final = 1e-5
"""Of checks."""

TITLE: Final = "RoPE and KV write"
STEPS: Final[Mapping[str, StepCategory]] = {"rope": "attention"}


def rope_and_store(
    on: GlueKernels,
    qkv: Segments,
    bias: Argument,
    q_out: DeviceMemory,
    cache: KvLayer,
    step: SharedArray,
    *,
    shape: HeadShape,
    rotation: Rotation,
    tokens: int,
    row_words: int = 0,
) -> Launch:
    """Return the launch that adds biases, rotates q and k and writes k and v to the KV cache.

    Tokens past the step's length or the capacity are dropped.

    Args:
        on: The device's kernels.
        qkv: Output of the group, of which members behind q, k and v are not read; or q and k, where values
            are the keys before their norm and rotation; or q alone, which leaves the cache as it is.
        bias: float32 of q, then k, then v; or None.
        q_out: float32 ``[tokens, heads * head_dim]``.
        cache: Target of keys and values.
        step: The step buffer.
        shape: OperatorSizes of the heads.
        rotation: Rotation and norms of q and k.
        tokens: Tokens of the pass.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
    """
    head_dim, turned = shape.head_dim, shape.head_dim if rotation.dim is None else rotation.dim
    kv_heads = shape.kv_heads if len(qkv.rows) > 1 else 0
    if qkv.rows[:3] != shape.rows[: len(qkv.rows)]:
        raise KernelError(
            f"rope: members of {qkv.rows} rows are not {shape.heads} and {shape.kv_heads} heads."
        )
    if head_dim % 2 or turned % 2 or not 0 <= turned <= head_dim:
        raise KernelError(f"rope: {turned} of {head_dim} elements cannot turn; both must be even.")
    q_out.require(tokens * shape.query_columns * 4, "rope query")
    pieces = max(-(-turned // 16) + -(-(head_dim - turned) // 16), -(-head_dim // 16))

    flags = {
        "JOINT_NORM": rotation.joint,
        "LIMITED": rotation.limit,
        "NORMS_LAST": rotation.norms_last,
        "QUERY_SCALES": rotation.query_scales is not None,
        "VALUE_NORM": rotation.value_norms,
        "VALUES_ARE_KEYS": len(qkv.rows) == len(("q", "k")),
    }

    def defines(style: KernelStyle) -> Defines:
        own: Defines = {"PIECES": pieces} if style == "simt" else {}
        return on.cache_defines | own | {name: 1 for name, holds in flags.items() if holds}

    splits = (*qkv.splits, *(0,) * (3 - len(qkv.splits)))
    widths = (head_dim // 2, turned // 2, *splits, *qkv.rows[3:])
    kernel, style, items = on.kernel(("rope.cl",), "rope_and_store", defines, widths=widths, segments=qkv)
    sizes = [*splits[:3], sum(splits[3:]), sum(qkv.rows[3:]), shape.heads, kv_heads]
    sizes += [head_dim, turned, shape.capacity, bias is not None, rotation.norms is not None]
    # Absent memory is never read, but OpenCL needs a valid argument.
    extra = [rotation.cos if memory is None else memory for memory in (bias, rotation.norms)]
    memory = (qkv.a, qkv.b, *extra, rotation.cos, rotation.sin, q_out, cache.memory, step)
    heads = shape.heads + 2 * kv_heads
    width = 1 if style == "vector" else round_up(pieces * heads, items)
    options: list[Argument] = [np.float32(rotation.limit)] * bool(rotation.limit)
    options += [rotation.query_scales] * (rotation.query_scales is not None)
    place = on.table(cache, shape), np.int32(row_words)
    arguments = (*memory, *place, *map(np.int32, sizes), np.float32(rotation.epsilon), *options)
    read_bytes = on.item_bytes * qkv.reads
    work = functools.partial(_work, shape, kv_heads, tokens, read_bytes, on.position_bytes(shape))
    launch = on.runtime.launch(kernel, arguments, (width, tokens), (items, 1), "rope", work=work)
    is_plain = qkv.rows == shape.rows and not any((*qkv.splits, *flags.values()))
    if tokens == 1 and on.runtime.has_endings and is_plain:
        has_norms = np.int32(rotation.norms is not None), np.float32(rotation.epsilon)
        others: tuple[Argument, ...] = (
            *(extra[1], *has_norms, rotation.cos, rotation.sin, cache.memory, step, *place),
            *map(np.int32, (shape.heads, kv_heads, shape.capacity)),
        )
        own = on.cache_defines | {"ROTARY": turned}
        launch.ending = Rotated(q_out, bias, head_dim, own, others)
    return launch


def _work(shape: HeadShape, kv_heads: int, tokens: int, read_bytes: float, position_bytes: int) -> GpuWork:
    """Return the work of RoPE and of the KV write.

    Args:
        shape: OperatorSizes of the heads.
        kv_heads: Key heads that are stored.
        tokens: Tokens of the pass.
        read_bytes: Bytes read for an element of the linear's output.
        position_bytes: Bytes of the cache for one position of a head.
    """
    queries, stored = tokens * shape.query_columns, 2 * tokens * kv_heads
    read = read_bytes * (queries + stored * shape.head_dim)
    return GpuWork("elementwise", 6 * queries, read, 4 * queries + position_bytes * stored)


def exact_rotation(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[np.float64]:
    """Rotate the first ``r`` elements of every head of ``x [m, heads, head_dim]``.

    ``cos`` and ``sin`` are ``[m, r / 2]``.
    Element i pairs with element ``i + r / 2``, as in ``rotate_half`` of transformers.
    """
    half = cos.shape[1]
    exact = x.astype(np.float64)
    low, high, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    c, s = cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=2)


@dataclass(frozen=True, slots=True)
class RopeCase:
    """RoPE and the KV write.

    ``splits`` are the columns of each member that lie in the first segment, ``rotary`` those of a head that
    turn (None for all), and ``pages`` those of :meth:`heterollm.kernels.operators.data.Data.cache`. One norm
    may span all heads of queries, another all of keys (``joint``); values may have one without weights; norms
    may come behind the rotation (``norms_last``), and queries have a factor for their position (``scaled``).
    With four splits there is a gate behind v; with two values are keys; a single one is that of queries,
    which write no keys.
    """

    tokens: int
    position: int
    shape: HeadShape
    splits: tuple[int, ...]
    join: Join = "concatenate"
    rotary: int | None = None
    biased: bool = False
    normed: bool = False
    joint: bool = False
    limit: float = 0.0
    norms_last: bool = False
    scaled: bool = False
    pages: tuple[int, ...] = ()
    value_norms: bool = False

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        shape, tokens, position = self.shape, self.tokens, self.position
        turned = shape.head_dim if self.rotary is None else self.rotary
        size = shape.capacity, turned // 2
        if self.norms_last:
            # A head keeps its length only in a rotation.
            angles = np.arange(size[0] * size[1], dtype=np.float32).reshape(size)
            cos, sin = data.put("cos", np.cos(angles)), data.put("sin", np.sin(angles))
        else:
            cos, sin = (data.floats(name, *size) for name in ("cos", "sin"))
        scales = data.weights("query_scales", shape.capacity) if self.scaled else None
        norms = data.weights("norms", sum(self._norm_widths)) if self.normed else None
        launch = rope_and_store(
            on,
            data.linear(tokens, self._rows, self.splits, self.join),
            data.floats("bias", sum(self._rows)) if self.biased else None,
            data.output("queries", tokens, shape.query_columns, dtype=np.float32),
            data.cache(shape, 0, range(position, position + tokens), self.pages),
            data.step(position, tokens),
            shape=shape,
            rotation=Rotation(
                *(cos, sin, self.rotary, norms, EPSILON, self.joint, self.limit, self.value_norms),
                *(self.norms_last, scales),
            ),
            tokens=tokens,
        )
        return (launch,)

    def exact(self, data: Values) -> Exact:
        shape, places = self.shape, slice(self.position, self.position + self.tokens)
        parts = np.split(data["linear"] + data.get("bias", 0.0), np.cumsum(self._rows)[:-1], axis=1)[:3]
        if len(self.splits) == len(("q", "k")):
            parts.append(parts[1])
        if not self.norms_last:
            parts = self._normed(parts, data)
        if self.value_norms:
            parts[2] = exact_rms_norm(parts[2].reshape(-1, shape.head_dim), np.ones(1), EPSILON)
        if self.limit:
            parts = [np.clip(part, -self.limit, self.limit) for part in parts]
        heads = [part.reshape(self.tokens, -1, shape.head_dim) for part in parts]
        angle = [data[name][places] for name in ("cos", "sin")]
        turned = [*(exact_rotation(part, *angle) for part in heads[:2]), *heads[2:]]
        found = [one.reshape(self.tokens, -1) for one in turned]
        if self.norms_last:
            found = self._normed(found, data)
        if self.scaled:
            found[0] *= data["query_scales"][places, None]
        return dict(zip(("queries", "keys", "values"), found, strict=False))

    def _normed(self, parts: Sequence[NDArray[Any]], data: Values) -> list[NDArray[Any]]:
        """Return queries and keys with norms, if they have any, and values."""
        if not self.normed:
            return list(parts)
        widths = self._norm_widths
        norms = np.split(data["norms"], [widths[0]])
        normed = [
            exact_rms_norm(part.reshape(-1, width), own, EPSILON).reshape(self.tokens, -1)
            for part, width, own in zip(parts, widths, norms, strict=False)
        ]
        return [*normed, *parts[2:]]

    @property
    def _rows(self) -> tuple[int, ...]:
        return (*self.shape.rows, self.shape.query_columns)[: len(self.splits)]

    @property
    def _norm_widths(self) -> tuple[int, int]:
        return self.shape.rows[:2] if self.joint else (self.shape.head_dim,) * 2


_HEADS: Final = HeadShape(heads=4, kv_heads=2, head_dim=32, capacity=80)
_SPLIT: Final = RopeCase(7, 11, _HEADS, (64, 32, 0), biased=True)
CHECKS: Final = (
    *(
        OperatorCheck(TITLE, f"7 tokens at 11, split, {name}", _SPLIT, name)
        for name in ("queries", "keys", "values")
    ),
    *(
        OperatorCheck(TITLE, f"normed heads, {name}", replace(_SPLIT, normed=True), name)
        for name in ("queries", "keys")
    ),
    OperatorCheck(TITLE, "7 tokens over two pages", RopeCase(7, 60, _HEADS, (0, 0, 0), pages=(2, 1)), "keys"),
    OperatorCheck(TITLE, "7 tokens, sum", replace(_SPLIT, join="sum", biased=False), "queries"),
    OperatorCheck(TITLE, "normed values", replace(_SPLIT, normed=True, value_norms=True), "values"),
    OperatorCheck(
        TITLE, "values are keys", RopeCase(7, 11, _HEADS, (64, 32), normed=True, value_norms=True), "values"
    ),
    OperatorCheck(TITLE, "queries alone", RopeCase(7, 11, _HEADS, (64,), normed=True), "queries"),
)


def _measured(at: Point) -> RopeCase:
    shape = HeadShape(at.sizes.heads, at.sizes.kv_heads, at.sizes.head_dim, at.capacity)
    return RopeCase(at.sizes.tokens, 0, shape, at.form.splits(*shape.rows), at.form.join)


ROPE: Final = Timed(
    forms={Form(): "rope_and_store", Form("sum"): "rope_and_store_sum"}, case=_measured, has_heads=True
)
