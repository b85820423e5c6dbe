"""The pool of shared memory for activations between processors and layers.

A few page-aligned slots serve all layers. They are never reallocated, so that the addresses bound to NPU
sessions and kernels stay valid (HeteroLLM, section 4.2: "a dedicated memory pool"). Those that NPU graphs use
are in an arena, where the device has one.
"""

from __future__ import annotations

from collections.abc import Iterator

from heterollm.base import KernelError
from heterollm.kernels.gpu import GpuRuntime, SharedArray
from heterollm.kernels.sync.arena import Arena


class Pool:
    """Named, fixed slots of shared memory.

    Args:
        runtime: The GPU that addresses them.
        sizes_bytes: Size of every slot.
        arena: Memory of some of them; None if all are the runtime's.
    """

    def __init__(self, runtime: GpuRuntime, sizes_bytes: dict[str, int], arena: Arena | None = None) -> None:
        self.arena = arena
        # One byte type: the same slot holds different shapes at different lengths.
        self._slots = {
            name: runtime.shared((size,), "uint8") if arena is None or name not in arena else arena.slot(name)
            for name, size in sizes_bytes.items()
        }

    def release(self) -> None:
        """Release every slot that is acquired, after a failure."""
        for slot in self._slots.values():
            slot.release()
        if self.arena is not None:
            self.arena.release()

    def __getitem__(self, name: str) -> SharedArray:
        """Return a slot by name."""
        try:
            return self._slots[name]
        except KeyError:
            raise KernelError(f"The pool has no slot {name!r}, only {', '.join(self._slots)}.") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._slots)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._slots)
