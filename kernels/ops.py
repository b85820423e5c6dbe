"""The nouns that model, profiler, solver and executor share.

A *group* is a set of linear layers that read the same input and run as one operator: ``qkv``, ``o``,
``gate_up``, ``down``, ``head``. Shapes are ``m`` tokens × ``k`` inputs × ``n`` outputs; a weight is
``[n, k]``, output rows first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["GROUPS", "Activation", "Group", "Join", "Member", "OpSpec", "Phase", "Precision", "WeightFormat"]

Precision = Literal["w4a16", "w4a8", "fp16"]
Phase = Literal["prefill", "decode"]
Group = Literal["qkv", "o", "gate_up", "down", "head"]
Join = Literal["concatenate", "sum"]
Activation = Literal["silu", "gelu_tanh"]
"""Of the gate; ``gelu_tanh`` is GELU by its tanh formula."""

GROUPS: tuple[Group, ...] = ("qkv", "o", "gate_up", "down", "head")
"""The groups in the order in which a token meets them."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
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

    @property
    def rows(self) -> int:
        """Output rows ``n`` of all members together."""
        return sum(member.rows for member in self.members)

    @property
    def member_rows(self) -> tuple[int, ...]:
        """Output rows of each member."""
        return tuple(member.rows for member in self.members)

    def flops(self, tokens: int) -> int:
        """Return the multiply-adds of one pass over ``tokens`` tokens, counted as two each."""
        return 2 * tokens * self.rows * self.columns

    def weight_bytes(self) -> int:
        """Return the bytes of weights that one pass reads."""
        return self.weight.weight_bytes(self.rows, self.columns)
