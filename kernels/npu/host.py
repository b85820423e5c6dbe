"""The NPU backend of the ``host`` device: ONNX Runtime's CPU provider on the same graphs, in float32.

A session leaves ``m`` symbolic and serves all lengths of its shard; the backend still accepts standard
lengths only. Measured with a 4-bit [8192, 2048] shard of 10 MB: a session keeps 8 MB in memory (the codes
packed for the CPU) and maps 2 MB of scales; a session loaded from bytes instead of a file keeps 30 MB.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np

from heterollm.base import DeviceError, GraphError, OptionError
from heterollm.kernels.npu.forms import every_form
from heterollm.kernels.npu.graphs import GRAPH_VERSION, graph_folder, graph_identity, write_graph
from heterollm.kernels.npu.protocol import (
    STANDARD_LENGTHS,
    BuiltGraph,
    GraphFolders,
    GraphForm,
    TimeKind,
    check_form,
    edge_dtype,
)
from heterollm.kernels.npu.qnn_binaries import ContextBinary
from heterollm.kernels.npu.session import HeldSession, SessionGraph, runtime_errors, session_options
from heterollm.kernels.npu.shapes import GraphShape
from heterollm.kernels.npu.shards import GraphShard, ShardKey

FLOAT_FORMS: Final[tuple[GraphForm, ...]] = ("activation_first", "weight_first")


class HostNpu:
    """ONNX Runtime's CPU provider behind the NPU protocol.

    Args:
        threads: Threads that compute one graph; 1 means the calling thread alone.

    Raises:
        OptionError: ``threads`` is not positive.
        DeviceError: ONNX Runtime cannot be imported.
    """

    name = "host NPU (ONNX Runtime CPU)"
    time_kind: TimeKind = "real"
    graphs_by_length = False
    copies_by_length = False
    io_by_graph = False
    reuses_io = False
    unrolls_blocks = False
    addressable_bytes = None
    domain_bytes = None
    graph_weight_bytes = None
    standard_lengths = STANDARD_LENGTHS
    row_alignment = 64
    activation_dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise OptionError(f"The host NPU needs at least one thread, not {threads}.")
        _share_arena()
        self.threads = threads
        self.compiled_count = 0
        self.loaded_count = 0
        """Graphs of exported models alone: the cache keeps none, since one is built in milliseconds."""
        self._folders = GraphFolders()
        self._checked: set[Path] = set()
        self._sessions: dict[tuple[ShardKey, GraphForm], HeldSession] = {}

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        return every_form(shape, length, FLOAT_FORMS)

    def prepare(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> SessionGraph:
        """Return a graph of the shard's session; see :class:`heterollm.kernels.npu.NpuBackend`."""
        chosen = check_form(self, shard, length, form, any_length=any_length)
        key = (shard.key, chosen)
        if key not in self._sessions:
            self._sessions[key] = HeldSession(self._kept(shard, chosen) or self._built(shard, chosen))
        dtype = edge_dtype(chosen, self.activation_dtype)
        return SessionGraph(self._sessions[key], shard, length, dtype)

    def keep_graphs(self, weights_key: str, folder: Path) -> None:
        """Keep graphs in a folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        self._folders.add(weights_key, folder)

    def build(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> BuiltGraph:
        """Put a graph of all lengths into its folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        chosen = check_form(self, shard, length, form)
        stored = self._stored(shard, chosen)
        # One file serves all lengths, and checking it reads it.
        compiled = stored.model not in self._checked and stored.problem() is not None
        self._checked.add(stored.model)
        if compiled:
            own = shard, chosen, self.activation_dtype
            stored.build(lambda folder, models: write_graph(*own, folder, name=models[0].stem))
            self.compiled_count += 1
        return BuiltGraph(stored.size_bytes, compiled, "")

    def stored_bytes(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> int:
        """Return the bytes of a graph in its folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        return self._stored(shard, check_form(self, shard, length, form)).size_bytes

    def cpu_times_us(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> None:
        """Return None: this backend's time is real."""

    def release(self, shard: GraphShard) -> None:
        """Drop the sessions of a shard; see :class:`heterollm.kernels.npu.NpuBackend`."""
        for key in [key for key in self._sessions if key[0] == shard.key]:
            del self._sessions[key]

    def versions(self) -> dict[str, str]:
        """Return the version of ONNX Runtime."""
        import onnxruntime

        return {"onnxruntime": onnxruntime.__version__}

    def close(self) -> None:
        """Drop all sessions."""
        self._sessions.clear()

    def _stored(self, shard: GraphShard, form: GraphForm) -> ContextBinary:
        """Return the files of a graph in its folder."""
        identity = graph_identity(shard, form, None) | {"dtype": str(self.activation_dtype)}
        return ContextBinary(
            identity, {"graph_version": GRAPH_VERSION}, self._folders.of(shard), ending=".weights"
        )

    def _kept(self, shard: GraphShard, form: GraphForm) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        """Open a session from a folder of graphs; None for a shard whose graphs lie in none."""
        if self._folders.of(shard) is None:
            return None
        stored = self._stored(shard, form)
        if (problem := stored.problem(contents=False)) is not None:
            self._folders.refuse(shard, shard.label, problem)
        self.loaded_count += 1
        return self._open(shard, stored.model)

    def _built(self, shard: GraphShard, form: GraphForm) -> Any:  # noqa: ANN401
        """Open a session through a temporary file, which ONNX Runtime maps rather than copies."""
        with graph_folder(shard.label) as folder:  # Windows keeps mapped files: they stay there
            session = self._open(shard, write_graph(shard, form, self.activation_dtype, folder))
        self.compiled_count += 1
        return session

    def _open(self, shard: GraphShard, model: Path) -> Any:  # noqa: ANN401
        import onnxruntime

        options = session_options(self.threads)
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        # Without VNNI its products of uint8 and int8 would saturate at 16 bits.
        options.add_session_config_entry("session.x64quantprecision", "1")
        # ONNX Runtime would round the inputs of integer forms to 8 bits.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        try:
            return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except runtime_errors() as error:
            raise GraphError(f"ONNX Runtime refused the graph of {shard.label}: {error}") from error


@functools.cache
def _share_arena() -> None:
    """Make all sessions of the process share one arena for scratch memory.

    Separate arenas took 48 MB more over six weight-first [8192, 2048] shards at 256 tokens.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(
            f"ONNX Runtime cannot be imported: {error}.", fix="Reinstall it: pip install onnxruntime"
        ) from error
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(memory, None)
