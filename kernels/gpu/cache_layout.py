"""The layout of a layer's keys and values: pages of positions, ``[page][k|v][kv_head][row][head_dim]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

KV_CODES: Final = np.dtype(np.int8)
"""Type of a KV cache of 8 bits: codes of -127 to 127, with a float32 scale for each position of a head."""

CACHE_DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    8: KV_CODES,
    16: np.dtype(np.float16),
    32: np.dtype(np.float32),
}
"""Types of a KV cache by the bits of a number."""

SCALE_BYTES: Final = 4

PAGE_POSITIONS: Final = 64
"""Positions of a page of the KV cache, as in glue.h."""


def head_elements(head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the elements of one head in a page: its rows, and in 8 bits a scale of each behind them."""
    return PAGE_POSITIONS * position_bytes(head_dim, kv_dtype) // np.dtype(kv_dtype).itemsize


def page_elements(kv_heads: int, head_dim: int, kv_dtype: DTypeLike, *, shares_values: bool = False) -> int:
    """Return the elements of a layer's page, whose values may be its keys."""
    return (2 - shares_values) * kv_heads * head_elements(head_dim, kv_dtype)


def pages_of(positions: int) -> int:
    """Return the pages of that many positions from the first on."""
    return -(-positions // PAGE_POSITIONS)


def position_bytes(head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the bytes of a position of one head, its scale included."""
    scale_bytes = SCALE_BYTES if np.dtype(kv_dtype) == KV_CODES else 0
    return head_dim * np.dtype(kv_dtype).itemsize + scale_bytes
