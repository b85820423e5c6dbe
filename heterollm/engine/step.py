"""A step of a pass: a prepared call that knows its operator, its layer, its processor and its buffers.

The compiler emits a pass as a list of steps; the engine runs the calls of that list. Whoever asks what a pass
does (the trace, the check of the buffers, ``heterollm plan --steps``) reads the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from heterollm.kernels.ops import OpSpec

__all__ = [
    "Action",
    "Buffer",
    "Call",
    "LinearWork",
    "Operator",
    "Processor",
    "Step",
    "Wait",
    "operator_name",
    "shard_name",
]

Call: TypeAlias = Callable[[], Any]

Processor: TypeAlias = Literal["gpu", "npu", "host"]

Operator: TypeAlias = Literal[
    "embedding",
    "norm",
    "qkv",
    "rope",
    "attention",
    "attention join",
    "o",
    "gate_up",
    "activation",
    "down",
    "ffn",
    "final norm",
    "head",
    "join",
    "soft cap",
    "rounding of inputs",
    "flag",
    "late write",
    "merged",
    "end of pass",
]
"""Groups of linears as a plan names them, and the operators between them. ``flag`` is the kernel that tells
the host how far the queue is; ``late write`` a delay of the check of the buffers; ``merged`` one launch of
several kernels, which :attr:`Step.merged` lists."""

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
]
"""How a step is carried out. The GPU runs kernels, the NPU graphs. The host marks the place in the queue that
a later ``wait`` waits for (``sent``: the mark is a kernel that was launched before), flushes the queue, waits
for all of it (``finish``), and takes mapped memory and gives it back."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that a step reads or writes, or a range of its bytes.

    Args:
        name: Its name: a slot of the pool, ``tokens``, ``step``, ``kv_cache``, or memory of the GPU's own.
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


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of the host for the GPU.

    Args:
        buffer: Name of the buffer that has been written when it ends.
        strategy: How it waits, as :mod:`heterollm.kernels.sync.fence` says.
    """

    buffer: str
    strategy: str


@dataclass(frozen=True, slots=True)
class LinearWork:
    """What a kernel or graph run of a linear layer computes: ``[m, k]`` times ``[n, k]`` transposed.

    Args:
        tokens: Tokens ``m``, padding included.
        columns: Inputs ``k``; of several linears, those of the first.
        rows: Output rows ``n`` that are computed.
        flops: Multiply-adds, counted as two each.
        weight_bytes: Bytes of weights that are read.
    """

    tokens: int
    columns: int
    rows: int
    flops: int
    weight_bytes: int

    @classmethod
    def of_rows(cls, spec: OpSpec, tokens: int, rows: int) -> LinearWork:
        """Return the work of so many rows of a group of linears."""
        columns = spec.columns
        size = spec.weight.weight_bytes(rows, columns)
        return cls(tokens, columns, rows, 2 * tokens * columns * rows, size)

    @classmethod
    def of_columns(cls, spec: OpSpec, tokens: int, columns: int) -> LinearWork:
        """Return the work of all rows of a group of linears along so many of their inputs."""
        size = spec.weight.weight_bytes(spec.rows, columns)
        return cls(tokens, columns, spec.rows, 2 * tokens * columns * spec.rows, size)

    @classmethod
    def of_block(cls, spec: OpSpec, tokens: int, width: int) -> LinearWork:
        """Return the work of a feed-forward block along so much of its intermediate width."""
        assert spec.then is not None
        first = cls.of_rows(spec, tokens, width * len(spec.members))
        second = cls.of_columns(spec.then, tokens, width)
        flops, size = first.flops + second.flops, first.weight_bytes + second.weight_bytes
        return cls(tokens, spec.columns, first.rows, flops, size)

    def __add__(self, other: LinearWork) -> LinearWork:
        flops, size = self.flops + other.flops, self.weight_bytes + other.weight_bytes
        return LinearWork(max(self.tokens, other.tokens), self.columns, self.rows + other.rows, flops, size)


def _not_run() -> None:
    raise AssertionError("the step is there to be read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a pass. Steps of the same pass compare equal, whoever compiled it.

    Args:
        operator: What it computes, or of a host's step, what it is done for.
        layer: Decoder layer; None outside of layers.
        tokens: Tokens, or of the head rows, that it is done for, padding included.
        processor: Where it runs.
        action: How it is carried out.
        label: What to call it in tables and errors, with the rows and tokens of a shard.
        reads: The buffers that it reads.
        writes: The buffers that it writes.
        wait: What it waits for; None where it does not wait for the GPU, or for all of the queue.
        work: What it computes of linear layers.
        merged: The steps that are one launch here; empty for all others.
        run: The prepared call. It is no part of the comparison.
    """

    operator: Operator
    layer: int | None
    tokens: int
    processor: Processor
    action: Action
    label: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    wait: Wait | None = None
    work: LinearWork | None = None
    merged: tuple[Step, ...] = ()
    run: Call = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""
        return operator_name(self.operator, self.layer)

    def touches(self, name: str) -> bool:
        """Whether the step reads or writes a buffer."""
        return any(buffer.name == name for buffer in (*self.reads, *self.writes))


NOT_RUN: Final[Call] = _not_run
"""The call of a step that runs within a merged launch, or whose graph was not built."""


def operator_name(operator: str, layer: int | None) -> str:
    """Return the name of an operator with its layer, such as ``3.qkv``; without it outside of layers."""
    return operator if layer is None else f"{layer}.{operator}"


def shard_name(name: str, spec: OpSpec, ranges: tuple[tuple[int, int], ...]) -> str:
    """Return the name of rows of a group: ``0.qkv`` for all of them, else with a range of each member."""
    if all(span == (0, member.rows) for span, member in zip(ranges, spec.members, strict=True)):
        return name
    cuts = [
        f"{member.name}[{start}:{stop}]"
        for (start, stop), member in zip(ranges, spec.members, strict=True)
        if start < stop
    ]
    return f"{name} {' '.join(cuts)}"
