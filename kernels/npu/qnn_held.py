"""Contexts of a Hexagon: compiled or found in the cache, loaded, and held within the memory that it maps.

Each shard has one static graph per length. The backend compiles it, closes the compiled session, which is
heavy, and loads the cached context binary, whose weights are mapped. QNN spreads loaded contexts over several
process domains where the platform has them. Open contexts take no more memory than these can address: the
backend closes those that it opened longest ago, and opens them again when they run. If QNN refuses one
nevertheless, what it holds by then is the limit from the next load on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from heterollm.base import GIB, MIB, CacheError, Count, GraphError, KeptResult, format_bytes, locked, see
from heterollm.kernels.npu.contexts import (
    ContextGraph,
    GraphIdentity,
    HeldContext,
    HeldContexts,
    PackedGraph,
    SharingVerdict,
    context_label,
)
from heterollm.kernels.npu.graphs import GRAPH_VERSION, graph_identity, write_graph
from heterollm.kernels.npu.protocol import INTEGER_FORMS, GraphFolders, GraphForm, edge_dtype
from heterollm.kernels.npu.qnn_binaries import GRAPHS_FOLDER, ContextBinary
from heterollm.kernels.npu.qnn_compile import compile_graph, compile_shared
from heterollm.kernels.npu.qnn_contexts import chosen_process_domains
from heterollm.kernels.npu.qnn_runtime import NoRoomError, QnnTarget, open_context, qnn_versions
from heterollm.kernels.npu.qnn_sharing import REUSED_IO_OPTION, machine_key, verdict_file
from heterollm.kernels.npu.shards import GraphShard
from heterollm.kernels.npu.shared_memory import SharedMemory
from heterollm.kernels.npu.tensors import graph_tensors

logger = logging.getLogger(__name__)

HEXAGON_BYTES = 7 * GIB // 2
"""Memory that one process domain of a Hexagon maps: 3.5 GiB by onnxruntime-qnn#606, up to 4 elsewhere."""


class NpuMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of contexts that a machine's NPU held when it refused one more."""

    held_bytes: Count


BLOCK_OPTION = {"enable_block_quant_weight_optimization": "1"}
"""Makes the compiler keep 4-bit blocks in integers; without it they become FP16, with nothing gained."""

CHILD_WEIGHT_BYTES = 16 * MIB
"""Larger shards are compiled in a child process by default."""

LEAVE: Final = "With `--allow-fallback` the GPU goes on alone."


class QnnContexts:
    """The contexts of one chip.

    Args:
        target: Options of the compiler and of sessions.
        soc_model: Qualcomm's number of the SoC.
        compile_in_child: Whether to compile in a child process; None does so for large shards.
        context_layers: Layers that share a context; 0 if each graph has a context of its own.

    Attributes:
        memory: Memory that graphs use without copies; None without it.
        addressable_bytes: What all process domains address, or hold: see :meth:`recall_memory`.
    """

    io_by_graph = True
    domain_bytes: int | None = HEXAGON_BYTES
    activation_dtype: np.dtype[Any] = np.dtype(np.float16)

    def __init__(
        self, target: QnnTarget, soc_model: str, *, compile_in_child: bool | None, context_layers: int
    ) -> None:
        self._target = target
        self.soc_model = soc_model
        self._compile_in_child = compile_in_child
        self.context_layers = context_layers
        self.memory: SharedMemory | None = None
        self._domains = chosen_process_domains()
        self.addressable_bytes: int | None = self._domains * HEXAGON_BYTES
        self.compiled_count = 0
        self.loaded_count = 0
        self._reuses_io = False
        self._contexts = HeldContexts()
        self._folders = GraphFolders()
        self._packages: dict[tuple[Any, ...], tuple[ContextGraph, ...]] = {}
        self._temporary: Path | None = None
        self._removable: dict[GraphIdentity, ContextBinary] = {}

    @property
    def reuses_io(self) -> bool:
        """Whether all lengths of a slice reserve memory for the longest one's input and output alone."""
        return self._reuses_io and bool(self.context_layers)

    def recall_memory(self) -> None:
        """Take as the limit what this machine's NPU held when it refused a context, if it ever has."""
        kept = self._kept_memory()
        if kept.path.exists():
            stated = NpuMemory(self._domains * HEXAGON_BYTES)
            self.addressable_bytes = kept.load(lambda: stated).held_bytes

    def machine_key(self) -> dict[str, Any]:
        """Return what the results of self-tests on this machine depend on."""
        return machine_key(self._target, self.soc_model)

    @property
    def open_bytes(self) -> int:
        """Memory that the open contexts take, by their weights, inputs and outputs."""
        return self._contexts.open_bytes

    def _hold(self, graphs: Sequence[PackedGraph]) -> None:
        """Open the context of some graphs, and build it first if necessary."""
        stored, label, size_bytes = self._stored(graphs), context_label(graphs), self._context_bytes(graphs)
        keys = [(shard.key, form, length) for shard, form, length in graphs]
        if self._temporary is not None:
            self._removable.update(dict.fromkeys(keys, stored))
        self._make_room(size_bytes)
        try:
            sessions = self._open(stored, graphs, label)
        except NoRoomError as error:
            raise self._refused(error, size_bytes) from error
        target, models = self._context_target(graphs), stored.models

        def open_again() -> Sequence[Any]:
            # It must not keep the shards with their weights.
            self._make_room(size_bytes)
            self._contexts.session(keys[0])
            try:
                sessions = open_context(models, target, label)
            except GraphError as found:
                error = self._refused(found, size_bytes) if isinstance(found, NoRoomError) else found
                if len(models) > 1 and not isinstance(error, NoRoomError):
                    self._stop_sharing(error.message)
                    fix = f"Load the model again: graphs share no contexts from now on. {LEAVE}"
                    error = GraphError(error.message, fix=fix)
                raise error from found
            self.loaded_count += len(sessions)
            return sessions

        handles = None if self.memory is None else self.memory.new_context()
        self._contexts.add(HeldContext(size_bytes, keys, sessions, open_again, handles))

    def _make_room(self, size_bytes: int) -> None:
        if self.addressable_bytes is not None and self.domain_bytes is not None:
            self._contexts.make_room(size_bytes, self.addressable_bytes, self.domain_bytes)

    def _kept_memory(self) -> KeptResult[NpuMemory]:
        key = self.machine_key() | {"domains": self._domains}
        return KeptResult(GRAPHS_FOLDER, "memory of the NPU", key, NpuMemory)

    def _refused(self, error: NoRoomError, size_bytes: int) -> GraphError:
        """Return the error of a context without room, after what the NPU holds became its limit.

        If it holds less than that context, the context is the reason: that is a refusal as any other.
        """
        held_bytes = self.open_bytes
        if held_bytes < size_bytes:
            return GraphError(error.message, fix=error.fix)
        self.addressable_bytes, kept = held_bytes, self._kept_memory()
        try:
            kept.keep(NpuMemory(held_bytes))
        except CacheError as problem:
            logger.warning("The memory of the NPU is not kept: %s", problem)
        return NoRoomError(
            f"The NPU holds {format_bytes(held_bytes)} of graphs, and QNN loads no further "
            f"{format_bytes(size_bytes)}: {error.message}",
            fix=f"Load the model again: plans keep to {format_bytes(held_bytes)} from now on. If another "
            f"program used the NPU, delete {kept.path} first. " + see("past-one-process-domain"),
        )

    def _stop_sharing(self, reason: str) -> None:
        """Use contexts of one graph from now on, in later processes too, after a context was refused."""
        logger.warning("NPU graphs share no contexts from now on: %s", reason)
        self.context_layers = 0
        self._packages.clear()
        try:
            verdict_file(self._target, self.soc_model).keep(SharingVerdict("fail", reason))
        except CacheError as error:
            logger.warning("This is not kept: %s", error)

    def _context_target(self, graphs: Sequence[PackedGraph]) -> QnnTarget:
        """Return the target that opens a context, with the size of the buffer that all its graphs use.

        All graphs of a model are bound to the same few slots.
        """
        if len(graphs) == 1 or not self.reuses_io:
            return self._target
        limit_mib = -(-max(map(self._io_bytes, graphs)) // MIB)
        options = self._target.session_options | {REUSED_IO_OPTION: str(limit_mib)}
        return replace(self._target, session_options=options)

    def _context_bytes(self, graphs: Sequence[PackedGraph]) -> int:
        # Graphs of one shard in several forms hold its weights once for each form.
        weights = {(shard.key, form): shard.weight_bytes for shard, form, _ in graphs}
        sizes = [self._io_bytes(graph) for graph in graphs]
        counted = max(sizes) if self.reuses_io else sum(sizes)
        return sum(weights.values()) + counted * self.io_by_graph

    def _io_bytes(self, graph: PackedGraph) -> int:
        shard, form, length = graph
        return graph_tensors(shard, length, edge_dtype(form, self.activation_dtype)).size_bytes

    def _open(self, stored: ContextBinary, graphs: Sequence[PackedGraph], label: str) -> Sequence[Any]:
        """Load the context from the cache; build it first if the cache has no sound one."""
        target = self._context_target(graphs)
        sessions, problem = self._load(stored, target, label)
        if sessions is not None:
            return sessions
        self._folders.refuse(graphs[0][0], label, problem)
        with locked(stored.model):
            # Another process may have built it while this one waited for the lock.
            sessions, problem = self._load(stored, target, label)
            if sessions is not None:
                return sessions
            if problem != "missing":
                logger.warning("The cached NPU graph of %s is %s; building it again.", label, problem)
            self._build(stored, graphs, label)
        return open_context(stored.models, target, label)

    def _build(self, stored: ContextBinary, graphs: Sequence[PackedGraph], label: str) -> None:
        stored.build(lambda folder, models: self._compile(graphs, folder, models, label))
        self.compiled_count += len(graphs)

    def _load(self, stored: ContextBinary, target: QnnTarget, label: str) -> tuple[Sequence[Any] | None, str]:
        """Return the sessions of sound files, or None and the fault.

        A context of several graphs that was refused cannot be loaded again in this process, so that its
        refusal is an error.
        """
        problem = stored.problem(contents=stored.folder in (None, self._temporary))
        if problem is not None:
            return None, problem
        try:
            sessions = open_context(stored.models, target, label)
        except GraphError as error:
            if stored.graphs > 1 or isinstance(error, NoRoomError):
                raise
            return None, f"refused by QNN ({error.message})"
        self.loaded_count += len(sessions)
        return sessions, ""

    def _compile(
        self, graphs: Sequence[PackedGraph], folder: Path, models: Sequence[Path], label: str
    ) -> None:
        sources = []
        for number, (shard, form, length) in enumerate(graphs):
            own = folder / str(number)
            own.mkdir()
            sources.append(write_graph(shard, form, self.activation_dtype, own, length))
        target = self._compiler_target([form for _, form, _ in graphs])
        if len(graphs) > 1:
            compile_shared(sources, models, target, label)
            return
        in_child = self._compile_in_child
        if in_child is None:
            in_child = graphs[0][0].weight_bytes > CHILD_WEIGHT_BYTES
        compile_graph(sources[0], models[0], target, label, in_child=in_child)

    def _compiler_target(self, forms: Collection[GraphForm]) -> QnnTarget:
        """Return the target that compiles forms: integer ones need an option that others may not have."""
        if INTEGER_FORMS.isdisjoint(forms):
            return self._target
        return replace(self._target, options=self._target.options | BLOCK_OPTION)

    def _stored(self, graphs: Sequence[PackedGraph]) -> ContextBinary:
        """Return the cache's files of a context."""
        own = [self._binary(*graph) for graph in graphs]
        if len(own) == 1:
            return own[0]
        return replace(own[0], identity={"context": [one.identity for one in own]}, graphs=len(own))

    def _binary(self, shard: GraphShard, form: GraphForm, length: int) -> ContextBinary:
        options = self._compiler_target([form]).options
        identity = graph_identity(shard, form, length) | {
            "dtype": str(self.activation_dtype),
            "soc": self.soc_model,
            "options": {name: value for name, value in options.items() if name != "soc_model"},
        }
        versions = qnn_versions()
        made_by = {
            "graph_version": GRAPH_VERSION,
            "onnxruntime-qnn": versions["onnxruntime-qnn"],
            "qairt": versions["qairt"],
        }
        return ContextBinary(identity, made_by, self._temporary or self._folders.of(shard))
