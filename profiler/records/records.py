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

from heterollm.base import Count, Positive
from heterollm.kernels.ops import Group, OpSpec, WeightFormat

__all__ = [
    "KINDS",
    "BandwidthKey",
    "Bound",
    "ContentionKey",
    "CopyKey",
    "DriftKey",
    "GraphKey",
    "HandOverKey",
    "Key",
    "LaunchKey",
    "LayerKey",
    "LinearKey",
    "LinearPoint",
    "Part",
    "PowerKey",
    "Record",
    "SweepKey",
]

Part = Literal["gpu", "npu"]
Bound = Literal["compute", "memory", "spill"]
"""The bound of a load; ``spill`` is that of an NPU with rows too long for its on-chip memory."""


class LinearPoint(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """One slice of a group of linear layers in one pass: what the solver asks the time of.

    A slice of a feed-forward block (group ``ffn``) is some of its intermediate width: those rows of gate and
    up, the activation, and the product with the columns of the down projection that they meet.

    Args:
        group: Which group.
        member_rows: Output rows of each member that the part computes; of a block those of gate and up, the
            width twice.
        columns: Inputs ``k``.
        tokens: Rows ``m`` that are computed, padding included.
        bits: Bits of a weight.
        block: Inputs that share a scale; 0 for float weights.
        symmetric: Whether zero is the middle code.
        integer_inputs: Whether inputs are rounded to int8 (``w4a8``).
        form: Which of the equivalent NPU graphs; empty on the GPU.
        streamed: Whether weights come from memory, as in a model larger than the caches, or from a cache.
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
            spec.group,
            spec.member_rows if member_rows is None else member_rows,
            spec.columns,
            tokens,
            weight.bits,
            weight.block,
            weight.symmetric,
            spec.integer_inputs,
            form,
            streamed,
        )

    @property
    def is_block(self) -> bool:
        """Whether it is a slice of a whole feed-forward block."""
        return self.group == "ffn"

    @property
    def rows(self) -> int:
        """Output rows ``n`` of all members together; of a block those of gate and up."""
        return sum(self.member_rows)

    @property
    def outputs(self) -> int:
        """Values written for each token: of a block as many as it reads."""
        return self.columns if self.is_block else self.rows

    @property
    def shape(self) -> str:
        """The weight in words: rows by inputs, and of a block outputs by width by inputs."""
        if self.is_block:
            return f"{self.outputs} x {self.member_rows[0]} x {self.columns}"
        return f"{self.rows} x {self.columns}"

    @property
    def weight(self) -> WeightFormat:
        """The number format of the weights."""
        return WeightFormat(self.bits, self.block, self.symmetric)

    @property
    def flops(self) -> int:
        """Multiply-adds, counted as two each."""
        weights = self.rows * self.columns
        if self.is_block:
            weights += self.outputs * self.member_rows[0]
        return 2 * self.tokens * weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the pass reads."""
        size = self.weight.weight_bytes(self.rows, self.columns)
        if self.is_block:
            size += self.weight.weight_bytes(self.outputs, self.member_rows[0])
        return size


class LinearKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of a linear slice on one part.

    Args:
        part: Which part.
        point: What it computed.
        code: Version of what computed it: hash of the kernel sources, or the graph builder's version.
    """

    part: Part
    point: LinearPoint
    code: str


class LayerKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of another operator of a layer, which runs on the GPU; sizes that it has no use for are 0.

    ``values["submissions"]`` counts its kernels, where a pass of one token submits them one by one.

    Args:
        operator: Its name, as in :mod:`heterollm.profiler.measure.layers`.
        tokens: Rows of the pass.
        context: Positions that attention reads.
        hidden: Size of the residual stream, or of the rows that are worked on.
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


class BandwidthKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of reading ``size_bytes`` of memory once on one part; ``values["gbps"]`` is the rate.

    Args:
        part: Which part reads.
        size_bytes: How much.
        together: Whether the other part was reading meanwhile.
    """

    part: Part
    size_bytes: Count
    together: bool


class ContentionKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of a part's reference job while the other part runs one of its own.

    ``values["slowdown"]`` is the time divided by the time alone.

    Args:
        part: Whose job is timed.
        bound: What bounds that job.
        beside: What bounds the other part's job.
    """

    part: Part
    bound: Bound
    beside: Bound


class LaunchKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The cost of a kernel launch.

    Args:
        measure: ``enqueue`` (the call), ``chained`` (a kernel more in a busy queue), ``idle`` (a kernel on an
            empty queue until it is done), ``npu_to_gpu`` (the same, right after an NPU graph returned).
    """

    measure: str


class HandOverKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The delay between the end of GPU work and the host seeing it.

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
        size_bytes: How much.
    """

    method: str
    size_bytes: Count


class GraphKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The cost of getting an NPU graph: samples are loads; ``values`` has ``build_us`` and ``size_bytes``.

    Args:
        point: The slice; ``tokens`` is the length of the graph.
        code: Version of the graph builder.
    """

    point: LinearPoint
    code: str


class PowerKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """Average power in ``values["watts"]``.

    Args:
        source: What was read, such as ``rapl package-0``.
        load: ``idle``, ``gpu``, ``npu`` or ``both``.
    """

    source: str
    load: str


class DriftKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The reference operator of a part, measured again through the run.

    Args:
        part: Which part.
        run: Which run of the profiler, as in the profile's list.
        index: Which time, counted from 0.
    """

    part: Part
    run: str
    index: Count


class SweepKey(Struct, frozen=True, order=True, cache_hash=True, forbid_unknown_fields=True):
    """The time of one weight on the NPU, for reports on the device: neither plans nor predictions read it.

    ``values["cycles"]`` are its cycles instead, where the NPU is emulated.

    Args:
        point: What it computed, at any number of tokens.
        code: Version of the graph builder.
    """

    point: LinearPoint
    code: str


Key: TypeAlias = (
    LinearKey
    | LayerKey
    | BandwidthKey
    | ContentionKey
    | LaunchKey
    | HandOverKey
    | CopyKey
    | GraphKey
    | PowerKey
    | DriftKey
    | SweepKey
)

KINDS: Final[dict[str, type[Key]]] = {
    "linear": LinearKey,
    "layer": LayerKey,
    "bandwidth": BandwidthKey,
    "contention": ContentionKey,
    "launch": LaunchKey,
    "hand_over": HandOverKey,
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
        key: What was measured.
        samples_us: Every timed run in microseconds; empty where it failed or has only values.
        warmup_us: Runs before them that were thrown away.
        values: Other numbers, by names that end in their unit.
        error: Why it failed; empty where it did not.
        taken_s: When it was taken, in seconds since 1970.
    """

    key: Key
    samples_us: tuple[float, ...] = ()
    warmup_us: tuple[float, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    taken_s: float = field(default_factory=lambda: round(time.time(), 3))

    @property
    def median_us(self) -> float:
        """Median of the samples; infinite where there are none."""
        return statistics.median(self.samples_us) if self.samples_us else math.inf

    @property
    def failed(self) -> bool:
        """Whether there is nothing but an error."""
        return bool(self.error)
