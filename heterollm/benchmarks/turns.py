"""The order in which samples are taken, and one sample: what else ran meanwhile, and what energy it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from heterollm.base import DeviceError
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.conditions import busy_s, undisturbed, wait_until_idle
from heterollm.benchmarks.rows import Sample
from heterollm.profiler.measure import RaplCounter, power_sources

__all__ = ["EnergyMeter", "Watch", "schedule"]


def schedule(
    configurations: Sequence[Configuration], cases: Sequence[Case], turn: int, *, all_resident: bool
) -> Iterator[tuple[Configuration, Case]]:
    """Yield who runs what in one round.

    Where all models are loaded, every test goes round all configurations before the next one, so that what is
    compared lies close together. Where they must be loaded in turns, every configuration runs all tests while
    it is loaded. The order of configurations is reversed in every other round: drift within a round then
    cancels, and the model that was loaded last is used first.

    Args:
        configurations: Those that still run.
        cases: The tests.
        turn: The round, counted from 0.
        all_resident: Whether all models are loaded.
    """
    order = list(configurations)[:: -1 if turn % 2 else 1]
    if all_resident:
        yield from ((configuration, case) for case in cases for configuration in order)
    else:
        yield from ((configuration, case) for configuration in order for case in cases)


class EnergyMeter:
    """The energy counters of the processor, where the system lets its user read them.

    Args:
        counters: To read; by default those of this machine.
    """

    def __init__(self, counters: Sequence[RaplCounter] | None = None) -> None:
        if counters is None:
            counters = [source for source in power_sources() if isinstance(source, RaplCounter)]
        self._counters = list(counters)

    @property
    def measures(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._counters)

    def start(self) -> list[float]:
        """Return what the counters show."""
        return [counter.energy_uj() for counter in self._counters]

    def joules_since(self, begin: Sequence[float]) -> float | None:
        """Return the energy since; None where nothing can be read."""
        if not self._counters:
            return None
        try:
            spent = [counter.spent_uj(before) for counter, before in zip(self._counters, begin, strict=True)]
        except DeviceError:
            return None
        return sum(spent) / 1e6


@dataclass(slots=True)
class Watch:
    """Takes samples and notes what else went on.

    Args:
        patience_s: How long at most to wait for an idle machine, and to take a disturbed sample again.
        meter: Reads energy.
    """

    patience_s: float = 0.0
    meter: EnergyMeter = field(default_factory=EnergyMeter)

    def take(self, ask: Callable[[], dict[str, Any]]) -> Sample:
        """Take a sample.

        Args:
            ask: Runs the test; returns ``us`` and ``own_s``, the processor time of the process that ran it.
        """
        give_up = time.monotonic() + self.patience_s
        while True:
            if self.patience_s:
                wait_until_idle(give_up)
            energy = self.meter.start()
            begin, busy, own_s = time.perf_counter(), busy_s(), time.process_time()
            answer = ask()
            own_s = time.process_time() - own_s + answer["own_s"]
            others_s = busy_s() - busy - own_s
            wall_s = time.perf_counter() - begin
            disturbed = None if math.isnan(others_s) else not undisturbed(others_s, wall_s)
            if not disturbed or time.monotonic() >= give_up:
                return Sample(answer["us"], disturbed, self.meter.joules_since(energy))
