"""Operators of a pass with placements and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from heterollm.engine.step import Buffer, Operator, operator_name
from heterollm.kernels.gpu import DeviceMemory, NpuCodes, RoundedInputs, Segments, SharedArray
from heterollm.kernels.ops import OpSpec
from heterollm.solver import Placement

Memory: TypeAlias = "DeviceMemory | Buffer"
"""A buffer, or the memory of one."""


class HandedOver(Protocol):
    """An operator whose input the GPU hands over to the NPU."""

    @property
    def operator(self) -> Operator:
        """The operator's name."""

    @property
    def layer(self) -> int | None:
        """The decoder layer; None for the head."""

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""

    @property
    def npu_source(self) -> SharedArray:
        """The memory that the NPU reads."""

    @property
    def npu_target(self) -> SharedArray:
        """The memory that the NPU writes."""


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An operator of a pass with its placement and buffers.

    Args:
        spec: The group of linears, or the ffn operator.
        placement: The placement.
        source: Slot of the input.
        npu_output: Slot of the NPU's output, which it writes itself unless there are codes.
        gpu_output: Slot that the GPU writes.
        rounded: Buffers for the input's int8 codes; None without codes.
        codes: Codes of input and output, where the NPU computes in integers; None elsewhere.
        stream: The copy of the residual stream that the NPU reads beside the input; None elsewhere.
        stream_codes: Codes of that copy, likewise.
    """

    spec: OpSpec
    placement: Placement
    source: SharedArray
    npu_output: SharedArray
    gpu_output: DeviceMemory
    rounded: RoundedInputs | None
    codes: NpuCodes | None = None
    stream: SharedArray | None = None
    stream_codes: NpuCodes | None = None

    @property
    def npu_stream(self) -> SharedArray | None:
        """The memory of the residual stream that the NPU reads."""
        return self.stream if self.stream_codes is None else self.stream_codes.inputs

    @property
    def npu_source(self) -> SharedArray:
        """The memory that the NPU reads."""
        return self.source if self.codes is None else self.codes.inputs

    @property
    def npu_target(self) -> SharedArray:
        """The memory that the NPU writes."""
        return self.npu_output if self.codes is None else self.codes.outputs

    @property
    def input_codes(self) -> RoundedInputs | NpuCodes | None:
        """Buffers for codes of the input that the operator before writes beside floats; None without."""
        return self.rounded or self.codes

    @property
    def operator(self) -> Operator:
        """The operator's name."""
        return self.spec.group

    @property
    def layer(self) -> int | None:
        """The decoder layer; None for the head."""
        return None if self.spec.layer < 0 else self.spec.layer

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""
        return operator_name(self.operator, self.layer)


@dataclass(frozen=True, slots=True)
class SharedOp:
    """An operator without weights, whose graphs layers share, that the GPU hands over to the NPU."""

    operator: Operator
    layer: int
    npu_source: SharedArray
    npu_target: SharedArray

    @property
    def name(self) -> str:
        """The operator with its layer."""
        return operator_name(self.operator, self.layer)


@dataclass(frozen=True, slots=True)
class Delta:
    """Values that the next norm adds to the residual stream.

    Args:
        segments: Output of linears.
        bias: float32 ``[hidden]`` to add first; None without.
        post: Weights of the values' own norm, float32 ``[hidden]``; None without.
        gain: Factor on the sum.
    """

    segments: Segments
    bias: Any = None  # pyopencl is not typed
    post: Any = None
    gain: float = 1.0


class Begun(NamedTuple):
    """A block whose norm comes next.

    Args:
        codes: Buffers for codes of the norm's output; None without.
        emit: Appends the block's steps, and returns its output; None where the next stage computes it.
        keeps: Whether the output, and the NPU's codes of the norm, stay beside further blocks of the stage.
        reads: ``norm`` of the stage, ``stream`` for a copy of the residual stream in its place, or
            ``nothing`` where the block itself appends what it reads.
    """

    codes: RoundedInputs | NpuCodes | None
    emit: Callable[[], Delta | None]
    keeps: bool = True
    reads: Literal["norm", "stream", "nothing"] = "norm"


def codes_of(rounded: RoundedInputs | NpuCodes | None) -> tuple[DeviceMemory, ...]:
    """Return the slots of codes that a kernel writes beside its output, if there are any."""
    if isinstance(rounded, NpuCodes):
        return (rounded.inputs, rounded.factors, rounded.counts)
    memories = () if rounded is None else (rounded.codes, rounded.blocks)
    return tuple(memory for memory in memories if isinstance(memory, DeviceMemory))


def segments_of(value: Segments | None) -> tuple[DeviceMemory, ...]:
    """Return the slots of a linear's output, if there is one."""
    return () if value is None else (value.a, value.b)


def place_of(op: HandedOver | None) -> str:
    """Return where a fence stands, in words: before an operator, or for None at the end of the pass."""
    return "the end of the pass" if op is None else op.name
