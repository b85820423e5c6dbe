"""The layout of the KV cache: bytes of a position, of a head, and the place of scales."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import PAGE_BYTES, round_up

KV_CODES: Final = np.dtype(np.int8)
"""Type of a KV cache of 8 bits: codes of -127 to 127, with a float32 scale for each position of a head."""

SCALE_BYTES: Final = 4

PAGE_POSITIONS: Final = 64
"""Positions of a page of the KV cache, as in glue.h."""


def head_stride(capacity: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the elements between the starts of two heads in the KV cache; each head starts on a page."""
    return round_up(head_end(capacity, head_dim, kv_dtype), PAGE_BYTES // np.dtype(kv_dtype).itemsize)


def pages_of(positions: int) -> int:
    """Return the pages of that many positions from the first on."""
    return -(-positions // PAGE_POSITIONS)


def position_bytes(head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the bytes of a position of one head, its scale included."""
    scale_bytes = SCALE_BYTES if np.dtype(kv_dtype) == KV_CODES else 0
    return head_dim * np.dtype(kv_dtype).itemsize + scale_bytes


def scales_start(capacity: int, head_dim: int) -> int:
    """Return the elements between the start of a head of codes and its scales, behind the codes."""
    return round_up(capacity * head_dim, SCALE_BYTES)


def head_end(capacity: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the elements of a head without padding behind them."""
    if np.dtype(kv_dtype) == KV_CODES:
        return scales_start(capacity, head_dim) + SCALE_BYTES * capacity
    return capacity * head_dim
