"""Linears of BitNet, whose weights are -1, 0 or 1 times one scale.

Packed by transformers (``integrations/bitnet.py``), or floats that its class ``AutoBitLinear`` rounds online.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.formats import as_float32
from heterollm.model.stored.affine_blocks import AffineBlocks
from heterollm.model.stored.packed_linears import PackedTensor

PER_BYTE: Final = 4
"""Weights in a byte: of one input, and of rows that lie a quarter of all apart, the first in the low bits."""

SMALLEST_MEAN: Final = 1e-5
"""Lower bound of the mean magnitude that is the scale of floats."""

FLOATS: Final = ("F16", "BF16", "F32")


class TernaryLinears:
    """The linears of a BitNet checkpoint.

    Args:
        path: The checkpoint, for messages.
        tensors: Every tensor of the files by name.
        read: Returns a tensor's elements as they are stored.
        config: ``quantization_config``.

    Raises:
        CheckpointError: A linear lacks its scale, or shapes contradict each other.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, PackedTensor],
        read: Callable[[str], NDArray[Any]],
        config: Mapping[str, Any],
    ) -> None:
        self.path = path
        self._tensors = tensors
        self._read = read
        self._divides = config.get("linear_class") != "autobitlinear"
        self._online = config.get("quantization_mode") == "online" and not self._divides
        self._scales: dict[str, np.float32] = {}
        kept = config.get("modules_to_not_convert") or ()
        stored = FLOATS if self._online else ("U8",)
        self._names = tuple(
            name
            for name, tensor in tensors.items()
            if name.endswith("_proj.weight")
            and tensor.dtype in stored
            and not any(one in name for one in kept)
        )
        for name in self._names:
            scale = tensors.get(_scale_name(name))
            scaled = scale is not None and scale.dtype in FLOATS and scale.shape in ((), (1,))
            if len(tensors[name].shape) != 2 or not (self._online or scaled):
                raise CheckpointError(f"{path}: {name} is no matrix, or lacks its scale {_scale_name(name)}.")

    @property
    def names(self) -> Collection[str]:
        """The name of every weight."""
        return self._names

    @property
    def parts(self) -> set[str]:
        """The tensors of the files that belong to these weights."""
        scales = (_scale_name(name) for name in self._names)
        return {*self._names, *(name for name in scales if name in self._tensors)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return rows and inputs of a weight."""
        rows, columns = self._tensors[name].shape
        return rows if self._online else rows * PER_BYTE, columns

    def size_bytes(self, name: str) -> int:
        """Return the size of a weight in the files."""
        return self._tensors[name].size_bytes

    def kind(self, name: str) -> str:  # noqa: ARG002 - one for all
        """Return the name of the format."""
        return "BitNet 1.58 bits"

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is one of these weights."""
        return name in self._names

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks:
        """Return rows of a weight."""
        codes = self._codes(name, rows)
        return AffineBlocks(
            codes, np.full((len(codes), 1), self._scale(name), np.float32), None, codes.shape[1]
        )

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a weight, or rows of it, as float32."""
        return self._codes(name, rows or (0, self.shape(name)[0])).astype(np.float32) * self._scale(name)

    def _codes(self, name: str, rows: tuple[int, int]) -> NDArray[np.int8]:
        stored = self._read(name)
        if self._online:
            inverse = np.float32(1) / self._scale(name)
            values = as_float32(stored[slice(*rows)])
            rounded: NDArray[np.int8] = np.clip(np.rint(values * inverse), -1, 1).astype(np.int8)
            return rounded
        numbers = np.arange(*rows)
        shifts = (2 * (numbers // len(stored))).astype(np.uint8)[:, None]
        codes: NDArray[np.int8] = (stored[numbers % len(stored)] >> shifts & np.uint8(3)).astype(np.int8) - 1
        return codes

    def _scale(self, name: str) -> np.float32:
        """Return the magnitude of a weight's elements that are not 0."""
        if name not in self._scales:
            if self._online:
                mean = np.abs(as_float32(self._read(name))).mean(dtype=np.float64)
                self._scales[name] = np.float32(max(mean, SMALLEST_MEAN))
            else:
                scale = as_float32(self._read(_scale_name(name))).reshape(-1)[0]
                with np.errstate(divide="ignore"):  # the caller checks the values
                    self._scales[name] = np.float32(1) / scale if self._divides else scale
        return self._scales[name]


def _scale_name(name: str) -> str:
    return f"{name}_scale"
