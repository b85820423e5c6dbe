"""Mapped memory of a simulated SoC: each map and unmap takes virtual time."""

from __future__ import annotations

from collections.abc import Callable

from heterollm.kernels.gpu import SharedArray
from heterollm.kernels.sim.clock import SimulatedClock
from heterollm.kernels.sim.soc.quantities import HandOverParameters


class MappedArray(SharedArray):
    """Memory that host and GPU share by maps, which clean the caches of the mapped bytes.

    Args:
        memory: The memory that this machine has for it.
        costs: Costs of maps, and whether they wait for the GPU's queue.
        clock: The virtual clock.
        settle: Waits until this machine has computed everything.
    """

    __slots__ = ("_beside_kernels", "_clock", "_costs", "_mapped_bytes", "_settle")

    def __init__(
        self,
        memory: SharedArray,
        costs: HandOverParameters,
        clock: SimulatedClock,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(memory.array, memory.buffer, memory.queue, coherent=False)
        self._costs = costs
        self._beside_kernels = bool(costs.maps_beside_kernels)
        self._clock = clock
        self._settle = settle
        self._mapped_bytes: int | None = None

    def acquire(self, size_bytes: int | None = None) -> None:
        """Wait for the GPU, and let the host read and write the first bytes; None is all of them."""
        if self._mapped_bytes is None:
            self._settle()
            self._mapped_bytes = self.array.nbytes if size_bytes is None else size_bytes
            self._clock.map(self._costs.map_us + self._cleaned_us(), waits=not self._beside_kernels)

    def acquire_to_read(self, size_bytes: int | None = None) -> None:
        """Wait for the GPU, and let the host read the first bytes."""
        self.acquire(size_bytes)

    def release(self) -> None:
        """Make the host's writes visible to the GPU."""
        if self._mapped_bytes is not None:
            self._clock.unmap(self._costs.unmap_us + self._cleaned_us())
            self._mapped_bytes = None

    def _cleaned_us(self) -> float:
        rate_gbps = self._costs.map_gbps
        return (self._mapped_bytes or 0) / (rate_gbps * 1e3) if rate_gbps else 0.0
