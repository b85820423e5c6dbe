"""Ways to do the same work take turns, so that the machine's drift meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from heterollm.benchmarks.conditions import busy_s, undisturbed, wait_until_idle


class Rounds:
    """Times of ways that take turns, in rounds; the first one compiles and learns, and does not count.

    Args:
        names: The ways.
        patience_s: How long each round waits for an idle machine.
    """

    def __init__(self, names: Sequence[str], patience_s: float) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._disturbed: list[bool] = []
        self._patience_s = patience_s

    def run(self, repetitions: int, timed: Callable[[str, bool], float]) -> None:
        """Run the rounds; every second one in reverse.

        Args:
            repetitions: Rounds that count.
            timed: Runs a way and returns its seconds; also told whether the round counts.
        """
        for turn in range(repetitions + 1):
            wait_until_idle(time.monotonic() + self._patience_s)
            begin_s, busy, own = time.perf_counter(), busy_s(), time.process_time()
            for name in list(self.seconds)[:: -1 if turn % 2 else 1]:
                took_s = timed(name, turn > 0)
                if turn:
                    self.seconds[name].append(took_s)
            others_s = busy_s() - busy - (time.process_time() - own)
            if turn:
                self._disturbed.append(not undisturbed(others_s, time.perf_counter() - begin_s))

    def times(self, name: str, base: str) -> dict[str, Any]:
        """Return the times of a way, and its rounds over those of another."""
        own = self.seconds[name]
        over = [one / first for one, first in zip(own, self.seconds[base], strict=True)]
        return {"time": "measured", "seconds": own, "over_base": over, "disturbed": self._disturbed}
