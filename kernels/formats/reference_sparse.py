"""NumPy oracles of sparse attention: codes, estimated scores, selected positions, and attention to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def codes(values: NDArray[Any], reciprocal_step: float) -> NDArray[np.uint8]:
    """Return 8-bit codes of values, to the nearest step, halves to the even one, within the range."""
    steps = values.astype(np.float32) * np.float32(reciprocal_step)
    rounded: NDArray[np.uint8] = (np.clip(np.rint(steps), -128, 127) + 128).astype(np.uint8)
    return rounded


def nearest_bucket(
    query_steps: float, key_steps: float, factors: tuple[tuple[float, float], ...]
) -> tuple[float, float]:
    """Return the factors of the bucket nearest to the largest codes of a head without buckets."""
    distances = [(query_steps - 127 * own[0]) ** 2 + (key_steps - 127 * own[1]) ** 2 for own in factors]
    return factors[int(np.argmin(distances))]


def estimate(queries: NDArray[np.uint8], keys: NDArray[np.uint8], exponent: int) -> NDArray[np.uint8]:
    """Return the codes of the scores of ``queries [slots, rows, d]`` and ``keys [slots, keys, d]``."""
    rows, columns = (part.astype(np.int64) - 128 for part in (queries, keys))
    exact = rows @ columns.swapaxes(1, 2) * 2.0**-exponent
    rounded: NDArray[np.uint8] = (np.clip(np.rint(exact), -128, 127) + 128).astype(np.uint8)
    return rounded


def weights(
    scores: NDArray[np.uint8], position: int, factor: float, *, window: int = 0, soft_cap: float = 0.0
) -> NDArray[np.float64]:
    """Return the sum of the shares of attention of a block's queries, ``[keys]``; -1 where none sees a key.

    Args:
        scores: Codes ``[queries, keys]``.
        position: Position of the first query.
        factor: Step of the scores times the factor on them.
        window: Positions visible to a query, its own included; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
    """
    own = position + np.arange(len(scores))[:, None]
    key = np.arange(scores.shape[1])[None, :]
    seen = (key <= own) & ((key > own - window) if window else True)
    values = (scores.astype(np.float64) - 128) * factor
    if soft_cap:
        values = soft_cap * np.tanh(values / soft_cap)
    values = np.where(seen, values, -np.inf)
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    total: NDArray[np.float64] = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
    return np.where(seen.any(axis=0), total, -1)


def kept_positions(
    block_weights: NDArray[np.float64], keep: float, *, first: int = 4, last: int = 64
) -> NDArray[np.int64]:
    """Return the positions that a block keeps, ascending, from the weights of :func:`weights`."""
    seen = np.flatnonzero(block_weights >= 0)
    always = seen[(seen < first) | (seen > seen[-1] - last)]
    count = max(len(always), int(np.ceil(np.float32(keep) * np.float32(len(seen)))))
    ranked = block_weights.copy()
    ranked[always] = np.inf
    order = np.lexsort((np.arange(len(ranked)), -ranked))
    return np.sort(order[: min(count, len(seen))])


def attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    kept: NDArray[Any],
    *,
    position: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> NDArray[np.float64]:
    """Return the attention of one head's queries ``[m, d]`` to kept positions of ``[keys, d]``."""
    own = position + np.arange(len(q))[:, None]
    seen = (kept <= own) & ((kept > own - window) if window else True)
    scores = q.astype(np.float64) @ keys[kept].astype(np.float64).T * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    output: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True) @ values[kept].astype(np.float64)
    return output
