"""Keep ratios: the share of visible keys that sparse attention keeps for each query head (shadowAttn).

A rule shares one ratio out over all heads of a model: alike, by the attention that the keys of heads hold on
calibration text, or by the heads' importance, as the paper's equation 3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from heterollm.base import OptionError

KeepRule = Literal["mass", "importance", "importance_literal", "uniform"]
"""Rules of :func:`keep_ratios`."""

KeepRatios = tuple[tuple[float, ...], ...]
"""Ratios by layer and query head."""

Floats = NDArray[np.float64]

FLOOR: Final = 0.5
"""Least ratio of a head, in parts of the global one."""

LEFT: Final = 0.7
"""Least mean ratio of the layers after the first, which may be dense, in parts of the global one."""

CLAMP: Final = 1e-3
"""Largest product of importances in equation 3, in nats squared."""

SMALLEST: Final = 1e-9
"""Weight of a head of no importance, in parts of the largest."""

HALVINGS: Final = 60


@dataclass(frozen=True, slots=True)
class HeadNeeds:
    """Measurements of a model's heads on calibration text.

    Args:
        masses: Shares of a query's attention, ascending.
        needed: Share of the visible keys that holds each of these masses, by layer, query head and mass.
        importance: Rise of the loss without a head (equation 1), by layer and query head; None if unknown.
        layer_importance: Rise of the loss without a layer (equation 2), by layer; None if unknown.
    """

    masses: tuple[float, ...]
    needed: tuple[tuple[tuple[float, ...], ...], ...]
    importance: tuple[tuple[float, ...], ...] | None = None
    layer_importance: tuple[float, ...] | None = None


def keep_ratios(needs: HeadNeeds, keep: float, rule: KeepRule = "mass") -> KeepRatios:
    """Return the ratio of each query head, by layer; their mean is the global ratio.

    ``mass`` keeps the first layer dense and gives every other head the keys that hold one common share of its
    attention, at least half of the global ratio. Where a model has so few layers that a dense first one would
    leave the others less than 70 % of the global ratio, the first layer keeps what leaves them that.
    ``importance`` shares out by equation 3, but no head gets less than half of the global ratio or more
    than 1. ``importance_literal`` is equation 3 as it stands, cut off at 1: some heads keep nothing, and the
    mean may be lower. ``uniform`` keeps as much in every head.

    Args:
        needs: Measurements of the heads.
        keep: The global ratio, above 0 and at most 1.
        rule: How to share it out.

    Raises:
        OptionError: The ratio is out of range, or there are no importances.
    """
    if not 0 < keep <= 1:
        raise OptionError(f"A keep ratio of {keep}.", fix="Choose a number above 0 and at most 1.")
    sizes = [len(layer) for layer in needs.needed]
    if rule == "uniform":
        return _by_layer(np.full(sum(sizes), keep), sizes)
    if rule == "mass":
        return _by_mass(needs, keep, sizes)
    weights = _importances(needs)
    if not weights.any():
        weights = np.ones_like(weights)
    if rule == "importance_literal":
        return _by_layer(np.minimum(1.0, keep * len(weights) * weights / weights.sum()), sizes)
    # A head of no importance gets more than the floor only where all others are dense.
    weights = np.maximum(weights, SMALLEST * weights.max())

    def shared_out(level: float) -> Floats:
        clipped: Floats = np.clip(level * weights / weights.min(), FLOOR * keep, 1.0)
        return clipped

    return _by_layer(_with_mean(keep, shared_out), sizes)


def _by_mass(needs: HeadNeeds, keep: float, sizes: Sequence[int]) -> KeepRatios:
    """Return ratios at a common attention mass, after a first layer that is dense if it may be."""
    total, first = sum(sizes), sizes[0]
    rest = total - first
    if not rest:
        return _by_layer(np.full(total, keep), sizes)
    ahead = min(1.0, (keep * total - LEFT * keep * rest) / first)
    mean = min(1.0, (keep * total - ahead * first) / rest)
    # No keys hold no mass, and all keys all of it.
    masses = np.array([0.0, *needs.masses, 1.0])
    curves = np.array([[0.0, *one, 1.0] for layer in needs.needed[1:] for one in layer])

    def at_mass(mass: float) -> Floats:
        place = max(1, int(np.searchsorted(masses, mass)))
        share = (mass - masses[place - 1]) / (masses[place] - masses[place - 1])
        found = curves[:, place - 1] * (1 - share) + curves[:, place] * share
        clipped: Floats = np.clip(found, FLOOR * keep, 1.0)
        return clipped

    return _by_layer(np.concatenate([np.full(first, ahead), _with_mean(mean, at_mass)]), sizes)


def _importances(needs: HeadNeeds) -> Floats:
    """Return the clamped products of equation 3; a head or layer whose removal helps has none."""
    if needs.importance is None or needs.layer_importance is None:
        raise OptionError(
            "The calibration has no importances of heads.",
            fix="Run the same `heterollm calibrate` with --head-importance, or choose the rule mass.",
        )
    layers = zip(needs.importance, needs.layer_importance, strict=True)
    products = [max(0.0, head) * max(0.0, layer) for heads, layer in layers for head in heads]
    clamped: Floats = np.minimum(np.array(products), CLAMP)
    return clamped


def _with_mean(mean: float, ratios: Callable[[float], Floats]) -> Floats:
    """Return the ratios of the level from 0 to 1 that have a mean; they rise with the level."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratios(middle).mean() <= mean else (low, middle)
    return ratios(low)


def _by_layer(ratios: Floats, sizes: Sequence[int]) -> KeepRatios:
    ends = np.cumsum(sizes)[:-1]
    return tuple(tuple(map(float, part)) for part in np.split(ratios, ends))
