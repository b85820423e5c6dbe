"""The layers of a decoder as data: blocks with their linears, and what decides their values and times.

A layer is a row of stages, each of which adds the outputs of its blocks to the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal, NamedTuple, Protocol, TypeVar

from heterollm.kernels.gpu import DeltaShape
from heterollm.kernels.ops import PARTS, Activation, GateClip, Group, Member, Routing
from heterollm.model.rope import QueryGrowth, RopeConfig
from heterollm.model.states import KvSpec, RecurrentSpec, StateSpec

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


@dataclass(frozen=True, slots=True)
class AttentionBlock(Block):
    """Attention to all positions, or to those of a window.

    Args:
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Width of one head (even).
        window: Positions that a token attends to, including its own; 0 for all.
        chunked: Whether these are the positions of its chunk, of ``window`` each, up to its own.
        rope: Rotary position embedding; None without.
        rotary_dim: Elements of a head that RoPE rotates, even.
        scale: Factor on the scores.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the output has a bias.
        head_norms: Whether each head of q and k has a norm, before RoPE unless it comes last.
        joint_head_norms: Whether that norm spans all heads of q, and all of k.
        norms_last: Whether the norms of heads come behind RoPE.
        query_growth: Growth of queries with the position; None without.
        qkv_limit: Magnitude that bounds q, k and v after the norm; 0 for none.
        gated: Whether the output is multiplied by the sigmoid of a fourth member beside q, k and v.
        gates_heads: Whether that member has one row for each head.
        value_norms: Whether each head of v has a norm without weights.
        values_are_keys: Whether the linear of k is that of v, too.
        kv_layer: The layer before whose keys and values it reads, in place of own ones; None for own ones.
        sinks: Whether each head has one more score, a weight of the model, whose value is zero.
        inner_norm: Whether the output has a norm before its linear.
    """

    NAME: ClassVar[str] = "attention"
    GROUPS: ClassVar[tuple[Group, ...]] = ("qkv", "o")

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope: RopeConfig | None
    rotary_dim: int
    scale: float
    soft_cap: float = 0.0
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False
    joint_head_norms: bool = False
    norms_last: bool = False
    query_growth: QueryGrowth | None = None
    qkv_limit: float = 0.0
    gated: bool = False
    gates_heads: bool = False
    value_norms: bool = False
    values_are_keys: bool = False
    chunked: bool = False
    kv_layer: int | None = None
    sinks: bool = False
    inner_norm: bool = False

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places; without own keys and values one of q alone."""
        rows, key_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        names = () if self.kv_layer is not None else ("k",) if self.values_are_keys else ("k", "v")
        own = tuple(Member(name, key_rows) for name in names)
        gate = (Member("gate", self.heads if self.gates_heads else rows),) if self.gated else ()
        members = (Member("q", rows), *own, *gate)
        rope, gates = "rope_and_store", ("output_gate",) if self.gated else ()
        ends = (*gates, *((INNER_NORM,) if self.inner_norm else ()))
        return (
            GroupShape(
                *("qkv", members, hidden, "linear_input", "qkv"),
                *((NORM,), rope, self.qkv_bias),
            ),
            GroupShape(
                *("o", (Member("o", hidden),), rows, "attention_output", "attention_delta"),
                *((rope, "attention", *ends), NORM, self.o_bias),
            ),
        )

    @property
    def turns_plainly(self) -> bool:
        """Whether RoPE and norms of each head are all that happens to q and k, and nothing to v."""
        q_and_k = self.joint_head_norms, self.norms_last, self.query_growth, self.qkv_limit
        others = self.gated, self.value_norms, self.values_are_keys, self.kv_layer is not None
        return not any((*q_and_k, *others))

    def norms(self) -> Mapping[Norm, int]:
        """Return the widths of the norms of q and k, and of that of the output."""
        inner: dict[Norm, int] = {"attention_inner": self.heads * self.head_dim} if self.inner_norm else {}
        return {**self.norms_of_heads(), **inner}

    def norms_of_heads(self) -> Mapping[Norm, int]:
        """Return the widths of the norms of q and k."""
        if not self.head_norms:
            return {}
        queries, keys = (self.heads, self.kv_heads) if self.joint_head_norms else (1, 1)
        own: dict[Norm, int] = {"query_head": queries * self.head_dim}
        return own if self.kv_layer is not None else own | {"key_head": keys * self.head_dim}

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the sinks, if there are some."""
        return {"sinks": (self.heads,)} if self.sinks else {}

    def state(self) -> KvSpec | None:
        """Return the keys and values, if they are its own."""
        if self.kv_layer is not None:
            return None
        return KvSpec(self.kv_heads, self.head_dim, self.window)

    def timed(self) -> AttentionBlock:
        """Return the block without window, RoPE, biases, and the number of the layer of its keys."""
        kv_layer = None if self.kv_layer is None else 0
        plain = replace(self, window=0, chunked=False, rope=None, query_growth=None, kv_layer=kv_layer)
        return replace(plain, qkv_bias=False, o_bias=False)


@dataclass(frozen=True, slots=True)
class LatentAttentionBlock(AttentionBlock):
    """Attention to latent vectors of tokens, one for all heads (MLA), with a rotated part behind each.

    Its only key head is a latent vector and that part, ``head_dim`` in all, and its value the vector: queries
    take on the weights that would make keys of the vector, and outputs those that make values.

    Args:
        plain_dim: Elements of a query without rotation, before they are multiplied.
        value_dim: Elements of a head's value.
        query_rank: Elements of a token's vector from which queries are made, behind a norm; 0 for the stream.
        interleaved: Whether the checkpoint rotates neighbouring elements.
    """

    NAME: ClassVar[str] = "latent_attention"
    GROUPS: ClassVar[tuple[Group, ...]] = ("latent_in", "latent_query", "latent_out")

    plain_dim: int = 0
    value_dim: int = 0
    query_rank: int = 0
    interleaved: bool = True

    @property
    def latent_dim(self) -> int:
        """Elements of a latent vector."""
        return self.head_dim - self.rotary_dim

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears that a plan places: q and p are parts of queries, c and r of keys."""
        queries = Member("q", self.heads * self.plain_dim), Member("p", self.heads * self.rotary_dim)
        keys, absorbed = (Member("c", self.latent_dim), Member("r", self.rotary_dim)), "absorbed_queries"
        last = GroupShape(
            *("latent_out", (Member("o", hidden),), self.heads * self.value_dim, "attention_output"),
            *("attention_delta", (absorbed, "turned_queries", "attention", "expanded_values"), NORM),
        )
        if not self.query_rank:
            first = GroupShape(
                *("latent_in", (*queries, *keys), hidden, "linear_input", "latent_in", (NORM,), absorbed)
            )
            return first, last
        members = (Member("a", self.query_rank), *keys)
        return (
            GroupShape("latent_in", members, hidden, "linear_input", "latent_in", (NORM,), "latent_norm"),
            GroupShape(
                *("latent_query", queries, self.query_rank, "latent_vector", "latent_query"),
                *(("latent_norm",), absorbed),
            ),
            last,
        )

    def tensors(self, _hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the weights that make keys and values of latent vectors, by head, and those of norms."""
        rows = self.heads * (self.plain_dim + self.value_dim)
        own = {"latent_weights": (rows, self.latent_dim), "latent_norm": (self.latent_dim,)}
        return own | ({"latent_query_norm": (self.query_rank,)} if self.query_rank else {})

    def state(self) -> KvSpec:
        """Return the latent vectors and rotated keys."""
        return KvSpec(1, self.head_dim, 0, shares_values=True)


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

AnyBlock = TypeVar("AnyBlock", bound=Block)


class BlockNorms(NamedTuple):
    """The norms of one of several blocks of a stage.

    Args:
        norm: The norm before; None where the block reads the stream itself.
        output_norm: The norm of its output alone; None without.
    """

    norm: Norm | None
    output_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class LayerStage:
    """Blocks that read norms of the residual stream, or the stream, to which their outputs are added.

    Args:
        norm: The norm before; None where the blocks read the stream itself.
        blocks: The blocks: one, or a mixture and the network beside it.
        output_norm: The norm of the sum of outputs; None without.
        own_norms: Norms of blocks that have their own, by name of the block.
        gain: Factor on the residual stream behind the stage.
        streams: What happens to several streams before; empty for nothing.
    """

    norm: Norm | None
    blocks: tuple[Block, ...]
    output_norm: Norm | None = None
    own_norms: Mapping[str, BlockNorms] = field(default_factory=dict)
    gain: float = 1.0
    streams: Literal["", "predicted", "corrected"] = ""

    def groups(self, hidden: int) -> tuple[GroupShape, ...]:
        """Return the groups of linears of its blocks."""
        found = tuple(shape for block in self.blocks for shape in block.groups(hidden))
        branches = (block.NAME for block in self.blocks if not block.GROUPS)
        own = *((STREAM_MIXING,) if self.streams else ()), *branches
        if not own or not found:
            return found
        first, *rest = found
        return replace(first, before=(*own, *first.before)), *rest

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms around the blocks, each once."""
        inner = (norm for block in self.blocks for norm in self.norms_of(block))
        return tuple(
            dict.fromkeys(norm for norm in (self.norm, *inner, self.output_norm) if norm is not None)
        )

    def norms_of(self, block: Block) -> BlockNorms:
        """Return the norm that a block reads, and that of its output alone."""
        return self.own_norms.get(block.NAME, BlockNorms(self.norm))


@dataclass(frozen=True, slots=True)
class LayerStreams:
    """Several residual streams (AltUp): a layer computes the first, and predicts and corrects the others.

    Args:
        count: Number of streams.
        scaled: Whether what meets the layer's own embedding has factors.
    """

    count: int
    scaled: bool = True

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that mix them, by role."""
        return {
            STREAM_ROUTER: (self.count, hidden),
            STREAM_ROUTER_NORM: (hidden,),
            STREAM_PREDICTION: (self.count**2, self.count),
            STREAM_CORRECTION: (self.count, self.count),
            STREAM_SCALE: (hidden,),
        }


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer.

    Args:
        stages: Its parts in order.
        is_scaled: Whether the residual stream is multiplied by a number of the layer at its end.
        streams: The streams, if there are several; None for one.
    """

    stages: tuple[LayerStage, ...]
    is_scaled: bool = False
    streams: LayerStreams | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of tensors beside linears and norms, by role."""
        own: dict[str, tuple[int, ...]] = {LAYER_SCALE: (1,)} if self.is_scaled else {}
        own |= self.streams.tensors(hidden) if self.streams else {}
        for block in self.blocks:
            own |= block.tensors(hidden)
        return own

    def find(self, kind: type[AnyBlock]) -> AnyBlock | None:
        """Return the layer's block of a kind; None without."""
        return next((block for block in self.blocks if isinstance(block, kind)), None)


def kind_names(layers: Sequence[LayerConfig]) -> tuple[str, ...]:
    """Return the name of each layer's kind: none if all are alike, else ``attention+ffn`` and such.

    Layers are alike if operators of equal sizes follow each other in the same order.
    """
    seen: dict[tuple[Block, ...], str] = {}
    found = []
    for layer in layers:
        timed = tuple(block.timed() for block in layer.blocks)
        if timed not in seen:
            name = "+".join(block.NAME for block in timed)
            others = sum(other.partition("#")[0] == name for other in seen.values())
            seen[timed] = f"{name}#{others + 1}" if others else name
        found.append(seen[timed])
    return tuple(found) if len(seen) > 1 else ("",) * len(found)
