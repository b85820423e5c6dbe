"""The time of prompts under a decision, relative to that under another: what long prompts are planned by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def relative_time(
    prompts: Mapping[int, float], before_us: Mapping[int, float], after_us: Callable[[int], float]
) -> float:
    """Return the weighted mean of each prompt's time over the time before; 1 without prompts.

    Args:
        prompts: Weights of prompts by length.
        before_us: Times of the prompts under the decision to compare with; infinite where one is not known.
        after_us: Returns the time of a prompt, likewise.
    """
    total = sum(weight * after_us(prompt) / before_us[prompt] for prompt, weight in prompts.items())
    if not math.isfinite(total):
        return math.inf
    return total / sum(prompts.values()) if total else 1.0
