"""The tensors of a GGUF file by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import as_float32
from heterollm.model.stored.affine_blocks import AffineBlocks
from heterollm.model.stored.gguf_blocks import BlockType, block_type
from heterollm.model.stored.gguf_config import architecture_of
from heterollm.model.stored.gguf_delta import DECAY_LOG, GATED_NORM
from heterollm.model.stored.gguf_file import GgufFile, GgufRows
from heterollm.model.stored.gguf_places import layer_numbers, places


class GgufTensors:
    """The tensors of a GGUF file by their Hugging Face names.

    Args:
        file: The file.
        notes: Assumptions about its metadata, and fields that have no effect here.

    Raises:
        CheckpointError: Tensors do not fit each other.
        UnsupportedModelError: The architecture is not supported, or rows of one weight have several types.
    """

    def __init__(self, file: GgufFile, notes: tuple[str, ...] = ()) -> None:
        self.path = file.path
        self.paths = tuple(part.path for part in file.parts)
        self.notes = notes
        self._file = file
        architecture = architecture_of(file)
        self._norm_offset = np.float32(architecture.norm_offset)
        self._places = places(file, architecture)
        self._numbers = layer_numbers(file, architecture)

    @property
    def names(self) -> Collection[str]:
        """The name of every tensor."""
        return (*self._places, *self._numbers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._numbers[name].shape if name in self._numbers else self._places[name].shape

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in the file."""
        return sum(self._part(part).nbytes for part in self._places[name].parts)

    def kind(self, name: str) -> str:
        """Return the type of a tensor, as llama.cpp spells it."""
        return self._file.entries[self._places[name].parts[0].own].kind

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored as integers."""
        return name not in self._numbers and self._type(name).dtype is None

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks:
        """Return rows ``[start, stop)`` of a quantised tensor."""
        return self._type(name).blocks(self._rows(name, *rows)).with_columns(self._places[name].columns)

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows ``[start, stop)`` of its matrix, as float32."""
        if name in self._numbers:
            return self._numbers[name]
        if heads := self._places[name].heads:
            keys, latent_values = (self._stack(part, heads) for part in self._places[name].parts)
            values = np.concatenate([keys.swapaxes(1, 2), latent_values], axis=1)
            return values.reshape(self.shape(name))[slice(*(rows or (None,)))]
        kind, every = self._type(name), sum(part.stop - part.start for part in self._places[name].parts)
        values = _values(kind, self._rows(name, *(rows or (0, every))))
        if columns := self._places[name].columns:
            values = values.reshape(len(values), len(columns), -1)[:, columns].reshape(values.shape)
        if name.endswith("norm.weight") and not name.endswith(GATED_NORM):
            values = values - self._norm_offset
        if name.endswith(DECAY_LOG):
            with np.errstate(invalid="ignore", divide="ignore"):  # the caller checks the values
                values = np.log(-values)
        return values if rows is not None else values.reshape(self.shape(name))

    def _stack(self, part: GgufRows, heads: int) -> NDArray[np.float32]:
        """Return a stack of matrices, ``[heads, rows, columns]``."""
        values = _values(block_type(self._file.entries[part.own].kind), self._part(part))
        return values.reshape(heads, -1, values.shape[-1])

    def gather(self, name: str, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return some rows of a matrix that one tensor holds, as float32."""
        (part,) = self._places[name].parts
        return _values(self._type(name), self._part(part)[rows])

    def _type(self, name: str) -> BlockType:
        return block_type(self.kind(name))

    def _rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        found, first = [], 0
        for part in self._places[name].parts:
            low, high = max(start - first, 0), min(stop - first, part.stop - part.start)
            if low < high:
                rows = self._part(part)
                found.append(rows[_unpaired(part)[low:high]] if part.heads else rows[low:high])
            first += part.stop - part.start
        return np.ascontiguousarray(found[0]) if len(found) == 1 else np.concatenate(found)

    def _part(self, part: GgufRows) -> NDArray[np.uint8]:
        """Return the bytes of some rows, ``[rows, bytes of a row]``."""
        entry, data = self._file.entries[part.own], self._file.bits(part.own)
        if len(entry.shape) == 1 and block_type(entry.kind).dtype is not None:
            data = data.reshape(entry.shape[0], -1)  # an element in each row
        return data[part.start : part.stop]


def _values(kind: BlockType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return rows of bytes as float32."""
    return kind.blocks(data).values() if kind.dtype is None else as_float32(data.view(kind.dtype))


def _unpaired(part: GgufRows) -> NDArray[np.intp]:
    """Return where rows lie whose halves of a head follow each other."""
    count = part.stop - part.start
    return np.arange(count).reshape(part.heads, -1, 2).swapaxes(1, 2).ravel()
