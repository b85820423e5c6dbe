"""The NPU backend of ``snapdragon`` and ``emulator``: Qualcomm's HTP through onnxruntime-qnn, in float16.

Each shard has one static graph per length. The backend compiles it, closes the compiled session, which is
heavy, and loads the cached context binary, whose weights are mapped. QNN spreads loaded contexts over several
process domains where the platform has them. Open contexts take no more memory than these can address: the
backend closes those that it opened longest ago, and opens them again when they run. If QNN refuses one
nevertheless, what it holds by then is the limit from the next load on.

Where :attr:`QnnNpu.context_layers` says so, graphs that :meth:`QnnNpu.package` names share one context, which
holds equal weights once. Such a binary compiles anywhere and crashes the x86 emulator that loads it, so that
a self-test in a child process decides (:mod:`heterollm.kernels.npu.qnn_sharing`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from heterollm.base import (
    GIB,
    MIB,
    CacheError,
    Count,
    DeviceError,
    GraphError,
    KeptResult,
    OptionError,
    format_bytes,
    locked,
    see,
)
from heterollm.kernels.npu.contexts import (
    ContextGraph,
    GraphIdentity,
    HeldContext,
    HeldContexts,
    PackedGraph,
    SharingVerdict,
    context_label,
)
from heterollm.kernels.npu.forms import (
    experts_forms,
    fused_forms,
    integer_forms,
    reshaped_forms,
    shared_forms,
)
from heterollm.kernels.npu.graphs import GRAPH_VERSION, graph_folder, graph_identity, write_graph
from heterollm.kernels.npu.protocol import (
    INTEGER_FORMS,
    STANDARD_LENGTHS,
    BuiltGraph,
    GraphFolders,
    GraphForm,
    TimeKind,
    check_form,
    edge_dtype,
)
from heterollm.kernels.npu.qnn_binaries import GRAPHS_FOLDER, ContextBinary, temporary_graphs
from heterollm.kernels.npu.qnn_compile import compile_graph, compile_shared
from heterollm.kernels.npu.qnn_contexts import chosen_process_domains
from heterollm.kernels.npu.qnn_cpu_time import emulated_cpu_us
from heterollm.kernels.npu.qnn_power import SESSION_OPTIONS, QnnPower
from heterollm.kernels.npu.qnn_runtime import (
    NoRoomError,
    QnnTarget,
    open_context,
    qnn_available,
    qnn_versions,
)
from heterollm.kernels.npu.qnn_sharing import (
    REUSED_IO_OPTION,
    kept_verdict,
    machine_key,
    run_sharing_test,
    verdict_file,
)
from heterollm.kernels.npu.qnn_socs import SOCS, this_soc
from heterollm.kernels.npu.self_test import check_small_linear
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.npu.shapes import AttentionShape, ExpertsShape, GraphShape, LinearShape, ScoresShape
from heterollm.kernels.npu.shards import ExpertsShard, GraphShard, SharedShard, WeightShard
from heterollm.kernels.npu.shared_memory import ALLOCATOR_OPTION, SharedMemory, SharedPages, SharingEdges
from heterollm.kernels.npu.small_shard import small_shard
from heterollm.kernels.npu.tensors import graph_tensors
from heterollm.kernels.ops import Power

logger = logging.getLogger(__name__)

DEFAULT_SOC_MODEL = "57"
"""Snapdragon 8 Gen 3 (HTP v75), which the emulator plays."""

HEXAGON_BYTES = 7 * GIB // 2
"""Memory that one process domain of a Hexagon maps: 3.5 GiB by onnxruntime-qnn#606, up to 4 elsewhere."""


class NpuMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of contexts that a machine's NPU held when it refused one more."""

    held_bytes: Count


EXPERTS_BYTES = HEXAGON_BYTES // 4
"""Most weights of one graph of experts. A graph is opened and closed as a whole, so the address space should
hold several. No other limit of a Hexagon is known; Apple's NPU refuses more than 1.2 GB (NPUMoE, 4.2)."""

BLOCK_OPTION = {"enable_block_quant_weight_optimization": "1"}
"""Makes the compiler keep 4-bit blocks in integers; without it they become FP16, with nothing gained."""

CHILD_WEIGHT_BYTES = 16 * MIB
"""Larger shards are compiled in a child process by default."""


LEAVE: Final = "With `--allow-fallback` the GPU goes on alone."

SHARED_REFUSAL: Final = "a context with shared weights loads on a Hexagon only"


class QnnNpu:
    """Qualcomm's HTP, real or emulated, behind the NPU protocol.

    Args:
        emulator: Whether to use the emulator in the x86-64 Linux wheel instead of a real Hexagon.
        soc_model: Qualcomm's number of the SoC to emulate or to compile for; None for this machine's SoC.
        compile_in_child: Whether to compile in a child process; None does so for large shards.
        power: Clocks to ask for while there is work.
        context_layers: Layers that share a context; 0 if each graph has a context of its own, the only form
            that the emulator loads.

    Attributes:
        power: The switch of the clocks; None where nothing is asked for.
        addressable_bytes: What all process domains address, or hold: see :meth:`recall_memory`.
        context_layers: As above; :meth:`choose_contexts` and a refused context change it.
        memory: Memory that graphs use without copies; None before :meth:`share_memory`.

    Raises:
        DeviceError: The provider, the emulator or the NPU is missing.
    """

    standard_lengths = STANDARD_LENGTHS
    row_alignment = 256
    graphs_by_length = True
    unrolls_blocks = False
    io_by_graph = True
    domain_bytes: int | None = HEXAGON_BYTES
    graph_weight_bytes: int | None = EXPERTS_BYTES
    activation_dtype: np.dtype[Any] = np.dtype(np.float16)

    def __init__(
        self,
        *,
        emulator: bool,
        soc_model: str | None = None,
        compile_in_child: bool | None = None,
        power: Power = "default",
        context_layers: int = 0,
    ) -> None:
        usable, reason, fix = qnn_available(emulator=emulator)
        if not usable:
            raise DeviceError(reason, fix=fix)
        self.memory: SharedMemory | None = None
        self._domains = chosen_process_domains()
        self.addressable_bytes: int | None = self._domains * HEXAGON_BYTES
        if emulator and soc_model is None:
            soc_model = DEFAULT_SOC_MODEL
        options = {
            "backend_type": "htp",
            "enable_htp_fp16_precision": "1",
            "htp_graph_finalization_optimization_mode": "3",
        }
        # The cache key names the chip, not the machine: graphs compiled elsewhere for this chip are the same.
        self.soc_model = soc_model or this_soc()
        if self.soc_model in SOCS:  # QNN asks for it with float16; nobody has seen what it does without
            options["soc_model"] = self.soc_model
        soc = SOCS.get(self.soc_model)
        limit = f"; {soc.refusal}" if soc is not None and soc.refusal else ""
        self.name = f"Hexagon {'emulator' if emulator else 'NPU'} (QNN HTP{limit})"
        self.time_kind: TimeKind = "emulated" if emulator else "real"
        self.compiled_count = 0
        self.loaded_count = 0
        self._target = QnnTarget(emulator, options, SESSION_OPTIONS[power])
        self.power = None if power == "default" else QnnPower(self._target, power)
        self._compile_in_child = compile_in_child
        self.context_layers = context_layers
        self._reuses_io = False
        self._contexts = HeldContexts()
        self._folders = GraphFolders()
        self._packages: dict[tuple[Any, ...], tuple[ContextGraph, ...]] = {}
        self._temporary: Path | None = None
        self._removable: dict[GraphIdentity, ContextBinary] = {}

    @property
    def copies_by_length(self) -> bool:
        """Whether each standard length of a shard has its own copy of the weights."""
        return not self.context_layers

    @property
    def reuses_io(self) -> bool:
        """Whether all lengths of a slice reserve memory for the longest one's input and output alone."""
        return self._reuses_io and bool(self.context_layers)

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`.

        Weight first leads: at 5 to 32 tokens the compiler lays activation first out in 265 memory blocks and
        weight first in 41 (512 x 512). It takes up to 7.7 times as long to emulate, which says nothing of
        silicon.

        QNN fuses a sigmoid into an activation-first product before it, at NMSE 1.4e-5 (measured on the
        emulator), far past the gate. SiLU between float weights therefore has weight-first forms only.
        """
        soc = SOCS.get(self.soc_model)
        if soc is not None and not soc.takes_float16:
            return ()
        if isinstance(shape, ScoresShape | AttentionShape):
            return shared_forms(shape, length)
        if isinstance(shape, ExpertsShape):
            return experts_forms(self.forms(shape.one, length))
        weight = shape.weight
        # MatMulNBits on HTP has float activations only.
        if weight.bits == 32 or shape.integer_inputs:
            return ()
        integer = integer_forms(shape, length)
        if weight.scales == "tensor" or (weight.quantized and soc is not None and not soc.takes_4_bits):
            return fused_forms(shape, integer)
        plain: tuple[GraphForm, ...]
        if isinstance(shape, LinearShape):
            plain = ("matmul_nbits",) if weight.quantized else ("weight_first", "activation_first")
        elif weight.quantized:
            plain = ("ffn",)
        else:
            plain = ("ffn_weight_first",) if shape.activation == "silu" else ("ffn_weight_first", "ffn")
        return fused_forms(shape, plain + reshaped_forms(shape, length) + integer)

    def prepare(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> SessionGraph:
        """Load or build a static graph; see :class:`heterollm.kernels.npu.NpuBackend`."""
        chosen = check_form(self, shard, length, form, any_length=any_length)
        key = (shard.key, chosen, length)
        if key not in self._contexts:
            graphs = self._context_of(shard, length, form, chosen)
            try:
                self._hold(graphs)
            except GraphError as error:
                if len(graphs) == 1 or isinstance(error, NoRoomError):
                    raise
                self._stop_sharing(error.message)
                self._hold([(shard, chosen, length)])
        dtype = edge_dtype(chosen, self.activation_dtype)
        return SessionGraph(self._contexts.session(key), shard, length, dtype)

    def choose_contexts(self, layers: int) -> None:
        """Share contexts if the self-test allows it; the first test of a machine takes seconds.

        Args:
            layers: Layers that share a context; 0 for contexts of one graph, without a test.
        """
        self.context_layers = 0
        if layers:
            verdict = kept_verdict(self._target, self.soc_model)
            if verdict.status == "pass":
                self.context_layers, self._reuses_io = layers, verdict.reuses_io
            else:
                logger.info("NPU graphs share no contexts: %s", verdict.reason)

    def recall_memory(self) -> None:
        """Take as the limit what this machine's NPU held when it refused a context, if it ever has."""
        kept = self._kept_memory()
        if kept.path.exists():
            stated = NpuMemory(self._domains * HEXAGON_BYTES)
            self.addressable_bytes = kept.load(lambda: stated).held_bytes

    def test_sharing(self) -> SharingVerdict:
        """Run the self-test of shared contexts, and keep its verdict.

        Raises:
            CacheError: The cache cannot be written.
        """
        verdict = run_sharing_test(self._target, loads=not self._target.emulator)
        verdict_file(self._target, self.soc_model).keep(verdict)
        return verdict

    def share_memory(
        self, edges: SharingEdges, refused: Callable[[SharingEdges], None] | None = None
    ) -> None:
        """Use QNN's shared allocator, and its memory without copies, in sessions that open from now on.

        Args:
            edges: The edges at which graphs may.
            refused: Called with the remaining edges if a graph refuses the memory in spite of that.
        """
        self._contexts.clear()  # sessions without the allocator, none of which runs again
        options = self._target.session_options | ALLOCATOR_OPTION
        self._target = replace(self._target, session_options=options)
        self.memory = SharedMemory(edges, refused)

    def allocate(self, size_bytes: int) -> SharedPages:
        """Return new shared memory; a small session allocates it, which need not stay open.

        Raises:
            GraphError: The session does not open, or does not allocate.
        """
        assert self.memory is not None  # share_memory comes first
        shard = small_shard("self_test")
        graphs: list[PackedGraph] = [(shard, check_form(self, shard, 32, None), 32)]
        (session,) = self._open(self._stored(graphs), graphs, context_label(graphs))
        return self.memory.allocate(session, size_bytes)

    def machine_key(self) -> dict[str, Any]:
        """Return what the results of self-tests on this machine depend on."""
        return machine_key(self._target, self.soc_model)

    def package(self, contexts: Sequence[Sequence[ContextGraph]]) -> None:
        """State which graphs share a context; see :class:`heterollm.kernels.npu.ContextPackager`.

        Graphs that it does not name, such as those of a profiler, have contexts of their own.
        """
        if self.context_layers:
            for context in contexts:
                self._packages.update(dict.fromkeys((graph.place for graph in context), tuple(context)))

    @property
    def open_bytes(self) -> int:
        """Memory that the open contexts take, by their weights, inputs and outputs."""
        return self._contexts.open_bytes

    def keep_graphs(self, weights_key: str, folder: Path) -> None:
        """Keep graphs in a folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        self._folders.add(weights_key, folder)

    def stored_bytes(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> int:
        """Return the bytes of a graph in its folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        chosen = check_form(self, shard, length, form)
        return self._stored(self._context_of(shard, length, form, chosen)).size_bytes

    def build(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> BuiltGraph:
        """Put a graph into its folder; see :class:`heterollm.kernels.npu.GraphKeeper`.

        By default that is the cache's. Checks whether a context of one graph loads on this machine; one for a
        newer Hexagon than the emulated one does not. Contexts of several graphs are never loaded here.
        """
        chosen = check_form(self, shard, length, form)
        graphs = self._context_of(shard, length, form, chosen)
        stored, label = self._stored(graphs), context_label(graphs)
        with locked(stored.model):
            compiled = stored.problem() is not None
            if compiled:
                self._build(stored, graphs, label)
        if len(graphs) > 1:
            return BuiltGraph(stored.size_bytes, compiled, SHARED_REFUSAL)
        _, problem = self._load(stored, self._target, label)
        return BuiltGraph(stored.size_bytes, compiled, problem)

    def cpu_times_us(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> tuple[float, ...] | None:
        """Return the CPU time of each emulated run; see :class:`heterollm.kernels.npu.NpuBackend`.

        A real Hexagon returns None: its time is real.
        """
        if not self._target.emulator:
            return None
        if runs < 1:
            raise OptionError(f"CPU time is measured over at least one run, not {runs}.")
        chosen = check_form(self, shard, length, form, any_length=True)
        label = f"{shard.label} ({chosen}, {length} tokens)"
        stored = self._binary(shard, chosen, length)
        with graph_folder(label) as folder:
            model = stored.model
            if stored.problem() is not None:
                model = folder / "compiled.onnx"
                self._compile([(shard, chosen, length)], folder, [model], label)
            dtype = edge_dtype(chosen, self.activation_dtype)
            return emulated_cpu_us(model, self._target, shard, length, dtype, runs)

    def release(self, shard: GraphShard) -> None:
        """Drop the sessions of a shard; see :class:`heterollm.kernels.npu.NpuBackend`.

        Within :meth:`temporary_graphs` this deletes its graphs as well.
        """
        self._contexts.release(shard.key)
        for key in [key for key in self._removable if key[0] == shard.key]:
            self._removable.pop(key).remove()

    @contextlib.contextmanager
    def temporary_graphs(self) -> Iterator[None]:
        """Delete each graph that is built within this context when its shard is released, or at the end.

        The end also drops all sessions; no graph may run afterwards. The random weights of a profiling run
        would otherwise take gigabytes of the cache.

        Raises:
            CacheError: The cache folder cannot be written.
        """
        with temporary_graphs() as folder:
            self._temporary = folder
            try:
                yield
            finally:
                self._temporary = None
                self._removable.clear()
                self._contexts.clear()  # they map the files

    def versions(self) -> dict[str, str]:
        """Return the versions of ONNX Runtime, the provider and its SDK, and the SoC compiled for."""
        return {
            **qnn_versions(),
            "soc": f"{self.soc_model} (emulated)" if self._target.emulator else self.soc_model,
        }

    def close(self) -> None:
        """Drop all sessions, and the vote for clocks."""
        if self.power is not None:
            self.power.close()
        self._contexts.clear()

    def self_test(self) -> None:
        """Run one small graph against float64.

        Raises:
            DeviceError: The graph computes wrong numbers, or the chip is too old.
            GraphError: The graph does not compile or run.
        """
        soc = SOCS.get(self.soc_model)
        if soc is not None and soc.refusal:
            raise DeviceError(
                f"This NPU cannot be used: {soc.refusal}.",
                fix="Leave it out with `--npu-threads 0`. " + see("the-hexagon-takes-no-4-bit-weights"),
            )
        check_small_linear(self, "onnxruntime-qnn")

    def _context_of(
        self, shard: GraphShard, length: int, form: GraphForm | None, chosen: GraphForm
    ) -> list[PackedGraph]:
        """Return the graphs that share a graph's context, itself included."""
        if isinstance(shard, SharedShard):
            return [(shard, chosen, length)]
        rows = tuple([stop - start for start, stop in shard.row_ranges])
        experts = shard.experts if isinstance(shard, ExpertsShard) else ()
        place = shard.layer, shard.group, rows, experts
        found: dict[GraphIdentity, PackedGraph] = {}
        made: dict[Any, WeightShard] = {place: shard}
        for graph in self._packages.get((place, length, form), ()):
            own = made.get(graph.slice)
            if own is None:
                own = made[graph.slice] = graph.shard()
            if own.weights_key != shard.weights_key:  # another model on this backend
                continue
            other = check_form(self, own, graph.length, graph.form)
            found[own.key, other, graph.length] = own, other, graph.length
        # A compiler takes one set of options for all graphs of a context.
        integer = chosen in INTEGER_FORMS
        alike = [graph for graph in found.values() if (graph[1] in INTEGER_FORMS) is integer]
        return alike or [(shard, chosen, length)]

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
