"""Inputs of linear layers as the matrix unit of a CPU multiplies them: floats split into parts of 8 bits."""

from __future__ import annotations

from typing import Final

import numpy as np

from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.parameters import MATRIX_TOKENS
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.ops import WeightFormat

SPLITTING: Final = "splitting of inputs"
"""Label of the launches that split."""

ROW_GAP: Final = 32
"""Numbers between two rows of parts, as in matrix_parts.h."""

SOURCES: Final = ("common.h", "matrix_parts.h", "split_inputs.cl")


def split_inputs(
    runtime: GpuRuntime,
    x: DeviceMemory,
    weight: WeightFormat,
    *,
    columns: int,
    tokens: int,
    first_token: int,
    half: bool,
) -> tuple[tuple[Argument, Argument], Launch]:
    """Return memory for the parts of inputs and the sums of their blocks, and the launch that writes both.

    All launches share the memory, which the next one may overwrite.

    Args:
        runtime: The device.
        x: The inputs ``[first_token + tokens, columns]``.
        weight: Format of the weights, which determines the blocks and the order.
        columns: Inputs of a row.
        tokens: Rows to split.
        first_token: First row to split.
        half: Whether ``x`` is float16, not float32.
    """
    # Tiles are read whole.
    rows, blocks = tokens + MATRIX_TOKENS, columns // weight.block
    parts = runtime.shared_scratch("parts", rows * 2 * ((2 if half else 3) * columns + ROW_GAP))
    sums = runtime.shared_scratch("sums", rows * blocks * 4)
    defines: dict[str, str | int] = {"CODE_BITS": weight.bits, "BLOCK": weight.block}
    if half:
        defines["ACT_HALF"] = 1
    kernel = runtime.kernel(SOURCES, "split_inputs", defines)
    arguments = (x, parts, sums, *map(np.int32, (columns, first_token, blocks)))
    return (parts, sums), runtime.launch(kernel, arguments, (1, tokens), (1, 1), SPLITTING)
