"""Lanes: what one of several chunks in flight owns, or the passes of several sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from heterollm.engine.step import Buffer
from heterollm.kernels.gpu import DeviceMemory, SharedArray


@dataclass(frozen=True, slots=True)
class Lane:
    """The memory of one chunk in flight, or of batches. The slots of the head are the same in all lanes.

    Args:
        number: 0 for the first, which runs all passes of a single chunk or session.
        shared: Slots that both processors address.
        private: Slots that only kernels read and write.
        tokens: Ids of the tokens.
        step: The step buffer.
        names: The buffers of all these.
    """

    number: int
    shared: Mapping[str, SharedArray]
    private: Mapping[str, DeviceMemory]
    tokens: SharedArray
    step: SharedArray
    names: Mapping[DeviceMemory, Buffer]

    def moved(self, shared: Mapping[str, SharedArray]) -> Lane:
        """Return the lane with some slots in other memory."""
        others: dict[DeviceMemory, DeviceMemory] = {self.shared[slot]: own for slot, own in shared.items()}
        names = {others.get(memory, memory): name for memory, name in self.names.items()}
        return replace(self, shared={**self.shared, **shared}, names=names)
