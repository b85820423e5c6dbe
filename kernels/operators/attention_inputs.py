"""Attention on the NPU: its inputs, which the GPU writes from queries and the KV cache, and its graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import (
    Argument,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    HeadShape,
    KvLayer,
    Launch,
    SharedArray,
    pages_of,
)
from heterollm.kernels.npu import (
    KEYS,
    LIMITS,
    OUTPUT,
    QUERIES,
    RANGE_KEYS,
    VALUES,
    AttentionShard,
    NpuBackend,
)
from heterollm.kernels.operators.attention import exact_attention
from heterollm.kernels.operators.attention_work import visible
from heterollm.kernels.operators.data import Data
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
)

STEPS: Final[Mapping[str, StepCategory]] = {"attention inputs": "attention"}


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of the graph of a pass, in the activation type; layers share them.

    Args:
        queries: ``[heads, tokens, head_dim]``.
        keys: ``[kv_heads, head_dim, keys]``.
        values: ``[kv_heads, keys, head_dim]``.
        limits: ``[ranges, tokens]``, as :mod:`heterollm.kernels.npu.tensors` says.
    """

    queries: SharedArray
    keys: SharedArray
    values: SharedArray
    limits: SharedArray

    @property
    def every(self) -> tuple[SharedArray, ...]:
        """All of them."""
        return self.queries, self.keys, self.values, self.limits


def write_attention_inputs(
    on: GlueKernels,
    q: DeviceMemory,
    cache: KvLayer,
    inputs: AttentionInputs,
    step: SharedArray,
    *,
    shape: HeadShape,
    shard: AttentionShard,
    tokens: int,
    scale: float,
) -> Launch:
    """Return the launch that writes the inputs of a graph of attention.

    Tokens and keys that do not exist have zeros, whatever lies in memory.

    Args:
        on: The device's kernels.
        q: float32 ``[at least the tokens of the pass, heads * head_dim]``, after RoPE.
        cache: Keys and values, those of this pass included; every position is there.
        inputs: Target.
        step: The step buffer.
        shape: Sizes of the heads.
        shard: The NPU's attention, whose keys are as many as the last token sees, or more.
        tokens: Tokens of the graph, its padding included.
        scale: Factor on the scores.
    """
    sizes = input_bytes(shard, tokens, on.item_bytes)
    for memory, (name, needed) in zip(inputs.every, sizes.items(), strict=True):
        memory.require(needed, f"{name} of attention")
    defines: Defines = {"HEAD_DIM": shape.head_dim, "GROUP": shape.group, "RANGE_KEYS": RANGE_KEYS}
    kernel, _, items = on.kernel(
        ("attention_inputs.cl",),
        "write_attention_inputs",
        lambda _: defines | on.cache_defines,
        widths=(shape.head_dim, shard.keys),
    )
    arguments: tuple[Argument, ...] = (
        *(q, cache.memory, step, *inputs.every),
        *(on.table(cache, shape), np.int32(tokens), np.int32(shard.keys), np.float32(scale)),
    )
    runs = pages_of(shard.keys) + shape.group * pages_of(tokens)
    work = functools.partial(_work, shape, step.array, tokens, on.position_bytes(shape), sum(sizes.values()))
    size = runs * items, shape.kv_heads
    return on.runtime.launch(kernel, arguments, size, (items, 1), "attention inputs", work=work)


def input_bytes(shard: AttentionShard, tokens: int, item_bytes: int) -> dict[str, int]:
    """Return the bytes of each input of a graph, in the order of :attr:`AttentionInputs.every`.

    Args:
        shard: The NPU's attention.
        tokens: Tokens of the graph.
        item_bytes: Size of an element.
    """
    cache = shard.kv_heads * shard.keys * shard.head_dim
    elements = {
        "queries": shard.heads * tokens * shard.head_dim,
        "keys": cache,
        "values": cache,
        "limits": len(shard.ranges) * tokens,
    }
    return {name: item_bytes * count for name, count in elements.items()}


def _work(
    shape: HeadShape, step: NDArray[np.int32], tokens: int, position_bytes: int, written_bytes: int
) -> GpuWork:
    rows, _, last = visible(step, tokens, 0)
    queries = rows * shape.query_columns
    read = 4 * queries + 2 * last * shape.kv_heads * position_bytes
    return GpuWork("elementwise", queries, read, written_bytes)


def exact_limits(shard: AttentionShard, position: int, tokens: int) -> NDArray[np.float64]:
    """Return the limits ``[ranges, tokens]`` of tokens from a position on."""
    places = np.arange(position, position + tokens)
    limits = [np.clip(places - start, -1, RANGE_KEYS) for start, _ in shard.ranges]
    return np.array(limits, np.float64)


@dataclass(frozen=True, slots=True)
class AttentionInputsCase:
    """Inputs of a graph from a cache that is NaN behind the last position.

    Args:
        tokens: Tokens of the pass.
        position: Tokens of the session before it.
        shape: Sizes of the heads.
        padded: Tokens of the graph, and its keys.
        scale: Factor on the scores.
        pages: Those of :meth:`heterollm.kernels.operators.data.Data.cache`.
    """

    tokens: int
    position: int
    shape: HeadShape
    padded: tuple[int, int]
    scale: float = 0.25
    pages: tuple[int, ...] = ()

    @property
    def shard(self) -> AttentionShard:
        """The NPU's attention."""
        shape = self.shape
        return AttentionShard(shape.heads, shape.kv_heads, self.padded[1], shape.head_dim)

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch, ...]:
        shape, (rows, keys) = self.shape, self.padded
        inputs = AttentionInputs(
            data.output("graph queries", shape.heads * rows, shape.head_dim),
            data.output("graph keys", shape.kv_heads * shape.head_dim, keys),
            data.output("graph values", shape.kv_heads * keys, shape.head_dim),
            data.output("limits", len(self.shard.ranges), rows),
        )
        q = data.floats("rotated", self.tokens, shape.query_columns)
        cache = data.cache(shape, self.position + self.tokens, pages=self.pages)
        step = data.step(self.position, self.tokens)
        sizes: dict[str, Any] = {"shape": shape, "shard": self.shard, "tokens": rows, "scale": self.scale}
        return (write_attention_inputs(on, q, cache, inputs, step, **sizes),)

    def exact(self, data: Values) -> Exact:
        (rows, keys), shape = self.padded, self.shape
        queries = np.zeros((shape.heads, rows, shape.head_dim))
        given = data["rotated"].reshape(self.tokens, shape.heads, shape.head_dim)
        queries[:, : self.tokens] = given.swapaxes(0, 1) * np.float64(self.scale)
        cache = np.zeros((2, shape.kv_heads, keys, shape.head_dim))
        for place, name in enumerate(("keys", "values")):
            cache[place, :, : data[name].shape[1]] = data[name]
        return {
            "graph queries": queries.reshape(-1, shape.head_dim),
            "graph keys": cache[0].swapaxes(1, 2).reshape(-1, keys),
            "graph values": cache[1].reshape(-1, shape.head_dim),
            "limits": exact_limits(self.shard, self.position, rows),
        }


_SEEN: Final = "37 tokens at 611"
_HEADS: Final = HeadShape(heads=4, kv_heads=2, head_dim=32, capacity=700)
CHECKS: Final = tuple(
    OperatorCheck("attention inputs", _SEEN, AttentionInputsCase(37, 611, _HEADS, (64, 672)), name)
    for name in ("graph queries", "graph keys", "graph values", "limits")
)


def _points(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
    for tokens, keys in scope.sparse if scope.on_npu else ():
        yield Form(), timed.sizes(model, tokens, keys - tokens)


def _measured(at: Point) -> AttentionInputsCase:
    tokens, keys, _, heads, kv_heads, head_dim = at.sizes
    shape = HeadShape(heads, kv_heads, head_dim, at.capacity)
    return AttentionInputsCase(tokens, keys - tokens, shape, (tokens, keys))


ATTENTION_INPUTS: Final = Timed(
    forms={Form(): "attention_inputs"}, case=_measured, has_heads=True, reads_cache=True, points=_points
)


@dataclass(frozen=True, slots=True)
class AttentionGraphCase:
    """Attention of an NPU graph to random keys, among them some behind the last token.

    Args:
        shard: The NPU's attention.
        tokens: Tokens of the graph, those of the pass and its padding.
        position: Tokens of the session before the pass.
        spread: Standard deviation of scores.
        seed: Of the random numbers.
    """

    shard: AttentionShard
    tokens: int
    position: int
    spread: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens at {self.position}, {self.shard.keys} keys"

    def data(self, dtype: np.dtype[Any]) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
        """Return the inputs of the graph, and the exact output of all tokens that have their own key."""
        generator, shard = np.random.default_rng(self.seed), self.shard
        size = shard.kv_heads, shard.keys, shard.head_dim
        deviation = self.spread * shard.head_dim**-0.5
        queries = generator.standard_normal((shard.heads, self.tokens, shard.head_dim)) * deviation
        queries, keys, values = (
            part.astype(dtype) for part in (queries, *(generator.standard_normal(size) for _ in "kv"))
        )
        limits = exact_limits(shard, self.position, self.tokens).astype(dtype)
        rows = min(self.tokens, shard.keys - self.position)
        exact = exact_attention(
            queries.swapaxes(0, 1)[:rows], keys, values, position=self.position, scale=1.0
        )
        arrays = queries, np.ascontiguousarray(keys.swapaxes(1, 2)), values, limits[..., None]
        return dict(zip((QUERIES, KEYS, VALUES, LIMITS), arrays, strict=True)), exact.reshape(rows, -1)

    def on_npu(self, npu: NpuBackend) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """Return the output that an NPU computes, and the exact one."""
        inputs, exact = self.data(npu.activation_dtype)
        output = np.zeros((self.tokens, exact.shape[1]), npu.activation_dtype)
        npu.prepare(self.shard, self.tokens).bind(inputs, {OUTPUT: output})()
        return output[: len(exact)], exact
