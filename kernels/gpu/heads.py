"""Sizes of attention heads, the layout of the KV cache, and the options of RoPE and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heterollm.base import KernelError
from heterollm.kernels.gpu.launch import Argument
from heterollm.kernels.gpu.memory import DeviceMemory


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a model's attention.

    Args:
        heads: Query heads, a multiple of ``kv_heads``.
        kv_heads: Key and value heads.
        head_dim: Elements of a head.
        capacity: Positions of a session, and of the tables of rotary angles.
        shares_values: Whether values are the keys, which a page has once.

    Raises:
        KernelError: The query heads are no multiple of the key heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    shares_values: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise KernelError(f"{self.heads} query heads cannot share {self.kv_heads} key heads.")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def query_columns(self) -> int:
        """Elements of a token's queries, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def rows(self) -> tuple[int, int, int]:
        """Output rows of the linears of q, k and v."""
        keys = self.kv_heads * self.head_dim
        return self.query_columns, keys, keys


LARGEST_KEY_DIM: Final = 256
"""Most elements of a head's keys in a delta net: work-items hold a row of the state in registers."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a gated delta net, or of a state space of Mamba-2, whose C, B and x stand for q, k and v.

    Args:
        key_heads: Heads of q and k.
        value_heads: Heads of v, a multiple of ``key_heads``; neighbours share a key head.
        key_dim: Elements of a head of q or k.
        value_dim: Elements of a head of v.
        taps: Tokens that the convolution of q, k and v spans.
        recalls: Whether a value that is written replaces what the state has for its key, as in a delta net. A
            state space adds it; its convolution has biases, and its outputs have the values added.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    recalls: bool = True

    @property
    def members(self) -> dict[str, int]:
        """Output rows of the linears by name: z gates the output, b writes to the state, a makes it decay.

        In a state space a, there dt, does both.
        """
        keys, values = self.key_heads * self.key_dim, self.value_columns
        gates = dict.fromkeys("ba" if self.recalls else "a", self.value_heads)
        return {"q": keys, "k": keys, "v": values, "z": values, **gates}

    @property
    def value_columns(self) -> int:
        """Elements of a token's values, and of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_columns

    @property
    def factors(self) -> int:
        """Numbers of a token beside its q, k and v: two of each value head, three of each key head."""
        return 2 * self.value_heads + 3 * self.key_heads

    @property
    def history(self) -> int:
        """Values of the convolution's state, its last inputs."""
        return (self.taps - 1) * self.channels

    @property
    def matrix(self) -> int:
        """Values of the delta rule's state, ``[value_heads, value_dim, key_dim]``."""
        return self.value_columns * self.key_dim


@dataclass(frozen=True, slots=True)
class KvLayer:
    """The keys and values of one layer, of all sessions.

    Args:
        memory: Pages of :data:`PAGE_POSITIONS` positions, ``[page][k|v][kv_head][row][head_dim]``. In 8 bits
            the scales of a head's rows lie behind them.
        table: First word in the step buffer of the pages that hold a session's positions.
    """

    memory: DeviceMemory
    table: int


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """The recurrent state of one layer, of all sessions.

    Args:
        memory: float32 ``[slot][values]``.
        values: Values of a slot.
    """

    memory: DeviceMemory
    values: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KvMemory:
    """The state of all layers, of all sessions: keys and values, and recurrent state.

    Args:
        memories: The memories, with the names of their buffers in steps.
        layers: The keys and values of each layer.
        recurrent: The recurrent state of each layer.
    """

    memories: Mapping[DeviceMemory, str]
    layers: Mapping[int, KvLayer]
    recurrent: Mapping[int, RecurrentLayer]


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of queries and keys, the norms of heads, and factors of queries.

    Element i of a head's first ``dim`` pairs with element ``i + dim / 2`` (the half-split convention of
    Hugging Face checkpoints).

    Args:
        cos: float32 ``[capacity, dim / 2]``.
        sin: float32 of the same shape.
        dim: Rotated elements of a head, even; None for all.
        norms: float32 ``[2 * head_dim]``, weights of q's norm, then of k's; None for no norms.
        epsilon: Added to the mean square in those norms.
        joint: Whether one norm spans all heads of q, another all of k, with weights for each element.
        limit: Magnitude that bounds q, k and v before the rotation; 0 for none.
        value_norms: Whether each head of v has a norm without weights.
        norms_last: Whether the norms come behind the rotation.
        query_scales: float32 ``[capacity]``, factors of q by position; None for none.
    """

    cos: Argument
    sin: Argument
    dim: int | None = None
    norms: Argument = None
    epsilon: float = 0.0
    joint: bool = False
    limit: float = 0.0
    value_norms: bool = False
    norms_last: bool = False
    query_scales: Argument = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Options of attention scores.

    Args:
        scale: Factor on the scores.
        window: Positions visible to a token, its own included; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
        chunked: Whether the visible positions are those of the token's chunk of ``window`` positions.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    chunked: bool = False
