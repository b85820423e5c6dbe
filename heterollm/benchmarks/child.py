"""The model of a child process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import BenchEngine, Facts, FoundFields, Ids, Job
from heterollm.benchmarks.engines import open_engine


class TimedRun(NamedTuple):
    """One run of a test.

    Args:
        time_us: Duration.
        processor_s: Processor time of the process during the run.
        modelled_j: Energy by the model of a simulated device.
    """

    time_us: float
    processor_s: float
    modelled_j: float | None = None


def random_ids(seed: int, vocabulary: int, count: int) -> Ids:
    """Return the token of every position, equal for all engines and tests of a run."""
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


class Model:
    """A model that is loaded once; :class:`~heterollm.benchmarks.worker_pool.WorkerPool` calls it."""

    _engine: BenchEngine
    _ids: Ids

    def load(self, job: Job, ids: Ids) -> tuple[Facts, int]:
        """Load the model; return the engine's facts and the private memory of loading, in bytes."""
        before = _private_bytes()
        self._engine, self._ids = open_engine(job), ids
        return self._engine.facts, max(0, _private_bytes() - before)

    def sample(self, case: Case) -> TimedRun:
        """Run a test once."""
        begin_s = time.process_time()
        time_us = self._engine.sample_us(case, self._ids)
        return TimedRun(time_us, time.process_time() - begin_s, self._engine.modelled_j)

    def logits(self, prompt: int, decoded: int) -> NDArray[np.float32]:
        """Return logits after a prompt and after each decoded token."""
        return self._engine.logits(self._ids[: prompt + decoded], decoded)

    def account(self, case: Case) -> FoundFields:
        """Return fields of a row that do not depend on times."""
        return self._engine.account(case)

    def trace(
        self, job: Job, ids: Ids, cases: Sequence[Case], files: Sequence[Path | None]
    ) -> list[FoundFields]:
        """Load one more model with tracing and run tests; write traces into files, if any."""
        engine = open_engine(job)
        try:
            return [engine.trace(case, ids, file) for case, file in zip(cases, files, strict=True)]
        finally:
            engine.close()

    def close(self) -> None:
        """Free the model."""
        if hasattr(self, "_engine"):
            self._engine.close()


def _private_bytes() -> int:
    """Return the memory that only swapping could free; the system can drop mapped files at any time."""
    found = psutil.Process().memory_info()
    return int(getattr(found, "private", found.rss - getattr(found, "shared", 0)))
