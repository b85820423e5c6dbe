"""The choice of standard lengths for a histogram of prompts (HeteroLLM, section 4.1), and of keys.

More lengths need less padding and more time to build. The search tries all sets within the build budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from heterollm.base import OptionError, PlanError
from heterollm.kernels.npu import TILE_OF_INTEGERS

MOST_LENGTHS: Final = 12
"""The search tries every set of so many lengths: 4096 sets."""

LEAST_KEYS: Final = 256
"""Least keys of graphs of scores; with fewer there is nothing to gain."""


LEAST_SCORE_TOKENS: Final = 32
"""Fewest tokens of a pass with estimated scores: a tile of every NPU."""


def score_tokens(tokens: int) -> int:
    """Return the tokens that a pass with estimated scores is padded to: a power of two."""
    return max(LEAST_SCORE_TOKENS, 1 << (tokens - 1).bit_length())


def score_keys(context: int) -> tuple[int, ...]:
    """Return the standard numbers of keys of graphs of scores, ascending; the last holds the context.

    They are powers of two and one and a half times these, so that at most a third of the keys is padding.

    Args:
        context: Positions of a session.
    """
    tile = TILE_OF_INTEGERS["static_int8"]
    last = -(-context // tile) * tile
    powers = (LEAST_KEYS << power for power in range(max(1, last // LEAST_KEYS).bit_length()))
    steps = (keys for power in powers for keys in (power, power + power // 2))
    return (*(keys for keys in steps if keys < last), last)


def choose_lengths(
    histogram: Mapping[int, float],
    available: Iterable[int],
    build_us: Callable[[int], float],
    time_us: Callable[[int, tuple[int, ...]], float],
    budget_us: float,
) -> tuple[int, ...]:
    """Return the standard lengths with the least time of all passes within a build budget, ascending.

    The search is exact. Of equally fast sets it returns the one with the shortest build time.

    Args:
        histogram: Weights of passes by length.
        available: Lengths that graphs can have, at most :data:`MOST_LENGTHS`.
        build_us: Returns the build time of the graphs of a length.
        time_us: Returns the time of a pass with graphs of some lengths, ascending; ``math.inf`` if the pass
            cannot run. Called once for every length of the histogram and every set within the budget.
        budget_us: Limit of the build time.

    Raises:
        OptionError: Lengths, weights or the budget are out of range, or there are too many lengths.
        PlanError: No set within the budget can run all passes.
    """
    lengths = sorted(set(available))
    if len(lengths) > MOST_LENGTHS:
        raise OptionError(
            f"{len(lengths)} standard lengths are too many to try all sets.",
            fix=f"Name at most {MOST_LENGTHS}.",
        )
    if any(length < 1 for length in (*lengths, *histogram)) or not budget_us >= 0.0:
        raise OptionError(
            f"Standard lengths {lengths}, passes of {sorted(histogram)} tokens, budget {budget_us} us.",
            fix="Lengths are at least 1 and the budget at least 0.",
        )
    if not all(0.0 <= weight < math.inf for weight in histogram.values()):
        raise OptionError(f"The weights of {dict(histogram)} are not all numbers of at least 0.")
    asked = {tokens: weight for tokens, weight in sorted(histogram.items()) if weight}
    builds_us = {length: build_us(length) for length in lengths}
    best: tuple[float, float, tuple[int, ...]] | None = None
    for count in range(len(lengths) + 1):
        for held in itertools.combinations(lengths, count):
            built_us = sum(builds_us[length] for length in held)
            if built_us > budget_us:
                continue
            total_us = sum(weight * time_us(tokens, held) for tokens, weight in asked.items())
            if math.isfinite(total_us) and (best is None or (total_us, built_us, held) < best):
                best = total_us, built_us, held
    if best is None:
        raise PlanError(
            f"Within {budget_us:.0f} us no set of the lengths {lengths} can be built that runs all passes.",
            fix="Raise the budget, or offer other lengths.",
        )
    return best[2]
