"""One scale for all 8-bit codes of a tensor, as static int8 NPU graphs take it.

The scale reaches to the largest weight. One of least squared error would clip a few weights, and those that
make the huge activations of some tokens are among them: SmolLM2-135M loses its perplexity without them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError

TENSOR_VERSION: Final = 2
"""Part of the cache keys of such weights; raise it when equal ones would give other codes or scales."""

LARGEST_WEIGHT_CODE: Final = 127
ZERO_WEIGHT_CODE: Final = 128

LARGEST_SCALE: Final = float(np.finfo(np.float16).max)
SMALLEST_SCALE: Final = float(np.finfo(np.float16).smallest_subnormal)


def largest_weight(values: NDArray[np.float32]) -> float:
    """Return the largest magnitude of some weights.

    Raises:
        CheckpointError: One is NaN or infinite, or too large for an FP16 scale.
    """
    largest = float(np.abs(values).max(initial=0))
    if not largest <= LARGEST_SCALE * LARGEST_WEIGHT_CODE:
        raise CheckpointError(
            f"A weight of magnitude {largest:g} cannot be quantised: its FP16 scale would overflow.",
            fix="The checkpoint is damaged, or was not trained as a language model.",
        )
    return largest


def scale_of_largest(largest: float) -> float:
    """Return the scale whose largest code stands for a magnitude, a positive FP16 number."""
    return float(np.float16(np.clip(largest / LARGEST_WEIGHT_CODE, SMALLEST_SCALE, LARGEST_SCALE)))


def tensor_codes(values: NDArray[np.float32], scale: float, block: int) -> NDArray[np.uint8]:
    """Return the codes ``[n, k/block, block]`` of weights ``[n, k]``, whose zero is 128."""
    steps = values * np.float32(1 / scale)
    np.rint(steps, out=steps)
    np.clip(steps, -LARGEST_WEIGHT_CODE, LARGEST_WEIGHT_CODE, out=steps)
    steps += ZERO_WEIGHT_CODE
    codes: NDArray[np.uint8] = steps.astype(np.uint8).reshape(len(values), -1, block)
    return codes
