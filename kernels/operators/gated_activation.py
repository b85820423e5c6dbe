"""The activation of a gate, times the up projection; without a gate, the activation of the projection."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.gpu import (
    Argument,
    DeviceMemory,
    Gated,
    GlueKernels,
    Launch,
    RoundedInputs,
    Segments,
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
from heterollm.kernels.ops import SLOPES, Activation, GateClip, Join, Slopes, WeightFormat

STEPS: Final[Mapping[str, StepCategory]] = {"activation": "activation"}

ACTIVATIONS: Final[tuple[Activation, ...]] = (
    "silu",
    "gelu_tanh",
    "gelu_erf",
    "relu",
    "relu_squared",
    "xielu",
)
"""Activations in the order of their numbers in pointwise.cl."""


class TokenFactors(NamedTuple):
    """Columns of an array of each token.

    Args:
        memory: The array ``[tokens, columns]`` in the activation type.
        columns: Its columns.
        first: The first of them that counts.
    """

    memory: DeviceMemory
    columns: int
    first: int


class ExpertBiases(NamedTuple):
    """The biases of experts, for rows of pairs of a token and an expert.

    Args:
        values: float32 of each expert's members.
        position: The row of each pair.
        chosen: The expert of each pair.
    """

    values: Argument
    position: Argument
    chosen: Argument


def activate(
    on: GlueKernels,
    gate_up: Segments,
    out: DeviceMemory,
    *,
    tokens: int,
    intermediate: int,
    activation: Activation = "silu",
    bias: Argument | ExpertBiases = None,
    rounded: RoundedInputs | None = None,
    factors: TokenFactors | None = None,
    clip: GateClip | None = None,
    slopes: Slopes = SLOPES,
    cutoffs: Argument = None,
    label: str = "activation",
) -> Launch:
    """Return the launch of ``out = activation(gate) * up``, or ``activation(up)`` of a group without a gate.

    Args:
        on: The device's kernels.
        gate_up: Output of the group, one or two members of ``intermediate`` rows.
        out: ``[tokens, intermediate]`` in the activation type.
        tokens: Rows.
        intermediate: Width of the feed-forward network.
        activation: Activation of the first member.
        bias: float32 of the members, added first, or those of experts; or None.
        rounded: Target of the int8 codes of ``out``; None for no codes.
        factors: Values that the output is multiplied by; None for none.
        clip: Bounds of gate and up, which the activation must be silu for; None for none.
        slopes: Numbers of xIELU.
        cutoffs: float32 ``[tokens]``, which is taken off gates that exceed it, others become zero; or None.
        label: Name for traces and errors.
    """
    members = len(gate_up.rows)
    if members > 2 or gate_up.rows != (intermediate,) * members:
        raise KernelError(f"{label}: members of {gate_up.rows} rows are not one or two of {intermediate}.")
    if clip is not None and (members != 2 or activation != "silu"):
        raise KernelError(f"{label}: gate and up are clipped with silu, not {members} with {activation}.")
    out.require(tokens * intermediate * on.item_bytes, f"{label} output")
    by_expert = isinstance(bias, ExpertBiases)
    values, *order = bias if isinstance(bias, ExpertBiases) else (bias,)
    has_slopes = activation == "xielu"
    bounds = tuple(map(np.float32, clip or (slopes if has_slopes else ())))
    own: tuple[Argument, ...] = ()
    if factors is not None:
        own = factors.memory, np.int32(factors.columns), np.int32(factors.first)
    memory: tuple[Argument, ...] = (
        gate_up.a,
        gate_up.b,
        out,
        gate_up.b if values is None else values,
        *own,
        *order,
        *bounds,
    )
    memory += () if cutoffs is None else (cutoffs,)
    flags = ACTIVATIONS.index(activation), values is not None, members
    sizes = (*flags, *(*gate_up.splits, 0)[:2], intermediate)
    item, block = on.item_bytes, rounded.block if rounded else 0
    read_bytes = members * item * gate_up.reads
    work = functools.partial(pointwise_work, tokens * intermediate, 10, read_bytes, item, block)
    options = {
        "FACTORS": factors,
        "BY_EXPERT": by_expert,
        "CLIPPED": clip,
        "SLOPES": has_slopes,
        "CUTOFFS": cutoffs is not None,
    }
    launch = on.pointwise(
        *("gated_activation", memory, sizes, tokens, label, work),
        flags=len(flags),
        rounded=rounded,
        segments=gate_up,
        defines={name: 1 for name, holds in options.items() if holds},
    )
    if tokens == 1 and on.runtime.has_endings and not any((*gate_up.splits, *options.values())):
        launch.ending = Gated(out, values, flags[0], members, rounded)
    return launch


def exact_gated_activation(
    gate: NDArray[Any],
    up: NDArray[Any] | None = None,
    activation: Activation = "silu",
    clip: GateClip | None = None,
    slopes: Slopes = SLOPES,
) -> NDArray[np.float64]:
    """Return ``activation(gate) * up``, or the activation alone."""
    exact = gate.astype(np.float64)
    if clip is not None:
        assert up is not None  # as in the launch
        exact, up = np.minimum(exact, clip.limit), np.clip(up.astype(np.float64), -clip.limit, clip.limit)
        clipped: NDArray[np.float64] = (up + 1.0) * exact / (1.0 + np.exp(-clip.slope * exact))
        return clipped
    if activation == "gelu_tanh":
        gated = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    elif activation == "gelu_erf":
        gated = 0.5 * exact * (1 + np.vectorize(math.erf)(exact / np.sqrt(2)))
    elif activation == "relu":
        gated = np.maximum(exact, 0.0)
    elif activation == "relu_squared":
        gated = np.square(np.maximum(exact, 0.0))
    elif activation == "xielu":
        low = np.minimum(exact, slopes.largest)
        bent = np.where(exact > 0, slopes.rising * exact**2, slopes.falling * (np.expm1(low) - exact))
        gated = bent + slopes.linear * exact
    else:
        # exp of minus the magnitude cannot overflow.
        small = np.exp(-np.abs(exact))
        gated = exact * np.where(exact >= 0, 1.0, small) / (1.0 + small)
    product: NDArray[np.float64] = gated if up is None else gated * up.astype(np.float64)
    return product


@dataclass(frozen=True, slots=True)
class GatedCase:
    """An activated gate times the up projection, or the activation of as many members as there are splits.

    ``splits`` are the columns of each that lie in the first segment, ``rounds`` is the format of a linear
    that reads int8 codes. The output may be multiplied by columns of another array, from ``factors`` on.
    Gates may have a cutoff of each token.
    """

    tokens: int
    width: int
    splits: tuple[int, ...]
    join: Join = "concatenate"
    activation: Activation = "silu"
    biased: bool = False
    scale: float = 1.0
    rounds: WeightFormat | None = None
    factors: int | None = None
    clip: GateClip | None = None
    slopes: Slopes = SLOPES
    has_cutoffs: bool = False

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, width = self.tokens, self.width
        launch = activate(
            on,
            data.linear(tokens, (width,) * len(self.splits), self.splits, self.join, self.scale),
            data.output("activated", tokens, width),
            tokens=tokens,
            intermediate=width,
            activation=self.activation,
            bias=data.floats("bias", len(self.splits) * width) if self.biased else None,
            rounded=data.int8(self.rounds, tokens, width),
            factors=self._factors(data),
            clip=self.clip,
            slopes=self.slopes,
            cutoffs=data.floats("cutoffs", tokens) if self.has_cutoffs else None,
        )
        return (launch,)

    def _factors(self, data: Data) -> TokenFactors | None:
        if self.factors is None:
            return None
        columns = self.factors + self.width + 3
        return TokenFactors(data.inputs("factors", self.tokens, columns), columns, self.factors)

    def exact(self, data: Values) -> Exact:
        gate, *up = np.split(data["linear"] + data.get("bias", 0.0), len(self.splits), axis=1)
        if self.has_cutoffs:
            gate = np.maximum(gate - data["cutoffs"][:, None], 0.0)
        found = exact_gated_activation(gate, up[0] if up else None, self.activation, self.clip, self.slopes)
        if self.factors is not None:
            found = found * data["factors"][:, self.factors : self.factors + self.width]
        return {"activated": found}


_SPLIT: Final = GatedCase(5, 160, (64, 64))
CHECKS: Final = tuple(
    OperatorCheck("gated activation", title, case, "activated")
    for title, case in (
        ("5 tokens, split", _SPLIT),
        ("5 tokens, GELU", replace(_SPLIT, activation="gelu_tanh")),
        ("5 tokens, GELU by erf", replace(_SPLIT, activation="gelu_erf")),
        ("5 tokens, ReLU", replace(_SPLIT, activation="relu")),
        ("5 tokens, no gate", replace(_SPLIT, splits=(64,), activation="relu_squared")),
        ("5 tokens, xIELU", replace(_SPLIT, splits=(64,), activation="xielu", slopes=Slopes(0.5, 1.1, 0.4))),
        ("5 tokens, sum", replace(_SPLIT, join="sum")),
        ("5 tokens, clipped", replace(_SPLIT, biased=True, scale=4.0, clip=GateClip(7.0, 1.702))),
        ("5 tokens, cutoffs", replace(_SPLIT, activation="gelu_tanh", has_cutoffs=True)),
        ("5 tokens, factors", replace(_SPLIT, splits=(64,), factors=11)),
    )
)


def _measured(at: Point) -> GatedCase:
    width = at.sizes.hidden
    splits = at.form.splits(width, width)
    return GatedCase(at.sizes.tokens, width, splits, at.form.join, rounds=at.int8("down"))


GATED_ACTIVATION: Final = Timed(
    forms={
        Form(): "gated_activation",
        Form("sum"): "gated_activation_sum",
        Form(codes="int8"): "gated_activation_int8",
    },
    case=_measured,
)
