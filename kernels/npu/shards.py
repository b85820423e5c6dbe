"""The NPU's shards of a layer, one graph each: linears, part of an ffn, experts, attention, its scores.

Linears, ffns and experts hold weights. Attention and scores have none: queries and keys are inputs of their
graph, so that one graph serves all layers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.formats import LARGEST_EXPONENT, LinearWeight, QuantizedTensor, weight_format
from heterollm.kernels.npu.ranges import FfnRanges, LinearRanges
from heterollm.kernels.npu.shapes import AttentionShape, ExpertsShape, FfnShape, LinearShape, ScoresShape
from heterollm.kernels.ops import SLOPES, Activation, Group, Slopes, WeightFormat

SCORES_CONTEXT_BYTES: Final = 100_000
"""About the size of a binary of scores: 58 to 161 KB for 192 to 4096 queries and up to 8192 keys."""

RANGE_KEYS: Final = 512
"""Keys of a range that a graph of attention computes at once."""

ATTENTION_CONTEXT_BYTES: Final = 100_000
"""About the size of a binary of attention for each range of keys."""

ShardKey: TypeAlias = tuple[str | int | float | WeightFormat | tuple[tuple[int, int], ...], ...]
"""Identity of a shard: equal keys mean equal numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamNorm:
    """An RMS norm of the residual stream.

    Args:
        weight: float32 ``[h]``.
        epsilon: Added to the mean square.
    """

    weight: NDArray[np.float32]
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class FusedOutput:
    """All that lies between attention and a feed-forward network: o, its sum with the stream, and a norm.

    Args:
        weight: ``[h, k]`` of o, whole.
        norm: The norm, whose output the network reads.
        is_added: Whether the output of o is added to that of the network, as it is where the NPU computes
            the whole network. Else the GPU computes o, too, since a graph hands its outputs over at its end.
    """

    weight: LinearWeight
    norm: StreamNorm
    is_added: bool

    @property
    def columns(self) -> int:
        """Inputs ``k`` of o."""
        return _shape(self.weight)[1]


@dataclass(frozen=True, slots=True, eq=False)
class LinearShard:
    """The NPU's output rows of one group of linears.

    Args:
        weight: ``[r, k]``, the rows of all members stacked in member order.
        layer: Decoder layer; -1 for the head.
        group: Name of the group.
        row_ranges: Rows ``[start, stop)`` taken of each member.
        weights_key: Content hash of the model's weights.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weights.
        ranges: Calibrated ranges, which integer forms need.
        norm: Norm of the input, which is the residual stream then; None without.

    Raises:
        GraphError: The ranges do not add up to the weight's rows.
    """

    weight: LinearWeight
    layer: int
    group: str
    row_ranges: tuple[tuple[int, int], ...]
    weights_key: str
    integer_inputs: bool = False
    ranges: LinearRanges | None = None
    norm: StreamNorm | None = None

    def __post_init__(self) -> None:
        stated = sum(stop - start for start, stop in self.row_ranges)
        if stated != self.rows or any(not 0 <= start <= stop for start, stop in self.row_ranges):
            raise GraphError(
                f"{self.label} has {self.rows} rows, but the ranges {self.row_ranges} name {stated}."
            )
        if self.rows < 1 or self.columns < 1:
            raise GraphError(f"{self.label} is empty: [{self.rows}, {self.columns}].")

    @property
    def rows(self) -> int:
        """Output rows ``r`` of all members together."""
        return _shape(self.weight)[0]

    @property
    def columns(self) -> int:
        """Inputs ``k``."""
        return _shape(self.weight)[1]

    @property
    def shape(self) -> LinearShape:
        """The shape of its graphs."""
        return LinearShape(self.format, self.columns, self.integer_inputs, self.norm is not None)

    @property
    def format(self) -> WeightFormat:
        """The number format."""
        return weight_format(self.weight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        return self.format.weight_bytes(self.rows, self.columns)

    @property
    def label(self) -> str:
        """Name of the shard in messages."""
        return f"{self.group} of layer {self.layer}" if self.layer >= 0 else self.group

    @property
    def key(self) -> ShardKey:
        """Identity of the shard."""
        identity = (self.weights_key, self.layer, self.group, self.row_ranges, self.columns, self.format)
        return (*identity, str(self.ranges))


@dataclass(frozen=True, slots=True, eq=False)
class FfnShard:
    """The NPU's shard of a feed-forward network, split along its intermediate width.

    ``y = down @ (activation(gate @ x + gate bias) * (up @ x + up bias))`` over ``c`` rows of gate and up and
    the matching columns of down: a partial sum of every output, without the bias of down. Without a gate it
    is ``down @ activation(up @ x + up bias)``.

    Args:
        gate_up: ``[2c, h]``, the rows of gate, then those of up; ``[c, h]`` without a gate.
        down: ``[h, c]``, the matching columns.
        activation: Activation of the gate, or of up without one.
        bias: float32 of each of these rows; or None.
        layer: Decoder layer.
        weights_key: Content hash of the model's weights.
        cut: Range ``[start, stop)`` of the intermediate width.
        integer_inputs: Whether the inputs of each linear are rounded to int8 for each block of its weights.
        ranges: Calibrated ranges, which integer forms need.
        slopes: Numbers of xIELU.
        fused: What makes the input of the output of attention and the residual stream; None for an input
            that is given.

    Raises:
        GraphError: The weights do not fit together or the cut, or differ in format.
    """

    gate_up: LinearWeight
    down: LinearWeight
    activation: Activation
    bias: NDArray[np.float32] | None
    layer: int
    weights_key: str
    cut: tuple[int, int]
    integer_inputs: bool = False
    ranges: FfnRanges | None = None
    slopes: Slopes = SLOPES
    fused: FusedOutput | None = None

    def __post_init__(self) -> None:
        start, stop = self.cut
        rows = _shape(self.gate_up)[0]
        if not 0 <= start < stop or rows not in (self.width, 2 * self.width) or self.columns < 1:
            raise GraphError(
                f"{self.label} cut at {self.cut} does not fit a gate and up of {_shape(self.gate_up)}."
            )
        if _shape(self.down)[1] != self.width or self.rows < 1:
            raise GraphError(f"{self.label} cut at {self.cut} does not fit a down of {_shape(self.down)}.")
        if weight_format(self.gate_up) != weight_format(self.down):
            raise GraphError(
                f"{self.label} has {weight_format(self.gate_up)} and {weight_format(self.down)} weights; one "
                f"graph takes one format."
            )
        if self.fused is not None and weight_format(self.fused.weight).layout != self.format.layout:
            raise GraphError(f"{self.label} has an o of {weight_format(self.fused.weight)} weights.")
        if self.bias is not None and self.bias.shape != (rows,):
            raise GraphError(f"{self.label} needs a bias of {rows} elements, not {self.bias.shape}.")

    @property
    def group(self) -> Group:
        """Name of the group."""
        return "ffn" if self.fused is None else "o_ffn"

    @property
    def rows(self) -> int:
        """Outputs ``h``."""
        return _shape(self.down)[0]

    @property
    def columns(self) -> int:
        """Inputs ``h``, those of the network itself."""
        return _shape(self.gate_up)[1]

    @property
    def width(self) -> int:
        """Rows ``c`` of the intermediate width."""
        return self.cut[1] - self.cut[0]

    @property
    def gated(self) -> bool:
        """Whether there is a gate beside up."""
        return _shape(self.gate_up)[0] > self.width

    @property
    def shape(self) -> FfnShape:
        """The shape of its graphs."""
        sizes = self.format, self.columns, self.width
        kind = self.activation, self.integer_inputs, self.gated
        return FfnShape(*sizes, *kind, normed=self.fused is not None)

    @property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """Rows ``[start, stop)`` taken of each of gate and up."""
        return (self.cut,) * (1 + self.gated)

    @property
    def format(self) -> WeightFormat:
        """The number format of all weights."""
        return weight_format(self.gate_up)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads."""
        weights = (self.gate_up, self.down, *([] if self.fused is None else [self.fused.weight]))
        return sum(self.format.weight_bytes(*_shape(weight)) for weight in weights)

    @property
    def label(self) -> str:
        """Name of the shard in messages."""
        return f"{self.group} of layer {self.layer}"

    @property
    def key(self) -> ShardKey:
        """Identity of the shard."""
        identity = (self.weights_key, self.layer, self.group, self.row_ranges, self.columns, self.format)
        added = self.fused is not None and self.fused.is_added
        return (*identity, self.activation, self.bias is not None, str(self.ranges), str(self.slopes), added)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsShard:
    """A group of experts of one layer, each with input rows of its own.

    The length of its graph is the capacity: the rows of each expert, which follow one another in the order of
    the experts. Rows do not mix, so that those past an expert's tokens may hold anything.

    Args:
        experts: The experts' numbers in their layer.
        parts: The whole feed-forward network of each.

    Raises:
        GraphError: There are no experts, one is given twice, or their shapes differ.
    """

    experts: tuple[int, ...]
    parts: tuple[FfnShard, ...]

    def __post_init__(self) -> None:
        alike = {(part.shape, part.cut, part.layer, part.weights_key, part.rows) for part in self.parts}
        if not self.parts or not len(set(self.experts)) == len(self.experts) == len(self.parts):
            raise GraphError(
                f"A graph of experts {self.experts} needs each once, with weights, not {len(self.parts)}."
            )
        if len(alike) != 1 or len({part.bias is None for part in self.parts}) != 1:
            raise GraphError(f"Experts {self.experts} differ in layer, shape or number format.")

    @property
    def layer(self) -> int:
        """Decoder layer."""
        return self.parts[0].layer

    @property
    def group(self) -> str:
        """Name of the group."""
        return "experts"

    @property
    def weights_key(self) -> str:
        """Content hash of the model's weights."""
        return self.parts[0].weights_key

    @property
    def rows(self) -> int:
        """Outputs ``h`` of each expert."""
        return self.parts[0].rows

    @property
    def columns(self) -> int:
        """Inputs ``h``."""
        return self.parts[0].columns

    @property
    def row_ranges(self) -> tuple[tuple[int, int], ...]:
        """Rows taken of gate and of up of each expert: all."""
        return self.parts[0].row_ranges

    @property
    def integer_inputs(self) -> bool:
        """Whether the inputs of each linear are rounded to int8 for each block of its weights."""
        return self.parts[0].integer_inputs

    @property
    def shape(self) -> ExpertsShape:
        """The shape of its graphs."""
        return ExpertsShape(self.parts[0].shape, len(self.parts))

    @property
    def format(self) -> WeightFormat:
        """The number format of all weights."""
        return self.parts[0].format

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads: those of all experts."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def label(self) -> str:
        """Name of the shard in messages."""
        return f"experts {', '.join(map(str, self.experts))} of layer {self.layer}"

    @property
    def key(self) -> ShardKey:
        """Identity of the shard."""
        return (*self.parts[0].key, "experts", *self.experts)


@dataclass(frozen=True, slots=True)
class ScoresShard:
    """Attention scores ``Q·Kᵀ`` of several key heads, before any scale or mask.

    All codes are uint8, 128 is that of 0. The code of a score is the integer product of the codes times
    ``2 ** -exponent``; scores past 127 steps saturate. The length of its graph is the number of queries of
    each key head: those of all query heads that share it, one head after the other.

    Args:
        heads: Key heads, each with queries of its own.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
        exponent: Of the scale: :class:`heterollm.kernels.formats.ScoreScale`.

    Raises:
        GraphError: A size is not positive, or the exponent not one of a scale.
    """

    heads: int
    keys: int
    head_dim: int
    exponent: int

    def __post_init__(self) -> None:
        if min(self.heads, self.keys, self.head_dim) < 1 or not 0 <= self.exponent <= LARGEST_EXPONENT:
            raise GraphError(
                f"{self.label} need positive sizes, not {self.keys} keys of {self.head_dim}, and an exponent "
                f"of 0 to {LARGEST_EXPONENT}, not {self.exponent}."
            )

    @property
    def shape(self) -> ScoresShape:
        """The shape of its graphs."""
        return ScoresShape(self.heads, self.keys, self.head_dim)

    @property
    def weight_bytes(self) -> int:
        """Bytes that its context takes beside inputs and outputs; there are no weights among them."""
        return SCORES_CONTEXT_BYTES

    @property
    def label(self) -> str:
        """Name of the shard in messages."""
        return f"scores of {self.heads} head{'s' * (self.heads > 1)}"

    @property
    def key(self) -> ShardKey:
        """Identity of the shard."""
        return ("scores", *astuple(self))


@dataclass(frozen=True, slots=True)
class AttentionShard:
    """Causal attention of all heads of a layer to keys and values that are inputs of its graph.

    The graph joins ranges of keys by running maxima and sums. Its length is the number of tokens; rows do not
    mix, so that those past the tokens of a pass may hold any finite numbers.

    Args:
        heads: Query heads, a multiple of the key heads.
        kv_heads: Key heads.
        keys: Keys of each key head, those past the last token of the pass included; hidden ones are finite.
        head_dim: Elements of a head.

    Raises:
        GraphError: A size is not positive, or query heads cannot share the key heads.
    """

    heads: int
    kv_heads: int
    keys: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1 or self.heads % self.kv_heads:
            raise GraphError(
                f"{self.label} needs positive sizes, not {self.keys} keys of {self.head_dim}, and query "
                f"heads that share {self.kv_heads} key heads."
            )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges of keys ``[start, stop)`` that the graph joins."""
        starts = range(0, self.keys, RANGE_KEYS)
        return tuple((start, min(start + RANGE_KEYS, self.keys)) for start in starts)

    @property
    def shape(self) -> AttentionShape:
        """The shape of its graphs."""
        return AttentionShape(self.heads, self.kv_heads, self.keys, self.head_dim)

    @property
    def weight_bytes(self) -> int:
        """Bytes that its context takes beside inputs and outputs; there are no weights among them."""
        return ATTENTION_CONTEXT_BYTES * len(self.ranges)

    @property
    def label(self) -> str:
        """Name of the shard in messages."""
        return f"attention of {self.heads} head{'s' * (self.heads > 1)}"

    @property
    def key(self) -> ShardKey:
        """Identity of the shard."""
        return ("attention", *astuple(self))


NpuShard: TypeAlias = LinearShard | FfnShard
"""The NPU's part of an operator that is split by rows or by its width."""

WeightShard: TypeAlias = NpuShard | ExpertsShard
"""The NPU's part of an operator with weights."""

SharedShard: TypeAlias = ScoresShard | AttentionShard
"""An operator without weights, whose graphs all layers share."""

GraphShard: TypeAlias = WeightShard | SharedShard
"""The shard that one graph of an NPU backend computes."""


def _shape(weight: LinearWeight) -> tuple[int, int]:
    if isinstance(weight, QuantizedTensor):
        return weight.rows, weight.columns
    return int(weight.shape[0]), int(weight.shape[1])
