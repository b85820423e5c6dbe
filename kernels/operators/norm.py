"""RMSNorm and LayerNorm of the residual stream, to which they first add the output of a linear."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import CodeGrid
from heterollm.kernels.gpu import (
    AddedToStream,
    Argument,
    Defines,
    DeviceMemory,
    GlueKernels,
    Launch,
    NpuCodes,
    RoundedInputs,
    Segments,
    SharedArray,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    GRIDS,
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
    every_pass,
    head_rows,
)
from heterollm.kernels.ops import Group, Join, WeightFormat

EPSILON, POST_EPSILON = 1e-5, 0.25
"""Of checks."""

STEPS: Final[Mapping[str, StepCategory]] = dict.fromkeys(
    ("norm", "norm of an output", "inner norm", "norm of the embedding", "residual", "final norm"), "norm"
)

NORM_ONLY, NORM_ADD, NORM_ADD_HEAD, NORM_ALONE, NORM_IN_PLACE = range(5)
"""Modes of rms_norm.cl."""


def rms_norm(
    on: GlueKernels,
    residual: DeviceMemory,
    weight: Argument,
    out: DeviceMemory,
    *,
    hidden: int,
    tokens: int,
    epsilon: float,
    delta: Segments | None = None,
    bias: Argument = None,
    post: Argument = None,
    post_epsilon: float | None = None,
    rounded: RoundedInputs | NpuCodes | None = None,
    centered: bool = False,
    gain: float = 1.0,
) -> Launch:
    """Return the launch of ``residual += delta; out = residual / rms(residual) * weight``.

    The delta includes ``bias``; with ``post`` it is then normed: ``delta / rms(delta) * post``. The sum is
    multiplied by ``gain``. Without a weight ``out`` is the residual itself.

    Args:
        on: The device's kernels.
        residual: float32 ``[tokens, hidden]``, updated in place if there is a delta.
        weight: float32 ``[hidden]``, or None.
        out: ``[tokens, hidden]`` in the activation type.
        hidden: Width of the model.
        tokens: Rows.
        epsilon: Added to the mean square.
        delta: Output of the preceding linear, one member; None at the start of the model.
        bias: float32 ``[hidden]`` of that linear, or None.
        post: float32 ``[hidden]``, weight of the delta's norm, or None.
        post_epsilon: Added to its mean square; None for ``epsilon``.
        rounded: Target of the codes of ``out``, int8 for a GPU, or those of an NPU; None for no codes.
        centered: Whether it is a LayerNorm: the mean is subtracted first, the second row of ``weight``,
            then ``[2, hidden]``, added at the end.
        gain: Factor on the sum.
    """
    residual.require(tokens * hidden * 4, "norm residual")
    memory, mode = (residual, weight, out, residual), NORM_ONLY if delta is None else NORM_ADD
    launch = _norm_launch(
        *(on, mode, memory, (tokens, hidden), delta, (bias, post), epsilon, rounded),
        post_epsilon=post_epsilon,
        centered=centered,
        gain=gain,
    )
    is_plain = post is None and weight is not None and not centered and gain == 1
    if delta is None or tokens > 1 or any(delta.splits) or not is_plain or isinstance(rounded, NpuCodes):
        return launch
    if on.runtime.has_endings:
        options = (residual, bias, weight, hidden, epsilon, rounded)
        launch.ending = AddedToStream.of(on.runtime, *options)
    return launch


def norm_residual(
    on: GlueKernels, residual: DeviceMemory, *, hidden: int, tokens: int, epsilon: float
) -> Launch:
    """Return the launch of ``residual /= rms(residual)``.

    Args:
        on: The device's kernels.
        residual: float32 ``[tokens, hidden]``.
        hidden: Width of the model.
        tokens: Rows.
        epsilon: Added to the mean square.
    """
    residual.require(tokens * hidden * 4, "norm residual")
    memory, shape = (residual, residual, residual, residual), (tokens, hidden)
    return _norm_launch(on, NORM_IN_PLACE, memory, shape, None, (None, None), epsilon, None)


def norm_output(
    on: GlueKernels,
    values: Segments,
    post: Argument,
    out: DeviceMemory,
    *,
    tokens: int,
    epsilon: float,
    bias: Argument = None,
    rounded: RoundedInputs | None = None,
) -> Launch:
    """Return the launch of ``out = values / rms(values) * post``, where the values include ``bias``.

    Args:
        on: The device's kernels.
        values: Output of a linear, one member.
        post: float32 ``[hidden]``.
        out: ``[tokens, hidden]`` in the activation type; may be the values.
        tokens: Rows.
        epsilon: Added to the mean square.
        bias: float32 ``[hidden]`` of that linear, or None.
        rounded: Target of the int8 codes of ``out``; None for no codes.
    """
    memory, shape = (out, None, out, out), (tokens, values.rows[0])
    extras = bias, post
    return _norm_launch(on, NORM_ALONE, memory, shape, values, extras, epsilon, rounded)


def final_norm(
    on: GlueKernels,
    residual: DeviceMemory,
    weight: Argument,
    out: SharedArray,
    step: SharedArray,
    *,
    rows: int,
    epsilon: float,
    delta: Segments,
    bias: Argument = None,
    post: Argument = None,
    post_epsilon: float | None = None,
    rounded: RoundedInputs | NpuCodes | None = None,
    centered: bool = False,
    gain: float = 1.0,
) -> Launch:
    """Return the launch of the norm before the head, of ``rows`` rows from the step's head row on.

    It differs from :func:`rms_norm` in that the residual stays unchanged, so that it may run again for
    other rows of the pass. Output row i is residual row ``step[STEP_HEAD_ROW] + i``, which must exist.
    """
    memory, shape = (residual, weight, out, step), (rows, delta.rows[0])
    return _norm_launch(
        *(on, NORM_ADD_HEAD, memory, shape, delta, (bias, post), epsilon, rounded),
        post_epsilon=post_epsilon,
        centered=centered,
        gain=gain,
    )


def _norm_launch(
    on: GlueKernels,
    mode: int,
    memory: tuple[DeviceMemory, Argument, DeviceMemory, DeviceMemory],
    shape: tuple[int, int],
    delta: Segments | None,
    extras: tuple[Argument, Argument],
    epsilon: float,
    rounded: RoundedInputs | NpuCodes | None,
    *,
    post_epsilon: float | None = None,
    centered: bool = False,
    gain: float = 1.0,
) -> Launch:
    (residual, weight, out, step), (rows, hidden) = memory, shape
    label = "final norm" if mode == NORM_ADD_HEAD else "norm"
    if delta is None:
        delta = Segments(out, out, (hidden,), (0,))
    elif delta.rows != (hidden,):
        raise KernelError(f"A norm over {hidden} columns cannot add members of {delta.rows} rows.")
    if centered and hidden % 8:
        raise KernelError(f"{label}: a mean over {hidden} columns, no multiple of 8, cannot be subtracted.")
    if mode != NORM_IN_PLACE:
        out.require(rows * hidden * on.item_bytes, f"{label} output")
    files = ("codes.h", "rms_norm.cl") if isinstance(rounded, NpuCodes) else ("rms_norm.cl",)
    widths = (hidden, delta.splits[0])
    defines: Defines = {"UNNORMED": 1} if weight is None else {"CENTERED": 1} if centered else {}
    if gain != 1:
        defines = {**defines, "GAIN": 1}
    if mode in (NORM_ALONE, NORM_IN_PLACE):
        # The residual is no norm's input and output at once but in place.
        defines = {**defines, "ALONE" if mode == NORM_ALONE else "IN_PLACE": 1}
    kernel, _, items = on.kernel(
        files, "rms_norm", lambda _: defines, rounded=rounded, widths=widths, segments=delta
    )
    given = tuple(extra is not None for extra in extras)
    # Absent memory is never read, but OpenCL needs a valid argument.
    present = tuple(residual if own is None else own for own in (weight, *extras))
    arguments = (
        *(residual, present[0], out, delta.a, delta.b, *present[1:], step),
        *map(np.int32, (delta.splits[0], hidden)),
        *map(np.float32, (epsilon, epsilon if post_epsilon is None else post_epsilon)),
        *map(np.int32, (NORM_ONLY if mode == NORM_IN_PLACE else mode, *given)),
        *((np.float32(gain),) if gain != 1 else ()),
        *(rounded.arguments(rows, hidden, label) if rounded else ()),
    )
    item, block = on.item_bytes, rounded.block if isinstance(rounded, RoundedInputs) else 0
    read = (0 if mode == NORM_ALONE else 4) + (
        0 if mode in (NORM_ONLY, NORM_IN_PLACE) else item * delta.reads
    )
    stored = {NORM_ADD: item + 4, NORM_IN_PLACE: 4}.get(mode, item)
    stored += rounded.code_bytes if isinstance(rounded, NpuCodes) else 0
    work = functools.partial(pointwise_work, rows * hidden, 6, read, stored, block)
    return on.runtime.launch(kernel, arguments, (rows * items,), (items,), label, work=work)


def exact_rms_norm(x: NDArray[Any], weight: NDArray[Any], epsilon: float) -> NDArray[np.float64]:
    """Return ``x [m, hidden]`` over its root mean square, times the weight."""
    exact = x.astype(np.float64)
    mean = np.square(exact).mean(axis=1, keepdims=True)
    normed: NDArray[np.float64] = exact / np.sqrt(mean + epsilon) * weight.astype(np.float64)
    return normed


def exact_layer_norm(
    x: NDArray[Any], weight: NDArray[Any], shift: NDArray[Any], epsilon: float
) -> NDArray[np.float64]:
    """Return ``x [m, hidden]`` less its mean, over its deviation, times the weight, plus the shift."""
    exact = x.astype(np.float64)
    return exact_rms_norm(exact - exact.mean(axis=1, keepdims=True), weight, epsilon) + shift.astype(
        np.float64
    )


@dataclass(frozen=True, slots=True)
class NormCase:
    """A norm of the residual stream with a linear's output added, or of that output alone.

    The delta, in two segments at ``split``, may have a bias and be normed first (``post``). The sum may be
    multiplied by a ``gain``. With a ``head_row`` it is the norm before the head, of the rows from there on;
    ``unnormed`` writes the stream itself, ``in_place`` norms it alone. Codes that are written beside floats
    (``rounds``) are those of a grid, or int8 for a linear of that format.
    """

    tokens: int
    hidden: int
    split: int
    join: Join = "concatenate"
    biased: bool = False
    post: bool = False
    scale: float = 1.0
    centered: bool = False
    gain: float = 1.0
    unnormed: bool = False
    alone: bool = False
    in_place: bool = False
    head_row: int | None = None
    rounds: CodeGrid | WeightFormat | None = None

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, hidden = self.tokens, self.hidden
        rows = tokens - (self.head_row or 0)
        factors = (2, hidden) if self.centered else (hidden,)
        memory = (
            data.floats("residual", tokens, hidden),
            None if self.unnormed else data.weights("norm", *factors),
            data.output("normed", rows, hidden),
        )
        options: dict[str, Any] = {
            "delta": data.linear(tokens, (hidden,), (self.split,), self.join, self.scale),
            "bias": data.floats("bias", hidden) if self.biased else None,
            "post": data.weights("post", hidden) if self.post else None,
            "rounded": self._rounded(data, rows),
            "epsilon": EPSILON,
            "post_epsilon": POST_EPSILON,
            "centered": self.centered,
            "gain": self.gain,
        }
        if self.in_place:
            return (norm_residual(on, memory[0], hidden=hidden, tokens=tokens, epsilon=EPSILON),)
        if self.alone:
            own = {name: options[name] for name in ("bias", "rounded")} | {"epsilon": POST_EPSILON}
            return (norm_output(on, options["delta"], options["post"], memory[2], tokens=tokens, **own),)
        if self.head_row is None:
            return (rms_norm(on, *memory, hidden=hidden, tokens=tokens, **options),)
        step = data.step(0, tokens, self.head_row)
        return (final_norm(on, *memory, step, rows=rows, **options),)

    def _rounded(self, data: Data, rows: int) -> NpuCodes | RoundedInputs | None:
        if isinstance(self.rounds, CodeGrid):
            return data.codes(self.rounds, rows, self.hidden)
        return data.int8(self.rounds, rows, self.hidden)

    def exact(self, data: Values) -> Exact:
        if self.in_place:
            return {"residual": exact_rms_norm(data["residual"], np.ones(self.hidden), EPSILON)}
        added = data["linear"] + data.get("bias", 0.0)
        if self.post:
            added = exact_rms_norm(added, data["post"], POST_EPSILON)
        if self.alone:
            return {"normed": added}
        residual = data["residual"].astype(np.float64)
        total = (residual + added) * self.gain
        normed = total[self.head_row or 0 :]
        if self.centered:
            normed = exact_layer_norm(normed, data["norm"][0], data["norm"][1], EPSILON)
        elif not self.unnormed:
            normed = exact_rms_norm(normed, data["norm"], EPSILON)
        return {"normed": normed, "residual": total if self.head_row is None else residual}


CHECKS: Final = (
    OperatorCheck("norm with residual", "5 tokens, split", NormCase(5, 192, 64), "normed"),
    OperatorCheck("norm with residual", "normed delta", NormCase(5, 192, 64, post=True), "normed"),
    OperatorCheck("norm with residual", "scaled sum", NormCase(5, 192, 64, gain=0.3), "residual"),
    OperatorCheck("norm with residual", "in place", NormCase(5, 192, 64, in_place=True), "residual"),
    OperatorCheck("norm with residual", "5 tokens, sum", NormCase(5, 192, 64, "sum"), "normed"),
    OperatorCheck(
        "norm of an output", "5 tokens, split", NormCase(5, 192, 64, post=True, alone=True), "normed"
    ),
    OperatorCheck(
        "norm of an output",
        "5 tokens, codes",
        NormCase(5, 192, 0, post=True, alone=True, rounds=WeightFormat(4, 32)),
        "normed",
    ),
    OperatorCheck("norm with residual", "no norm", NormCase(5, 192, 64, unnormed=True), "normed"),
    OperatorCheck("final norm", "3 of 5 tokens, split", NormCase(5, 192, 64, head_row=2), "normed"),
)


def _layer_points(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
    """Yield all tokens; those of codes too, where the first linear of a layer has integer graphs."""
    yield from every_pass(timed, model, scope)
    if any(spec.group == "qkv" for spec in scope.coded):
        yield from ((scope.codes, timed.sizes(model, tokens)) for tokens in scope.tokens)


def _measured(at: Point, head_row: int | None, group: Group) -> NormCase:
    tokens, hidden = at.sizes.tokens, at.sizes.hidden
    (split,) = at.form.splits(hidden)
    return NormCase(
        *(tokens, hidden, split, at.form.join),
        head_row=head_row,
        rounds=GRIDS.get(at.form.codes) or at.int8(group),
    )


RMS_NORM: Final = Timed(
    forms={
        Form(): "rms_norm",
        Form("sum"): "rms_norm_sum",
        Form(codes="int8"): "rms_norm_int8",
        Form(codes="uint8"): "rms_norm_uint8",
        Form(codes="uint16"): "rms_norm_uint16",
    },
    case=lambda at: _measured(at, None, "qkv"),
    width=lambda model: model.hidden_size,
    points=_layer_points,
)
INNER_NORM: Final = Timed(
    forms={Form(): "inner_norm", Form(codes="int8"): "inner_norm_int8"},
    case=lambda at: NormCase(
        at.sizes.tokens, at.sizes.hidden, 0, post=True, alone=True, rounds=at.int8("down")
    ),
)
FINAL_NORM: Final = Timed(
    forms={
        Form(): "final_norm",
        Form(codes="int8"): "final_norm_int8",
        Form(codes="uint16"): "final_norm_uint16",
    },
    case=lambda at: _measured(at, 0, "head"),
    width=lambda model: model.hidden_size,
    points=head_rows,
)
