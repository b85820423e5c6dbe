"""Memory-mapped safetensors files, and headers of files whose tensors are written one after another.

The safetensors library checks a file, but its NumPy tensors are copies; those of this module are views of the
mapped file. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import safetensors
from numpy.typing import NDArray

from heterollm.base import CheckpointError, atomic_path, parse_json, round_up
from heterollm.kernels.formats import BFLOAT16
from heterollm.kernels.threads import allowed_cores

ITEM_BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits per element of each type of the format."""

DATA_TYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F32": np.dtype("<f4"),
}
"""NumPy's type of each supported type."""

DATA_ALIGNMENT = 64

CHECKSUMS = "checksums"
"""Name of the tensor of checksums in files that this package writes."""

LARGEST_RANK = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and byte range after the header of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A safetensors file whose header agrees with its size.

    Args:
        path: The file.
        entries: Every tensor by name.
        metadata: The header's text values.
        data: All bytes after the header, mapped read-only.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data: NDArray[np.uint8] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Check and map a file.

        Raises:
            CheckpointError: The file cannot be read, is cut short, or its header contradicts itself.
            MemoryError: The address space has no room for the file.
        """
        try:
            with safetensors.safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                described = {name: file.get_slice(name) for name in file.offset_keys()}
            with path.open("rb") as raw:
                start = 8 + int.from_bytes(raw.read(8), "little")
                parse_json(raw.read(start - 8))  # refuses repeated names, which the library accepts
            size = path.stat().st_size
            data = np.memmap(path, np.uint8, "r", start) if size > start else np.empty(0, np.uint8)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError(f"{path} cannot be mapped.") from error
            raise _damaged(path, f"{error}{_last_tensor(path)}") from error
        entries: dict[str, TensorEntry] = {}
        position = 0
        for name, tensor in described.items():
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if len(shape) > LARGEST_RANK or dtype not in ITEM_BITS:
                raise _damaged(path, f"tensor {name} is {dtype} of shape {shape!r:.80}")
            # The library refuses overlaps and gaps.
            stop = position + math.prod(shape) * ITEM_BITS[dtype] // 8
            entries[name] = TensorEntry(dtype, shape, position, stop)
            position = stop
        if position != len(data):
            raise _damaged(path, f"it changed while it was read: {len(data)} bytes of data, not {position}")
        return cls(path, entries, metadata, data)

    def bits(self, name: str) -> NDArray[Any]:
        """Return a read-only view, possibly unaligned, of a tensor with its type in ``DATA_TYPES``.

        Raises:
            CheckpointError: The tensor's type is not supported.
        """
        entry = self.entries[name]
        dtype = DATA_TYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: tensor {name} has type {entry.dtype}.")
        return np.ndarray(entry.shape, dtype, self.data[entry.start : entry.stop].data)


def checksums(file: TensorFile) -> NDArray[np.uint32]:
    """Return the CRC-32 of every tensor except the checksums, in the file's order."""

    def checksum(entry: TensorEntry) -> int:
        return zlib.crc32(file.data[entry.start : entry.stop].data)

    with ThreadPoolExecutor(len(allowed_cores())) as pool:
        places = [entry for name, entry in file.entries.items() if name != CHECKSUMS]
        return np.array(list(pool.map(checksum, places)), np.uint32)


def layout_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Place tensors of given type and shape one after another, those with the widest elements first.

    This order aligns each tensor to its element size without gaps, which the format forbids.
    """
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BITS[item[1][0]]):
        stop = position + math.prod(shape) * ITEM_BITS[dtype] // 8
        entries[name] = TensorEntry(dtype, shape, position, stop)
        position = stop
    return entries


def write_header(file: BinaryIO, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> int:
    """Write the length and the header; return the position of the data, a multiple of 64."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        places = [entry.start, entry.stop]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    start = round_up(8 + len(text), DATA_ALIGNMENT)
    file.write((start - 8).to_bytes(8, "little"))
    file.write(text.ljust(start - 8))
    return start


class PutTensor(Protocol):
    """Writes into a file."""

    def __call__(self, name: str, values: NDArray[Any], offset: int = 0) -> None:
        """Write values into a tensor of a name, from a byte of it on."""


@contextlib.contextmanager
def written_tensors(
    path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> Iterator[PutTensor]:
    """Replace a file by one whose tensors the block writes; if it lists checksums, the end adds them.

    Raises:
        CacheError: The file cannot be written; the old one stays.
    """
    with atomic_path(path) as temporary, temporary.open("r+b") as file:
        start = write_header(file, entries, metadata)
        file.truncate(start + max(entry.stop for entry in entries.values()))

        def put(name: str, values: NDArray[Any], offset: int = 0) -> None:
            # A plain write reports a full disk; a memory map would end the process.
            file.seek(start + entries[name].start + offset)
            file.write(np.ascontiguousarray(values).data)

        yield put
        file.flush()
        if CHECKSUMS in entries:
            put(CHECKSUMS, checksums(TensorFile.open(temporary)))
            file.flush()
        os.fsync(file.fileno())


def _last_tensor(path: Path) -> str:
    """Return which tensor a cut file ends in; nothing where its header does not say so."""
    try:
        with path.open("rb") as raw:
            size, start = path.stat().st_size, 8 + int.from_bytes(raw.read(8), "little")
            header = parse_json(raw.read(start - 8)) if start < size else {}
        header.pop("__metadata__", None)
        stops = sorted((start + entry["data_offsets"][1], name) for name, entry in header.items())
        return next((f"; the file ends in tensor {name}" for stop, name in stops if stop > size), "")
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return ""


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is no sound safetensors file: {reason}.", fix="Download it again; it may be cut short."
    )
