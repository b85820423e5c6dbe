"""Compiled passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from heterollm.base import EngineError
from heterollm.engine.step import Call, Step
from heterollm.kernels.gpu import Launch, MergedLaunch, OpenClError, Segments, SharedArray
from heterollm.kernels.ops import Phase

__all__ = ["CompiledPass", "PassError", "compiling"]


@dataclass(slots=True)
class CompiledPass:
    """One pass or head, ready to run.

    Args:
        steps: Its steps in order.
        calls: What the engine runs: the calls of the steps.
        cache_launches: The kernels that name a session's KV cache.
        output: Where the last layer's output lies, of a pass.
        bound_cache: The session's KV cache that kernels name, of a pass.
    """

    steps: tuple[Step, ...]
    calls: tuple[Call, ...]
    cache_launches: tuple[Launch | MergedLaunch, ...] = ()
    output: Segments | None = None
    bound_cache: SharedArray | None = None

    @classmethod
    def of(
        cls, steps: tuple[Step, ...], output: Segments | None = None, cache: SharedArray | None = None
    ) -> CompiledPass:
        """Return the pass of some steps."""
        calls = tuple(step.run for step in steps)
        launches = tuple(
            step.run
            for step in steps
            if isinstance(step.run, Launch | MergedLaunch) and step.touches("kv_cache")
        )
        return cls(steps, calls, launches, output, cache)

    def bind_cache(self, cache: SharedArray) -> None:
        """Point the launches at a session's cache, if they are not there yet."""
        if self.bound_cache is not cache:
            for launch in self.cache_launches:
                launch.replace(self.bound_cache, cache)
            self.bound_cache = cache


class PassError(EngineError):
    """A pass cannot be prepared, as memory runs out."""


@contextlib.contextmanager
def compiling(phase: Phase, tokens: int) -> Iterator[None]:
    """Turn what running out of memory raises into an error that says when it happened."""
    try:
        yield
    except (MemoryError, OpenClError) as error:
        raise PassError(
            f"Preparing a {phase} pass of {tokens} tokens failed: {str(error) or 'memory ran out'}.",
            fix="Close other programs, use a smaller context, or choose the plan level gpu.",
        ) from error
