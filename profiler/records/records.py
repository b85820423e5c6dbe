"""Records of a profile: one measurement each, filed under a key that identifies it.

Keys are frozen data of plain numbers and words, so that they sort, compare and read the same on every
platform. A failed measurement is a record too, with its error (design, section 8).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from heterollm.base import Count, Positive
from heterollm.kernels.ops import Group, OpSpec, WeightFormat

Processor = Literal["gpu", "npu"]
FIELD_NAMES: Final = {"processor": "part"}
"""Fields that have another name in files."""

ContentionBound = Literal["compute", "memory", "spill"]
"""The bound of a load; ``spill`` is that of an NPU with rows too long for its on-chip memory."""


SparseOperator = Literal[
    "score_codes", "scores", "score_estimate", "selection", "sparse_attention", "attention_graph"
]
"""Operators of sparse attention: codes of queries and keys, their scores on the NPU or on the GPU, the keys
that each block of queries keeps, and attention to these; and dense attention in one graph on the NPU."""


ExpertsOperator = Literal["graph", "products", "moves"]
"""Operators of a mixture of experts: a group in one graph on the NPU; the experts' networks on the GPU; and
the GPU's kernels around these, of router, choice, order, gathering and sum of rows."""


class LinearPoint(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """One shard of a group of linear layers in one pass, whose time the solver asks for.

    A shard of an ffn is a range of its intermediate width: those rows of gate and up, the activation, and the
    product with the matching columns of the down projection.

    Args:
        group: The group.
        member_rows: Output rows of each member that the processor computes; of an ffn those of gate and up,
            the width twice, or of up alone.
        columns: Inputs ``k``.
        tokens: Rows ``m`` that are computed, padding included.
        bits: Bits of a weight.
        block: Inputs that share a scale; 0 for float weights.
        symmetric: Whether zero is the middle code.
        integer_inputs: Whether inputs are rounded to int8 (``w4a8``).
        form: Graph form; empty on the GPU.
        streamed: Whether weights come from memory, as in a model larger than the caches, or from a cache.
        minimum: Whether blocks have float minimums.
    """

    group: Group
    member_rows: Annotated[tuple[Count, ...], Meta(min_length=1)]
    columns: Positive
    tokens: Positive
    bits: Literal[4, 8, 16, 32]
    block: Count
    symmetric: bool = True
    integer_inputs: bool = False
    form: str = ""
    streamed: bool = True
    minimum: bool = False

    @classmethod
    def of(
        cls,
        spec: OpSpec,
        tokens: int,
        *,
        member_rows: tuple[int, ...] | None = None,
        form: str = "",
        streamed: bool = True,
    ) -> LinearPoint:
        """Return the point of a model's group, or of some rows of its members."""
        weight = spec.weight
        return cls(
            spec.timed_group,
            spec.member_rows if member_rows is None else member_rows,
            spec.columns,
            tokens,
            weight.bits,
            weight.block,
            weight.symmetric,
            spec.integer_inputs,
            form,
            streamed,
            weight.minimum,
        )

    @property
    def is_ffn(self) -> bool:
        """Whether it is a shard of an ffn."""
        return self.group == "ffn"

    @property
    def rows(self) -> int:
        """Output rows ``n`` of all members together; of an ffn those of gate and up."""
        return sum(self.member_rows)

    @property
    def comparable(self) -> LinearPoint:
        """The shard itself; of an ffn without a gate, one that has a gate and as many weights."""
        if not self.is_ffn or len(self.member_rows) > 1:
            return self
        width = 2 * self.member_rows[0] // 3
        return replace(self, member_rows=(width, width))

    @property
    def outputs(self) -> int:
        """Values written for each token; an ffn writes as many as it reads."""
        return self.columns if self.is_ffn else self.rows

    @property
    def shape(self) -> str:
        """The weight in words: rows by inputs; of an ffn outputs by width by inputs."""
        if self.is_ffn:
            return f"{self.outputs} x {self.member_rows[0]} x {self.columns}"
        return f"{self.rows} x {self.columns}"

    @property
    def weight(self) -> WeightFormat:
        """The number format of the weights."""
        return WeightFormat(self.bits, self.block, self.symmetric, minimum=self.minimum)

    @property
    def flops(self) -> int:
        """Multiply-adds, counted as two each."""
        weights = self.rows * self.columns
        if self.is_ffn:
            weights += self.outputs * self.member_rows[0]
        return 2 * self.tokens * weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the pass reads."""
        size = self.weight.weight_bytes(self.rows, self.columns)
        if self.is_ffn:
            size += self.weight.weight_bytes(self.outputs, self.member_rows[0])
        return size


class LinearKey(
    Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True, rename=FIELD_NAMES
):
    """The time of a linear shard on one processor.

    Args:
        processor: The processor.
        point: The shard.
        code: Version of the code: hash of the kernel sources, or the graph builder's version.
    """

    processor: Processor
    point: LinearPoint
    code: str


class LayerKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of a glue operator, which runs on the GPU; sizes that it does not depend on are 0.

    ``values["submissions"]`` counts its kernels, where a pass of one token submits them one by one;
    ``values["ending_rows"]`` are the rows from which a linear layer before it computes it in such a pass.

    Args:
        operator: Its name: a form of an operator of :mod:`heterollm.kernels.operators`.
        tokens: Rows of the pass.
        context: Positions that attention reads.
        hidden: Size of the residual stream, or of the operator's rows.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        code: Hash of the kernel sources.
    """

    operator: str
    tokens: Count
    context: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    code: str


class SparseKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of an operator of sparse attention, for the last tokens of ``keys`` positions.

    Args:
        operator: Its name; ``scores`` and ``attention_graph`` run on the NPU, the others on the GPU.
        tokens: Tokens of the pass.
        keys: Positions that are estimated, those of the pass included.
        heads: Key heads of the launch.
        group: Query heads that share a key head.
        head_dim: Size of a head.
        keep: Share of the positions that each query head keeps; 0 where nothing depends on it.
        code: Hash of the kernel sources, or version of the graph builder.
    """

    operator: SparseOperator
    tokens: Positive
    keys: Positive
    heads: Positive
    group: Positive
    head_dim: Positive
    keep: Annotated[float, Meta(ge=0, le=1)]
    code: str


class ExpertsKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of an operator of a layer's mixture of experts.

    Args:
        operator: Its name; ``graph`` runs on the NPU, the others on the GPU.
        experts: Experts of the graph or of the launch; of ``moves`` those of a layer.
        tokens: Rows of each expert, the capacity of a graph; of ``moves`` the tokens of the pass.
        chosen: Experts that each token chooses; 0 where nothing depends on it.
        columns: Inputs of an expert.
        width: Rows of gate and of up each.
        bits: Bits of a weight.
        block: Inputs that share a scale; 0 for float weights.
        symmetric: Whether zero is the middle code.
        integer_inputs: Whether inputs are rounded to int8 (``w4a8``).
        form: Graph form; empty on the GPU.
        streamed: Whether weights come from memory, as in a model larger than the caches, or from a cache.
        code: Hash of the kernel sources, or version of the graph builder.
        minimum: Whether blocks have float minimums.
        gated: Whether there is a gate beside up.
    """

    operator: ExpertsOperator
    experts: Positive
    tokens: Positive
    chosen: Count
    columns: Positive
    width: Positive
    bits: Literal[4, 8, 16, 32]
    block: Count
    symmetric: bool
    integer_inputs: bool
    form: str
    streamed: bool
    code: str
    minimum: bool = False
    gated: bool = True

    @property
    def weight(self) -> WeightFormat:
        """The number format of the weights."""
        return WeightFormat(self.bits, self.block, self.symmetric, minimum=self.minimum)

    @property
    def linears(self) -> int:
        """Linears of an expert, each of as many weights."""
        return 2 + self.gated

    @property
    def flops(self) -> int:
        """Multiply-adds of the experts' networks, counted as two each; a bound for ``moves``."""
        return 2 * self.linears * self.experts * self.tokens * self.columns * self.width

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts' weights."""
        gate_up = self.weight.weight_bytes((self.linears - 1) * self.width, self.columns)
        return self.experts * (gate_up + self.weight.weight_bytes(self.columns, self.width))


class BandwidthKey(
    Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True, rename=FIELD_NAMES
):
    """The time of reading ``size_bytes`` of memory once on one processor; ``values["gbps"]`` is the rate.

    Args:
        processor: The reading processor.
        size_bytes: Size of the read memory.
        together: Whether the other processor was reading meanwhile.
    """

    processor: Processor
    size_bytes: Count
    together: bool


class ContentionKey(
    Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True, rename=FIELD_NAMES
):
    """The time of a processor's reference job while the other processor runs one of its own.

    ``values["slowdown"]`` is the time divided by the time alone.

    Args:
        processor: The processor whose job is timed.
        bound: The bound of that job.
        beside: The bound of the other processor's job.
    """

    processor: Processor
    bound: ContentionBound
    beside: ContentionBound


class LaunchKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The cost of a kernel launch.

    Args:
        measure: ``enqueue`` (the call), ``chained`` (a kernel more in a busy queue), ``idle`` (a kernel on an
            empty queue until it is done), ``npu_to_gpu`` (the same, right after an NPU graph returned).
    """

    measure: str


class FenceKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The delay between the end of GPU work and the return of the host's fence.

    ``values["processor_fraction"]`` is the processor time that waiting took, as a share of the wait.

    Args:
        strategy: How the host waits (:mod:`heterollm.kernels.sync.fence`).
        kernel_us: About how long the awaited kernel runs.
    """

    strategy: str
    kernel_us: Count


class CopyKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time to move or map memory.

    Args:
        method: ``write`` or ``read`` (copies), ``acquire`` or ``release`` (zero copy).
        size_bytes: Size of the memory.
    """

    method: str
    size_bytes: Count


class GraphKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The cost of an NPU graph: samples are loads; ``values`` has ``build_us`` and ``size_bytes``.

    Args:
        point: The shard; ``tokens`` is the length of the graph.
        code: Version of the graph builder.
    """

    point: LinearPoint
    code: str


class PowerKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """Average power in ``values["watts"]``.

    Args:
        source: The power source, such as ``rapl package-0``.
        load: ``idle``, ``gpu``, ``npu`` or ``both``.
    """

    source: str
    load: str


class DriftKey(
    Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True, rename=FIELD_NAMES
):
    """The reference operator of a processor, measured again through the run.

    Args:
        processor: The processor.
        run: Name of the run of the profiler.
        index: Number of the measurement, from 0.
    """

    processor: Processor
    run: str
    index: Count


class SweepKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of one weight on the NPU, for reports on the device: neither plans nor predictions read it.

    ``values["cpu_us"]`` is the CPU time of a run instead, where the NPU is emulated.

    Args:
        point: The weight, at any number of tokens.
        code: Version of the graph builder.
    """

    point: LinearPoint
    code: str


Key: TypeAlias = (
    LinearKey
    | LayerKey
    | SparseKey
    | ExpertsKey
    | BandwidthKey
    | ContentionKey
    | LaunchKey
    | FenceKey
    | CopyKey
    | GraphKey
    | PowerKey
    | DriftKey
    | SweepKey
)

KINDS: Final[dict[str, type[Key]]] = {
    "linear": LinearKey,
    "layer": LayerKey,
    "sparse": SparseKey,
    "experts": ExpertsKey,
    "bandwidth": BandwidthKey,
    "contention": ContentionKey,
    "launch": LaunchKey,
    "hand_over": FenceKey,
    "copy": CopyKey,
    "graph": GraphKey,
    "power": PowerKey,
    "drift": DriftKey,
    "sweep": SweepKey,
}
"""Every kind of key by its name in a profile file, in the order of the file."""


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement, sound or failed.

    Args:
        key: Key of the measurement.
        samples_us: Every timed run in microseconds; empty where it failed or has only values.
        warmup_us: Warm-up runs in microseconds, which do not count.
        values: Other numbers, by names that end in their unit.
        error: Reason of a failure, else empty.
        taken_s: Time of the measurement, in seconds since 1970.
        expected_us: Time that its neighbours explain, where the measured one lies far off it, also when
            measured again: the record is disturbed, and no plan counts on it. 0 where it is not.
    """

    key: Key
    samples_us: tuple[float, ...] = ()
    warmup_us: tuple[float, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    taken_s: float = field(default_factory=lambda: round(time.time(), 3))
    expected_us: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether it lies far off its neighbours."""
        return self.expected_us > 0.0

    @property
    def median_us(self) -> float:
        """Median of the samples; infinite where there are none."""
        return statistics.median(self.samples_us) if self.samples_us else math.inf

    @property
    def planned_us(self) -> float:
        """Time that plans count with: that which its neighbours explain, where it is disturbed."""
        return self.expected_us or self.median_us

    @property
    def failed(self) -> bool:
        """Whether it has an error in place of a measurement."""
        return bool(self.error)
