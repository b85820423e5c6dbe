"""Opens the engine of a configuration, and imports no other."""

from __future__ import annotations

from heterollm.benchmarks.engine import BenchEngine, Job
from heterollm.benchmarks.plugins import load_plugin


def open_engine(job: Job) -> BenchEngine:
    """Load a model with the engine of a job.

    Raises:
        HeteroLLMError: There is no such engine, or it cannot load the model.
    """
    if job.configuration.engine == "self":
        from heterollm.benchmarks.engine_self import SelfEngine

        return SelfEngine(job)
    engine: BenchEngine = load_plugin(job.configuration.engine)(job)
    return engine
