"""Records of 8-bit activations: errors on static grids, the shadow of outliers, and the decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta, Struct

from heterollm.base import Amount, Count, Number, Positive, PositiveNumber

HOT_SHARE: Final = 0.8
"""Share of the outliers that hot channels cover."""

ENOUGH_DB: Final = 1.0
"""A shadow of fewer channels is chosen if it is at most this much worse than the best one."""

Activations = Literal["int8", "shadow", "int16"]
"""Kinds of activations: 8 bits that reach to the largest magnitude, 8 bits that are clamped at a
threshold while the GPU adds the rest, or 16 bits."""

Share = Annotated[float, Meta(ge=0, le=1)]


class Int8Errors(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of a group of linears with 8-bit activations on static grids, in exact arithmetic.

    Args:
        nmse: NMSE of the whole output, in which tokens of large values count most.
        token_nmse: Mean of the NMSE of each token.
    """

    nmse: Amount
    token_nmse: Amount

    @property
    def sqnr_db(self) -> float:
        """The mean token's signal-to-noise ratio in decibels."""
        return float(-10 * np.log10(max(self.token_nmse, 1e-30)))


class ChannelOutliers(Struct, frozen=True, forbid_unknown_fields=True):
    """Outliers of one input channel.

    Args:
        channel: The input.
        count: Tokens at which its magnitude exceeds the threshold.
        maximum: Its largest magnitude.
    """

    channel: Count
    count: Positive
    maximum: Amount


class Shadow(Struct, frozen=True, forbid_unknown_fields=True):
    """A threshold that clamps a group's input, beyond which the GPU computes.

    Args:
        threshold: Largest magnitude that the NPU gets; its step is a 127th of it.
        outputs: Largest magnitude of each member's output from clamped inputs, before biases.
        outliers: Channels with inputs beyond the threshold, by channel.
        window_channels: Sum, over windows, of the channels that have an outlier in the window.
        most_channels: Most such channels of a window.
        errors: The check; None as long as there was none.
    """

    threshold: Amount
    outputs: tuple[Amount, ...]
    outliers: tuple[ChannelOutliers, ...] = ()
    window_channels: Count = 0
    most_channels: Count = 0
    errors: Int8Errors | None = None

    @property
    def hot_channels(self) -> tuple[int, ...]:
        """The fewest channels that have four fifths of the outliers, the one with most outliers first."""
        ranked = sorted(self.outliers, key=lambda one: (-one.count, one.channel))
        sums = np.cumsum([one.count for one in ranked])
        needed = int(np.searchsorted(sums, HOT_SHARE * sums[-1])) + 1 if ranked else 0
        return tuple(one.channel for one in ranked[:needed])


class Int8Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """A group of linears with 8-bit activations.

    Args:
        shadows: Candidates of thresholds, the largest first.
        errors: The check of 8-bit grids that reach to the largest magnitudes; None as long as there was none.
        chosen: Place of the chosen candidate; None before the check.
        activations: The decision; None before it.
    """

    shadows: tuple[Shadow, ...]
    errors: Int8Errors | None = None
    chosen: Count | None = None
    activations: Activations | None = None

    @property
    def shadow(self) -> Shadow:
        """The chosen candidate; before the check the first."""
        return self.shadows[self.chosen or 0]

    @property
    def checked(self) -> bool:
        """Whether the errors are known."""
        return self.errors is not None and self.chosen is not None and self.shadow.errors is not None

    @property
    def gain(self) -> float:
        """The error that the shadow takes away: those with little are pruned first."""
        if self.errors is None or self.shadow.errors is None or not self.shadow.outliers:
            return 0.0
        return self.errors.token_nmse - self.shadow.errors.token_nmse

    def errors_of(self, activations: Activations) -> Int8Errors | None:
        """Return the errors of 8-bit activations with or without the shadow; None at 16 bits."""
        return {"int8": self.errors, "shadow": self.shadow.errors, "int16": None}[activations]


def choose_shadow(shadows: tuple[Shadow, ...]) -> int:
    """Return the place of the largest threshold that is nearly as good as the best one."""
    quality_db = [one.errors.sqnr_db if one.errors is not None else -np.inf for one in shadows]
    return next(place for place, one in enumerate(quality_db) if one >= max(quality_db) - ENOUGH_DB)


class LossAtShare(Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of pruning.

    Args:
        pruned: Share of the shadows that were pruned.
        loss_percent: Rise of the perplexity of calibration text over that with all shadows, in percent.
        error_percent: Its standard error, as if tokens were independent.
    """

    pruned: Share
    loss_percent: Number
    error_percent: Amount


class Decision(Struct, frozen=True, forbid_unknown_fields=True):
    """The rule by which the activations of all operators were decided.

    Args:
        pruned: Share of the shadows that are pruned, those first that take least error away.
        int16_limit_db: Operators below this signal-to-noise ratio have 16 bits; None for none.
        loss_limit_percent: The largest rise of perplexity, its standard error added, that pruning may cost;
            None if the share was given.
        losses: The shares that were tried, in that order.
    """

    pruned: Share
    int16_limit_db: Number | None = None
    loss_limit_percent: PositiveNumber | None = None
    losses: tuple[LossAtShare, ...] = ()


def int8_mistakes(where: str, found: Int8Calibration, inputs: float, members: int) -> Iterator[str]:
    """Yield mistakes in a record beyond its types, each with the path of the field."""
    if not found.shadows:
        yield f"{where}.shadows: no threshold"
        return
    thresholds = [one.threshold for one in found.shadows]
    if thresholds != sorted(thresholds, reverse=True):
        yield f"{where}.shadows: the thresholds {thresholds} do not fall"
    for place, shadow in enumerate(found.shadows):
        here = f"{where}.shadows[{place}]"
        if len(shadow.outputs) != members:
            yield f"{here}.outputs: {len(shadow.outputs)} members, not {members}"
        if [one.channel for one in shadow.outliers] != sorted({one.channel for one in shadow.outliers}):
            yield f"{here}.outliers: a channel is given twice, or out of order"
        for number, one in enumerate(shadow.outliers):
            if not shadow.threshold < one.maximum <= inputs:
                yield f"{here}.outliers[{number}].maximum: {one.maximum} is no outlier"
        if not shadow.most_channels <= len(shadow.outliers) <= shadow.window_channels:
            yield f"{here}.most_channels, window_channels: they do not fit {len(shadow.outliers)} outliers"
    if found.chosen is not None and found.chosen >= len(found.shadows):
        yield f"{where}.chosen: {found.chosen} of {len(found.shadows)} thresholds"
    elif found.activations is not None and not found.checked:
        yield f"{where}.activations: {found.activations} without a check of its errors"
