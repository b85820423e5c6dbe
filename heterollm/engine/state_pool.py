"""Pools of state in the GPU's memory: blocks that sessions take, share and give back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, format_bytes
from heterollm.kernels.gpu import DeviceMemory, GpuRuntime


class StatePool:
    """Blocks of memory that a session fills: pages of keys and values, or recurrent states.

    A block has some bytes in a memory of each layer, and is free once no session holds it. The memories grow
    when none is left: their content moves to larger buffers.

    Args:
        gpu: The GPU.
        block_bytes: Bytes of a block by layer.
        each: Blocks that one session holds at most: the pool begins with so many.
        most_bytes: Largest memory of a layer, unless a single session needs more.
        moved: Called when the memories have other buffers, which kernels must use from now on.

    Attributes:
        memories: The memory of each layer.
    """

    def __init__(
        self,
        gpu: GpuRuntime,
        block_bytes: Mapping[int, int],
        each: int,
        most_bytes: int,
        moved: Callable[[], None],
    ) -> None:
        self._gpu, self._block_bytes, self._each, self._moved = gpu, block_bytes, each, moved
        self._most = self._largest = most_bytes // max(block_bytes.values())
        self.memories = {
            layer: DeviceMemory(gpu.scratch(each * size), each * size) for layer, size in block_bytes.items()
        }
        self._holders = [0] * each
        self._free = list(range(each))[::-1]
        # Any thread may drop a session.
        self._returned: deque[Sequence[int]] = deque()

    def limit(self, sessions: int | None) -> None:
        """Bound the memory to that of so many sessions, or by the largest buffer alone."""
        self._most = self._largest if sessions is None else min(self._largest, sessions * self._each)

    @property
    def held(self) -> int:
        """Blocks that sessions hold, each once."""
        self._drop_returned()
        return len(self._holders) - len(self._free)

    def take(self) -> int:
        """Return a block that no other session holds, of any content.

        Raises:
            KernelError: There is none, and no memory for more.
        """
        self._drop_returned()
        if not self._free:
            self._grow()
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Let another session hold blocks, too."""
        for block in blocks:
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Take blocks from a session that holds them."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def drop_later(self, blocks: Sequence[int]) -> None:
        """Take blocks from a session that ends; for any thread."""
        self._returned.append(blocks)

    def own(self, block: int, *, copied: bool) -> int:
        """Return a block that a session may write instead of one that it holds.

        Args:
            block: The block.
            copied: Whether the content counts.
        """
        if self._holders[block] == 1:
            return block
        own = self.take()
        if copied:
            for layer, memory in self.memories.items():
                size, buffer = self._block_bytes[layer], memory.buffer
                self._gpu.copy_range(buffer, buffer, size, to_bytes=own * size, from_bytes=block * size)
        self.drop([block])
        return own

    def read(self, layer: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return the bytes ``[block, byte]`` of a layer's blocks."""
        size = self._block_bytes[layer]
        found = np.empty((len(blocks), size), np.uint8)
        for block, row in zip(blocks, found, strict=True):
            self._gpu.copy(row, self.memories[layer].buffer, offset_bytes=block * size)
        return found

    def write(self, layer: int, blocks: Sequence[int], values: NDArray[np.uint8]) -> None:
        """Replace the bytes of a layer's blocks."""
        size = self._block_bytes[layer]
        for block, row in zip(blocks, values, strict=True):
            self._gpu.copy(self.memories[layer].buffer, row, offset_bytes=block * size)

    def shape(self, layer: int, blocks: int) -> tuple[int, int]:
        """Return the shape of so many blocks as :meth:`read` returns them."""
        return blocks, self._block_bytes[layer]

    def _drop_returned(self) -> None:
        while self._returned:
            self.drop(self._returned.popleft())

    def _grow(self) -> None:
        """Make room for another session, or for a quarter of all, if there are many."""
        count = len(self._holders)
        more = min(max(self._each, count // 4), self._most - count)
        if more < 1:
            taken = format_bytes(sum(memory.size_bytes for memory in self.memories.values()))
            raise KernelError(
                f"The state of all sessions takes {taken}, and may take no more.",
                fix="Drop sessions, or load the model with a smaller context.",
            )
        try:
            for layer, memory in self.memories.items():
                size = (count + more) * self._block_bytes[layer]
                buffer = self._gpu.scratch(size)
                self._gpu.copy_range(buffer, memory.buffer, count * self._block_bytes[layer])
                memory.buffer, memory.size_bytes = buffer, size
        finally:
            self._moved()
        self._holders += [0] * more
        self._free += range(count + more - 1, count - 1, -1)
