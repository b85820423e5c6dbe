"""Blocks of attention: with keys and values of each head, and with latent vectors of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from heterollm.kernels.ops import Group, Member
from heterollm.model.block import INNER_NORM, NORM, Block, GroupShape, Norm
from heterollm.model.rope import QueryGrowth, RopeConfig
from heterollm.model.states import KvSpec


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
            GroupShape(*("qkv", members, hidden, "linear_input", "qkv"), *((NORM,), rope, self.qkv_bias)),
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
