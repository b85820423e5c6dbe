"""Lines between measured shards, and bounds that measured shards set on the time of others.

A model that was fitted to few points may predict that a wide shard is faster than a measured narrow one, or
that eight tokens cost as much as one. Between two measured widths of a weight, time is nearly linear. Beside
them, and at other lengths, four rules hold on every processor that was measured:

- More rows take no less time, and neither do more tokens within a stage of 32, or from the second stage on.
  From the first stage to the second time may fall (one order of the emulator costs less at 33 tokens than at
  32), but never below the time of a token.
- A row costs no less in a narrower shard than in a measured wider one, since fewer rows share the fixed
  costs; likewise a token in a shorter shard of another stage. The rule does not hold for inputs: Hexagon
  takes 3.5 times as long for each weight of 14336 inputs as for one of 4096.
- Two shards cost at least as much as one shard of both together.
- No weight is faster than the fastest measured one of the same size or larger, of any number of inputs, at
  that length.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from heterollm.profiler.predict.curves import ARRAY, isotonic_median, stage
from heterollm.profiler.predict.time_model import Kind, Prediction, TimeModel, with_interval
from heterollm.profiler.records import LinearPoint

LINE: Final = "line"
"""Source of times between two measured widths."""

FEWEST_MISSES: Final = 10
"""Widths between others from which on the spread of lines is known."""

NOISE: Final = 0.9
"""Least cost of a row, as a share of its cost in a wider shard: times are noisy, and caches are finite."""


class Widths:
    """The measured widths of a weight at one length.

    Args:
        times_us: Rows and times; equal rows may occur several times.
    """

    def __init__(self, times_us: Iterable[tuple[int, float]]) -> None:
        found: dict[int, list[float]] = defaultdict(list)
        for rows, time_us in times_us:
            found[rows].append(time_us)
        self.rows: Final = sorted(found)
        # Medians, not means: a disturbed run is an outlier.
        self.times_us: Final = isotonic_median([statistics.median(found[rows]) for rows in self.rows])

    def line(self, rows: int) -> float | None:
        """Return the time at a measured width or between two; None beside them."""
        place = bisect.bisect_left(self.rows, rows)
        if place == len(self.rows) or (place == 0 and rows != self.rows[0]):
            return None
        if self.rows[place] == rows:
            return self.times_us[place]
        share = (rows - self.rows[place - 1]) / (self.rows[place] - self.rows[place - 1])
        return self.times_us[place - 1] + share * (self.times_us[place] - self.times_us[place - 1])

    def misses(self) -> Iterator[float]:
        """Yield measured over predicted time of each width by the line between the widths beside it."""
        for place in range(1, len(self.rows) - 1):
            low, own, high = self.rows[place - 1 : place + 2]
            before, time_us, after = self.times_us[place - 1 : place + 2]
            yield time_us / (before + (after - before) * (own - low) / (high - low))

    def bounds(self, rows: int) -> tuple[float, float]:
        """Return the least and the greatest time of a shard of some rows."""
        if rows < self.rows[0]:
            return NOISE * self.times_us[0] * rows / self.rows[0], self.times_us[0]
        if rows > self.rows[-1]:
            return self.times_us[-1], self.times_us[-1] * rows / self.rows[-1]
        on_line = self.line(rows)
        assert on_line is not None
        return on_line, on_line


class Weights:
    """The measured weights of one kind at one length, of any number of inputs.

    Args:
        times_us: Weights and times.
    """

    def __init__(self, times_us: Iterable[tuple[int, float]]) -> None:
        ordered = sorted(times_us)
        self._sizes: Final = [size for size, _ in ordered]
        rates = [time_us / size for size, time_us in ordered]
        for place in range(len(rates) - 2, -1, -1):
            rates[place] = min(rates[place], rates[place + 1])
        self._us_per_weight: Final = rates

    def bounds(self, size: int) -> tuple[float, float]:
        """Return the least time of so many weights; beyond the largest measured weight, its own time."""
        place = bisect.bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return self._sizes[-1] * self._us_per_weight[-1], math.inf
        return size * self._us_per_weight[place], math.inf


_Bound: TypeAlias = tuple[Widths | Weights, float, float]
"""Times at a measured length, and the factors of their least and greatest time."""


class Neighbours:
    """All measured shards of a processor, by the shards that they bound.

    Args:
        times_us: The measured times.
    """

    def __init__(self, times_us: Mapping[LinearPoint, float]) -> None:
        widths: dict[tuple[Kind, int], dict[int, list[tuple[int, float]]]] = {}
        weights: dict[Kind, dict[int, list[tuple[int, float]]]] = {}
        for point, time_us in times_us.items():
            kind = Kind.of(point)
            own = widths.setdefault((kind, point.columns), {})
            own.setdefault(point.tokens, []).append((point.rows, time_us))
            every = weights.setdefault(kind, {})
            every.setdefault(point.tokens, []).append((_weights(point), time_us))
        self._widths = {
            key: {tokens: Widths(found) for tokens, found in lengths.items()}
            for key, lengths in widths.items()
        }
        self._weights = {
            kind: {tokens: Weights(found) for tokens, found in lengths.items()}
            for kind, lengths in weights.items()
        }
        self._found: dict[tuple[Kind, int, int], list[_Bound]] = {}
        misses = sorted(
            miss for own in self._widths.values() for widths in own.values() for miss in widths.misses()
        )
        self._spread: tuple[float, float] | None = None
        if len(misses) >= FEWEST_MISSES:
            tenth = len(misses) // 10
            self._spread = misses[tenth], misses[-1 - tenth]

    def predict(self, point: LinearPoint, model: TimeModel) -> Prediction:
        """Return the time on a line between measured widths; else the answer of a model within the bounds.

        Where noise makes the bounds contradict each other, the middle between them is returned.

        Raises:
            ProfileError: As :meth:`heterollm.profiler.predict.time_model.TimeModel.predict`.
        """
        kind = Kind.of(point)
        widths = self._widths.get((kind, point.columns), {}).get(point.tokens)
        on_line = None if widths is None else widths.line(point.rows)
        if on_line is not None:
            return with_interval(on_line, self._spread or model.spread, known=True, source=LINE)
        found = model.predict(point)
        low_us, high_us = self._bounds(kind, point)
        if low_us <= found.us <= high_us:
            return found
        us = (low_us + high_us) / 2 if low_us > high_us else min(max(found.us, low_us), high_us)
        # The interval still holds the answer of the model.
        return Prediction(us, min(found.low_us, us), max(found.high_us, us), found.known, found.source)

    def _bounds(self, kind: Kind, point: LinearPoint) -> tuple[float, float]:
        """Return the least and the greatest time of a shard, by the measured lengths that bound it."""
        asked = (kind, point.columns, point.tokens)
        own = self._widths.get((kind, point.columns))
        bounds = self._found.get(asked)
        if bounds is None:
            measured: Mapping[int, Widths | Weights] = self._weights.get(kind, {}) if own is None else own
            bounds = [
                (measured[length], low, high)
                for length, low, high in _bounding_lengths(sorted(measured), point.tokens)
            ]
            self._found[asked] = bounds
        size = _weights(point) if own is None else point.rows
        low_us, high_us = 0.0, math.inf
        for found, low, high in bounds:
            own_low, own_high = found.bounds(size)
            low_us, high_us = max(low_us, own_low * low), min(high_us, own_high * high)
        return low_us, high_us


def _weights(point: LinearPoint) -> int:
    """Return the number of weights of a shard; of an ffn, those of its three linear layers."""
    return point.flops // (2 * point.tokens)


def _bounding_lengths(lengths: Sequence[int], tokens: int) -> list[tuple[int, float, float]]:
    """Return the measured lengths that bound another length, and the factors of their bounds.

    Args:
        lengths: Measured numbers of tokens, ascending.
        tokens: Tokens of the shard.
    """
    place = bisect.bisect_left(lengths, tokens)
    own = stage(tokens)
    found: list[tuple[int, float, float]] = []
    if lengths and lengths[0] == 1 < tokens:
        found.append((1, 1.0, math.inf))
    for length in reversed(lengths[:place]):
        # Below one array's width, twice the tokens may take more than twice as long.
        high = float(-(-tokens // length)) if length >= ARRAY else math.inf
        found.append((length, 1.0 if stage(length) == own or length > ARRAY else 0.0, high))
        break
    for length in lengths[place:]:
        if length == tokens:
            found.append((length, 1.0, 1.0))
        elif stage(length) == own:
            found.append((length, 0.0, 1.0))
        else:
            # The last array may be partly filled.
            found.append((length, tokens / (ARRAY * stage(length)), math.inf))
            break
    return found
