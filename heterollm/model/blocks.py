"""Blocks beside attention, recurrent ones and networks, and the list of all kinds of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from heterollm.kernels.gpu import DeltaShape
from heterollm.kernels.ops import PARTS, Activation, GateClip, Group, Member, Routing
from heterollm.model.attention_blocks import AttentionBlock, LatentAttentionBlock
from heterollm.model.block import (
    EXPERT_FACTORS,
    INNER_NORM,
    NORM,
    ROUTER_BIAS,
    ROUTER_NORM,
    SLOPE_SHAPES,
    Block,
    GroupShape,
    Norm,
)
from heterollm.model.states import RecurrentSpec


@dataclass(frozen=True, slots=True)
class ShortConvBlock(Block):
    """A causal convolution of each channel over few tokens, with a gate before and one behind.

    Args:
        width: Channels.
        taps: Tokens that a convolution spans, its own included.
    """

    NAME: ClassVar[str] = "short_conv"
    GROUPS: ClassVar[tuple[Group, ...]] = ("conv_in", "conv_out")

    width: int
    taps: int

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places: b gates the inputs x, c the convolution."""
        members, conv = tuple(Member(name, self.width) for name in "bcx"), "short_conv"
        return (
            GroupShape("conv_in", members, hidden, "linear_input", "conv_in", (NORM,), conv),
            GroupShape(
                *("conv_out", (Member("out", hidden),), self.width, "mixer_output", "mixer_delta"),
                *((conv,), NORM),
            ),
        )

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the weights of each channel, that of a token itself last."""
        return {"taps": (self.width, 1, self.taps)}

    def state(self) -> RecurrentSpec:
        """Return the last inputs, ``[taps - 1, width]``."""
        return RecurrentSpec((self.taps - 1) * self.width)


@dataclass(frozen=True, slots=True)
class DeltaNetBlock(Block):
    """A gated delta net: a convolution of q, k and v, the delta rule, and a norm of its output with a gate.

    Args:
        shape: Its sizes.
        normed: Whether the output has a norm, in parts.
        gate_first: Whether that norm comes behind the gate.
    """

    NAME: ClassVar[str] = "delta_net"
    GROUPS: ClassVar[tuple[Group, ...]] = ("delta_in", "delta_out")
    OPERATORS: ClassVar[tuple[str, ...]] = ("delta_convolution", "delta_rule", "gated_norm")

    shape: DeltaShape
    normed: bool = True
    gate_first: bool = False

    @property
    def normed_parts(self) -> int:
        """Parts of the output that have a norm each: heads, or in a state space heads that share B and C."""
        return self.shape.value_heads if self.shape.recalls else self.shape.key_heads

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places; the few rows of b and a join the others."""
        members = tuple(Member(name, rows) for name, rows in self.shape.members.items())
        first, last = self.GROUPS
        return (
            GroupShape(first, members, hidden, "linear_input", first, (NORM,), self.OPERATORS[0]),
            GroupShape(
                *(last, (Member("out", hidden),), self.shape.value_columns, "mixer_output"),
                *("mixer_delta", self.OPERATORS, NORM),
            ),
        )

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the convolution's weights, logarithms of rates of decay, what a has added, and the norm."""
        heads, shape = (self.shape.value_heads,), self.shape
        return {
            "taps": (shape.channels, 1, shape.taps),
            "decay": heads,
            "decay_shift": heads,
            "gated_norm": (shape.value_dim,),
        }

    def state(self) -> RecurrentSpec:
        """Return the last inputs of the convolution, and the matrix of each value head."""
        return RecurrentSpec(self.shape.history + self.shape.matrix)


@dataclass(frozen=True, slots=True)
class MambaBlock(DeltaNetBlock):
    """Mamba-2: a convolution of x, B and C, a selective scan, and a gate of its output.

    It is a delta net that recalls nothing, in which C, B and x are q, k and v, and dt is a.

    Args:
        biased: Whether the convolution has biases.
    """

    NAME: ClassVar[str] = "mamba"
    GROUPS: ClassVar[tuple[Group, ...]] = ("mamba_in", "mamba_out")
    OPERATORS: ClassVar[tuple[str, ...]] = ("state_convolution", "selective_scan", "gated_norm")

    biased: bool = True

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return what a delta net has, biases of the convolution, and factors of values in the output."""
        heads, shape = (self.shape.value_heads,), self.shape
        own = {"taps": (shape.channels, 1, shape.taps), "decay": heads, "decay_shift": heads, "skip": heads}
        own |= {"taps_bias": (shape.channels,)} if self.biased else {}
        return own | ({"gated_norm": (shape.value_columns,)} if self.normed else {})


@dataclass(frozen=True, slots=True)
class FfnBlock(Block):
    """A feed-forward network.

    Args:
        width: Its intermediate width.
        activation: Activation of the gate, or of up without one.
        biased: Whether gate, up and down have biases.
        gated: Whether there is a gate beside up.
        token_gated: Whether the output of each token is multiplied by the sigmoid of a linear of its input.
        inner_norm: Whether what down reads has a norm.
        sparsity: Share of normal numbers below the cutoff that gates must exceed; 0 for none.
    """

    NAME: ClassVar[str] = "ffn"
    GROUPS: ClassVar[tuple[Group, ...]] = ("gate_up", "down")

    width: int
    activation: Activation
    biased: bool = False
    gated: bool = True
    token_gated: bool = False
    inner_norm: bool = False
    sparsity: float = 0.0

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places."""
        names = ("gate", "up") if self.gated else ("up",)
        members, down = tuple(Member(name, self.width) for name in names), (Member("down", hidden),)
        activation = "gated_activation"
        before = (*(("gate_cutoff",) if self.sparsity else ()), activation)
        return (
            GroupShape(
                "gate_up", members, hidden, "linear_input", "gate_up", (NORM,), before[0], self.biased
            ),
            GroupShape(
                *("down", down, self.width, "activated", "feed_forward_delta"),
                *((*before, *((INNER_NORM,) if self.inner_norm else ())), NORM, self.biased),
            ),
        )

    def norms(self) -> Mapping[Norm, int]:
        """Return the width of the norm of what down reads."""
        return {"network_inner": self.width} if self.inner_norm else {}

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the weights of the token's gate, if there is one, and the numbers of xIELU."""
        gate = {"token_gate": (1, hidden)} if self.token_gated else {}
        return {**gate, **(SLOPE_SHAPES if self.activation == "xielu" else {})}

    def timed(self) -> FfnBlock:
        """Return the block without biases."""
        return replace(self, biased=False)


@dataclass(frozen=True, slots=True)
class MixtureBlock(Block):
    """A mixture of networks, the experts.

    Its experts are no group that a plan splits; :func:`heterollm.model.expert_specs` has them.

    Args:
        routing: Rule by which the router chooses experts.
        width: Width of an expert.
        activation: Activation of the gates.
        bias: Shape of the tensor with the bias of the choice, or of the router's logits; empty for none.
        clip: Bounds of gate and up; None for none.
        biased: Whether gate, up and down of each expert have biases.
        router_normed: Whether the router reads a norm of the stream that no other linear reads.
        scaled: Whether each expert has a factor on its weight.
        weighs_inputs: Whether the weight of the only expert of a token multiplies its input, not its output.
        gated: Whether experts have a gate beside up.
    """

    NAME: ClassVar[str] = "mixture"
    GROUPS: ClassVar[tuple[Group, ...]] = ("experts",)

    routing: Routing
    width: int
    activation: Activation
    bias: tuple[int, ...] = ()
    clip: GateClip | None = None
    biased: bool = False
    router_normed: bool = False
    scaled: bool = False
    weighs_inputs: bool = False
    gated: bool = True

    def groups(self, _hidden: int) -> tuple[GroupShape, ...]:
        """Return no groups."""
        return ()

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return biases, weights of the router's norm, and factors, as far as it has them."""
        widths = {"gate_bias": self.width, "up_bias": self.width, "down_bias": hidden} if self.biased else {}
        own = (
            (ROUTER_BIAS, self.bias),
            (ROUTER_NORM, (hidden,) if self.router_normed else ()),
            (EXPERT_FACTORS, (self.routing.experts,) if self.scaled else ()),
            *((role, (self.routing.experts, width)) for role, width in widths.items()),
        )
        return {role: shape for role, shape in own if shape}


@dataclass(frozen=True, slots=True)
class LayerInputBlock(Block):
    """A network between two linears, multiplied by the layer's own embedding of the token.

    Args:
        width: Elements of the embedding for a layer.
        activation: Activation of the first linear.
    """

    NAME: ClassVar[str] = "layer_input"
    GROUPS: ClassVar[tuple[Group, ...]] = ("layer_gate", "layer_out")

    width: int
    activation: Activation

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places."""
        gate, out, activation = (Member("gate", self.width),), (Member("out", hidden),), "gated_activation"
        return (
            GroupShape("layer_gate", gate, hidden, "linear_input", "layer_gate", (NORM,), activation),
            GroupShape("layer_out", out, self.width, "activated", "layer_delta", (activation,), NORM),
        )


@dataclass(frozen=True, slots=True)
class LaurelBlock(Block):
    """Two linears of low rank with a norm behind, added to their input (Laurel).

    Only the GPU computes them, since they are too small to hand over.

    Args:
        width: Width of the residual stream.
        rank: Width between the linears.
    """

    NAME: ClassVar[str] = "laurel"
    GROUPS: ClassVar[tuple[Group, ...]] = ()

    width: int
    rank: int

    def groups(self, _hidden: int) -> tuple[GroupShape, ...]:
        """Return no groups."""
        return ()

    def norms(self) -> Mapping[Norm, int]:
        """Return the width of the norm of the output."""
        return {"laurel_output": self.width}

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the weights of both linears."""
        return {"laurel_left": (self.rank, self.width), "laurel_right": (self.width, self.rank)}


BLOCKS: Final = (
    *(AttentionBlock, LatentAttentionBlock, ShortConvBlock, DeltaNetBlock, MambaBlock),
    *(FfnBlock, LayerInputBlock, LaurelBlock, MixtureBlock),
)
LAYER_GROUPS: Final = tuple(group for kind in BLOCKS for group in kind.GROUPS)
"""The groups of linears that a layer may have."""

ALL_GROUPS: Final = (*LAYER_GROUPS, "head", *PARTS)
"""All groups, in the order of reports."""
