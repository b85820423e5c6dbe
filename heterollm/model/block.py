"""A block of a decoder layer: its groups of linears, and the names of its norms and other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Protocol

from heterollm.kernels.ops import Group, Member
from heterollm.model.states import StateSpec

Norm = Literal[
    "attention",
    "feed_forward",
    "attention_output",
    "feed_forward_output",
    "layer_input_output",
    "laurel_output",
    "attention_inner",
    "network_inner",
    "network",
    "network_output",
    "experts",
    "experts_output",
    "query_head",
    "key_head",
]
"""Norms of a layer: of inputs and outputs of its stages, of single blocks, and of the heads of q and k."""

NORM: Final = "rms_norm"
"""The norm before each block, by its name in profiles."""

INNER_NORM: Final = "inner_norm"
"""The norm of what the last linears of a block read, likewise."""

INNER_NORMS: Final[tuple[Norm, ...]] = ("attention_inner", "network_inner", "laurel_output")
"""Norms of what the last linears of a block read, or of their output alone."""

STREAM_MIXING: Final = "stream_mixing"
"""The prediction or correction of several streams, by its name in profiles."""

LAYER_SCALE: Final = "scale"
"""Role of the factor of a layer."""

ROUTER_BIAS, ROUTER_NORM, EXPERT_FACTORS = "router_bias", "router_norm", "expert_factors"
"""Roles of a mixture's tensors: the bias of the choice, the weights of the router's norm, times the root of
their number, and a factor of each expert."""

STREAM_ROUTER, STREAM_ROUTER_NORM, STREAM_SCALE = "stream_router", "stream_router_norm", "stream_scale"
STREAM_PREDICTION, STREAM_CORRECTION = "stream_prediction", "stream_correction"
"""Roles of the tensors that mix several streams: the router and the norm before it, a factor on what the
layer's own embedding meets, and the coefficients of prediction and correction."""

SLOPE_SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "rising": (1,),
    "falling": (1,),
    "linear": (),
    "largest": (),
}
"""Shapes of the tensors with the numbers of xIELU, two of which are behind a softplus, by role."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group of linears of a block, without layer and number format; the fields are those of an operator.

    Args:
        group: Its name; a layer has at most one of a name.
        members: The linears in the order of their stacked rows.
        columns: Inputs that all members read.
        source: Slot of the input.
        target: Name of the value written.
        before: The operators that lead to it from the group before, or from the stream.
        reader: The operator that reads the output.
        biased: Whether the members have biases.
    """

    group: Group
    members: tuple[Member, ...]
    columns: int
    source: str
    target: str
    before: tuple[str, ...]
    reader: str
    biased: bool = False


class Block(Protocol):
    """A part of a layer: its linears, its other tensors, and numbers that decide what it computes."""

    NAME: ClassVar[str]
    GROUPS: ClassVar[tuple[Group, ...]]
    """Names of all its groups of linears in the order of a pass; no other kind of block has one of them."""

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places, in order, at a width of the residual stream."""

    def norms(self) -> Mapping[Norm, int]:
        """Return the widths of norms inside the block."""
        return {}

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of its other tensors, which stay float32, by role."""
        return {}

    def state(self) -> StateSpec | None:
        """Return the state that a session keeps for the block; None for none."""
        return None

    def timed(self) -> Block:
        """Return the block without what no time of an operator depends on."""
        return self
