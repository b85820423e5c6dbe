"""The order of samples, and a sample with its energy and the load by other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from heterollm.base import DeviceError
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.child import TimedRun
from heterollm.benchmarks.conditions import busy_s, undisturbed, wait_until_idle
from heterollm.benchmarks.rows import Sample
from heterollm.profiler.measure import RaplCounter, power_sources


def schedule(
    configurations: Sequence[Configuration], cases: Sequence[Case], turn: int, *, all_loaded: bool
) -> Iterator[tuple[Configuration, Case]]:
    """Yield the configurations and tests of one round-robin round.

    If all models are loaded, each test runs on all configurations before the next test, so that compared
    samples are close in time. Otherwise each configuration runs all tests while it is loaded. Every second
    round reverses the order of configurations: drift within a round cancels, and the last loaded model runs
    first.

    Args:
        configurations: Configurations that still run.
        cases: The tests.
        turn: The round, counted from 0.
        all_loaded: Whether all models are loaded.
    """
    order = list(configurations)[:: -1 if turn % 2 else 1]
    if all_loaded:
        yield from ((configuration, case) for case in cases for configuration in order)
    else:
        yield from ((configuration, case) for configuration in order for case in cases)


class EnergyMeter:
    """The energy counters of the processor, if the user may read them.

    Args:
        counters: The counters; by default this machine's.
    """

    def __init__(self, counters: Sequence[RaplCounter] | None = None) -> None:
        if counters is None:
            counters = [source for source in power_sources() if isinstance(source, RaplCounter)]
        self._counters = list(counters)

    def start(self) -> list[float]:
        """Return the values of the counters."""
        return [counter.energy_uj() for counter in self._counters]

    def joules_since(self, begin: Sequence[float]) -> float | None:
        """Return the energy since ``start``; None without a readable counter."""
        if not self._counters:
            return None
        try:
            spent = [counter.spent_uj(before) for counter, before in zip(self._counters, begin, strict=True)]
        except DeviceError:
            return None
        return sum(spent) / 1e6


@dataclass(slots=True)
class UndisturbedSampler:
    """Takes samples.

    Args:
        patience_s: Longest time to wait for an idle machine, and to take a disturbed sample again.
        meter: Reads energy.
    """

    patience_s: float = 0.0
    meter: EnergyMeter = field(default_factory=EnergyMeter)

    def take(self, run: Callable[[], TimedRun]) -> tuple[Sample, TimedRun]:
        """Run a test until a run is undisturbed or patience ends; return the last run as sample."""
        give_up_s = time.monotonic() + self.patience_s
        while True:
            if self.patience_s:
                wait_until_idle(give_up_s)
            energy = self.meter.start()
            begin_s, busy_before_s, own_before_s = time.perf_counter(), busy_s(), time.process_time()
            measured = run()
            own_s = time.process_time() - own_before_s + measured.processor_s
            others_s = busy_s() - busy_before_s - own_s
            disturbed = not undisturbed(others_s, time.perf_counter() - begin_s)
            if not disturbed or time.monotonic() >= give_up_s:
                return Sample(measured.time_us, disturbed, self.meter.joules_since(energy)), measured
