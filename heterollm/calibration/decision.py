"""Decides activations at 8 bits: which shadows are pruned, and which operators keep 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.base import OptionError
from heterollm.calibration.int8_records import Activations, Decision, LossAtShare
from heterollm.calibration.range_records import LinearCalibration

Loss = Callable[[Sequence[LinearCalibration]], NDArray[np.float64]]
"""Returns the negative log-likelihood of each token of calibration text with the decided activations."""

LOSS_LIMIT_PERCENT: Final = 1.0
"""The loss that llm.npu reports."""

SHARE_STEPS: Final = 5
"""Halvings of the interval in which the largest share lies."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The rule of a decision.

    Args:
        int16_limit_db: Operators whose activations, shadowed or pruned, leave a smaller signal-to-noise ratio
            keep 16 bits; None for none.
        pruned: Share of the shadows to prune; None for the largest within the limit of the loss.
        loss_limit_percent: That limit: largest rise of the perplexity over that with all shadows; None for 1.

    Raises:
        OptionError: A value is out of range.
    """

    int16_limit_db: float | None = None
    pruned: float | None = None
    loss_limit_percent: float | None = None

    def __post_init__(self) -> None:
        if self.pruned is not None and self.loss_limit_percent is not None:
            raise OptionError(
                "A share of shadows to prune, and a limit of its loss.", fix="Choose one of them."
            )
        if self.pruned is not None and not 0 <= self.pruned <= 1:
            raise OptionError(f"A share of {self.pruned} of the shadows.", fix="Choose 0 to 1.")
        if not 0 < self.limit_percent < float("inf"):
            raise OptionError(f"A loss limit of {self.limit_percent} %.", fix="Choose a number above 0.")
        if self.int16_limit_db is not None and not abs(self.int16_limit_db) < float("inf"):
            raise OptionError(f"A limit of {self.int16_limit_db} dB.", fix="Choose a finite number.")

    @property
    def limit_percent(self) -> float:
        """The limit of the loss."""
        return LOSS_LIMIT_PERCENT if self.loss_limit_percent is None else self.loss_limit_percent

    def made(self, decision: Decision | None) -> bool:
        """Whether a decision was made by this policy."""
        if decision is None or decision.int16_limit_db != self.int16_limit_db:
            return False
        if self.pruned is None:
            return decision.loss_limit_percent == self.limit_percent
        return decision.loss_limit_percent is None and decision.pruned == self.pruned


def decide(
    linears: Sequence[LinearCalibration], policy: Policy, loss: Loss
) -> tuple[tuple[LinearCalibration, ...], Decision]:
    """Return the records with their decisions, and how they were made.

    Args:
        linears: Records with checks of 8-bit activations.
        policy: How to decide.
        loss: Measures the loss; called only if the policy has no share.
    """
    if policy.pruned is not None:
        decided = _decided(linears, policy.pruned, policy)
        return decided, Decision(policy.pruned, policy.int16_limit_db)
    unpruned = loss(_decided(linears, 0.0, policy))
    losses: list[LossAtShare] = []

    def fits(share: float) -> bool:
        rises = loss(_decided(linears, share, policy)) - unpruned
        ratio = 100 * float(np.exp(rises.mean()))
        error = ratio * float(rises.std()) / math.sqrt(len(rises))
        losses.append(LossAtShare(share, ratio - 100, error))
        return ratio - 100 + error <= policy.limit_percent

    low, high = 0.0, 1.0
    if fits(high):
        low = high
    for _ in range(SHARE_STEPS if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    decision = Decision(low, policy.int16_limit_db, policy.limit_percent, tuple(losses))
    return _decided(linears, low, policy), decision


def _decided(
    linears: Sequence[LinearCalibration], pruned: float, policy: Policy
) -> tuple[LinearCalibration, ...]:
    """Return the records with a share of the shadows pruned, those first that take least error away.

    A shadow that takes no error away is always pruned.
    """
    gains = [0.0 if one.int8 is None else one.int8.gain for one in linears]
    ranked = sorted(range(len(linears)), key=lambda place: (gains[place], place))
    without = {place for place, gain in enumerate(gains) if gain <= 0}
    without |= set(ranked[: round(pruned * len(ranked))])
    return tuple(
        one if one.int8 is None else _with(one, "int8" if place in without else "shadow", policy)
        for place, one in enumerate(linears)
    )


def _with(one: LinearCalibration, activations: Activations, policy: Policy) -> LinearCalibration:
    assert one.int8 is not None
    errors = one.int8.errors_of(activations)
    if policy.int16_limit_db is not None and errors is not None and errors.sqnr_db < policy.int16_limit_db:
        activations = "int16"
    return structs.replace(one, int8=structs.replace(one.int8, activations=activations))
