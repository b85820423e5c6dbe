"""bfloat16, which NumPy lacks: its arrays hold pairs of bytes, which no operation takes for numbers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BFLOAT16: Final[np.dtype[Any]] = np.dtype("V2")
"""The type of arrays of bfloat16: the high half of a float32, low byte first."""


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers of bfloat16, or of any type of NumPy, as a new array of float32."""
    if values.dtype != BFLOAT16:
        return values.astype(np.float32)
    wide = values.view("<u2").astype("<u4")
    wide <<= np.uint32(16)
    return wide.view("<f4")
