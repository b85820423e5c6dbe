"""Starts the engine of a loaded model on its thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heterollm.base import Progress
from heterollm.engine.emulation import check_emulation
from heterollm.engine.memory import return_freed_memory
from heterollm.kernels.device import Device
from heterollm.model import ModelWeights
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.engine.runner import Engine

__all__ = ["start_engine"]


def start_engine(
    device: Device,
    weights: ModelWeights,
    plan: Plan,
    context: int,
    progress: Progress,
    *,
    allow_slow: bool = False,
    **options: Any,  # noqa: ANN401 - those of the engine
) -> Engine:
    """Return an engine with decode and one prefill length compiled.

    Args:
        device: The opened device.
        weights: The model's weights.
        plan: Who computes what.
        context: Positions of every session.
        progress: Called with a stage's name, steps done and steps in all.
        allow_slow: Whether a model may take an emulated NPU more than a few seconds a pass.
        options: The engine's others.

    Raises:
        OptionError: It would, and may not.
    """
    # Imported only now: without an OpenCL binding, opening the device has said what to install.
    from heterollm.engine.runner import Engine

    # The OpenCL context exists by now: its workers keep their own cores (kernels.device).
    device.pin()
    engine = Engine(device, weights, plan, context, progress, **options)
    if not allow_slow:
        check_emulation(engine)
    ahead = (min(device.standard_lengths[1], plan.chunk_length),) if plan.uses_npu else ()
    engine.compile_ahead(engine.new_cache(), ahead, progress)
    return_freed_memory()
    return engine
