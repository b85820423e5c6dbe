"""Distinguishes a change between two sets of times from noise.

The rule, everywhere in this project: the ratio of two sets of times is the ratio of their medians, which
tables print. Its 95 % interval comes from the logarithms of the times: for samples of one run that took
turns, round by round (a paired t interval), so that the machine's drift affects both; for different runs as
two groups (Welch's t interval). This is an interval of means: it is widened if the ratio of the medians lies
outside. A difference counts as a change if the interval excludes 1 and the ratio differs from 1 by at least
:data:`SMALLEST_CHANGE`; else it is noise. Fewer than :data:`FEWEST_SAMPLES` samples on a side give no
verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

SMALLEST_CHANGE: Final = 0.02
"""Smaller differences never count as a change."""

FEWEST_SAMPLES: Final = 3

Verdict: TypeAlias = Literal["faster", "slower", "noise", "too few samples"]

QUANTILES: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 %, for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Change:
    """Speed of the second set relative to the first.

    Args:
        ratio: Ratio of the medians; above 1 the second is faster.
        low: Lower end of the 95 % interval; equal to the ratio if there are too few samples.
        high: Upper end of the interval.
        verdict: The verdict.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict

    def __str__(self) -> str:
        if self.verdict == "too few samples":
            return f"{self.ratio:.2f} x (too few samples)"
        return f"{self.ratio:.2f} x ({self.low:.2f} to {self.high:.2f})"


def student_quantile(freedom: float) -> float:
    """Return Student's t at 97.5 %; fractional degrees of freedom are rounded down.

    Beyond the table by the first terms of its expansion (Abramowitz and Stegun, 26.7.5), to 0.001.
    """
    whole = max(1, math.floor(freedom))
    if whole <= len(QUANTILES):
        return QUANTILES[whole - 1]
    return 1.95996 + 2.37227 / whole + 2.8225 / whole**2


def compare_times(before: Sequence[float], after: Sequence[float], *, paired: bool = False) -> Change:
    """Compare two sets of times of the same work.

    Args:
        before: The first times, all positive.
        after: The second times.
        paired: Whether samples with the same index are of one round.
    """
    if paired:
        count = min(len(before), len(after))
        before, after = before[:count], after[:count]
    first, second = [math.log(time) for time in before], [math.log(time) for time in after]
    if not first or not second:
        return Change(math.nan, math.nan, math.nan, "too few samples")
    ratio = statistics.median(before) / statistics.median(after)
    if min(len(first), len(second)) < FEWEST_SAMPLES:
        return Change(ratio, ratio, ratio, "too few samples")
    if paired:
        gains = [old - new for old, new in zip(first, second, strict=True)]
        error, freedom = math.sqrt(statistics.variance(gains) / len(gains)), len(gains) - 1.0
    else:
        error, freedom = _welch(first, second)
    reach = student_quantile(freedom) * error
    middle = statistics.fmean(first) - statistics.fmean(second)
    low, high = min(ratio, math.exp(middle - reach)), max(ratio, math.exp(middle + reach))
    verdict: Verdict = "noise"
    if low > 1.0 and ratio >= 1.0 + SMALLEST_CHANGE:
        verdict = "faster"
    elif high < 1.0 and ratio <= 1.0 / (1.0 + SMALLEST_CHANGE):
        verdict = "slower"
    return Change(ratio, low, high, verdict)


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the standard error of the difference of the means, and Welch's degrees of freedom."""
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    total = sum(parts)
    if total == 0.0:
        return 0.0, 1.0
    weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    return math.sqrt(total), total**2 / weights
