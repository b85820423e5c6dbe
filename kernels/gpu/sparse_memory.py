"""Sizes, memory and constants of sparse attention.

Codes, estimates and positions lie in *slots*: the plan's order of units gives each key head its slot, so the
key heads of a fused unit are neighbours. The query heads that share a key head are its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.formats import ScoreScale
from heterollm.kernels.gpu.heads import HeadShape
from heterollm.kernels.gpu.launch import Argument
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.protocol import GpuRuntime

KEY_MULTIPLE: Final = 16
"""Kernels read that many codes at once."""

RUN_ROWS: Final = 64
"""Rows of codes that a work-group writes, as in sparse.h."""


@dataclass(frozen=True, slots=True)
class SparseShape:
    """Sizes of a pass of sparse attention.

    Args:
        heads: Sizes of the heads and of the KV cache.
        tokens: Tokens of the pass, padded to the NPU's tile.
        keys: Keys of an estimate, at least the position behind the pass's last token; a multiple of 16.
        block: Queries that share a selection.
        first: Leading positions that are always kept.
        last: Last positions that are always kept; at least ``block``, so that each query sees itself.

    Raises:
        KernelError: A size is not positive or not such a multiple, or ``last`` is too small.
    """

    heads: HeadShape
    tokens: int
    keys: int
    block: int = 32
    first: int = 4
    last: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.keys < KEY_MULTIPLE or self.keys % KEY_MULTIPLE:
            raise KernelError(
                f"Estimates of {self.tokens} tokens and {self.keys} keys need a token, and "
                f"whole {KEY_MULTIPLE} keys."
            )
        if self.block < 32 or self.block % 32 or self.first < 0 or self.last < self.block:
            raise KernelError(
                f"A selection for {self.block} queries that keeps the first {self.first} and the last "
                f"{self.last} positions needs whole 32 queries and as many last positions."
            )

    @property
    def rows(self) -> int:
        """Rows of queries of a slot."""
        return self.heads.group * self.tokens

    @property
    def blocks(self) -> int:
        """Blocks of queries of a head."""
        return -(-self.tokens // self.block)

    @property
    def runs(self) -> int:
        """Work-groups that write the codes of a slot."""
        return -(-self.keys // RUN_ROWS) - self.heads.group * (-self.tokens // RUN_ROWS)

    @property
    def query_bytes(self) -> int:
        """Bytes of the codes of all queries."""
        return self.heads.kv_heads * self.rows * self.heads.head_dim

    @property
    def key_bytes(self) -> int:
        """Bytes of the codes of all keys."""
        return self.heads.kv_heads * self.keys * self.heads.head_dim

    @property
    def score_bytes(self) -> int:
        """Bytes of all estimated scores."""
        return self.heads.kv_heads * self.rows * self.keys

    @property
    def position_bytes(self) -> int:
        """Bytes of all selected positions."""
        return 4 * self.heads.heads * self.blocks * self.keys


@dataclass(frozen=True, slots=True)
class ScoreMemory:
    """Codes and estimates of one pass at a time; layers share them.

    Args:
        queries: uint8 ``[kv_heads, group * tokens, head_dim]``: row ``member * tokens + token`` of a slot.
        keys: uint8 ``[kv_heads, keys, head_dim]``.
        scores: uint8 ``[kv_heads, group * tokens, keys]``.
        steps: float32 ``[heads]``: step of the scores of each query head, not of its slot.
        largest: float32 ``[kv_heads, runs]``: largest magnitudes from which a bucket is chosen.
    """

    queries: SharedArray
    keys: SharedArray
    scores: SharedArray
    steps: DeviceMemory
    largest: DeviceMemory

    @classmethod
    def allocate(cls, runtime: GpuRuntime, shape: SparseShape) -> ScoreMemory:
        """Return memory for passes of ``shape``."""
        heads = shape.heads
        sizes = 4 * heads.heads, 4 * heads.kv_heads * shape.runs
        return cls(
            runtime.shared((heads.kv_heads, shape.rows, heads.head_dim), np.uint8),
            runtime.shared((heads.kv_heads, shape.keys, heads.head_dim), np.uint8),
            runtime.shared((heads.kv_heads, shape.rows, shape.keys), np.uint8),
            *(DeviceMemory(runtime.scratch(size), size) for size in sizes),
        )

    def require(self, shape: SparseShape) -> None:
        """Refuse memory that is too small for passes of ``shape``."""
        self.queries.require(shape.query_bytes, "query codes")
        self.keys.require(shape.key_bytes, "key codes")
        self.scores.require(shape.score_bytes, "estimated scores")
        self.steps.require(4 * shape.heads.heads, "score steps")
        self.largest.require(4 * shape.heads.kv_heads * shape.runs, "largest magnitudes")


@dataclass(frozen=True, slots=True)
class Selection:
    """Positions that each block of queries attends to; layers share them.

    Args:
        positions: int32 ``[heads, blocks, keys]``, ascending.
        counts: int32 ``[heads, blocks]``.
    """

    positions: DeviceMemory
    counts: DeviceMemory

    @classmethod
    def allocate(cls, runtime: GpuRuntime, shape: SparseShape) -> Selection:
        """Return memory for passes of ``shape``."""
        sizes = shape.position_bytes, 4 * shape.heads.heads * shape.blocks
        return cls(*(DeviceMemory(runtime.scratch(size), size) for size in sizes))

    def require(self, shape: SparseShape) -> None:
        """Refuse memory that is too small for passes of ``shape``."""
        self.positions.require(shape.position_bytes, "selected positions")
        self.counts.require(4 * shape.heads.heads * shape.blocks, "counts of positions")


@dataclass(frozen=True, slots=True)
class HeadTable:
    """Constants of a layer's heads on the device, made by :meth:`upload`.

    Args:
        order: int32 ``[kv_heads]``: key head of each slot.
        numbers: float32 ``[heads, 4]``: 1 / query step, score step, share to keep, 1 / key step.
        factors: float32 ``[buckets, 4]``: factors on query step and key step, and their reciprocals.
        buckets: Number of buckets; with one nothing is measured.
        keep: Share of the positions that each query head keeps.
    """

    order: Argument
    numbers: Argument
    factors: Argument
    buckets: int
    keep: tuple[float, ...]

    @classmethod
    def upload(
        cls,
        runtime: GpuRuntime,
        heads: HeadShape,
        scales: Sequence[ScoreScale],
        *,
        order: Sequence[int],
        keep: Sequence[float],
        buckets: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    ) -> HeadTable:
        """Return the table of a layer.

        Args:
            runtime: The device.
            heads: Sizes of the heads.
            scales: Steps of each key head and of its query heads.
            order: Key heads in the order of the slots.
            keep: Share of the positions that each query head keeps, above 0 and at most 1.
            buckets: Factors on query step and key step, powers of two; see :func:`score_scales.buckets`.

        Raises:
            KernelError: A length does not fit the heads, or a share is out of range.
        """
        members = {len(scale.query_steps) for scale in scales}
        if sorted(order) != list(range(heads.kv_heads)) or len(scales) != heads.kv_heads:
            raise KernelError(
                f"Slots {list(order)} and {len(scales)} scales do not fit {heads.kv_heads} key heads."
            )
        if members != {heads.group} or len(keep) != heads.heads or not all(0 < share <= 1 for share in keep):
            raise KernelError(
                f"Steps of {sorted(members)} members and shares {list(keep)} do not fit {heads.heads} query "
                f"heads in groups of {heads.group}."
            )
        steps = np.array([scale.query_steps for scale in scales], np.float64)
        scores = np.array([scale.score_steps for scale in scales], np.float64)
        numbers = np.empty((heads.kv_heads, heads.group, 4), np.float32)
        numbers[..., 0] = 1 / steps
        numbers[..., 1] = scores
        numbers[..., 2] = np.reshape(keep, scores.shape)
        numbers[..., 3] = 1 / np.array([[scale.key_step] for scale in scales])
        pairs = np.array(buckets, np.float32)
        return cls(
            runtime.upload(np.array(order, np.int32)),
            runtime.upload(numbers.reshape(heads.heads, 4)),
            runtime.upload(np.concatenate([pairs, 1 / pairs], axis=1)),
            len(pairs),
            tuple(keep),
        )
