"""Measures how well logits predict a text, and how near they are to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS = 64
"""Positions whose float64 probabilities are in memory at a time."""


def surprises(logits: NDArray[Any], ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the negative log-likelihood of all ids but the first, given the logits of every position."""
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(scores)), np.asarray(ids)[1:]]
    found: NDArray[np.float64] = np.log(np.exp(scores, out=scores).sum(axis=1)) - chosen
    return found


def perplexity(windows: Iterable[NDArray[np.float64]]) -> float:
    """Return the perplexity of a text from the surprises of its windows."""
    return float(np.exp(np.concatenate(list(windows)).mean()))


def divergences(logits: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of the reference from the logits at each position, in nats."""
    found = np.empty(len(logits))
    for start in range(0, len(logits), ROWS):
        rows = slice(start, start + ROWS)
        own, exact = _log_probabilities(logits[rows]), _log_probabilities(reference[rows])
        found[rows] = np.einsum("ij,ij->i", np.exp(exact), exact - own)
    return np.maximum(found, 0.0)


def _log_probabilities(logits: NDArray[Any]) -> NDArray[np.float64]:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def top_1_agreement(logits: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the share of positions at which both have the same likeliest token."""
    return float(np.mean(np.argmax(logits, axis=-1) == np.argmax(reference, axis=-1)))
