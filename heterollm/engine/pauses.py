"""Pauses between the layers of a prompt's pass: other passes use the same slots meanwhile.

At a pause the GPU's queue is finished, the slots whose content later layers read are copied, and afterwards
written back. So a pass that pauses computes the same values as one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
        memories: Slots that earlier steps write and later ones read.
    """

    index: int
    memories: tuple[DeviceMemory, ...]


def find_pauses(steps: Sequence[Step], names: Mapping[DeviceMemory, Buffer]) -> tuple[Pause, ...]:
    """Return the places between the layers of a pass.

    Args:
        steps: The steps of the pass, of one chunk.
        names: The buffers of all slots.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        for buffer in step.writes:
            first.setdefault(buffer.name, index)
        for buffer in step.reads:
            last[buffer.name] = index
    kept = [
        (first[buffer.name], last[buffer.name], memory)
        for memory, buffer in names.items()
        if buffer.name in first and buffer.name in last
        if not (is_state(buffer) or buffer.name in NOT_SET_ASIDE)
    ]
    places = (
        index
        for index in range(1, len(steps))
        if None not in (steps[index - 1].layer, steps[index].layer)
        and steps[index - 1].layer != steps[index].layer
    )
    return tuple(
        Pause(index, tuple(memory for begin, end, memory in kept if begin < index <= end)) for index in places
    )


def set_aside(gpu: GpuRuntime, memories: Iterable[DeviceMemory]) -> Callable[[], None]:
    """Copy memories that the finished queue has written, and return a call that writes them back."""
    back = tuple(
        _shared(memory) if isinstance(memory, SharedArray) else _private(gpu, memory) for memory in memories
    )

    def write_back() -> None:
        for write in back:
            write()

    return write_back


def _shared(memory: SharedArray) -> Callable[[], None]:
    memory.acquire()
    copy = memory.array.copy()
    memory.release()

    def write() -> None:
        memory.acquire()
        memory.array[...] = copy
        memory.release()

    return write


def _private(gpu: GpuRuntime, memory: DeviceMemory) -> Callable[[], None]:
    size = memory.size_bytes
    spare = gpu.scratch(size)
    gpu.copy_range(spare, memory.buffer, size)
    return lambda: gpu.copy_range(memory.buffer, spare, size)
