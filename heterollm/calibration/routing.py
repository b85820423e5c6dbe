"""Routing of a mixture of experts: the tokens that each expert of a layer gets, chunk by chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from heterollm.base import CalibrationError, Count, OptionError
from heterollm.kernels.ops import OpSpec

ROUTED_TOKENS: Final = 64
"""Tokens of a chunk of the records; chunks of a multiple are sums."""

Ints = NDArray[np.int64]


class RoutingCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a layer's experts.

    Args:
        layer: Decoder layer.
        windows: By window and chunk of :data:`ROUTED_TOKENS` tokens, the tokens of each expert. A shorter
            rest of a window is left out.
    """

    layer: Count
    windows: tuple[tuple[tuple[Count, ...], ...], ...]

    def loads(self, tokens: int) -> Ints:
        """Return the tokens of each expert in chunks of so many tokens, ``[chunks, experts]``.

        Raises:
            CalibrationError: The windows are shorter, or the length is no multiple of :data:`ROUTED_TOKENS`.
        """
        counts = np.array(self.windows, np.int64)
        joined, rest = divmod(tokens, ROUTED_TOKENS)
        if rest or not 1 <= joined <= counts.shape[1]:
            raise CalibrationError(
                f"The calibration has no loads of experts in chunks of {tokens} tokens.",
                fix=f"Choose a multiple of {ROUTED_TOKENS} up to {counts.shape[1] * ROUTED_TOKENS}, or "
                "calibrate longer windows.",
            )
        whole = counts[:, : counts.shape[1] // joined * joined]
        summed: Ints = whole.reshape(-1, joined, counts.shape[2]).sum(axis=1)
        return summed

    def scaled_loads(self, tokens: int) -> Ints:
        """Return the tokens of each expert in chunks of any length, ``[chunks, experts]``.

        Those of other lengths than :meth:`loads` has are scaled from the next shorter one, or from the
        shortest.
        """
        longest = len(self.windows[0])
        known = ROUTED_TOKENS * min(max(1, tokens // ROUTED_TOKENS), longest)
        scaled: Ints = np.rint(self.loads(known) * (tokens / known)).astype(np.int64)
        return scaled

    @property
    def counts(self) -> Ints:
        """Tokens of each expert, ``[experts]``."""
        counts: Ints = self.loads(ROUTED_TOKENS).sum(axis=0)
        return counts

    @property
    def imbalance(self) -> float:
        """The largest number of tokens of an expert over the mean one."""
        counts = self.counts
        return float(counts.max() / counts.mean()) if counts.any() else 1.0

    def most_popular(self, number: int) -> list[int]:
        """Return the experts with the most tokens, by falling popularity.

        Raises:
            OptionError: The layer has fewer experts.
        """
        counts = self.counts
        if not 1 <= number <= len(counts):
            raise OptionError(f"The {number} most popular of {len(counts)} experts.")
        return [int(expert) for expert in np.argsort(-counts, kind="stable")[:number]]


class RoutingStatistics:
    """Running counts of the chosen experts.

    Args:
        specs: The experts of each layer.
        earlier: The state to continue from.
    """

    def __init__(self, specs: Collection[OpSpec], earlier: Sequence[RoutingCalibration] = ()) -> None:
        self._routings = {spec.layer: spec.experts for spec in specs}
        before = {one.layer: one.windows for one in earlier}
        self._windows = {layer: list(before.get(layer, ())) for layer in self._routings}

    def chosen(self, layer: int) -> int:
        """Return the experts of each token."""
        routing = self._routings[layer]
        assert routing is not None  # of a spec of experts
        return routing.chosen

    def add(self, layer: int, chosen: NDArray[np.float32]) -> None:
        """Add the experts ``[m, k]`` of a window's tokens."""
        routing = self._routings[layer]
        assert routing is not None  # of a spec of experts
        whole = chosen[: len(chosen) // ROUTED_TOKENS * ROUTED_TOKENS].astype(np.int64)
        chunks = whole.reshape(-1, ROUTED_TOKENS * chosen.shape[1])
        counted = [tuple(np.bincount(own, minlength=routing.experts).tolist()) for own in chunks]
        self._windows[layer].append(tuple(counted))

    def record(self) -> tuple[RoutingCalibration, ...]:
        """Return the counts so far."""
        return tuple(RoutingCalibration(layer, tuple(own)) for layer, own in sorted(self._windows.items()))


def overlap(
    one: Sequence[RoutingCalibration], other: Sequence[RoutingCalibration], number: int
) -> tuple[float, ...]:
    """Return Overlap@K: the share of the K most popular experts that two texts have in common, by layer.

    Args:
        one: The layers of one calibration.
        other: Those of another calibration of the model.
        number: K.

    Raises:
        CalibrationError: The calibrations have other layers, or none with experts.
        OptionError: A layer has fewer experts.
    """
    if not one or [own.layer for own in one] != [own.layer for own in other]:
        raise CalibrationError(
            "Two calibrations have no experts, or not those of the same layers.",
            fix="Calibrate one mixture of experts on two texts.",
        )
    return tuple(
        len({*first.most_popular(number)} & {*second.most_popular(number)}) / number
        for first, second in zip(one, other, strict=True)
    )


def routing_mistakes(routing: Sequence[RoutingCalibration], windows: int) -> Iterator[str]:
    """Yield mistakes in records beyond their types, each with the path of the field."""
    layers = [one.layer for one in routing]
    if layers != sorted(set(layers)):
        yield f"routing.layer: {layers} do not rise"
    for place, one in enumerate(routing):
        shapes = {(len(chunks), *{len(counts) for counts in chunks}) for chunks in one.windows}
        sums = {sum(counts) for chunks in one.windows for counts in chunks}
        if len(one.windows) != windows or len(shapes) != 1 or len(next(iter(shapes))) != 2:
            yield f"routing[{place}].windows: not {windows} with as many chunks and experts each"
        elif len(sums) != 1 or next(iter(sums)) % ROUTED_TOKENS or not sums.pop():
            yield f"routing[{place}].windows: chunks do not have {ROUTED_TOKENS} tokens"
