"""The probe of shared memory, in a child process: kernels and graphs on one arena, an edge at a time.

Each edge runs with new values several times, and is compared with float64: memory that keeps the values of an
earlier round, or of none, fails as a driver's error does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from numpy.typing import NDArray

from heterollm.base import DeviceError, GraphError, HeteroLLMError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import OpenClRuntime, SharedArray, list_opencl_devices
from heterollm.kernels.npu import LinearShard, QnnNpu, SharingEdges, answer_parent, exact_product, small_shard
from heterollm.kernels.sync.arena import Arena

TOKENS: Final = 32
SIZE: Final = 256
ROUNDS: Final = 4
ROUNDS_WITHOUT_MAPS: Final = 200

COPY: Final = """
kernel void copy_values(global const ushort *from, global ushort *to) {
    to[get_global_id(0)] = from[get_global_id(0)];
}
"""

SLOT_BYTES: Final = TOKENS * SIZE * 2
NAMES: Final = ("first", "input", "between", "output")


class ProbedChain:
    """A kernel, one or two graphs, and a kernel, which hand values over by slots or by the host's memory.

    Args:
        runtime: The GPU.
        npu: The NPU, which shares memory.
    """

    def __init__(self, runtime: OpenClRuntime, npu: QnnNpu) -> None:
        self._runtime = runtime
        self._npu = npu
        self.arena = Arena(runtime, npu, dict.fromkeys(NAMES, SLOT_BYTES))
        self._shards = [small_shard(name, SIZE, SIZE) for name in ("arena a", "arena b")]
        self._host = {name: runtime.shared((SLOT_BYTES,), np.uint8) for name in ("from", "to", *NAMES)}
        self._random = np.random.default_rng(0)

    def run(self, *slots: str, shared: tuple[str, ...], rounds: int = ROUNDS, maps: bool = True) -> None:
        """Run values through slots in order, a graph between each two.

        Args:
            slots: Names of the slots.
            shared: Those of them that are in the arena.
            rounds: Runs, each with new values.
            maps: Whether the host maps the slots around the graphs.

        Raises:
            GraphError: The last slot has wrong values after a round, or a graph refused its memory.
        """
        memory = [self.arena.slot(name) if name in shared else self._host[name] for name in slots]
        views = [slot.view(np.float16, (TOKENS, SIZE)) for slot in memory]
        pairs = zip(self._shards, views[:-1], views[1:], strict=False)
        graphs = [self._npu.prepare(shard, TOKENS).bind({"x": x}, {"y": y}) for shard, x, y in pairs]
        writes, reads = self._copy(self._host["from"], memory[0]), self._copy(memory[-1], self._host["to"])
        mapped = memory if maps else []
        for number in range(rounds):
            x = self._random.standard_normal((TOKENS, SIZE)).astype(np.float16)
            self._host["from"].write(x.view(np.uint8).ravel())
            writes()
            self._runtime.finish()
            for slot in mapped:
                slot.acquire()
            for graph in graphs:
                graph()
            for slot in mapped:
                slot.release()
            reads()
            self._runtime.finish()
            _compare(
                self._host["to"].read().view(np.float16).reshape(x.shape),
                x,
                self._shards[: len(graphs)],
                number,
            )
        assert self._npu.memory is not None  # the arena has it
        if refusal := self._npu.memory.edges.arena:
            raise GraphError(refusal)

    def _copy(self, source: SharedArray, target: SharedArray) -> Callable[[], Any]:
        kernel = self._runtime.kernel_of_source(COPY, "copy_values")
        return self._runtime.launch(kernel, (source, target), (TOKENS * SIZE,), (1,), "copy")


def _compare(y: NDArray[np.float16], x: NDArray[np.float16], shards: list[LinearShard], number: int) -> None:
    exact: NDArray[Any] = x
    for shard in shards:
        exact = exact_product(shard, exact.astype(np.float16))
    errors = linear_errors(y, exact)
    if not errors.within("fp16"):
        raise GraphError(f"wrong values in round {number + 1} (NMSE {errors.nmse:.1e})")


def _probe(request: Mapping[str, Any]) -> None:
    """Try each edge, and store the result so far before each one: the child's work."""
    edges = SharingEdges("the import failed")

    def store(found: SharingEdges) -> SharingEdges:
        Path(request["edges"]).write_text(json.dumps(to_builtins(found)), "utf-8")
        return found

    store(edges)
    runtime = _gpu(request)
    npu = QnnNpu(emulator=request["emulator"], soc_model=request["soc_model"])
    npu.share_memory(SharingEdges())
    memory = npu.memory
    assert memory is not None
    chain = ProbedChain(runtime, npu)
    source = chain.arena.source

    def tried(*slots: str, known: SharingEdges | None = None, **options: Any) -> str:  # noqa: ANN401
        memory.edges = known or SharingEdges()  # an earlier refusal would hold for all graphs
        try:
            chain.run(*slots, **options)
        except HeteroLLMError as error:
            return error.message
        return ""

    edges = store(SharingEdges("inputs at the arena's start failed", source=source))
    inputs = tried("first", "output", shared=("first",))
    edges = store(replace(edges, arena="outputs failed"))
    outputs = tried("input", "first", shared=("first",))
    edges = store(replace(edges, arena="slots at offsets failed", inputs=inputs, outputs=outputs))
    found = SharingEdges("", inputs, outputs, source)
    if found.usable:
        places = NAMES[1:]
        if reason := tried("input", "output", shared=places, known=found):
            found = replace(found, arena=f"slots at offsets: {reason}")
        else:
            store(replace(edges, arena="two contexts on one arena failed"))
            if reason := tried(*places, shared=places, known=found):
                found = replace(found, arena=f"two contexts on one arena: {reason}")
            else:
                store(replace(edges, arena="slots without maps failed"))
                maps = tried(*places, shared=places, known=found, rounds=ROUNDS_WITHOUT_MAPS, maps=False)
                found = replace(found, maps=maps)
    store(found)


def _gpu(request: Mapping[str, Any]) -> OpenClRuntime:
    for platform, device in list_opencl_devices():
        if (platform.strip(), device.name.strip()) == (request["platform"], request["gpu"]):
            return OpenClRuntime(device, shared_memory=request["shared_memory"])
    raise DeviceError(f"The child process finds no OpenCL device {request['gpu']!r}.")


if __name__ == "__main__":
    answer_parent(_probe)
