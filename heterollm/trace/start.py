"""Starts the engine of a loaded model on its thread; the plain one, or one that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heterollm.base import OptionError, Progress
from heterollm.engine import return_freed_memory
from heterollm.kernels.device import Device
from heterollm.model import ModelWeights
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.engine import Engine
    from heterollm.trace.spans import Trace

__all__ = ["start_engine", "take_trace"]


def start_engine(
    device: Device,
    weights: ModelWeights,
    plan: Plan,
    context: int,
    progress: Progress,
    *,
    trace: bool,
    **options: Any,  # noqa: ANN401 - those of the engine
) -> Engine:
    """Return an engine with decode and one prefill length compiled.

    Args:
        device: The opened device; where the engine is traced, its queue stamps events.
        weights: The model's weights.
        plan: Who computes what.
        context: Positions of every session.
        progress: Called with a stage's name, steps done and steps in all.
        trace: Whether its passes are recorded.
        options: The engine's others.
    """
    # Imported only now: without an OpenCL binding, opening the device has said what to install.
    from heterollm.engine import Engine

    kind: type[Engine] = Engine
    if trace:
        from heterollm.trace.engine import TracedEngine

        kind = TracedEngine
    # The OpenCL context exists by now: its workers keep their own cores (kernels.device).
    device.pin()
    engine = kind(device, weights, plan, context, progress, **options)
    ahead = (min(device.standard_lengths[1], plan.chunk_length),) if plan.uses_npu else ()
    engine.compile_ahead(engine.new_cache(), ahead, progress)
    return_freed_memory()
    return engine


def take_trace(engine: Engine) -> Trace:
    """Return what an engine has recorded since the last time, on its thread.

    Raises:
        OptionError: It records nothing.
    """
    from heterollm.trace.engine import TracedEngine

    if not isinstance(engine, TracedEngine):
        raise OptionError("The model was not loaded to be traced.", fix="Load it with trace=True.")
    return engine.take_trace()
