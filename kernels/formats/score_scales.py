"""Steps of the 8-bit codes by which an NPU estimates attention scores, and the buckets that scale them.

A value is ``(code - 128) * step``. A graph of scores multiplies integer sums ``q·k`` of codes by a constant,
``query_step * key_step / score_step``. All constants are powers of two, so that few graphs serve all layers
and heads: the query step is free, since the largest scores of a row stay so when the row is scaled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from heterollm.base import CalibrationError

BucketCount: TypeAlias = Literal[1, 5, 9]
"""Scale factors of queries and keys to choose among in each pass: the calibrated one; with each of the two
halved or doubled; with both."""

BUCKET_STEP: Final = 0.5
"""Ratio of adjacent buckets' scales (shadowAttn, section 5.2)."""

LARGEST_CODE: Final = 127
LARGEST_EXPONENT: Final = 16
"""Heads of 512 elements have no larger scores than ``127 * 2 ** 16`` times the product of their steps."""
SMALLEST_LARGEST: Final = 2.0**-60
"""Stands for smaller maxima: a head that was all zeros while it was calibrated has steps, too."""


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """Steps of a key head and of the query heads that share it.

    Args:
        query_steps: Of each query head.
        key_step: Of the key head.
        exponent: ``query_step * key_step / score_step`` is ``2 ** -exponent`` for each query head.
    """

    query_steps: tuple[float, ...]
    key_step: float
    exponent: int

    @property
    def score_steps(self) -> tuple[float, ...]:
        """Steps of ``q·k`` of each query head, before any scale or mask."""
        return tuple(step * self.key_step * 2.0**self.exponent for step in self.query_steps)


def score_scales(
    query_largest: Sequence[float], key_largest: float, score_largest: Sequence[float]
) -> ScoreScale:
    """Return steps by which no code of a key head's calibrated maxima saturates.

    Where the power of two does not fit the maxima, the step of the queries or of the scores grows: of the
    query heads that share the key head, the one that suffers most has it as small as possible.

    Args:
        query_largest: Largest magnitude of the elements of each query head.
        key_largest: Largest magnitude of the key head's elements.
        score_largest: Largest magnitude of ``q·k`` of each query head.

    Raises:
        CalibrationError: A maximum is negative or not finite, or their numbers differ.
    """
    _check(query_largest, key_largest, score_largest)
    key_step = _step(key_largest)
    steps = [(_step(query), _step(score)) for query, score in zip(query_largest, score_largest, strict=True)]
    fitting = [math.log2(score / (query * key_step)) for query, score in steps]
    middle = (min(fitting) + max(fitting)) / 2
    exponent = min(max(round(middle), 0), LARGEST_EXPONENT)
    factor = 2.0**-exponent / key_step
    return ScoreScale(tuple(max(query, score * factor) for query, score in steps), key_step, exponent)


def buckets(count: BucketCount) -> tuple[tuple[float, float], ...]:
    """Return the factors of query step and key step of each bucket, the calibrated scale first.

    The score step of a query head takes both factors. So the constant of its graph is the same in all
    buckets. Five buckets change one of both factors at a time.
    """
    factors = (1.0, BUCKET_STEP, 1 / BUCKET_STEP)
    every = list(itertools.product(factors, factors))
    if count == 1:
        return tuple(every[:1])
    return tuple(pair for pair in every if count == 9 or 1.0 in pair)


def _step(largest: float) -> float:
    return max(largest, SMALLEST_LARGEST) / LARGEST_CODE


def _check(query_largest: Iterable[float], key_largest: float, score_largest: Iterable[float]) -> None:
    queries, scores = list(query_largest), list(score_largest)
    if not queries or len(queries) != len(scores):
        raise CalibrationError(
            f"A key head has the largest queries of {len(queries)} heads and the largest scores of "
            f"{len(scores)}.",
            fix="Run `heterollm calibrate` again.",
        )
    for largest in (*queries, key_largest, *scores):
        if not 0 <= largest < math.inf:
            raise CalibrationError(
                f"The largest query, key or score of a head cannot be {largest}.",
                fix="Run `heterollm calibrate` again.",
            )
