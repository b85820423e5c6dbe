"""Options of a bench."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heterollm.base import OptionError
from heterollm.benchmarks.cases import Case, Configuration


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a bench.

    Args:
        model: A local folder, a GGUF file or a hub name.
        configurations: Configurations that run each test.
        cases: The tests.
        repetitions: Samples of each.
        seed: Seed of the token ids.
        patience_s: Longest time to wait for an idle machine before each sample, and to take it again.
        memory_gib: Limit for all models together; by default 0.8 of the available memory.
        trace: Whether to run every test once more with tracing, for overlap and synchronisation.
        traces: Folder for the traces of these runs, for ``heterollm trace``.
        time_limit_s: Time after which no further sample is taken; the rows so far are the result.
        profile: A profile's file, in place of that of the device.
    """

    model: str | Path
    configurations: tuple[Configuration, ...]
    cases: tuple[Case, ...]
    repetitions: int = 5
    seed: int = 0
    patience_s: float = 0.0
    memory_gib: float | None = None
    trace: bool = True
    traces: Path | None = None
    time_limit_s: float | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        if not self.configurations or not self.cases:
            raise OptionError("There is nothing to measure.", fix="Give configurations and tests.")
        if self.repetitions < 1 or self.seed < 0 or not self.patience_s >= 0:
            raise OptionError(
                f"Cannot repeat {self.repetitions} times with seed {self.seed} and {self.patience_s} s "
                "of patience.",
                fix="Repeat at least once; seed and patience are not negative.",
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise OptionError(f"A limit of {self.memory_gib} GiB holds no model.", fix="Raise --memory-gib.")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise OptionError(f"Nothing runs in {self.time_limit_s} s.", fix="Raise --time-limit.")
