"""The state that a session keeps for a layer between passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from heterollm.kernels.gpu import PAGE_POSITIONS, page_elements, pages_of

if TYPE_CHECKING:
    import numpy as np

GOING_BACK: Final = 512
"""Positions that a sliding window keeps beside those of a pass, to go back behind most answers."""

FEWEST_STATES: Final = 4
MOST_STATES: Final = 16
STATES_BYTES: Final = 2**20
"""Recurrent states of a session: as many as a layer has room for in these bytes, within limits. A pass reads
one and writes another, chunks in flight two in turns, and the others let a session go back."""


class StateSpec(Protocol):
    """The state that a session keeps for a layer between passes."""

    def kept(self, context: int, longest: int) -> int:
        """Return the positions that it keeps.

        Args:
            context: Positions of a session.
            longest: Most positions that a pass writes.
        """

    def bytes(self, positions: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes of so many positions in a type of the KV cache."""


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Keys and values, of all positions or of those in a window.

    Args:
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        window: Positions that a token attends to, including its own; 0 for all.
        shares_values: Whether values are the keys.
    """

    kv_heads: int
    head_dim: int
    window: int
    shares_values: bool = False

    @property
    def page_heads(self) -> int:
        """Heads of keys and of values that a page has."""
        return (2 - self.shares_values) * self.kv_heads

    def kept(self, context: int, longest: int) -> int:
        """Return the positions that are kept: with a window those of a pass, and :data:`GOING_BACK` more."""
        if not self.window:
            return context
        # The first and the last page may hold a part each.
        return min(context, PAGE_POSITIONS * (pages_of(self.window + longest + GOING_BACK) + 1))

    def bytes(self, positions: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes of so many positions in a type of the KV cache, in whole pages."""
        page = page_elements(self.kv_heads, self.head_dim, dtype, shares_values=self.shares_values)
        return pages_of(positions) * page * dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """State that depends on all tokens before, of a fixed size at each of the positions that are kept.

    Args:
        values: Values of float32 at a position.
    """

    values: int

    def kept(self, _context: int, _longest: int) -> int:
        """Return the positions that are kept: more of them where they are small."""
        return max(FEWEST_STATES, min(MOST_STATES, STATES_BYTES // (4 * self.values)))

    def bytes(self, positions: int, _dtype: np.dtype[Any]) -> int:
        """Return the bytes of so many positions, which do not depend on the KV cache's type."""
        return 4 * self.values * positions
