"""Rounding of activations to int8 for linear layers with integer inputs.

The kernel that writes a linear's input rounds it as well where it can (opencl/rounding.h); elsewhere
a launch of its own does. Both call one function on what lies in memory, so that the codes are the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import SharedArray
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.gpu.work import BLOCK_BYTES, rounding_work
from heterollm.kernels.ops import WeightFormat

__all__ = ["ROUNDING", "RoundedInputs", "code_bytes", "rounding_launch", "scratch_codes"]

ROUNDING: Final = "rounding of inputs"
"""Label of the launches that do nothing but round."""

SPARE_TOKENS: Final = 7
"""Rows behind the last that the kernels for a few tokens read: up to their number, eight at most."""

WHOLE_BLOCKS: Final = 128
"""Columns that every kernel that rounds writes whole multiples of; so a block must divide them."""

SIMT_ITEMS: Final = 64


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """Where the int8 codes of a linear's inputs lie, and which linears can read them.

    Args:
        codes: int8 ``[tokens + 7, k]``, in the order of ``kernels/gpu/opencl/linear_int8.h``.
        blocks: float32 ``[tokens + 7, k / block, 2]``: scale and sum of the codes of each block.
        bits: Bits of the weights that the codes are ordered for.
        block: Inputs that share a scale.
    """

    codes: Argument
    blocks: Argument
    bits: int
    block: int

    @property
    def defines(self) -> dict[str, str | int]:
        """What tells the kernels that round what they write."""
        return {"CODE_BITS": self.bits, "CODE_BLOCK": self.block}

    def check(self, weight: WeightFormat, tokens: int, columns: int, label: str) -> None:
        """Refuse codes of another order or block than a weight's, and slots that are too small.

        Raises:
            KernelError: One of these.
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
            KernelError: Rows that are not whole blocks, or slots that are too small.
        """
        if columns % self.block or WHOLE_BLOCKS % self.block:
            raise KernelError(f"{label}: {columns} columns cannot be rounded in blocks of {self.block}.")
        sizes = code_bytes(tokens, columns, self.block)
        for memory, size_bytes in zip((self.codes, self.blocks), sizes, strict=True):
            if isinstance(memory, SharedArray) and memory.array.nbytes < size_bytes:
                raise KernelError(
                    f"The {label} code slot has {memory.array.nbytes} bytes, {size_bytes} are needed."
                )
        return self.codes, self.blocks


def code_bytes(tokens: int, columns: int, block: int) -> tuple[int, int]:
    """Return the sizes that the two memories of :class:`RoundedInputs` need for so many tokens."""
    values = (tokens + SPARE_TOKENS) * columns
    return values, values // block * BLOCK_BYTES


def scratch_codes(runtime: GpuRuntime, weight: WeightFormat, tokens: int, columns: int) -> RoundedInputs:
    """Return memory for the codes that a launch leaves to the next one, which all such pairs share."""
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
    """Return the prepared call that rounds rows of ``x [first_token + tokens, columns]``.

    Args:
        runtime: The device.
        x: The inputs.
        rounded: Where the codes go; row 0 is that of ``first_token``.
        columns: Inputs of a row, a multiple of the block.
        tokens: Rows to round.
        first_token: The first of them.
        half: Whether ``x`` is float16, not float32.
        variant: Which kernel.

    Raises:
        KernelError: The device refuses the kernel.
    """
    defines = variant.defines | {"CODE_BITS": rounded.bits} | ({"ACT_HALF": 1} if half else {})
    kernel = runtime.kernel(("common.h", "rounding.h", "quantize.cl"), "quantize_activations", defines)
    blocks = columns // rounded.block
    span, items = (blocks, 1) if variant.style == "vector" else (1, SIMT_ITEMS)
    sizes = map(np.int32, (columns, rounded.block, first_token, span))
    size = (round_up(-(-blocks // span), items), tokens)
    arguments = (x, rounded.codes, rounded.blocks, *sizes)
    work = functools.partial(rounding_work, tokens * columns, 2 if half else 4, tokens * blocks)
    return runtime.launch(kernel, arguments, size, (items, 1), ROUNDING, work=work)
