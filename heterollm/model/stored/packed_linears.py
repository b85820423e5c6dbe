"""Linears that GPTQ, AWQ and compressed-tensors pack into 32-bit words of safetensors files.

Packing: https://github.com/ModelCloud/GPTQModel (``gptq``; ``gptq_v2`` stores zero points as they are),
https://github.com/casper-hansen/AutoAWQ (``gemm``), and ``pack-quantized`` of
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.formats import as_float32
from heterollm.model.stored.affine_blocks import AffineBlocks

AWQ_COLUMNS: Final = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Column of each nibble of a word, the lowest first."""

LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
)


class PackedTensor(NamedTuple):
    """Type, shape and size of a tensor of the files."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class PartNames(NamedTuple):
    """Endings of the tensors of a linear; the group index and zero points may be missing."""

    words: str
    scales: str
    zeros: str
    groups: str


GPTQ_NAMES: Final = PartNames("qweight", "scales", "qzeros", "g_idx")
COMPRESSED_NAMES: Final = PartNames("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")


class PackedLinears:
    """The packed linears of a checkpoint, by the names of the weights that they stand for.

    Args:
        path: The checkpoint, for messages.
        tensors: Every tensor of the files by name.
        read: Returns a tensor's elements as they are stored.
        config: ``quantization_config``, as :mod:`heterollm.model.stored_formats` normalises it.

    Raises:
        CheckpointError: A linear lacks a tensor, or shapes contradict each other.
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
        self._method = str(config.get("quant_method"))
        self._names = COMPRESSED_NAMES if self._method == "compressed-tensors" else GPTQ_NAMES
        self._bits = _bits(config)
        # GPTQ subtracts one from the zero points that it stores.
        self._zero_shift = int(self._method == "gptq" and config.get("checkpoint_format") != "gptq_v2")
        self._shapes: dict[str, tuple[int, int]] = {}
        ending = f".{self._names.words}"
        for name in tensors:
            if name.endswith(ending):
                module = name.removesuffix(ending)
                self._shapes[f"{module}.weight"] = self._checked_shape(module)

    @property
    def names(self) -> Collection[str]:
        """The name of every weight."""
        return self._shapes.keys()

    @property
    def parts(self) -> set[str]:
        """The tensors of the files that belong to these weights."""
        endings = (*self._names, "weight_shape")
        parts = (f"{name.removesuffix('weight')}{ending}" for name in self._shapes for ending in endings)
        return {name for name in parts if name in self._tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return rows and inputs of a weight."""
        return self._shapes[name]

    def size_bytes(self, name: str) -> int:
        """Return the size of a weight's words in the files."""
        return self._tensors[self._part(name, self._names.words)].size_bytes

    def kind(self, name: str) -> str:  # noqa: ARG002 - one for all
        """Return the name of the format."""
        return f"{LABELS.get(self._method, self._method)} {self._bits} bits"

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is one of these weights."""
        return name in self._shapes

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks | None:
        """Return rows of a weight; None if its groups are no ranges of inputs, or need more than 8 bits."""
        codes, zeros, scales, groups = self._unpacked(name, rows)
        block = self._shapes[name][1] // scales.shape[1]
        if not np.array_equal(groups, np.arange(len(groups)) // block):
            return None
        codes -= np.repeat(zeros, block, axis=1)
        if codes.min(initial=0) < -128 or codes.max(initial=0) > 127:
            return None
        return AffineBlocks(codes.astype(np.int8), scales, None, block)

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a weight, or rows of it, as float32."""
        codes, zeros, scales, groups = self._unpacked(name, rows or (0, self._shapes[name][0]))
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales; the caller checks the values
            values: NDArray[np.float32] = (codes - zeros[:, groups]) * scales[:, groups]
        return values

    def _unpacked(
        self, name: str, rows: tuple[int, int]
    ) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.float32], NDArray[np.intp]]:
        """Return codes ``[n, k]``, zero points and scales ``[n, groups]``, and the group of each input."""
        columns = self._shapes[name][1]
        part = slice(*rows)
        words, scales = (self._read(self._part(name, one)) for one in self._names[:2])
        zeros_name, groups_name = (self._part(name, one) for one in self._names[2:])
        stored = self._read(zeros_name) if zeros_name in self._tensors else None
        if self._method == "compressed-tensors":
            codes = self._bytes(words[part], 1)[:, :columns]
            zeros = None if stored is None else self._bytes(stored, 0)[part]
            scales = scales[part]
        elif self._method == "awq":
            assert stored is not None  # by the check of shapes
            codes, zeros = (self._awq(one, rows).T for one in (words, stored))
            scales = scales[:, part].T
        else:
            codes = self._bytes(words[:, part], 0).T
            zeros = None if stored is None else self._bytes(stored, 1)[:, part].T
            scales = scales[:, part].T
        middle = np.full(scales.shape, 1 << (self._bits - 1), np.int16)
        own = middle if zeros is None else zeros.astype(np.int16) + self._zero_shift
        groups = np.arange(columns) // (columns // scales.shape[1])
        if groups_name in self._tensors:
            groups = self._read(groups_name).astype(np.intp)
            if groups.min(initial=0) < 0 or groups.max(initial=0) >= scales.shape[1]:
                raise CheckpointError(f"{self.path}: {groups_name} names a group that {name} does not have.")
        return codes.astype(np.int16), own, as_float32(scales), groups

    def _bytes(self, words: NDArray[Any], axis: int) -> NDArray[np.uint8]:
        """Return the codes of words along an axis, the lowest bits first."""
        shifts = np.arange(0, 32, self._bits, dtype=np.uint32)
        parts = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(
            (1 << self._bits) - 1
        )
        moved = np.moveaxis(parts.astype(np.uint8), -1, axis + 1)
        shape = list(words.shape)
        shape[axis] *= len(shifts)
        return moved.reshape(shape)

    def _awq(self, words: NDArray[Any], rows: tuple[int, int]) -> NDArray[np.uint8]:
        """Return the columns ``[start, stop)`` of AWQ's words, whose nibbles have an order of their own."""
        first, last = rows[0] // 8, -(-rows[1] // 8)
        codes = self._bytes(words[:, first:last], 1).reshape(len(words), -1, 8)
        ordered = codes[:, :, np.argsort(AWQ_COLUMNS)].reshape(len(words), -1)
        return ordered[:, rows[0] - 8 * first : rows[1] - 8 * first]

    def _part(self, name: str, ending: str) -> str:
        return f"{name.removesuffix('weight')}{ending}"

    def _checked_shape(self, module: str) -> tuple[int, int]:
        """Return rows and inputs of a linear after a check of all its tensors."""
        per_word = 32 // self._bits
        words, scales, zeros, groups = (self._tensors.get(f"{module}.{name}") for name in self._names)
        assert words is not None  # it names the linear
        if scales is None or (zeros is None and self._method == "awq"):
            raise CheckpointError(f"{self.path}: {module} lacks its scales or zero points.")
        if self._method == "compressed-tensors":
            rows, columns = words.shape[0], words.shape[-1] * per_word
            shape = self._tensors.get(f"{module}.weight_shape")
            if shape is not None and shape.dtype in ("I64", "I32") and shape.shape == (2,):
                rows, columns = (int(one) for one in self._read(f"{module}.weight_shape"))
            count = scales.shape[-1]
            expected = ((rows, -(-columns // per_word)), (rows, count), (-(-rows // per_word), count))
        elif self._method == "awq":
            columns, rows = words.shape[0], words.shape[-1] * per_word
            count = scales.shape[0]
            expected = ((columns, rows // per_word), (count, rows), (count, rows // per_word))
        else:
            columns, rows = words.shape[0] * per_word, words.shape[-1]
            count = scales.shape[0]
            expected = ((columns // per_word, rows), (count, rows), (count, -(-rows // per_word)))
        given = (words.shape, scales.shape, expected[2] if zeros is None else zeros.shape)
        indexed = groups is None or (groups.shape == (columns,) and groups.dtype in ("I32", "I64"))
        types = all(one is None or one.dtype in ("I32", "U32") for one in (words, zeros))
        if given != expected or not count or columns % count or not indexed or not types:
            raise CheckpointError(
                f"{self.path}: {module} has packed tensors of shapes {given!r:.120}, which do not agree."
            )
        return rows, columns


def _bits(config: Mapping[str, Any]) -> int:
    groups = config.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        weights = next(iter(groups.values())).get("weights", {})
        return int(weights.get("num_bits", 4))
    return int(config.get("bits", 4))
