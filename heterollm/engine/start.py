"""Starts the engine of a loaded model on its thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from heterollm.base import Progress
from heterollm.engine.emulation import check_emulation
from heterollm.engine.memory import return_freed_memory
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import programs_are_sound
from heterollm.model import ModelWeights
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.engine.runner import Engine

WARM_TOKENS: Final = (2, 5, 16)
"""Lengths of prompts that run at load: kernels differ between few, some and many tokens."""


def start_engine(
    device: Device,
    weights: ModelWeights,
    plan: Plan,
    context: int,
    progress: Progress,
    *,
    allow_slow: bool = False,
    ahead: Sequence[tuple[int, int]] | None = None,
    **options: Any,  # noqa: ANN401 - those of the engine
) -> Engine:
    """Return an :class:`Engine` with decode and some passes of prompts compiled.

    Args:
        device: The opened device.
        weights: The model's weights.
        plan: The plan.
        context: Positions of every session.
        progress: Called with the name of a stage, the steps done and the total number of steps.
        allow_slow: Whether a pass on an emulated NPU may take more than a few seconds.
        ahead: Position and length of prefill passes to compile beside decode; by default one usual length.
        options: Further arguments of the engine.

    Raises:
        OptionError: A pass would be too slow.
    """
    # A late import: without an OpenCL binding, opening the device has raised the error that says so.
    from heterollm.engine.runner import Engine

    # The OpenCL context exists by now, and its workers keep their own cores (kernels.device).
    device.pin()
    engine = Engine(device, weights, plan, context, progress, **options)
    if not allow_slow:
        check_emulation(engine)
    if ahead is None:
        ahead = [(0, min(device.standard_lengths[1], plan.chunk_length))] if plan.uses_npu else ()
    engine.compile_ahead(engine.new_cache(), ahead, progress)
    if device.time_kind == "real" and engine.observer is None:
        longest = min(plan.chunk_length, context - 1)
        lengths = (*(length for _, length in ahead), *WARM_TOKENS)
        _run_once(engine, [length for length in lengths if length <= longest])
    # The tokens of that run are no text: what it counted and the experts that it read say nothing.
    engine.fill_experts(progress)
    engine.reset_counts()
    programs_are_sound()
    return_freed_memory()
    return engine


def _run_once(engine: Engine, lengths: Sequence[int]) -> None:
    """Run prompts and a token, since drivers compile and load programs when kernels run first.

    Otherwise this second would count in the rates of the first answer.
    """
    cache = engine.new_cache()
    for length in lengths:
        engine.prefill(cache, 0, np.zeros(length, np.int32), "prefill", None)
    engine.decode(cache, 0, 0)
