"""Assumed routing of a mixture of experts: how many tokens of each pass go to each expert.

Simulations read no checkpoint, so that the choices of its routers are not known. Instead each token draws its
experts, without replacement, by their popularity. That is log-normal, as if the mean logits of routers were
normally distributed, and as wide as the stated imbalance asks. Tokens do not depend on each other, and each
layer prefers other experts. The draws are seeded: equal cases get equal loads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import OptionError
from heterollm.calibration import ROUTED_TOKENS, RoutingCalibration
from heterollm.kernels.ops import Routing

IMBALANCE: Final = 2.0
"""Largest load of an expert over the mean one, in the mean over many tokens."""

WINDOWS: Final = 4
WINDOW_TOKENS: Final = 1024
"""Windows of the calibration by which experts are placed; the simulated prompt is not among them."""

SEED: Final = 19
CALIBRATION: Final = 1 << 32
"""First position of the tokens of the calibration, behind those of any prompt."""

WIDEST: Final = 64.0
"""Largest spread of the logarithms of popularity that is tried: only the chosen number of experts has any."""

HALVINGS: Final = 60

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class AssumedRouting:
    """Draws the loads of a mixture's experts.

    Args:
        routing: How each token chooses.
        imbalance: Largest load of an expert over the mean one.

    Raises:
        OptionError: No choice of so many experts is as imbalanced.
    """

    def __init__(self, routing: Routing, imbalance: float = IMBALANCE) -> None:
        most = routing.experts / routing.chosen
        if not 1.0 <= imbalance <= 0.99 * most:
            raise OptionError(
                f"An imbalance of {imbalance:g} is not possible: with {routing.chosen} of {routing.experts} "
                f"experts for each token the busiest one has at most {most:g} times the mean load.",
                fix=f"Choose 1 to {0.99 * most:g}.",
            )
        self.routing, self.imbalance = routing, imbalance
        self._popularity = _popularity(routing, imbalance)
        self.loads = functools.lru_cache(maxsize=None)(self._drawn)

    def calibrated(self, layers: Iterable[int]) -> tuple[RoutingCalibration, ...]:
        """Return what a calibration on another text than the prompt would have of layers with experts.

        Args:
            layers: Their numbers, ascending.
        """
        windows = [
            range(first, first + WINDOW_TOKENS, ROUTED_TOKENS)
            for first in range(CALIBRATION, CALIBRATION + WINDOWS * WINDOW_TOKENS, WINDOW_TOKENS)
        ]

        def chunk(layer: int, position: int) -> tuple[int, ...]:
            return tuple(self._drawn(layer, position, ROUTED_TOKENS).tolist())

        return tuple(
            RoutingCalibration(layer, tuple(tuple(chunk(layer, own) for own in window) for window in windows))
            for layer in layers
        )

    def _drawn(self, layer: int, position: int, tokens: int) -> Ints:
        """Return the tokens of each expert in a pass, ``[experts]``.

        Args:
            layer: Decoder layer.
            position: Position of the first token.
            tokens: Tokens of the pass.
        """
        own = np.random.default_rng((SEED, layer)).permutation(self._popularity)
        # Of exponential times with the popularities as rates the first are a draw without replacement.
        generator = np.random.default_rng((SEED, layer, position))
        times = generator.standard_exponential((tokens, len(own)), np.float32) / own.astype(np.float32)
        chosen = np.argpartition(times, self.routing.chosen - 1, axis=1)[:, : self.routing.chosen]
        loads: Ints = np.bincount(chosen.ravel(), minlength=len(own)).astype(np.int64)
        loads.flags.writeable = False
        return loads


def _popularity(routing: Routing, imbalance: float) -> Floats:
    """Return the relative popularity of experts, rising, with a spread that gives the imbalance."""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((rank + 0.5) / routing.experts) for rank in range(routing.experts)])
    wanted = imbalance * routing.chosen / routing.experts

    def busiest(spread: float) -> float:
        return float(_inclusion(np.exp(spread * (quantiles - quantiles[-1])), routing.chosen)[-1])

    low, high = 0.0, WIDEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if busiest(middle) < wanted else (low, middle)
    popularity: Floats = np.exp(low * (quantiles - quantiles[-1]))
    return popularity


def _inclusion(popularity: Floats, chosen: int) -> Floats:
    """Return about how likely a token is to choose each expert: as if its draw ended at one time."""
    low, high = 0.0, 1.0
    while float((1 - np.exp(-high * popularity)).sum()) < chosen and high < 1e300:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = float((1 - np.exp(-middle * popularity)).sum()) < chosen
        low, high = (middle, high) if short else (low, middle)
    shares: Floats = 1 - np.exp(-high * popularity)
    return shares
