"""Errors of the times of a profile: the spread of its samples, and that of predictions of unseen shapes."""

from __future__ import annotations

import math
import statistics
from typing import Final

from heterollm.base import ProfileError
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import OpSpec
from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict import Prediction, Predictor
from heterollm.profiler.records import FenceKey, LinearPoint, Processor, Profile

REPEATED_FRACTION: Final = 0.02
"""Least error of a measured time: the median of a measurement that is repeated on another day."""


class ProfileErrors:
    """The errors of one model's times on a profiled device; see :class:`heterollm.solver.costs.Errors`.

    The error of a time is half the width of its interval: the quartiles of a measured one, and the
    cross-validated interval of a predicted one. It is at least the usual one of the processor: a few samples
    agree by chance.

    Args:
        profile: The measurements.
        predictor: Its predictor.
        streamed: Whether the model's weights come from memory.
        strategy: How the processors wait for each other.

    Attributes:
        sync_us: Error of the time of a sync.
    """

    def __init__(
        self, profile: Profile, predictor: Predictor, *, streamed: bool, strategy: str | None
    ) -> None:
        spreads_us = [
            _half_width(*Measurement(record.samples_us).quartiles_us)
            for key, record in profile.of_kind(FenceKey)
            if key.strategy == strategy and record.samples_us
        ]
        self.sync_us = statistics.median(spreads_us) if spreads_us else 0.0
        self._least_fraction: dict[Processor, float] = {
            processor: max(REPEATED_FRACTION, statistics.median(map(_fraction, held.measured.values())))
            for processor, held in predictor.processors.items()
        }
        self._predictor = predictor
        self._streamed = streamed

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the error of the GPU's time for some rows of each member."""
        point = LinearPoint.of(spec, tokens, member_rows=member_rows, streamed=self._streamed)
        return self._error_us(point, "gpu")

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the error of the time of one NPU graph."""
        point = LinearPoint.of(spec, length, member_rows=member_rows, form=form, streamed=self._streamed)
        own_us, first = self._error_us(point, "npu"), spec.first
        if first is None:
            return own_us
        linear = "integer" if form in INTEGER_FORMS else "matmul_nbits"
        return math.hypot(own_us, self.npu_us(first, first.member_rows, length, linear))

    def between_us(self, spec: OpSpec, tokens: int) -> float:  # noqa: ARG002 - see Errors
        """Return 0: the operators between groups run with and without a split."""
        return 0.0

    def _error_us(self, point: LinearPoint, processor: Processor) -> float:
        try:
            found = self._predictor.predict_us(point, processor)
        except ProfileError:
            return 0.0  # no option has this point
        return max(_fraction(found), self._least_fraction[processor]) * found.us


def _fraction(found: Prediction) -> float:
    return _half_width(found.low_us, found.high_us) / found.us


def _half_width(low_us: float, high_us: float) -> float:
    return (high_us - low_us) / 2
