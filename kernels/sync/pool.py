"""The pool of shared memory for activations between processors and layers.

A few page-aligned slots serve all layers. They are never reallocated, so that the addresses bound to NPU
sessions and kernels stay valid (HeteroLLM, section 4.2: "a dedicated memory pool").
"""

from __future__ import annotations

from collections.abc import Iterator

from heterollm.base import KernelError
from heterollm.kernels.gpu import GpuRuntime, SharedArray


class Pool:
    """Named, fixed slots of shared memory.

    Args:
        runtime: The GPU that addresses them.
        sizes_bytes: Size of every slot.
    """

    def __init__(self, runtime: GpuRuntime, sizes_bytes: dict[str, int]) -> None:
        # One byte type: the same slot holds different shapes at different lengths.
        self._slots = {name: runtime.shared((size,), "uint8") for name, size in sizes_bytes.items()}

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
