"""Latent attention (MLA) around its scores: keys, queries and values of a common latent vector.

The cache has one latent vector of a token, behind its norm, and one rotated key for all heads. Queries are
multiplied by the weights that would make keys of the latent vector, and sums of latent vectors by those that
make values (https://arxiv.org/abs/2405.04434, section 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

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
    KvLayer,
    Launch,
    Rotation,
    Segments,
    SharedArray,
    pointwise_work,
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
from heterollm.kernels.operators.rope import exact_rotation
from heterollm.kernels.ops import Join

STORE: Final = "latent store"
TURN: Final = "turned queries"
NORM: Final = "latent norm"
ABSORB: Final = "absorbed queries"
EXPAND: Final = "expanded values"
STEPS: Final[Mapping[str, StepCategory]] = {
    NORM: "norm",
    **dict.fromkeys((STORE, TURN, ABSORB, EXPAND), "attention"),
}

FILE: Final = "latent.cl"
MOST_TOKENS: Final = 4
"""Tokens that share a read of the weights."""
EPSILON: Final = 1e-6
"""Of checks."""


def turn(
    on: GlueKernels,
    linear: Segments,
    member: int,
    query: DeviceMemory,
    cache: KvLayer,
    step: SharedArray,
    *,
    shape: HeadShape,
    rotation: Rotation,
    tokens: int,
    row_words: int = 0,
) -> Launch:
    """Return the launch that rotates queries, or that writes the normed latent vector and the rotated key.

    Args:
        on: The device's kernels.
        linear: Output of linears.
        member: The member with the rotated part of every query; or, if the rotation has weights of a norm,
            that with the latent vector, which the rotated key follows.
        query: float32 ``[tokens, heads, head_dim]``, of which the last elements of heads are written.
        cache: Target of the key.
        step: The step buffer.
        shape: Sizes of the heads, with one key head.
        rotation: The rotation, of ``dim`` elements, and the weights and the epsilon of the latent norm.
        tokens: Tokens of the pass.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
    """
    rope, is_key = rotation.dim or 0, rotation.norms is not None
    latent, title = shape.head_dim - rope, STORE if is_key else TURN
    rows = (latent, rope) if is_key else (shape.heads * rope,)
    if linear.rows[member : member + len(rows)] != rows or rope % 2:
        raise KernelError(f"{title}: members of {linear.rows} rows are not those of {shape}.")
    defines: Defines = {"TURNS": 1, "LATENT": latent, "ROPE": rope}
    table = np.int32(0)
    # Absent memory is never read, but OpenCL needs a valid argument.
    norm: Argument = rotation.cos
    target: Argument = query
    stored = query
    if is_key:
        defines |= {"KEY": 1, "SHARED_VALUES": 1, **on.cache_defines}
        table = on.table(cache, shape)
        norm, target, stored = rotation.norms, rotation.sin, cache.memory
    else:
        query.require(tokens * shape.query_columns * 4, f"{title} query")
    if "KV_CODES" in defines:
        raise KernelError(
            f"{title}: keys and values in 8 bits are not possible in latent attention.",
            fix="Leave kv_bits out.",
        )
    widths = (latent, rope // 2, *linear.rows, *linear.splits)
    kernel, _, items = on.kernel((FILE,), "latent_turn", lambda _: defines, widths=widths, segments=linear)
    memory = (linear.a, linear.b, norm, rotation.cos, rotation.sin, target, stored, step)
    splits = (*_member(linear, member), linear.splits[member + 1] if is_key else 0)
    arguments = (*memory, table, *map(np.int32, (row_words, *splits, shape.heads, shape.capacity)))
    units = 1 if is_key else shape.heads
    elements = tokens * sum(rows)
    work = functools.partial(pointwise_work, elements, 8, on.item_bytes * linear.reads, 4)
    arguments = (*arguments, np.float32(rotation.epsilon))
    return on.runtime.launch(kernel, arguments, (units * items, tokens), (items, 1), title, work=work)


def norm_member(
    on: GlueKernels,
    linear: Segments,
    member: int,
    norm: Argument,
    out: DeviceMemory,
    *,
    tokens: int,
    epsilon: float,
) -> Launch:
    """Return the launch of a norm of one member of linears; ``out`` is ``[tokens, rows]``."""
    width = linear.rows[member]
    out.require(tokens * width * on.item_bytes, f"{NORM} output")
    defines: Defines = {"NORMS": 1}
    kernel, _, items = on.kernel(
        (FILE,), "latent_norm", lambda _: defines, widths=(*linear.rows, *linear.splits), segments=linear
    )
    sizes = (*_member(linear, member), width)
    arguments = (linear.a, linear.b, norm, out, *map(np.int32, sizes), np.float32(epsilon))
    work = functools.partial(pointwise_work, tokens * width, 4, on.item_bytes * linear.reads, on.item_bytes)
    return on.runtime.launch(kernel, arguments, (items, tokens), (items, 1), NORM, work=work)


def multiply_heads(
    on: GlueKernels,
    linear: Segments,
    member: int,
    weights: Argument,
    out: DeviceMemory,
    *,
    heads: int,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    tokens: int,
    floats: bool = False,
) -> Launch:
    """Return the launch of ``out[token, head] = weights[head] x[token, head]``.

    Args:
        on: The device's kernels.
        linear: Output of linears, of which a member holds the inputs of all heads.
        member: Its place.
        weights: ``[heads, outputs, inputs]`` in the activation type.
        out: ``[tokens, heads * stride]``: float32, or in the activation type.
        heads: Heads.
        sizes: Inputs and outputs of a head.
        strides: Columns from a head to the next, of inputs and of outputs.
        tokens: Tokens of the pass.
        floats: Whether the output is float32, as queries are.
    """
    (inputs, outputs), title = sizes, ABSORB if floats else EXPAND
    if linear.rows[member] != heads * strides[0]:
        raise KernelError(
            f"{title}: a member of {linear.rows[member]} rows is not {heads} heads of {strides[0]}."
        )
    out.require(tokens * heads * strides[1] * (4 if floats else on.item_bytes), f"{title} output")
    together = min(tokens, MOST_TOKENS)
    defines: Defines = {"MULTIPLIES": 1, "INPUTS": inputs, "OUTPUTS": outputs, "TOKENS": together}
    defines |= {"FLOAT_OUTPUT": 1} if floats else {}
    widths = (inputs, *strides, *linear.rows, *linear.splits)
    kernel, style, items = on.kernel(
        (FILE,), "head_linear", lambda _: defines, widths=widths, segments=linear
    )
    span = outputs if style == "vector" else 1
    grid = (round_up(-(-outputs // span), items), heads, -(-tokens // together))
    arguments = (linear.a, linear.b, weights, out, *map(np.int32, (*_member(linear, member), heads)))
    arguments += (*map(np.int32, (*strides, tokens, span)),)
    work = functools.partial(
        GpuWork,
        "attention",
        flops=2 * tokens * heads * inputs * outputs,
        read_bytes=on.item_bytes * heads * (inputs * outputs + tokens * inputs),
        written_bytes=on.item_bytes * tokens * heads * outputs,
        tokens=tokens,
    )
    return on.runtime.launch(kernel, arguments, grid, (items, 1, 1), title, work=work)


def _member(linear: Segments, member: int) -> tuple[int, int, int, int, int]:
    """Return the columns of an output and of its first segment, those before a member, and its split."""
    rows, splits = linear.rows, linear.splits
    return sum(rows), sum(splits), sum(rows[:member]), sum(splits[:member]), splits[member]


@dataclass(frozen=True, slots=True)
class TurnCase:
    """The rotation of queries; ``splits`` are their columns in the first segment."""

    tokens: int
    position: int
    heads: int
    latent: int
    rope: int
    splits: tuple[int, ...] = (0,)
    join: Join = "concatenate"

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, capacity = self.tokens, self.position + self.tokens + 3
        shape = HeadShape(self.heads, 1, self.latent + self.rope, capacity, shares_values=True)
        linear = data.linear(tokens, (self.heads * self.rope,), self.splits, self.join)
        cos, sin = (data.floats(name, capacity, self.rope // 2) for name in ("cos", "sin"))
        # The other elements keep what they have.
        query = data.floats("query", tokens, shape.query_columns)
        cache = KvLayer(data.output("cache", capacity * shape.head_dim * 2, dtype=np.float32), 0)
        step = data.step(self.position, tokens)
        rotation = Rotation(cos, sin, self.rope)
        return (turn(on, linear, 0, query, cache, step, shape=shape, rotation=rotation, tokens=tokens),)

    def exact(self, data: Values) -> Exact:
        at = slice(self.position, self.position + self.tokens)
        parts = data["linear"].reshape(self.tokens, self.heads, self.rope)
        query = data["query"].astype(np.float64).reshape(self.tokens, self.heads, -1)
        query[..., self.latent :] = exact_rotation(parts, data["cos"][at], data["sin"][at])
        return {"query": query.reshape(self.tokens, -1)}


@dataclass(frozen=True, slots=True)
class HeadLinearCase:
    """A linear of each head; of two members the second has the inputs."""

    tokens: int
    heads: int
    inputs: int
    outputs: int
    splits: tuple[int, ...] = (0, 0)
    join: Join = "concatenate"
    floats: bool = False

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, width = self.tokens, self.heads * self.inputs
        launch = multiply_heads(
            on,
            data.linear(tokens, (8, width), self.splits, self.join),
            1,
            data.inputs("weights", self.heads * self.outputs, self.inputs),
            data.output(
                "out", tokens, self.heads * self.outputs, **({"dtype": np.float32} if self.floats else {})
            ),
            heads=self.heads,
            sizes=(self.inputs, self.outputs),
            strides=(self.inputs, self.outputs),
            tokens=tokens,
            floats=self.floats,
        )
        return (launch,)

    def exact(self, data: Values) -> Exact:
        x = data["linear"][:, 8:].reshape(self.tokens, self.heads, self.inputs)
        weights = data["weights"].astype(np.float64).reshape(self.heads, self.outputs, self.inputs)
        out: NDArray[np.float64] = np.einsum("thi,hoi->tho", x, weights)
        return {"out": out.reshape(self.tokens, -1)}


_HEADS: Final = HeadLinearCase(5, 3, 24, 40, (8, 48))
CHECKS: Final = (
    OperatorCheck(TURN, "5 tokens at 7, split", TurnCase(5, 7, 3, 24, 16, (32,)), "query"),
    OperatorCheck(ABSORB, "5 tokens, split", replace(_HEADS, floats=True), "out"),
    OperatorCheck(EXPAND, "5 tokens, split", _HEADS, "out"),
)

MEASURED_DIM, MEASURED_LATENT, MEASURED_ROPE = 128, 512, 64
"""Width of a head of values, of latent vectors and of rotated keys in DeepSeek's models; others are near."""


@dataclass(frozen=True, slots=True)
class MemberNormCase:
    """The norm of the first of two members; ``splits`` are their columns in the first segment."""

    tokens: int
    width: int
    splits: tuple[int, ...] = (0, 0)
    join: Join = "concatenate"

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        linear = data.linear(self.tokens, (self.width, 8), self.splits, self.join)
        norm, out = data.weights("norm", self.width), data.output("out", self.tokens, self.width)
        return (norm_member(on, linear, 0, norm, out, tokens=self.tokens, epsilon=EPSILON),)

    def exact(self, data: Values) -> Exact:
        return {"out": exact_rms_norm(data["linear"][:, : self.width], data["norm"], EPSILON)}


def _norm(at: Point) -> MemberNormCase:
    return MemberNormCase(at.sizes.tokens, at.sizes.hidden)


def _turn(at: Point) -> TurnCase:
    heads = max(1, at.sizes.hidden // MEASURED_DIM)
    return TurnCase(at.sizes.tokens, 1, heads, MEASURED_LATENT, MEASURED_ROPE)


def _heads(at: Point, floats: bool) -> HeadLinearCase:
    heads = max(1, at.sizes.hidden // MEASURED_DIM)
    sizes = (MEASURED_DIM, MEASURED_LATENT) if floats else (MEASURED_LATENT, MEASURED_DIM)
    return HeadLinearCase(at.sizes.tokens, heads, *sizes, floats=floats)


TURNED_QUERIES: Final = Timed(forms={Form(): "turned_queries"}, case=_turn)
LATENT_NORM: Final = Timed(forms={Form(): "latent_norm"}, case=_norm)
ABSORBED_QUERIES: Final = Timed(
    forms={Form(): "absorbed_queries"}, case=functools.partial(_heads, floats=True)
)
EXPANDED_VALUES: Final = Timed(
    forms={Form(): "expanded_values"}, case=functools.partial(_heads, floats=False)
)
