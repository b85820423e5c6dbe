"""Several residual streams beside the one that layers compute: AltUp (https://arxiv.org/abs/2301.13310)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.gpu import Argument, DeviceMemory, GlueKernels, Launch, Segments, pointwise_work
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
from heterollm.kernels.ops import MOST_STREAMS, Join

TITLE: Final = "streams"
STEPS: Final[Mapping[str, StepCategory]] = {TITLE: "norm"}

EPSILON: Final = 1e-5
"""Of checks."""

SMALLEST_SQUARE: Final = 1e-5
"""Least mean square of values that are brought to the size of others."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a pass.

    Args:
        memory: float32 ``[tokens, count, hidden]``; layers compute the first.
        residual: float32 ``[tokens, hidden]``, the stream that a layer computes.
        count: Number of streams.
        hidden: Their width.
        tokens: Tokens of the pass.
        epsilon: Added to the mean square in norms.
    """

    memory: DeviceMemory
    residual: DeviceMemory
    count: int
    hidden: int
    tokens: int
    epsilon: float


class Mixing(NamedTuple):
    """The weights by which a token mixes its streams.

    Args:
        router: float32 ``[count, hidden]``, times the weights of the norm of its input.
        coefficients: float32 ``[count * count, count]`` of a prediction, ``[count, count]`` of a correction.
    """

    router: Argument
    coefficients: Argument


class Normed(NamedTuple):
    """The output of a linear behind a norm of its own.

    Args:
        values: The output, one member.
        post: float32 ``[hidden]``, weights of the norm.
    """

    values: Segments
    post: Argument


def predict_streams(on: GlueKernels, streams: Streams, mixing: Mixing, added: Normed | None) -> Launch:
    """Return the launch of ``stream j += sum of c[j, s] * stream s``, whose first becomes the residual.

    The coefficients are linear in the hyperbolic tangents of the router's product with the normed first
    stream.

    Args:
        on: The device's kernels.
        streams: The streams.
        mixing: The weights.
        added: Added to all streams but the first before; None at the start of a model.
    """
    given = _delta(streams, added)
    memory = (*given[:3], mixing.router, mixing.coefficients, np.int32(added is not None))
    return _launch(on, "predict_streams", streams, memory, added, traffic=8 * streams.count)


def correct_streams(
    on: GlueKernels, streams: Streams, mixing: Mixing, added: Normed, scale: Argument, out: DeviceMemory
) -> Launch:
    """Return the launch of the correction behind a layer's network.

    ``residual += added``; ``stream j += (1 + c[j]) * (residual - stream 0)``, with coefficients as of
    :func:`predict_streams`, of the residual. Its first becomes the residual, and times ``scale`` the output.

    Args:
        on: The device's kernels.
        streams: The streams as predicted.
        mixing: The weights.
        added: Output of the network.
        scale: float32 ``[hidden]``.
        out: ``[tokens, hidden]`` in the activation type.
    """
    out.require(streams.tokens * streams.hidden * on.item_bytes, f"{TITLE} output")
    memory = (out, *_delta(streams, added)[:3], mixing.router, mixing.coefficients, scale)
    traffic = 8 * streams.count + 8 + on.item_bytes
    return _launch(on, "correct_streams", streams, memory, added, traffic=traffic)


def read_stream(
    on: GlueKernels, streams: Streams, stream: int, added: Normed | None, out: DeviceMemory
) -> Launch:
    """Return the launch of ``out = stream``, in the activation type.

    Args:
        on: The device's kernels.
        streams: The streams.
        stream: Number of the stream.
        added: Added to all streams but the first before; None for nothing.
        out: ``[tokens, hidden]``.
    """
    out.require(streams.tokens * streams.hidden * on.item_bytes, f"{TITLE} output")
    memory = (out, *_delta(streams, added)[:3], np.int32(added is not None), np.int32(stream))
    # The residual is no argument.
    return _launch(on, "read_stream", streams, memory, added, traffic=8, has_residual=False)


def fit_stream(
    on: GlueKernels, streams: Streams, stream: int, values: DeviceMemory, *, opens: bool
) -> Launch:
    """Return the launch that brings values to the root mean square of a token's first stream.

    Args:
        on: The device's kernels.
        streams: The streams.
        stream: Number of the stream, from 1 on.
        values: ``[tokens, hidden]`` in the activation type.
        opens: Whether the values begin that stream, and the residual the first. At the end of a model they
            are added to the residual, or those of the last stream stay where they are.
    """
    values.require(streams.tokens * streams.hidden * on.item_bytes, f"{TITLE} values")
    defines = {"OPENS": 1} if opens else {}
    return _launch(
        on, "fit_stream", streams, (values, np.int32(stream)), None, defines, traffic=12, has_norm=False
    )


def _delta(streams: Streams, added: Normed | None) -> tuple[Argument, Argument, Argument]:
    """Return the arguments of added values; absent memory is never read, but OpenCL needs a valid one."""
    if added is None:
        return (streams.residual,) * 3
    return added.values.a, added.values.b, added.post


def _launch(
    on: GlueKernels,
    name: Literal["predict_streams", "correct_streams", "read_stream", "fit_stream"],
    streams: Streams,
    memory: tuple[Argument, ...],
    added: Normed | None,
    defines: Mapping[str, int] | None = None,
    *,
    traffic: int,
    has_residual: bool = True,
    has_norm: bool = True,
) -> Launch:
    count, hidden, tokens = streams.count, streams.hidden, streams.tokens
    if not 2 <= count <= MOST_STREAMS:
        raise KernelError(f"{TITLE}: {count} streams are not 2 to {MOST_STREAMS}.")
    if added is not None and added.values.rows != (hidden,):
        raise KernelError(f"{TITLE} of {hidden} columns cannot add members of {added.values.rows} rows.")
    streams.memory.require(tokens * count * hidden * 4, TITLE)
    streams.residual.require(tokens * hidden * 4, f"{TITLE} residual")
    split = 0 if added is None else added.values.splits[0]
    own: dict[str, str | int] = {"STREAMS": count, **(defines or {})}
    kernel, _, items = on.kernel(
        ("streams.cl",),
        name,
        lambda _: own,
        widths=(hidden, split),
        segments=None if added is None else added.values,
    )
    ends = (
        (np.int32(split), np.int32(hidden), np.float32(streams.epsilon)) if has_norm else (np.int32(hidden),)
    )
    arguments = (streams.memory, *((streams.residual,) if has_residual else ()), *memory, *ends)
    flops = 4 * count * (count if name == "predict_streams" else 1)
    work = functools.partial(pointwise_work, tokens * hidden, flops, traffic / 2, traffic // 2)
    return on.runtime.launch(kernel, arguments, (tokens * items,), (items,), TITLE, work=work)


def exact_rates(row: NDArray[Any], router: NDArray[Any], epsilon: float) -> NDArray[np.float64]:
    """Return the rates ``[tokens, count]`` that coefficients are linear in."""
    normed = exact_rms_norm(row, np.ones(row.shape[1]), epsilon)
    rates: NDArray[np.float64] = np.tanh(normed @ router.astype(np.float64).T)
    return rates


@dataclass(frozen=True, slots=True)
class StreamsCase:
    """One of the launches on streams; ``split`` are the columns of added values in the first segment."""

    kind: Literal["predict", "correct", "read", "opens", "closes"]
    tokens: int
    hidden: int
    count: int = 4
    split: int = 0
    join: Join = "concatenate"
    stream: int = 1
    has_delta: bool = True

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, hidden, count = self.tokens, self.hidden, self.count
        streams = Streams(
            data.floats("streams", tokens, count, hidden),
            data.floats("residual", tokens, hidden),
            *(count, hidden, tokens, EPSILON),
        )
        if self.kind in ("opens", "closes"):
            values = data.inputs("values", tokens, hidden)
            return (fit_stream(on, streams, self.stream, values, opens=self.kind == "opens"),)
        normed = Normed(
            data.linear(tokens, (hidden,), (self.split,), self.join), data.weights("post", hidden)
        )
        added = normed if self.has_delta else None
        if self.kind == "read":
            return (read_stream(on, streams, self.stream, added, data.output("out", tokens, hidden)),)
        rows = count * (count if self.kind == "predict" else 1)
        mixing = Mixing(
            data.floats("router", count, hidden, scale=hidden**-0.5),
            data.floats("coefficients", rows, count, scale=0.5),
        )
        if self.kind == "predict":
            return (predict_streams(on, streams, mixing, added),)
        scale, out = data.weights("scale", hidden), data.output("out", tokens, hidden)
        return (correct_streams(on, streams, mixing, normed, scale, out),)

    def exact(self, data: Values) -> Exact:
        streams, residual = data["streams"].astype(np.float64), data["residual"].astype(np.float64)
        if self.kind in ("opens", "closes"):
            return self._fitted(streams, residual, data["values"].astype(np.float64))
        delta = exact_rms_norm(data["linear"], data["post"], EPSILON)
        if self.kind == "correct":
            return self._corrected(streams, residual + delta, data)
        if self.has_delta:
            streams[:, 1:] += delta[:, None]
        if self.kind == "read":
            return {"out": streams[:, self.stream], "streams": streams}
        rates = exact_rates(streams[:, 0], data["router"], EPSILON)
        mixed = rates @ data["coefficients"].astype(np.float64).T
        mixed = mixed.reshape(-1, self.count, self.count)
        streams += np.einsum("tjs,tsd->tjd", mixed, streams)
        return {"streams": streams, "residual": streams[:, 0]}

    def _corrected(self, streams: NDArray[np.float64], computed: NDArray[np.float64], data: Values) -> Exact:
        rates = exact_rates(computed, data["router"], EPSILON)
        shares = 1 + rates @ data["coefficients"].astype(np.float64).T
        streams = streams + shares[:, :, None] * (computed - streams[:, 0])[:, None]
        first = streams[:, 0]
        return {"streams": streams, "residual": first, "out": first * data["scale"]}

    def _fitted(
        self, streams: NDArray[np.float64], residual: NDArray[np.float64], values: NDArray[np.float64]
    ) -> Exact:
        first = residual if self.kind == "opens" else streams[:, 0]
        own, size = (np.square(one).mean(axis=1, keepdims=True) for one in (values, first))
        fitted = values * np.sqrt(size / np.maximum(own, SMALLEST_SQUARE))
        if self.kind == "opens":
            streams[:, self.stream] = fitted
            if self.stream == 1:
                streams[:, 0] = residual
            return {"streams": streams}
        is_last = self.stream == self.count - 1
        return {"values": fitted} if is_last else {"residual": residual + fitted}


CHECKS: Final = tuple(
    OperatorCheck(TITLE, title, case, output)
    for title, case, output in (
        ("5 tokens, predicted", StreamsCase("predict", 5, 192, split=64), "streams"),
        ("5 tokens, predicted, sum", StreamsCase("predict", 5, 192, split=64, join="sum"), "residual"),
        ("5 tokens, corrected", StreamsCase("correct", 5, 192, split=64), "streams"),
        ("5 tokens, output", StreamsCase("correct", 5, 192, split=64), "out"),
        ("5 tokens, read", StreamsCase("read", 5, 192, stream=2, split=64), "out"),
        ("5 tokens, opened", StreamsCase("opens", 5, 192), "streams"),
        ("5 tokens, closed", StreamsCase("closes", 5, 192), "residual"),
        ("5 tokens, last closed", StreamsCase("closes", 5, 192, stream=3), "values"),
    )
)


def _measured(at: Point) -> StreamsCase:
    hidden = at.sizes.hidden
    (split,) = at.form.splits(hidden)
    return StreamsCase("predict", at.sizes.tokens, hidden, split=split, join=at.form.join)


STREAM_MIXING: Final = Timed(
    forms={Form(): "stream_mixing", Form("sum"): "stream_mixing_sum"},
    case=_measured,
)
