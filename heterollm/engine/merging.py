"""Merges consecutive launches of a pass into one, which the driver takes with less overhead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from heterollm.engine.step import NOT_RUN, Buffer, Step
from heterollm.kernels.gpu import GpuRuntime, MergedLaunch, merge_launches


def merge_steps(runtime: GpuRuntime, steps: Sequence[Step]) -> list[Step]:
    """Return the steps with consecutive launches merged, if the device benefits from it."""
    left = iter(steps)
    found = []
    for call in merge_launches(runtime, (step.run for step in steps)):
        if isinstance(call, MergedLaunch):
            found.append(_joined([next(left) for _ in call.labels], call))
        else:
            found.append(next(left))
    return found


def _joined(steps: Sequence[Step], launch: MergedLaunch) -> Step:
    layers = {step.layer for step in steps}
    works = [step.work for step in steps if step.work is not None]
    return Step(
        operator="merged",
        layer=layers.pop() if len(layers) == 1 else None,
        tokens=steps[0].tokens,
        processor="gpu",
        action="kernel",
        label=f"{steps[0].label} to {steps[-1].label}",
        reads=_all_of(step.reads for step in steps),
        writes=_all_of(step.writes for step in steps),
        work=sum(works[1:], works[0]) if works else None,
        # Without their calls, which would keep kernels that never run alone.
        merged=tuple(replace(step, run=NOT_RUN) for step in steps),
        run=launch,
    )


def _all_of(buffers: Iterable[tuple[Buffer, ...]]) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(buffer for some in buffers for buffer in some))
