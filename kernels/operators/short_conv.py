"""A gated causal convolution of each channel over few tokens, whose history is recurrent state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu import (
    Argument,
    DeviceMemory,
    GlueKernels,
    Launch,
    RecurrentLayer,
    RoundedInputs,
    Segments,
    SharedArray,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    Point,
    StepCategory,
    Timed,
    Values,
)
from heterollm.kernels.ops import Join, WeightFormat

TITLE: Final = "short convolution"
STEPS: Final[Mapping[str, StepCategory]] = {TITLE: "activation"}

SLOTS: Final = (1, 2)
"""Slots of checks that are read and written, of three."""


def convolve(
    on: GlueKernels,
    gates: Segments,
    taps: Argument,
    out: DeviceMemory,
    state: RecurrentLayer,
    step: SharedArray,
    *,
    tokens: int,
    width: int,
    row_words: int = 0,
    rounded: RoundedInputs | None = None,
) -> Launch:
    """Return the launch of ``out = c * convolution(b * x)``, which also writes the state behind the pass.

    Args:
        on: The device's kernels.
        gates: Output of the group, the members b, c and x of ``width`` rows.
        taps: float32 ``[taps, width]``; the last row weighs the token itself.
        out: ``[tokens, width]`` in the activation type.
        state: The last ``taps - 1`` products ``b * x``.
        step: The step buffer.
        tokens: Tokens of the pass.
        width: Channels.
        row_words: As of :func:`heterollm.kernels.operators.attend`.
        rounded: Target of the int8 codes of ``out``; None for no codes.
    """
    if gates.rows != (width,) * 3 or state.values % width:
        raise KernelError(f"{TITLE}: members of {gates.rows} rows are not three of {width}.")
    out.require(tokens * width * on.item_bytes, f"{TITLE} output")
    history = state.values // width
    read_bytes = 3 * on.item_bytes * gates.reads + 4 * history / tokens
    block = rounded.block if rounded else 0
    work = functools.partial(
        pointwise_work, tokens * width, 2 * history + 4, read_bytes, on.item_bytes, block
    )
    return on.pointwise(
        "short_conv",
        (gates.a, gates.b, out, taps, state.memory, step, np.int32(row_words)),
        (*gates.splits, width),
        tokens,
        TITLE,
        work,
        rounded=rounded,
        segments=gates,
        file="short_conv.cl",
        defines={"TAPS": history + 1},
    )


@dataclass(frozen=True, slots=True)
class ShortConvCase:
    """A gated convolution; ``splits`` are the columns of b, c and x that lie in the first segment."""

    tokens: int
    position: int
    width: int
    taps: int
    splits: tuple[int, ...]
    join: Join = "concatenate"
    rounds: WeightFormat | None = None

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, width, history = self.tokens, self.width, self.taps - 1
        launch = convolve(
            on,
            data.linear(tokens, (width,) * 3, self.splits, self.join),
            data.floats("taps", self.taps, width),
            data.output("convolved", tokens, width),
            RecurrentLayer(data.floats("states", 3 * history, width), history * width),
            data.step(self.position, tokens, slots=SLOTS),
            tokens=tokens,
            width=width,
            rounded=data.int8(self.rounds, tokens, width),
        )
        return (launch,)

    def exact(self, data: Values) -> Exact:
        b, c, x = np.split(data["linear"], 3, axis=1)
        states = data["states"].astype(np.float64).reshape(3, self.taps - 1, self.width)
        read, written = SLOTS
        inputs = np.concatenate([states[read] * (self.position > 0), b * x])
        states[written] = inputs[self.tokens :]
        taps = data["taps"].astype(np.float64)
        sums = sum(taps[tap] * inputs[tap : tap + self.tokens] for tap in range(self.taps))
        return {"convolved": c * sums, "states": states.reshape(-1, self.width)}


_SPLIT: Final = ShortConvCase(5, 7, 160, 3, (64, 32, 0))
CHECKS: Final = tuple(
    OperatorCheck(TITLE, title, case, output)
    for title, case, output in (
        ("5 tokens at 7, split", _SPLIT, "convolved"),
        ("5 tokens at 7, state", _SPLIT, "states"),
        ("1 token, state", replace(_SPLIT, tokens=1), "states"),
        ("5 tokens at 0, 7 taps", replace(_SPLIT, position=0, taps=7), "states"),
        ("5 tokens, sum", replace(_SPLIT, join="sum"), "convolved"),
    )
)

MEASURED_TAPS: Final = 3


def _measured(at: Point) -> ShortConvCase:
    width = at.sizes.hidden
    splits = at.form.splits(width, width, width)
    tokens, rounds = at.sizes.tokens, at.int8("conv_out")
    return ShortConvCase(tokens, 1, width, MEASURED_TAPS, splits, at.form.join, rounds)


SHORT_CONV: Final = Timed(
    forms={Form(): "short_conv", Form("sum"): "short_conv_sum", Form(codes="int8"): "short_conv_int8"},
    case=_measured,
)
