"""Safetensors files: headers that are checked before anything is read through them, and memory maps.

The library of that name gives NumPy no BF16, no rows of a tensor, and no way to write a file whose tensors
are computed one after another. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, parse_json, round_up

__all__ = ["ITEM_BYTES", "TensorEntry", "TensorFile", "layout_tensors", "write_header"]

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element of each type of the format that has whole bytes."""

DATA_TYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
}
"""The element type under which NumPy maps each type that is read; BF16 as its bits."""

PACKED_TYPES = ("F4", "F6_E2M3", "F6_E3M2")
"""The types of the format whose elements share bytes; they are never read."""

LARGEST_HEADER_BYTES = 100_000_000
DATA_ALIGNMENT = 64
LARGEST_RANK = 16
LARGEST_EXTENT = 2**48


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and place of one tensor, in bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A safetensors file whose header holds what the file does.

    Args:
        path: The file.
        entries: Every tensor by name.
        metadata: The header's free text values.
        data: All bytes after the header, mapped read-only.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data: NDArray[np.uint8] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Map a file and check its header.

        Raises:
            CheckpointError: The file cannot be read, is cut short, or its header contradicts itself.
        """
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                if not 2 <= header_bytes <= min(LARGEST_HEADER_BYTES, size - 8):
                    raise _damaged(path, f"its header should have {header_bytes} bytes, the file has {size}")
                header = parse_json(file.read(header_bytes))
            start = 8 + header_bytes
            data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not isinstance(header, dict):
            raise _damaged(path, "its header is no JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise _damaged(path, "its metadata is no object of texts")
        entries = {name: _entry(path, name, value) for name, value in header.items()}
        _check_places(path, entries, len(data))
        return cls(path, entries, metadata, data)

    def bits(self, name: str) -> NDArray[Any]:
        """Return a read-only view of a tensor, with the type of ``DATA_TYPES``; it may be unaligned.

        Raises:
            CheckpointError: The tensor has a type that is not read.
        """
        entry = self.entries[name]
        dtype = DATA_TYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name} has type {entry.dtype}.")
        return np.ndarray(entry.shape, dtype, self.data[entry.start : entry.stop].data)


def layout_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Place tensors of given type and shape one after another, the widest elements first.

    In this order each is aligned to its element size though the format allows no gaps.
    """
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        stop = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = TensorEntry(dtype, shape, position, stop)
        position = stop
    return entries


def write_header(file: BinaryIO, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> int:
    """Write length and header; return the position of the data, a multiple of 64."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        places = [entry.start, entry.stop]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    start = round_up(8 + len(text), DATA_ALIGNMENT)
    file.write((start - 8).to_bytes(8, "little"))
    file.write(text.ljust(start - 8))
    return start


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is no sound safetensors file: {reason}.", fix="Download it again.")


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            # Bounded, because the product of a long list of numbers alone could take hours.
            if len(shape) > LARGEST_RANK or not all(
                type(extent) is int and 0 <= extent <= LARGEST_EXTENT for extent in shape
            ):
                raise _damaged(path, f"tensor {name} has shape {shape!r:.80}")
            if isinstance(start, bool) or isinstance(stop, bool):
                raise _damaged(path, f"tensor {name} is at {start} to {stop}")
            item = ITEM_BYTES.get(dtype)
            if item is None and dtype not in PACKED_TYPES:
                raise _damaged(path, f"tensor {name} has type {dtype!r:.80}")
            if item is not None and stop - start != math.prod(shape) * item:
                raise _damaged(path, f"tensor {name} ({dtype} {shape}) is said to have {stop - start} bytes")
            return TensorEntry(dtype, tuple(shape), start, stop)
        case _:
            raise _damaged(path, f"tensor {name} is described by {value!r:.80}")


def _check_places(path: Path, entries: dict[str, TensorEntry], size: int) -> None:
    """Check that the tensors fill the data without gap or overlap."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position or entry.stop < entry.start:
            raise _damaged(path, f"tensor {name} is at bytes {entry.start} to {entry.stop}, not {position}")
        if entry.stop > size:
            raise _damaged(path, f"it ends after {size} bytes of data, tensor {name} at {entry.stop}")
        position = entry.stop
    if position != size:
        raise _damaged(path, f"it has {size - position} bytes that belong to no tensor")
