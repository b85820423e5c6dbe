"""Measures 8-bit activations: thresholds of shadows, and outputs on 8-bit grids in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.calibration.int8_records import (
    Activations,
    ChannelOutliers,
    Int8Calibration,
    Int8Errors,
    Shadow,
    choose_shadow,
)
from heterollm.kernels.formats import largest_code, on_grid
from heterollm.kernels.ops import Member

Floats = NDArray[np.float32]

CHANNEL_SHARES: Final = (0.003, 0.01, 0.03)
"""Candidates of a threshold: it clamps this share of the channels in the first window. The least is what the
paper finds in one prompt."""

SMALLEST: Final = 1e-30
"""Magnitude of a grid without values."""


class Int8Statistics:
    """Running magnitudes of a group's shadows; the first window sets their thresholds.

    Args:
        members: The group's linears.
        columns: Inputs.
        earlier: The state to continue from.
    """

    def __init__(
        self, members: Sequence[Member], columns: int, earlier: Int8Calibration | None = None
    ) -> None:
        self._ends = np.cumsum([member.rows for member in members])[:-1]
        self._columns = columns
        self._shadows = [] if earlier is None else list(earlier.shadows)

    def add(self, x: Floats, y: Floats, weight: Floats) -> None:
        """Add an input ``[m, k]``, its output ``[m, n]`` and the weight ``[n, k]``."""
        sizes = np.abs(x)
        maxima = sizes.max(axis=0)
        if not self._shadows:
            descending = np.sort(maxima)[::-1]
            # Channels with a magnitude beyond the threshold are those before its place.
            places = dict.fromkeys(max(1, round(share * len(maxima))) for share in CHANNEL_SHARES)
            members = len(self._ends) + 1
            self._shadows = [
                Shadow(float(descending[min(place, len(maxima) - 1)]), (0.0,) * members) for place in places
            ]
        self._shadows = [self._added(one, x, y, weight, sizes, maxima) for one in self._shadows]

    def record(self) -> Int8Calibration:
        """Return the magnitudes so far."""
        return Int8Calibration(tuple(self._shadows))

    def _added(
        self, old: Shadow, x: Floats, y: Floats, weight: Floats, sizes: Floats, maxima: Floats
    ) -> Shadow:
        channels = np.flatnonzero(maxima > old.threshold)
        clamped = y - _residual(x[:, channels], old.threshold) @ weight[:, channels].T
        found = [float(np.abs(part).max()) for part in np.split(clamped, self._ends, axis=1)]
        counts = {one.channel: one for one in old.outliers}
        for channel in channels.tolist():
            count, largest = int((sizes[:, channel] > old.threshold).sum()), float(maxima[channel])
            known = counts.get(channel)
            if known is not None:
                count, largest = count + known.count, max(largest, known.maximum)
            counts[channel] = ChannelOutliers(channel, count, largest)
        return structs.replace(
            old,
            outputs=tuple(map(max, old.outputs, found)),
            outliers=tuple(counts[channel] for channel in sorted(counts)),
            window_channels=old.window_channels + len(channels),
            most_channels=max(old.most_channels, len(channels)),
        )


def int8_output(
    x: Floats,
    weight: Floats,
    found: Int8Calibration,
    activations: Activations,
    *,
    inputs: float,
    outputs: Sequence[float],
    member_rows: Sequence[int],
) -> Floats:
    """Return the output of a group with 8-bit activations, its weight ``[n, k]`` as given.

    Args:
        x: The input ``[m, k]``.
        weight: The weight ``[n, k]``.
        found: The group's record.
        activations: ``int8`` or ``shadow``.
        inputs: Largest magnitude of the input, for ``int8``.
        outputs: Largest magnitude of each member's output, for ``int8``; each has a grid of its own.
        member_rows: Rows of each member.
    """
    if activations == "int8":
        return _members_rounded(_rounded(x, inputs) @ weight.T, outputs, member_rows)
    shadow = found.shadow
    y = _members_rounded(_rounded(x, shadow.threshold) @ weight.T, shadow.outputs, member_rows)
    channels = np.flatnonzero(np.abs(x).max(axis=0) > shadow.threshold)
    beyond: Floats = _residual(x[:, channels], shadow.threshold) @ weight[:, channels].T
    return y + beyond


def int8_checked(
    found: Int8Calibration,
    weight: Floats,
    x: Floats,
    *,
    inputs: float,
    outputs: Sequence[float],
    member_rows: Sequence[int],
) -> Int8Calibration:
    """Return the record with the errors of all thresholds and with a chosen one; see :func:`int8_output`."""
    exact = x @ weight.T

    def errors(one: Int8Calibration, activations: Activations) -> Int8Errors:
        actual = int8_output(
            *(x, weight, one, activations), inputs=inputs, outputs=outputs, member_rows=member_rows
        )
        return _errors(actual, exact)

    shadows = tuple(
        structs.replace(shadow, errors=errors(structs.replace(found, chosen=place), "shadow"))
        for place, shadow in enumerate(found.shadows)
    )
    checked = structs.replace(found, shadows=shadows, errors=errors(found, "int8"))
    return structs.replace(checked, chosen=choose_shadow(shadows))


def _residual(x: Floats, threshold: float) -> Floats:
    limit = np.float32(threshold)
    beyond: Floats = x - np.clip(x, -limit, limit)
    return beyond


def _rounded(values: Floats, magnitude: float) -> Floats:
    """Return values on a grid of 8 bits whose largest code stands for a magnitude."""
    return on_grid(values, max(magnitude, SMALLEST) / largest_code(8), 8)


def _members_rounded(y: Floats, magnitudes: Sequence[float], member_rows: Sequence[int]) -> Floats:
    parts = np.split(y, np.cumsum(member_rows)[:-1], axis=1)
    return np.concatenate([_rounded(*pair) for pair in zip(parts, magnitudes, strict=True)], axis=1)


def _errors(actual: Floats, exact: Floats) -> Int8Errors:
    error = np.square(actual.astype(np.float64) - exact).sum(axis=1)
    power = np.square(exact.astype(np.float64)).sum(axis=1)
    if not power.sum():
        return Int8Errors(float(error.sum() > 0), float(error.sum() > 0))
    tokens = error / np.maximum(power, 1e-12 * power.mean())
    return Int8Errors(float(error.sum() / power.sum()), float(tokens.mean()))
