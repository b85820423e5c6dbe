"""The NPU backend of ``snapdragon`` and ``emulator``: Qualcomm's HTP through onnxruntime-qnn, in float16.

Where :attr:`QnnNpu.context_layers` says so, graphs that :meth:`QnnNpu.package` names share one context, which
holds equal weights once. Such a binary compiles anywhere and crashes the x86 emulator that loads it, so that
a self-test in a child process decides (:mod:`heterollm.kernels.npu.qnn_sharing`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from heterollm.base import DeviceError, GraphError, OptionError, locked, see
from heterollm.kernels.npu.contexts import (
    ContextGraph,
    GraphIdentity,
    PackedGraph,
    SharingVerdict,
    context_label,
)
from heterollm.kernels.npu.forms import hexagon_forms
from heterollm.kernels.npu.graphs import graph_folder
from heterollm.kernels.npu.protocol import (
    INTEGER_FORMS,
    STANDARD_LENGTHS,
    BuiltGraph,
    GraphForm,
    TimeKind,
    check_form,
    edge_dtype,
)
from heterollm.kernels.npu.qnn_binaries import temporary_graphs
from heterollm.kernels.npu.qnn_cpu_time import emulated_cpu_us
from heterollm.kernels.npu.qnn_held import HEXAGON_BYTES, QnnContexts
from heterollm.kernels.npu.qnn_power import SESSION_OPTIONS, QnnPower
from heterollm.kernels.npu.qnn_runtime import NoRoomError, QnnTarget, qnn_available, qnn_versions
from heterollm.kernels.npu.qnn_sharing import kept_verdict, run_sharing_test, verdict_file
from heterollm.kernels.npu.qnn_socs import SOCS, this_soc
from heterollm.kernels.npu.self_test import check_small_linear
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.npu.shapes import GraphShape
from heterollm.kernels.npu.shards import ExpertsShard, GraphShard, SharedShard, WeightShard
from heterollm.kernels.npu.shared_memory import ALLOCATOR_OPTION, SharedMemory, SharedPages, SharingEdges
from heterollm.kernels.npu.small_shard import small_shard
from heterollm.kernels.ops import Power

logger = logging.getLogger(__name__)

DEFAULT_SOC_MODEL = "57"
"""Snapdragon 8 Gen 3 (HTP v75), which the emulator plays."""

EXPERTS_BYTES = HEXAGON_BYTES // 4
"""Most weights of one graph of experts. A graph is opened and closed as a whole, so the address space should
hold several. No other limit of a Hexagon is known; Apple's NPU refuses more than 1.2 GB (NPUMoE, 4.2)."""

SHARED_REFUSAL: Final = "a context with shared weights loads on a Hexagon only"


class QnnNpu(QnnContexts):
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
    graph_weight_bytes: int | None = EXPERTS_BYTES

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
        if emulator and soc_model is None:
            soc_model = DEFAULT_SOC_MODEL
        options = {
            "backend_type": "htp",
            "enable_htp_fp16_precision": "1",
            "htp_graph_finalization_optimization_mode": "3",
        }
        # The cache key names the chip, not the machine: graphs compiled elsewhere for this chip are the same.
        soc_model = soc_model or this_soc()
        if soc_model in SOCS:  # QNN asks for it with float16; nobody has seen what it does without
            options["soc_model"] = soc_model
        soc = SOCS.get(soc_model)
        limit = f"; {soc.refusal}" if soc is not None and soc.refusal else ""
        self.name = f"Hexagon {'emulator' if emulator else 'NPU'} (QNN HTP{limit})"
        self.time_kind: TimeKind = "emulated" if emulator else "real"
        target = QnnTarget(emulator, options, SESSION_OPTIONS[power])
        super().__init__(target, soc_model, compile_in_child=compile_in_child, context_layers=context_layers)
        self.power = None if power == "default" else QnnPower(target, power)

    @property
    def copies_by_length(self) -> bool:
        """Whether each standard length of a shard has its own copy of the weights."""
        return not self.context_layers

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        soc = SOCS.get(self.soc_model)
        if soc is None:
            return hexagon_forms(shape, length)
        return hexagon_forms(shape, length, takes_4_bits=soc.takes_4_bits) if soc.takes_float16 else ()

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

    def package(self, contexts: Sequence[Sequence[ContextGraph]]) -> None:
        """State which graphs share a context; see :class:`heterollm.kernels.npu.ContextPackager`.

        Graphs that it does not name, such as those of a profiler, have contexts of their own.
        """
        if self.context_layers:
            for context in contexts:
                self._packages.update(dict.fromkeys((graph.place for graph in context), tuple(context)))

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
