"""Rounding of activations to int8 for linear layers with integer inputs.

The kernel that writes a linear's input also rounds it if it can (opencl/rounding.h); otherwise a separate
launch does. Both call the same function on the values in memory, so the codes are bit-identical.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.parameters import CPU_STYLES
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.variants import Variant, whole_eights
from heterollm.kernels.gpu.work import BLOCK_BYTES, rounding_work
from heterollm.kernels.ops import WeightFormat

ROUNDING: Final = "rounding of inputs"
"""Label of the launches that only round."""

SPARE_TOKENS: Final = 7
"""Rows behind the last token that the kernels for a few tokens may read."""

WHOLE_BLOCKS: Final = 128
"""Kernels that round write multiples of this many columns, so a scale block must divide it."""

SIMT_ITEMS: Final = 64


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """Memory for the int8 codes of a linear's inputs.

    Args:
        codes: int8 ``[tokens + 7, k]``, in the order of ``kernels/gpu/opencl/linear_int8.h``.
        blocks: float32 ``[tokens + 7, k / block, 2]``: scale and sum of the codes of each block.
        bits: Bits of the linear's weights, which determine the order of the codes.
        block: Inputs that share a scale.
    """

    codes: Argument
    blocks: Argument
    bits: int
    block: int

    @property
    def defines(self) -> dict[str, str | int]:
        """Defines of the kernels that round their output."""
        return {"CODE_BITS": self.bits, "CODE_BLOCK": self.block}

    def check(self, weight: WeightFormat, tokens: int, columns: int, label: str) -> None:
        """Refuse codes that do not fit a weight.

        Raises:
            KernelError: Their order or block differs, or a slot is too small.
        """
        if (self.bits, self.block) != (weight.bits, weight.block):
            raise KernelError(
                f"{label}: codes for weights of {self.bits} bits in blocks of {self.block} cannot be read "
                f"with {weight} weights."
            )
        self.arguments(tokens, columns, label)

    def arguments(self, tokens: int, columns: int, label: str) -> tuple[Argument, Argument]:
        """Return the arguments of a kernel that writes or reads the codes of ``[tokens, columns]``.

        Raises:
            KernelError: The rows are not whole blocks, or a slot is too small.
        """
        if columns % self.block or WHOLE_BLOCKS % self.block:
            raise KernelError(f"{label}: {columns} columns cannot be rounded in blocks of {self.block}.")
        sizes = code_bytes(tokens, columns, self.block)
        for memory, size_bytes in zip((self.codes, self.blocks), sizes, strict=True):
            if isinstance(memory, DeviceMemory):
                memory.require(size_bytes, f"{label} code")
        return self.codes, self.blocks


def code_bytes(tokens: int, columns: int, block: int) -> tuple[int, int]:
    """Return the sizes in bytes of the codes and the blocks of :class:`RoundedInputs`."""
    values = (tokens + SPARE_TOKENS) * columns
    return values, values // block * BLOCK_BYTES


def scratch_codes(runtime: GpuRuntime, weight: WeightFormat, tokens: int, columns: int) -> RoundedInputs:
    """Return scratch memory for codes that the next launch reads; all launches share it."""
    codes, blocks = code_bytes(tokens, columns, weight.block)
    return RoundedInputs(
        runtime.shared_scratch("codes", codes),
        runtime.shared_scratch("blocks", blocks),
        weight.bits,
        weight.block,
    )


def rounding_launch(
    runtime: GpuRuntime,
    x: Argument,
    rounded: RoundedInputs,
    *,
    columns: int,
    tokens: int,
    first_token: int = 0,
    half: bool,
    variant: Variant,
) -> Launch:
    """Return the launch that rounds rows of ``x [first_token + tokens, columns]``.

    Args:
        runtime: The device.
        x: The inputs.
        rounded: Target of the codes; row 0 is that of ``first_token``.
        columns: Inputs of a row, a multiple of the block.
        tokens: Rows to round.
        first_token: First row to round.
        half: Whether ``x`` is float16, not float32.
        variant: Variant of the kernel.

    Raises:
        KernelError: The device refuses the kernel.
    """
    defines = variant.defines | {"CODE_BITS": rounded.bits} | ({"ACT_HALF": 1} if half else {})
    if variant.style == "simt":
        defines |= {"BLOCK": rounded.block} | whole_eights(variant, has_half=runtime.traits.has_half)
    kernel = runtime.kernel(("common.h", "rounding.h", "quantize.cl"), "quantize_activations", defines)
    blocks = columns // rounded.block
    span, items = (blocks, 1) if variant.style in CPU_STYLES else (1, SIMT_ITEMS)
    sizes = map(np.int32, (columns, rounded.block, first_token, span))
    size = (round_up(-(-blocks // span), items), tokens)
    arguments = (x, rounded.codes, rounded.blocks, *sizes)
    work = functools.partial(rounding_work, tokens * columns, 2 if half else 4, tokens * blocks)
    return runtime.launch(kernel, arguments, size, (items, 1), ROUNDING, work=work)
