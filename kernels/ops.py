"""The nouns that model, profiler, solver and executor share.

A *group* is a set of linear layers that read the same input and run as one operator: ``qkv``, ``o``,
``gate_up``, ``down``, ``head``. Shapes are ``m`` tokens × ``k`` inputs × ``n`` outputs; a weight is
``[n, k]``, output rows first. A *block* group (``ffn``) is two such groups and what lies between them, cut as
a whole along the width in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct

__all__ = [
    "GROUPS",
    "Activation",
    "Group",
    "Join",
    "Member",
    "OpSpec",
    "Phase",
    "Precision",
    "WeightFormat",
    "feed_forward_block",
    "feed_forward_blocks",
]

Precision = Literal["w4a16", "w4a8", "fp16"]
Phase = Literal["prefill", "decode"]
Group = Literal["qkv", "o", "gate_up", "down", "head", "ffn"]
Join = Literal["concatenate", "sum"]
Activation = Literal["silu", "gelu_tanh"]
"""Of the gate; ``gelu_tanh`` is GELU by its tanh formula."""

GROUPS: tuple[Group, ...] = ("qkv", "o", "gate_up", "down", "head")
"""The groups of linears in the order in which a token meets them; ``ffn`` stands for two of them."""


class WeightFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """How the numbers of one linear weight are stored.

    Args:
        bits: 4 or 8 for block-quantised weights, 16 or 32 for floats.
        block: Inputs that share one scale (a power of two of at least 16); 0 for floats.
        symmetric: Whether zero is the middle code rather than stored per block; true for floats.
    """

    bits: Literal[4, 8, 16, 32]
    block: int = 0
    symmetric: bool = True

    @property
    def quantized(self) -> bool:
        """Whether the weight is block-quantised."""
        return self.bits <= 8

    def weight_bytes(self, rows: int, columns: int) -> int:
        """Return the size in bytes of a ``[rows, columns]`` weight with FP16 scales."""
        size = rows * columns * self.bits // 8
        if self.quantized:
            blocks = rows * (columns // self.block)
            size += 2 * blocks + (0 if self.symmetric else blocks * self.bits // 8)
        return size

    def __str__(self) -> str:
        if not self.quantized:
            return f"f{self.bits}"
        return f"int{self.bits} block {self.block}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True, slots=True)
class Member:
    """One linear layer of a group: its name (``q``, ``gate``, …) and its output rows."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One group of linear layers, as the model lists it.

    Args:
        group: Which group.
        layer: Decoder layer, counted from 0; -1 for the head.
        members: The linears in the order in which their rows are stacked.
        columns: Inputs ``k`` that all members read.
        weight: Number format of all members.
        join: How the parts of a cut come together.
        source: Name of the value read.
        target: Name of the value written.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weights (``w4a8``).
        then: Of a block group, the linear that reads what its members make; ``members`` are then cut rows
            of the width in the middle, and the outputs of the parts are summed.
    """

    group: Group
    layer: int
    members: tuple[Member, ...]
    columns: int
    weight: WeightFormat
    source: str
    target: str
    join: Join = "concatenate"
    integer_inputs: bool = False
    then: OpSpec | None = None

    @property
    def rows(self) -> int:
        """Output rows ``n`` of all members together."""
        return sum(member.rows for member in self.members)

    @property
    def member_rows(self) -> tuple[int, ...]:
        """Output rows of each member."""
        return tuple([member.rows for member in self.members])

    def flops(self, tokens: int) -> int:
        """Return the multiply-adds of one pass over ``tokens`` tokens, counted as two each."""
        own = 2 * tokens * self.rows * self.columns
        return own if self.then is None else own + self.then.flops(tokens)

    def weight_bytes(self) -> int:
        """Return the bytes of weights that one pass reads."""
        return self.slice_bytes(self.member_rows)

    def slice_bytes(self, member_rows: tuple[int, ...]) -> int:
        """Return the bytes of weights of some rows of each member, and of what a block does with them."""
        own = self.weight.weight_bytes(sum(member_rows), self.columns)
        if self.then is None:
            return own
        return own + self.then.weight.weight_bytes(self.then.rows, member_rows[0])


def feed_forward_block(gate_up: OpSpec, down: OpSpec) -> OpSpec | None:
    """Return a layer's feed-forward network as one group, cut along its intermediate width.

    Each part computes its rows of gate and up, the activation of those, and the product with the columns of
    ``down`` that they meet: a partial sum of all outputs.

    Args:
        gate_up: The gate and up projections.
        down: The projection that follows.

    Returns:
        The group; None where the two have different number formats, which one graph form does not name.
    """
    if gate_up.weight != down.weight or gate_up.integer_inputs != down.integer_inputs:
        return None
    return replace(gate_up, group="ffn", target=down.target, join="sum", then=down)


def feed_forward_blocks(specs: Iterable[OpSpec]) -> tuple[OpSpec, ...]:
    """Return the blocks of the layers that have one, from all groups of linears of a model."""
    layers: dict[int, dict[Group, OpSpec]] = {}
    for spec in specs:
        layers.setdefault(spec.layer, {})[spec.group] = spec
    found = (
        feed_forward_block(groups["gate_up"], groups["down"])
        for groups in layers.values()
        if "gate_up" in groups and "down" in groups
    )
    return tuple(block for block in found if block is not None)
