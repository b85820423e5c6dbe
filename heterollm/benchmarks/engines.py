"""Opens the engine that a bench names; each is imported only when it is asked for."""

from __future__ import annotations

from heterollm.base import OptionError
from heterollm.benchmarks.engine import BenchEngine, Job

__all__ = ["open_engine"]


def open_engine(job: Job) -> BenchEngine:
    """Load a model with the engine that a job names.

    Raises:
        HeteroLLMError: The engine is not installed, or cannot load the model.
    """
    name = job.configuration.engine
    if name == "self":
        from heterollm.benchmarks.engine_self import SelfEngine

        return SelfEngine(job)
    if name == "llama.cpp":
        from heterollm.benchmarks.engine_llama_cpp import LlamaCppEngine

        return LlamaCppEngine(job)
    if name == "transformers":
        from heterollm.benchmarks.engine_transformers import TransformersEngine

        return TransformersEngine(job)
    if name == "onnxruntime-genai":
        from heterollm.benchmarks.engine_genai import GenaiEngine

        return GenaiEngine(job)
    raise OptionError(f"There is no engine {name!r:.80}.")
