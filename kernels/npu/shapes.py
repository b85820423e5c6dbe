"""Shapes of NPU graphs: one record for each kind of operator, by which a backend states the legal forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from heterollm.kernels.ops import Activation, OpSpec, WeightFormat


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Linear layers.

    Args:
        weight: Number format of the weights.
        columns: Inputs ``k``.
        integer_inputs: Whether the inputs must be rounded to int8 for each block of the weights.
        normed: Whether the graph norms its input, the residual stream.
    """

    weight: WeightFormat
    columns: int
    integer_inputs: bool = False
    normed: bool = False

    def __str__(self) -> str:
        return _weights(self.weight, self.integer_inputs)


@dataclass(frozen=True, slots=True)
class FfnShape:
    """Part of a feed-forward network.

    Args:
        weight: Number format of the weights.
        columns: Inputs ``h``.
        width: Rows ``c`` of the intermediate width.
        activation: Activation of the gate, or of up without one.
        integer_inputs: Whether the inputs of each linear must be rounded to int8 for each block of its
            weights.
        gated: Whether there is a gate beside up.
        normed: Whether the graph makes the network's input: o, its sum with the residual stream, and a norm.
    """

    weight: WeightFormat
    columns: int
    width: int
    activation: Activation
    integer_inputs: bool = False
    gated: bool = True
    normed: bool = False

    @classmethod
    def of(cls, spec: OpSpec, width: int, activation: Activation) -> FfnShape:
        """Return the shape of so many rows of each member of a group with a down projection."""
        gated = len(spec.members) > 1
        normed = spec.first is not None
        return cls(spec.weight, spec.columns, width, activation, spec.integer_inputs, gated, normed)

    def __str__(self) -> str:
        return _weights(self.weight, self.integer_inputs)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A group of experts of equal shape.

    Args:
        one: Shape of one expert.
        experts: Number of experts.
    """

    one: FfnShape
    experts: int

    def __str__(self) -> str:
        return str(self.one)


@dataclass(frozen=True, slots=True)
class ScoresShape:
    """Attention scores, in codes of 8 bits.

    Args:
        heads: Heads, each with queries and keys of its own.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
    """

    heads: int
    keys: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.keys} keys of {self.head_dim} codes"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Causal attention.

    Args:
        heads: Query heads.
        kv_heads: Key heads.
        keys: Keys of each key head.
        head_dim: Elements of a head.
    """

    heads: int
    kv_heads: int
    keys: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.keys} keys of {self.head_dim} elements"


WeightShape: TypeAlias = LinearShape | FfnShape
GraphShape: TypeAlias = WeightShape | ExpertsShape | ScoresShape | AttentionShape


def _weights(weight: WeightFormat, integer_inputs: bool) -> str:
    return f"{weight} weights{' and int8 activations' if integer_inputs else ''}"
