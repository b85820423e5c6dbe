"""The steps of a pass: prepared calls with operator, layer, processor and buffers.

The compiler emits a pass as a list of steps, and the engine runs their calls. The trace, the check of buffers
and ``heterollm plan --steps`` read the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from heterollm.kernels.ops import OpSpec

Call: TypeAlias = Callable[[], Any]

StepProcessor: TypeAlias = Literal["gpu", "npu", "host"]

Operator: TypeAlias = str
"""Name of an operator in steps: of a group of linears, of those of ``kernels/operators``, or one of these."""

OWN_OPERATORS: Final = ("rounding of inputs", "flag", "late write", "merged", "end of pass")
"""Steps beside the operators: ``flag`` is a kernel that signals the progress of the queue to the host; ``late
write`` a delay from the check of buffers; ``merged`` one launch of the kernels that :attr:`Step.merged`
lists."""

Action: TypeAlias = Literal[
    "kernel",
    "graph",
    "mark",
    "sent",
    "flush",
    "wait",
    "finish",
    "acquire",
    "acquire_to_read",
    "release",
    "read_ahead",
    "fetch",
    "read_weights",
]
"""Actions of steps. The GPU runs kernels, the NPU graphs. The host marks the place in the queue that a later
``wait`` waits for (``sent``: a kernel that was launched before is the mark), flushes the queue, waits for the
whole queue (``finish``), and maps (``acquire``) and unmaps (``release``) memory. It asks the system for
the weights of outliers that are not in memory (``read_ahead``), and multiplies them (``fetch``) by a
kernel with the operator ``cold outliers``. Under a budget of experts it waits for the queue and reads chosen
experts that are not in memory (``read_weights``)."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that a step reads or writes, or a range of its bytes.

    Args:
        name: Name of a slot of the pool, ``tokens``, ``step``, ``kv_cache``, or of GPU memory.
        start: First byte.
        stop: Byte after the last; None for the end of the buffer.
    """

    name: str
    start: int = 0
    stop: int | None = None

    def __str__(self) -> str:
        if not self.start and self.stop is None:
            return self.name
        return f"{self.name}[{self.start}:{'' if self.stop is None else self.stop}]"


HANDED: Final = Buffer("next_input")
"""GPU memory for a normed input that a linear layer hands to the next one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the host for the GPU.

    Args:
        buffer: Name of the buffer whose writing ends the wait.
        strategy: The fence's strategy.
    """

    buffer: str
    strategy: str


@dataclass(frozen=True, slots=True)
class LinearWork:
    """The work of a kernel or graph run of a linear layer: ``[m, k]`` times ``[n, k]`` transposed.

    Args:
        tokens: Tokens ``m``, padding included.
        columns: Inputs ``k``; those of the first of several linears.
        rows: Output rows ``n``.
        flops: Operations; a multiply-add counts as two.
        weight_bytes: Bytes of weights to read.
    """

    tokens: int
    columns: int
    rows: int
    flops: int
    weight_bytes: int

    @classmethod
    def of_rows(cls, spec: OpSpec, tokens: int, rows: int) -> LinearWork:
        """Return the work of some rows of a group of linears."""
        columns = spec.columns
        size = spec.weight.weight_bytes(rows, columns)
        return cls(tokens, columns, rows, 2 * tokens * columns * rows, size)

    @classmethod
    def of_columns(cls, spec: OpSpec, tokens: int, columns: int) -> LinearWork:
        """Return the work of all rows of a group of linears along some of their inputs."""
        size = spec.weight.weight_bytes(spec.rows, columns)
        return cls(tokens, columns, spec.rows, 2 * tokens * columns * spec.rows, size)

    @classmethod
    def of_ffn(cls, spec: OpSpec, tokens: int, width: int) -> LinearWork:
        """Return the work of an ffn operator along a part of its intermediate width."""
        assert spec.then is not None
        first = cls.of_rows(spec, tokens, width * len(spec.members))
        others = [cls.of_columns(spec.then, tokens, width)]
        others += [] if spec.first is None else [cls.of_rows(spec.first, tokens, spec.first.rows)]
        flops, size = (
            sum(getattr(work, name) for work in (first, *others)) for name in ("flops", "weight_bytes")
        )
        return cls(tokens, spec.columns, first.rows, flops, size)

    def __add__(self, other: LinearWork) -> LinearWork:
        flops, size = self.flops + other.flops, self.weight_bytes + other.weight_bytes
        return LinearWork(max(self.tokens, other.tokens), self.columns, self.rows + other.rows, flops, size)


def _not_run() -> None:
    raise AssertionError("the step cannot run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a pass; the comparison ignores the call, so that two compilations of a pass are equal.

    Args:
        operator: The operator that the step computes, or that a step of the host belongs to.
        layer: Decoder layer; None outside of layers.
        tokens: Tokens, or rows of the head, padding included.
        lane: Number of the chunk among those in flight.
        processor: GPU, NPU or host.
        action: The action.
        label: Name in tables and errors, with the rows and tokens of a shard.
        reads: Buffers that the step reads.
        writes: Buffers that the step writes.
        wait: The wait, if the step waits for a part of the GPU's queue.
        work: The work of linear layers.
        merged: The steps of a merged launch; empty for all others.
        run: The prepared call.
    """

    operator: Operator
    layer: int | None
    tokens: int
    processor: StepProcessor
    action: Action
    label: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    wait: Wait | None = None
    work: LinearWork | None = None
    merged: tuple[Step, ...] = ()
    lane: int = 0
    run: Call = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""
        return operator_name(self.operator, self.layer)


NOT_RUN: Final[Call] = _not_run
"""The call of a step in a merged launch, or of one whose graph was not built."""


def operator_name(operator: str, layer: int | None) -> str:
    """Return the name of an operator, inside layers with its layer, such as ``3.qkv``."""
    return operator if layer is None else f"{layer}.{operator}"


def shard_name(name: str, spec: OpSpec, ranges: tuple[tuple[int, int], ...]) -> str:
    """Return the name of rows of a group: ``0.qkv`` for all rows, else with a range of each member."""
    pairs = list(zip(ranges, spec.members, strict=True))
    if all(rows == (0, member.rows) for rows, member in pairs):
        return name
    shards = [f"{member.name}[{start}:{stop}]" for (start, stop), member in pairs if start < stop]
    return f"{name} {' '.join(shards)}"
