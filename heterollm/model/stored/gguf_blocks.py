"""The block types of GGUF: integers of 1 to 8 bits with a scale, and in some a minimum, per block.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import BFLOAT16
from heterollm.model.stored.affine_blocks import AffineBlocks

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]


class BlockType(NamedTuple):
    """A type of GGUF tensors.

    Args:
        name: As llama.cpp spells it.
        block: Elements of one block.
        block_bytes: Its size.
        dtype: NumPy's type of floats; None for blocks.
        unpack: Returns codes ``[b, block]``, and scales and minimums (or None) ``[b, scales of a block]``.
        bits: Bits of a code; 0 for floats.
        scale_block: Elements that share a scale.
        minimum: Whether blocks have a float minimum.
    """

    name: str
    block: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Bytes], Parts] | None = None
    bits: int = 0
    scale_block: int = 0
    minimum: bool = False

    def blocks(self, rows: Bytes) -> AffineBlocks:
        """Return rows of bytes as integers and scales."""
        assert self.unpack is not None
        with np.errstate(invalid="ignore"):  # damaged scales; the caller checks the values
            codes, scales, minimums = self.unpack(rows.reshape(-1, self.block_bytes))
        count = len(rows)
        return AffineBlocks(
            codes.reshape(count, -1),
            scales.reshape(count, -1),
            None if minimums is None else minimums.reshape(count, -1),
            self.scale_block,
        )


def block_type(name: str) -> BlockType:
    """Return the type of a name."""
    return next(kind for kind in BLOCK_TYPES.values() if kind.name == name)


def _half(data: Bytes, start: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(data[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(data: Bytes, width: int) -> Bytes:
    """Return the low nibbles of each run of ``width`` bytes, then the high ones: ``[b, 2 * bytes]``."""
    runs = data.reshape(len(data), -1, width)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(data), -1)


def _two_bits(data: Bytes, width: int = 32) -> Bytes:
    """Return the two-bit codes of each run of ``width`` bytes, the lowest pairs first: ``[b, 4 * bytes]``."""
    runs = data.reshape(len(data), -1, 1, width) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return np.ascontiguousarray(runs.reshape(len(data), -1))


def _bits(data: Bytes) -> Bytes:
    """Return the bits of all 32 bytes, the lowest of each first: ``[b, 256]``."""
    bits = data[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return bits.reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """Return the bits of 4 bytes, lowest first, as 16 or 0: ``[b, 32]``."""
    return np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little") << np.uint8(4)


def _signed(codes: NDArray[Any], zero: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero)


def _q4_0(data: Bytes) -> Parts:
    return _signed(_nibbles(data[:, 2:], 16), 8), _half(data, 0), None


def _q4_1(data: Bytes) -> Parts:
    return _signed(_nibbles(data[:, 4:], 16), 0), _half(data, 0), _half(data, 2)


def _q5_0(data: Bytes) -> Parts:
    return _signed(_nibbles(data[:, 6:], 16) | _fifth_bits(data[:, 2:6]), 16), _half(data, 0), None


def _q5_1(data: Bytes) -> Parts:
    codes = _nibbles(data[:, 8:], 16) | _fifth_bits(data[:, 4:8])
    return _signed(codes, 0), _half(data, 0), _half(data, 2)


def _q8_0(data: Bytes) -> Parts:
    return np.ascontiguousarray(data[:, 2:]).view(np.int8), _half(data, 0), None


def _six_bit_pairs(data: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the eight scales and the eight minimums of a block of 256, as fractions of its two floats."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimums = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _half(data, 0) * scales, -(_half(data, 2) * minimums)


def _q4_k(data: Bytes) -> Parts:
    return _signed(_nibbles(data[:, 16:], 32), 0), *_six_bit_pairs(data)


def _q5_k(data: Bytes) -> Parts:
    codes = _nibbles(data[:, 48:], 32) | _bits(data[:, 16:48]) << 4
    return _signed(codes, 0), *_six_bit_pairs(data)


def _q6_k(data: Bytes) -> Parts:
    codes = _nibbles(data[:, :128], 64) | _two_bits(data[:, 128:192]) << 4
    parts = np.ascontiguousarray(data[:, 192:208]).view(np.int8)
    return _signed(codes, 32), _half(data, 208) * parts, None


def _q2_k(data: Bytes) -> Parts:
    scales, minimums = data[:, :16] & 15, data[:, :16] >> 4
    codes = _signed(_two_bits(data[:, 16:80]), 0)
    return codes, _half(data, 80) * scales, -(_half(data, 82) * minimums)


def _q3_k(data: Bytes) -> Parts:
    # A set bit of the mask, which has one for each element, means that nothing is subtracted.
    codes = _two_bits(data[:, 32:96]) | _bits(data[:, :32]) << 2
    low = np.concatenate([data[:, 96:104] & 15, data[:, 96:104] >> 4], axis=1)
    scales = _signed(low | _two_bits(data[:, 104:108], 4) << 4, 32)
    return _signed(codes, 4), _half(data, 108) * scales, None


def _iq4_nl(data: Bytes) -> Parts:
    return IQ4_VALUES[_nibbles(data[:, 2:], 16)], _half(data, 0), None


def _mxfp4(data: Bytes) -> Parts:
    # Half the power of two, since the values are twice those of the format.
    scales = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)
    return MXFP4_VALUES[_nibbles(data[:, 1:], 16)], scales, None


def _tq1_0(data: Bytes) -> Parts:
    # A byte has five ternary digits, or four, as a fraction of 256; a multiplication moves the next one out.
    parts = []
    for first, stop, width, digits in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        runs = data[:, first:stop].reshape(len(data), -1, 1, width)
        parts.append((runs * POWERS_OF_3[:digits, None]).reshape(len(data), -1))
    digits_of = np.concatenate(parts, axis=1).astype(np.uint16) * 3 >> 8
    return _signed(digits_of.astype(np.uint8), 1), _half(data, 52), None


def _tq2_0(data: Bytes) -> Parts:
    return _signed(_two_bits(data[:, :64]), 1), _half(data, 64), None


def _q1_0(data: Bytes) -> Parts:
    bits = np.unpackbits(np.ascontiguousarray(data[:, 2:]), axis=1, bitorder="little")
    return _signed(bits << np.uint8(1), 1), _half(data, 0), None


IQ4_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
MXFP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of FP4 (E2M1) by their codes."""
POWERS_OF_3: Final = np.array([1, 3, 9, 27, 81], np.uint8)

BLOCK_TYPES: Final[Mapping[int, BlockType]] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4, np.dtype("<f4")),
        1: BlockType("F16", 1, 2, np.dtype("<f2")),
        30: BlockType("BF16", 1, 2, BFLOAT16),
        2: BlockType("Q4_0", 32, 18, None, _q4_0, 4, 32),
        3: BlockType("Q4_1", 32, 20, None, _q4_1, 4, 32, minimum=True),
        6: BlockType("Q5_0", 32, 22, None, _q5_0, 5, 32),
        7: BlockType("Q5_1", 32, 24, None, _q5_1, 5, 32, minimum=True),
        8: BlockType("Q8_0", 32, 34, None, _q8_0, 8, 32),
        10: BlockType("Q2_K", 256, 84, None, _q2_k, 2, 16, minimum=True),
        11: BlockType("Q3_K", 256, 110, None, _q3_k, 3, 16),
        12: BlockType("Q4_K", 256, 144, None, _q4_k, 4, 32, minimum=True),
        13: BlockType("Q5_K", 256, 176, None, _q5_k, 5, 32, minimum=True),
        14: BlockType("Q6_K", 256, 210, None, _q6_k, 6, 16),
        20: BlockType("IQ4_NL", 32, 18, None, _iq4_nl, 8, 32),
        34: BlockType("TQ1_0", 256, 54, None, _tq1_0, 2, 256),
        35: BlockType("TQ2_0", 256, 66, None, _tq2_0, 2, 256),
        39: BlockType("MXFP4", 32, 17, None, _mxfp4, 5, 32),
        41: BlockType("Q1_0", 128, 18, None, _q1_0, 2, 128),
    }
)
"""The supported types by their numbers in the file."""

OTHER_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        40: "NVFP4",
    }
)
"""Names of other types, for the message that refuses them."""
