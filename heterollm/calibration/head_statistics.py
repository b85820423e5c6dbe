"""Statistics of attention heads: magnitudes of queries, keys and scores, and the keys that hold attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CalibrationError
from heterollm.calibration.head_records import MASSES, HeadCalibration
from heterollm.model import AttentionBlock, ModelConfig

Floats = NDArray[np.float32]

BLOCK: Final = 32
"""Queries that sparse attention selects keys for together."""

SAMPLED_EIGHTHS: Final = (5, 6, 7, 8)
"""Ends of the sampled blocks, in eighths of a window: queries that see at least half of it."""

ROWS: Final = 256
"""Queries whose scores are in memory at once."""


class HeadStatistics:
    """Running statistics of queries and keys after RoPE.

    Args:
        config: The model.
        earlier: The state to continue from.
        windows: Windows of that state.
    """

    def __init__(
        self, config: ModelConfig, earlier: Sequence[HeadCalibration] = (), windows: int = 0
    ) -> None:
        self._config = config
        self._records = list(earlier)
        self._windows = windows if earlier else 0
        self._queries: dict[int, Floats] = {}

    @property
    def query_columns(self) -> int:
        """Elements of a token's queries."""
        return self._config.attention.heads * self._config.attention.head_dim

    def add_queries(self, layer: int, queries: Floats) -> None:
        """Add queries ``[m, heads * head_dim]`` of a layer."""
        self._queries[layer] = queries

    def add_keys(self, keys: Floats) -> None:
        """Add keys of layers with attention ``[layers, kv_heads, m * head_dim]``, which end a window."""
        found = []
        for place, (layer, block) in enumerate(self._config.blocks(AttentionBlock).items()):
            queries = self._queries.pop(layer).reshape(-1, block.heads, block.head_dim).swapaxes(0, 1)
            own = keys[place].reshape(block.kv_heads, -1, block.head_dim)
            if not (np.isfinite(queries).all() and np.isfinite(own).all()):
                raise CalibrationError(
                    f"Queries or keys of layer {layer} are not finite.", fix="The checkpoint is damaged."
                )
            found.append(_of_window(layer, block, queries, own))
        if self._records:
            pairs = zip(self._records, found, strict=True)
            found = [_merged(old, new, self._windows) for old, new in pairs]
        self._records = found
        self._windows += 1

    def record(self) -> tuple[HeadCalibration, ...]:
        """Return the statistics so far."""
        return tuple(self._records)


def _of_window(layer: int, block: AttentionBlock, queries: Floats, keys: Floats) -> HeadCalibration:
    window, group = block.window, block.heads // block.kv_heads
    scores, needed = [], []
    for head, own in enumerate(queries):
        largest = 0.0
        for first in range(0, len(own), ROWS):
            raw = own[first : first + ROWS] @ keys[head // group].T
            largest = max(largest, float(np.abs(raw[_visible(first, len(raw), len(own), window)]).max()))
        scores.append(largest)
        needed.append(_needed(block, own, keys[head // group]))
    largest_queries, largest_keys = (
        tuple(np.abs(values).max(axis=(1, 2)).tolist()) for values in (queries, keys)
    )
    maxima = largest_queries, largest_keys, tuple(scores)
    return HeadCalibration(layer, *maxima, *maxima, tuple(needed))


def _needed(own: AttentionBlock, queries: Floats, keys: Floats) -> tuple[float, ...]:
    """Return the shares of the visible keys that hold each attention mass, as means over blocks."""
    window, tokens = own.window, len(queries)
    block = min(BLOCK, tokens)
    ends = {max(block, tokens * eighth // 8) for eighth in SAMPLED_EIGHTHS}
    shares = []
    for end in sorted(ends):
        scores = (queries[end - block : end] @ keys[:end].T).astype(np.float64) * own.scale
        if own.soft_cap:
            scores = own.soft_cap * np.tanh(scores / own.soft_cap)
        scores[~_visible(end - block, block, end, window)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mass = np.sort((weights / weights.sum(axis=1, keepdims=True)).sum(axis=0))[::-1].cumsum()
        counts = np.searchsorted(mass, np.array(MASSES) * mass[-1]) + 1
        shares.append(np.minimum(1.0, counts / min(end, window or end)))
    return tuple(np.mean(shares, axis=0).tolist())


def _visible(first: int, rows: int, columns: int, window: int) -> NDArray[np.bool_]:
    """Return which positions are visible to queries from a position on ``[rows, columns]``."""
    ages = np.arange(first, first + rows)[:, None] - np.arange(columns)
    return (ages >= 0) & (ages < (window or columns))


def _merged(old: HeadCalibration, new: HeadCalibration, windows: int) -> HeadCalibration:
    """Return the statistics of several windows and of one more."""

    def largest(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(map(max, one, other))

    def mean(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return tuple((a * windows + b) / (windows + 1) for a, b in zip(one, other, strict=True))

    return HeadCalibration(
        old.layer,
        largest(old.queries, new.queries),
        largest(old.keys, new.keys),
        largest(old.scores, new.scores),
        mean(old.mean_queries, new.mean_queries),
        mean(old.mean_keys, new.mean_keys),
        mean(old.mean_scores, new.mean_scores),
        tuple(mean(*pair) for pair in zip(old.needed, new.needed, strict=True)),
    )
