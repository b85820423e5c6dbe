"""Lets the linear layers of a pass of one token compute the operators around them, on GPUs.

A norm between two linear layers, an activation or RoPE behind one costs a launch of its own otherwise
(:mod:`heterollm.kernels.gpu.endings`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from heterollm.base import KernelError
from heterollm.engine.step import HANDED, NOT_RUN, Buffer, Step
from heterollm.kernels.gpu import (
    AddedToStream,
    Ending,
    GpuRuntime,
    Launch,
    NormedInput,
    OpenClLaunch,
    groups_of,
)

logger = logging.getLogger(__name__)


class _Ended(NamedTuple):
    """A linear layer's step that computes the one behind it, and for a norm the layer that reads it then."""

    ended: int
    reader: int | None


def with_endings(runtime: GpuRuntime, steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a pass of one token without those that the linear layer before them computes."""
    units = runtime.traits.compute_units
    found = {first: ended_by for first in range(len(steps)) if (ended_by := _ended(steps, first, units))}
    try:
        return _joined(steps, found)
    except KernelError as error:
        logger.warning("Operators keep launches of their own: %s", error.message)
        return list(steps)


def _ended(steps: Sequence[Step], first: int, units: int) -> _Ended | None:
    """Return what a step computes beside its linear layer; None for nothing."""
    linear, second = steps[first].run, _next(steps, first)
    if not isinstance(linear, OpenClLaunch) or linear.remade is None or second is None:
        return None
    ended = steps[second]
    ending = ended.run.ending if isinstance(ended.run, Launch) else None
    if ending is None or not ending.suits or not set(steps[first].writes) <= set(ended.reads):
        return None
    # One work-group for each compute unit, at least, or as many as before.
    few = ending.groups(linear) < min(units, groups_of(linear))
    if few or not _unread(steps, second, steps[first].writes):
        return None
    if not isinstance(ending, AddedToStream):
        return _Ended(second, None)
    third = _next(steps, second)
    if third is None:
        return None
    reader = steps[third]
    takes = isinstance(reader.run, Launch) and reader.run.remade is not None
    # The layer reads floats or codes of the norm, of which an ending writes one.
    floats = _floats(ended)
    reads_floats = bool(set(floats) & set(reader.reads))
    if not takes or reads_floats != (ending.rounded is None):
        return None
    return _Ended(second, third) if _unread(steps, third, floats) else None


def _floats(norm: Step) -> tuple[Buffer, ...]:
    """Return the floats that a norm writes beside the residual stream."""
    return tuple(buffer for buffer in norm.writes if buffer.name.partition(".")[0] == "linear_input")


def _next(steps: Sequence[Step], number: int) -> int | None:
    """Return the number of the next step that is no flush."""
    later = range(number + 1, len(steps))
    return next((other for other in later if steps[other].action != "flush"), None)


def _unread(steps: Sequence[Step], number: int, written: Sequence[Buffer]) -> bool:
    """Return whether no step behind one reads what was written before it."""
    names = {buffer.name for buffer in written}
    for step in steps[number + 1 :]:
        if names & {buffer.name for buffer in step.reads}:
            return False
        names -= {buffer.name for buffer in step.writes}
    return True


def _joined(steps: Sequence[Step], ended_by: dict[int, _Ended]) -> list[Step]:
    """Return the steps with what they compute beside their linear layers."""
    gone = {ended for ended, _ in ended_by.values()}
    handed: dict[int, tuple[NormedInput, tuple[Buffer, ...]]] = {}
    found = []
    for number, step in enumerate(steps):
        if number in gone:
            continue
        normed, floats = handed.get(number, (None, ()))
        second, reader = ended_by.get(number, (None, None))
        if second is None and normed is None:
            found.append(step)
            continue
        ended = None if second is None else steps[second]
        ending: Ending | None = None if ended is None else cast("Launch", ended.run).ending
        launch = cast("Launch", step.run).remade(normed, ending)  # type: ignore[misc]
        found.append(_with(step, launch, ended, floats, reads_handed=normed is not None))
        if reader is not None:
            assert isinstance(ending, AddedToStream)
            assert ended is not None
            handed[reader] = ending.handed(groups_of(cast("OpenClLaunch", launch))), _floats(ended)
    return found


def _with(
    step: Step, launch: Launch, ended: Step | None, floats: tuple[Buffer, ...], *, reads_handed: bool
) -> Step:
    """Return the step of a linear layer with the launch that computes ``ended`` as well.

    Args:
        step: The step.
        launch: Its launch.
        ended: The step behind it; None for none.
        floats: What it does not read any more, since the layer before hands its input over.
        reads_handed: Whether that is so.
    """
    reads = [buffer for buffer in step.reads if buffer not in floats] + [HANDED] * reads_handed
    if ended is None:
        return replace(step, reads=tuple(reads), run=launch)
    reads += [buffer for buffer in ended.reads if buffer not in (*step.writes, *reads)]
    lost = _floats(ended) if ended.operator == "norm" else ()
    writes = [buffer for buffer in ended.writes if buffer not in lost] + [HANDED] * bool(lost)
    merged = tuple(replace(part, run=NOT_RUN) for part in (step, ended))
    label = f"{step.label} to {ended.label}"
    return replace(step, label=label, reads=tuple(reads), writes=tuple(writes), merged=merged, run=launch)
