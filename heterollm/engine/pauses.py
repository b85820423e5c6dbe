"""Pauses between the layers of a prompt's pass: other passes use the same slots meanwhile.

At a pause the GPU's queue is finished, the slots whose content later layers read are copied, and afterwards
written back. So a pass that pauses computes the same values as one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.engine.state import is_state
from heterollm.engine.step import Buffer, Step
from heterollm.kernels.gpu import DeviceMemory, GpuRuntime, SharedArray

NOT_SET_ASIDE: Final = ("tokens", "step", "code_counts", "expert_counts")
"""Buffers that the engine writes again, or that count over all passes."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A place between two layers of a pass.

    Args:
        index: The first step behind it.
        memories: Slots that earlier steps write and later ones read, with the bytes that the pass uses.
    """

    index: int
    memories: tuple[tuple[DeviceMemory, int], ...]


def find_pauses(
    steps: Sequence[Step], names: Mapping[DeviceMemory, Buffer], sizes: Mapping[str, int]
) -> tuple[Pause, ...]:
    """Return the places between the layers of a pass.

    Args:
        steps: The steps of the pass, of one chunk.
        names: The buffers of all slots.
        sizes: Bytes of each slot that a pass of so many tokens uses, from its start.
    """
    memories = {buffer.name: memory for memory, buffer in names.items() if not _is_kept(buffer)}
    pauses: list[Pause] = []
    live: set[Buffer] = set()  # what the steps from the index on read before they write it
    for index in reversed(range(1, len(steps))):
        step, before = steps[index], steps[index - 1]
        for written in step.writes:
            live = {rest for buffer in live for rest in _without(buffer, written)}
        live.update(buffer for buffer in step.reads if buffer.name in memories)
        if None not in (before.layer, step.layer) and before.layer != step.layer:
            names_read = sorted({buffer.name for buffer in live})
            pauses.append(Pause(index, tuple((memories[name], sizes[name]) for name in names_read)))
    return tuple(reversed(pauses))


def _without(buffer: Buffer, written: Buffer) -> Iterator[Buffer]:
    """Yield the parts of a buffer that a write leaves."""
    if buffer.name != written.name:
        yield buffer
        return
    if buffer.start < written.start:
        stop = written.start if buffer.stop is None else min(buffer.stop, written.start)
        yield Buffer(buffer.name, buffer.start, stop)
    if written.stop is not None and (buffer.stop is None or written.stop < buffer.stop):
        yield Buffer(buffer.name, max(buffer.start, written.stop), buffer.stop)


def _is_kept(buffer: Buffer) -> bool:
    return is_state(buffer) or buffer.name in NOT_SET_ASIDE


def set_aside(gpu: GpuRuntime, memories: Iterable[tuple[DeviceMemory, int]]) -> Callable[[], None]:
    """Copy the first bytes of memories, behind all kernels, and return a call that writes them back."""
    back = tuple(
        _shared(memory, size) if isinstance(memory, SharedArray) else _private(gpu, memory, size)
        for memory, size in memories
    )

    def write_back() -> None:
        for write in back:
            write()

    return write_back


def _shared(memory: SharedArray, size: int) -> Callable[[], None]:
    memory.acquire()
    copy = memory.view(np.uint8, (size,)).copy()
    memory.release()

    def write() -> None:
        memory.acquire()
        memory.view(np.uint8, (size,))[...] = copy
        memory.release()

    return write


def _private(gpu: GpuRuntime, memory: DeviceMemory, size: int) -> Callable[[], None]:
    spare = gpu.scratch(size)
    gpu.copy_range(spare, memory.buffer, size)
    return lambda: gpu.copy_range(memory.buffer, spare, size)
