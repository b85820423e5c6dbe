"""Pools the states of a prompt's tokens to its embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import OptionError
from heterollm.model import Pooling


class PooledStates:
    """The embedding of a text whose states come in pieces.

    Args:
        pooling: The way to it.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, states: NDArray[np.float32]) -> None:
        """Take the states of the next tokens, float32 ``[n, hidden]``."""
        if self._pooling.mode == "last" or self._sum is None:
            self._sum, self._count = np.zeros(states.shape[1]), 0
        own = states[-1:] if self._pooling.mode == "last" else states
        self._sum += own.sum(axis=0, dtype=np.float64)
        self._count += len(own)

    def embedding(self, dimensions: int | None = None) -> NDArray[np.float32]:
        """Return the embedding, float32 ``[dimensions]``, by default ``[hidden]``.

        Args:
            dimensions: Leading elements to keep; their vector has the length 1.

        Raises:
            OptionError: There are fewer.
        """
        assert self._sum is not None  # a text has tokens
        vector: NDArray[Any] = self._sum / self._count
        check_dimensions(dimensions, len(vector))
        vector = vector[:dimensions]
        if self._pooling.normalized or dimensions is not None:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


def check_dimensions(dimensions: int | None, hidden: int) -> None:
    """Refuse more elements than an embedding has.

    Raises:
        OptionError: The number is below 1, or there are fewer.
    """
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise OptionError(f"dimensions is {dimensions}, but an embedding has {hidden} elements.")
