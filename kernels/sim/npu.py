"""The NPU of a simulated SoC: graphs take modelled time on the virtual clock.

Without numerics a graph computes nothing; with numerics another backend computes it, whose time is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from heterollm.base import GIB, GraphError
from heterollm.kernels.npu import (
    INTEGER_FORMS,
    STANDARD_LENGTHS,
    AttentionShape,
    AttentionShard,
    ExpertsShape,
    ExpertsShard,
    FfnShard,
    GraphForm,
    GraphShape,
    GraphShard,
    GraphTensors,
    LinearShape,
    LinearShard,
    NamedArrays,
    NpuBackend,
    NpuGraph,
    ScoresShape,
    ScoresShard,
    ShardKey,
    TimeKind,
    check_arrays,
    check_form,
    edge_dtype,
    every_form,
    graph_tensors,
)
from heterollm.kernels.sim.clock import SimulatedClock
from heterollm.kernels.sim.jobs import SimulatedJob
from heterollm.kernels.sim.soc.npu_model import (
    AttentionWork,
    NpuWork,
    ScoresWork,
    SharedWork,
    npu_time,
    shared_time,
)
from heterollm.kernels.sim.soc.power_model import build_us
from heterollm.kernels.sim.soc.quantities import SocParameters

FLOAT_FORMS: Final[tuple[GraphForm, ...]] = ("weight_first", "activation_first")

AS_INTEGERS: Final = " as integers"
"""End of the name of a run of an integer graph."""

GRAPHS_IN_SPACE: Final = 4
"""Least number of the largest graphs of experts that the address space holds, as on a real Hexagon."""

BASELINE_FORMS: Final = frozenset(
    {"matmul_nbits", "matmul_nbits_int8", "activation_first", "weight_first", "static_int8"}
)
"""The graph forms that HeteroLLM has, and llm.npu."""


class SimulatedNpu:
    """The NPU of a simulated SoC.

    Args:
        soc: Parameters of the SoC.
        clock: Its clock, shared with the GPU.
        real: Backend that computes; None computes nothing.
        settle: Waits until the GPU has computed the input; called before each computation.
        lengths: Lengths of its graphs, ascending.
        every_form: Whether to offer more forms than HeteroLLM's.
    """

    time_kind: TimeKind = "simulated"
    row_alignment = 256
    graphs_by_length = True
    loaded_count = 0
    reuses_io = False
    unrolls_blocks = False

    def __init__(
        self,
        soc: SocParameters,
        clock: SimulatedClock,
        real: NpuBackend | None = None,
        settle: Callable[[], None] = lambda: None,
        *,
        lengths: tuple[int, ...] = STANDARD_LENGTHS,
        every_form: bool = True,
    ) -> None:
        self.name = f"simulated NPU of {soc.name}"
        self.standard_lengths = lengths
        self.copies_by_length = not soc.npu.shared_contexts
        self.io_by_graph = bool(soc.npu.io_by_graph)
        self.domain_bytes = int(soc.npu.address_space_gib * GIB) or None
        self.addressable_bytes = (self.domain_bytes or 0) * soc.npu.process_domains or None
        space_bytes = (self.domain_bytes or 0) // GRAPHS_IN_SPACE
        self.graph_weight_bytes = int(soc.npu.graph_gib * GIB) or space_bytes or None
        self.activation_dtype = np.dtype(np.float16) if real is None else real.activation_dtype
        self.compiled_count = 0
        self._soc = soc
        self._clock = clock
        self._real = real
        self._settle = settle
        self._every_form = every_form
        self._built: dict[ShardKey, set[tuple[int, GraphForm]]] = {}
        self._shapes: set[NpuWork | SharedWork] = set()

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        if self._soc.npu.float_weights and _has_codes(shape):
            return ()
        found = every_form(shape, length, FLOAT_FORMS)
        # Every Hexagon has graphs of 8 bits; llm.npu publishes their times on this chip.
        eight_bits = isinstance(shape, LinearShape) and shape.weight.scales == "tensor"
        if not (eight_bits or self._soc.npu.integer_graphs):
            found = tuple(form for form in found if form not in INTEGER_FORMS)
        return tuple(form for form in found if self._every_form or form in BASELINE_FORMS)

    def prepare(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> SimulatedGraph:
        """Return a shard's graph; building and opening a new one take virtual time.

        Where ``build.shared_graphs`` says so, as in the papers, layers share graphs of the same shape and
        bind their own weights.
        """
        chosen = check_form(self, shard, length, form, any_length=any_length)
        built = self._built.setdefault(shard.key, set())
        is_new = (length, chosen) not in built
        if is_new:
            self._check_count(shard)
            built.add((length, chosen))
            self.compiled_count += 1
            self._clock.work(self._soc.build.session_us, "open")
        work = npu_work(shard, length, chosen)
        if work not in self._shapes or (is_new and not self._soc.build.shared_graphs):
            self._shapes.add(work)
            weights = 0 if isinstance(work, SharedWork) else work.weights
            self._clock.work(build_us(self._soc, length, weights=weights), "build")
        real = None if self._real is None else self._real.prepare(shard, length, chosen, any_length=True)
        label = f"{shard.label}{AS_INTEGERS}" if chosen in INTEGER_FORMS else shard.label
        return SimulatedGraph(
            *(self._soc, self._clock, label, work),
            *(graph_tensors(shard, length, edge_dtype(chosen, self.activation_dtype)), real, self._settle),
        )

    def _check_count(self, shard: GraphShard) -> None:
        """Refuse a graph beyond those that can be open at once.

        Raises:
            GraphError: As many are open.
        """
        most = self._soc.npu.most_graphs
        if most and sum(map(len, self._built.values())) >= most:
            raise GraphError(
                f"{self.name} holds {most} graphs at once, and {shard.label} would be one more.",
                fix="Plan fewer graphs: larger groups of experts, or level gpu.",
            )

    def cpu_times_us(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> None:
        """Return None: the model gives times, and emulates nothing."""

    def release(self, shard: GraphShard) -> None:
        """Forget a shard; see :class:`heterollm.kernels.npu.NpuBackend`."""
        self._built.pop(shard.key, None)
        if self._real is not None:
            self._real.release(shard)

    def versions(self) -> dict[str, str]:
        """Return the parameters' digest and the offered forms, which determine times."""
        return {"soc": self._soc.digest(), "forms": "all" if self._every_form else "baseline"}

    def close(self) -> None:
        """Release all shards."""
        self._built.clear()
        if self._real is not None:
            self._real.close()


def _has_codes(shape: GraphShape) -> bool:
    """Return whether the weights of a graph are codes."""
    one = shape.one if isinstance(shape, ExpertsShape) else shape
    return not isinstance(one, ScoresShape | AttentionShape) and one.weight.quantized


class SimulatedGraph:
    """The graph of one shard at one length.

    Args:
        soc: Parameters of the SoC.
        clock: Its clock.
        label: Name of the shard.
        work: Work of a run.
        tensors: Its inputs and outputs.
        real: Graph that computes, or None.
        settle: Waits until the GPU has computed the input.
    """

    def __init__(
        self,
        soc: SocParameters,
        clock: SimulatedClock,
        label: str,
        work: NpuWork | SharedWork,
        tensors: GraphTensors,
        real: NpuGraph | None,
        settle: Callable[[], None],
    ) -> None:
        self.tensors = tensors
        self.work = work
        self._clock = clock
        self._label = label
        self._real = real
        self._settle = settle
        self._time = shared_time(soc, work) if isinstance(work, SharedWork) else npu_time(soc, work)

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        """Return a call that takes the modelled time; see :meth:`heterollm.kernels.npu.NpuGraph.bind`."""
        check_arrays(inputs, outputs, self.tensors, self._label)
        compute = None if self._real is None else self._real.bind(inputs, outputs)
        clock, settle, time, label = self._clock, self._settle, self._time, self._label
        arithmetic_bound = time.arithmetic_bound

        def call() -> None:
            if compute is not None:
                settle()
                compute()
            job = SimulatedJob(label, time.alone_us, time.dram_bytes, time.fixed_us, arithmetic_bound)
            job.copy_us = time.copy_us
            clock.run_npu(job)

        return call


def npu_work(shard: GraphShard, length: int, form: GraphForm) -> NpuWork | SharedWork:
    """Return the work of a run of a shard.

    Args:
        shard: The shard.
        length: Tokens, padding included.
        form: Graph form.
    """
    if isinstance(shard, ScoresShard):
        return ScoresWork(shard.heads, length, shard.keys, shard.head_dim)
    if isinstance(shard, AttentionShard):
        return AttentionWork(shard.heads, shard.kv_heads, length, shard.keys, shard.head_dim)
    weight = shard.format
    ffn = shard.parts[0] if isinstance(shard, ExpertsShard) else shard
    fused = ffn.fused if isinstance(ffn, FfnShard) else None
    return NpuWork(
        rows=shard.rows,
        columns=shard.columns,
        tokens=length,
        bits=weight.bits,
        block=weight.block,
        form=form,
        integer_inputs=shard.integer_inputs,
        width=ffn.width if isinstance(ffn, FfnShard) else 0,
        gated=not isinstance(ffn, FfnShard) or ffn.gated,
        experts=len(shard.experts) if isinstance(shard, ExpertsShard) else 1,
        first=0 if fused is None else fused.columns,
        normed=shard.shape.normed if isinstance(shard, LinearShard | FfnShard) else False,
    )
