"""Measures how well logits predict a text: surprises of tokens, perplexity, and agreement of top tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["perplexity", "surprises", "top_1_agreement"]


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


def top_1_agreement(logits: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return the share of positions at which both have the same likeliest token."""
    return float(np.mean(np.argmax(logits, axis=-1) == np.argmax(reference, axis=-1)))
