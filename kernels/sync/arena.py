"""Slots that GPU and NPU address without a copy: one allocation of the NPU's driver, imported by the GPU's.

A driver may accept such memory at one edge of a graph and not at another (on a Snapdragon 8 Elite Gen 5 some
outputs were refused and some were not), so that :mod:`heterollm.kernels.sync.arena_probe` tries each one in a
child process before the first use. Where an edge fails, values are copied there, as without an arena.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from heterollm.base import (
    PAGE_BYTES,
    CacheError,
    GraphError,
    HeteroLLMError,
    KeptResult,
    KernelError,
    round_up,
    scratch_folder,
)
from heterollm.kernels.gpu import ImportedMemory, OpenClRuntime, import_padding_bytes
from heterollm.kernels.npu import GRAPHS_FOLDER, QnnNpu, SharingEdges, rpcmem, run_child

if TYPE_CHECKING:
    from heterollm.kernels.gpu import SharedArray

logger = logging.getLogger(__name__)

SPARE_BYTES: Final = 32 * PAGE_BYTES
"""Bytes behind each slot, so that passes may begin it later: QNN knows one tensor at an address."""

PROBE_MODULE: Final = "heterollm.kernels.sync.arena_probe"
TIMEOUT_S: Final = 120.0
"""Longest time of the child; its graphs take a few seconds to compile and to run on the emulator."""

NO_LIBRARY: Final = "libcdsprpc.so, the library of shared memory, does not load"


class Arena:
    """Named slots at offsets of one allocation.

    Args:
        runtime: The GPU.
        npu: The NPU, which shares memory.
        sizes_bytes: Size of every slot.
        coherent: Whether slots need no maps.

    Raises:
        GraphError: The NPU's driver does not allocate.
        KernelError: The GPU's driver does not import the allocation.
    """

    def __init__(
        self, runtime: OpenClRuntime, npu: QnnNpu, sizes_bytes: Mapping[str, int], *, coherent: bool = False
    ) -> None:
        self._coherent = coherent
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes_bytes.items():
            self._places[name] = end, size
            end += round_up(max(size, 1), PAGE_BYTES) + SPARE_BYTES
        self._memory = ImportedMemory(runtime, npu.allocate(end + import_padding_bytes(runtime)))
        self.source = self._memory.source
        self._memory.slot(0, end).write(0)
        self._slots: dict[tuple[str, int], SharedArray] = {}

    def slot(self, name: str, shift_bytes: int = 0) -> SharedArray:
        """Return a slot.

        Args:
            name: Its name.
            shift_bytes: Bytes by which it begins later, whole pages and at most :data:`SPARE_BYTES`.
        """
        if (name, shift_bytes) not in self._slots:
            offset, size = self._places[name]
            self._slots[name, shift_bytes] = self._memory.slot(
                offset + shift_bytes, size, coherent=self._coherent
            )
        return self._slots[name, shift_bytes]

    def release(self) -> None:
        """Release every slot that is acquired, after a failure."""
        for slot in self._slots.values():
            slot.release()

    def __contains__(self, name: str) -> bool:
        """Return whether it has a slot of that name."""
        return name in self._places


class SharedArenas:
    """The arenas of a device, if its processors can share memory.

    Args:
        runtime: The GPU.
        npu: The NPU, before its first graph.
        edges: Result of the probe.

    Attributes:
        edges: The edges at which values need no copy.
        offered: Whether the machine has the library of shared memory.
    """

    def __init__(self, runtime: OpenClRuntime, npu: QnnNpu, edges: SharingEdges) -> None:
        self._runtime = runtime
        self._npu = npu
        if edges.usable and not runtime.traits.coherent:
            edges = replace(edges, maps=edges.maps or "all memory of this GPU is")
        elif edges.usable and edges.maps:
            # A token has two maps for a graph, of tens of microseconds each, and copies kilobytes.
            edges = replace(edges, arena=f"copies cost less than the maps that it needs ({edges.maps})")
        self.edges = edges
        self.offered = rpcmem() is not None
        if edges.usable:
            npu.share_memory(edges, self._refused)

    def allocate(self, sizes_bytes: Mapping[str, int]) -> Arena | None:
        """Return slots of some sizes; None, with a log line, where values must be copied."""
        if not self.edges.usable:
            return None
        try:
            return Arena(self._runtime, self._npu, sizes_bytes, coherent=not self.edges.maps)
        except (GraphError, KernelError) as error:
            logger.warning("Inputs and outputs of NPU graphs are copied: %s", error.message)
            return None

    def test(self) -> SharingEdges:
        """Run the probe, and keep its result for the next start.

        Raises:
            CacheError: The cache cannot be written.
        """
        edges = probe_edges(self._runtime, self._npu)
        _kept(self._runtime, self._npu).keep(edges)
        return edges

    def _refused(self, edges: SharingEdges) -> None:
        """Keep that a graph has refused its memory."""
        self.edges = edges
        try:
            _kept(self._runtime, self._npu).keep(edges)
        except CacheError as error:
            logger.warning("This is not kept: %s", error)


def open_arenas(runtime: OpenClRuntime, npu: QnnNpu) -> SharedArenas:
    """Return the arenas of two processors; the first start with these drivers runs the probe.

    Args:
        runtime: The GPU.
        npu: The NPU, before its first graph.
    """
    if rpcmem() is None:
        return SharedArenas(runtime, npu, SharingEdges(NO_LIBRARY))
    edges = _kept(runtime, npu).load(lambda: probe_edges(runtime, npu))
    logger.info("Inputs and outputs of NPU graphs: %s", edges)
    return SharedArenas(runtime, npu, edges)


def probe_edges(runtime: OpenClRuntime, npu: QnnNpu, *, timeout_s: float = TIMEOUT_S) -> SharingEdges:
    """Try each edge in a child process; what a crash or a hang keeps it from has failed."""
    kept = _kept(runtime, npu)
    try:
        with scratch_folder("heterollm-arena-") as folder:
            result = folder / "edges.json"
            request = {
                "platform": runtime.traits.platform,
                "gpu": runtime.traits.name,
                "shared_memory": runtime.shared_memory,
                "emulator": npu.time_kind == "emulated",
                "soc_model": npu.soc_model,
                "edges": str(result),
            }
            try:
                run_child(
                    PROBE_MODULE, request, folder / "answer", "test of shared memory", timeout_s=timeout_s
                )
                return kept.read(result.read_bytes())
            except HeteroLLMError as error:
                seen = kept.read(result.read_bytes()).arena if result.exists() else ""
                return SharingEdges(f"{seen}: {error.message}" if seen else error.message)
    except OSError as error:
        return SharingEdges(f"cannot write a temporary file: {error.strerror}")


def _kept(runtime: OpenClRuntime, npu: QnnNpu) -> KeptResult[SharingEdges]:
    traits = runtime.traits
    gpu = traits.platform, traits.name, traits.driver, runtime.shared_memory
    return KeptResult(GRAPHS_FOLDER, "shared memory", npu.machine_key() | {"gpu": gpu}, SharingEdges)
