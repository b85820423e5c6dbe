"""Reads the header of a GGUF file, all of whose numbers are checked against the file's size.

The ``gguf`` package trusts the file: a false count makes it raise bare errors, or read for minutes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, UnsupportedModelError, round_up
from heterollm.model.stored.foreign_formats import foreign_format
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES, OTHER_TYPES

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
VERSIONS_BIG_ENDIAN: Final = (0x0100, 0x0200, 0x0300)
"""Upper halves of versions 1 to 3, read in the wrong order of bytes."""
SCALARS: Final[Mapping[int, struct.Struct]] = MappingProxyType(
    {
        number: struct.Struct(f"<{kind}")
        for number, kind in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
    }
)
STRING: Final = 8
ARRAY: Final = 9
LENGTH: Final = struct.Struct("<Q")
SMALLEST_PAIR: Final = 8 + 4 + 1
SMALLEST_TENSOR: Final = 8 + 4 + 8 + 4 + 8
MOST_DIMENSIONS: Final = 4
LARGEST_ALIGNMENT: Final = 1 << 20
LONGEST_NAME: Final = 1024


class GgufEntry(NamedTuple):
    """Type, shape (rows first), byte range and part of the file of a tensor."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int = 0


class GgufPart(NamedTuple):
    """A file whose header agrees with its size.

    Args:
        path: The file.
        metadata: Numbers, texts, flags and lists of them.
        entries: Every tensor by name.
        header_bytes: Size of metadata and tensor table.
        data: All bytes of the file, mapped read-only.
    """

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, GgufEntry]
    header_bytes: int
    data: NDArray[np.uint8]


def read_part(path: Path) -> GgufPart:
    """Check and map a file.

    Raises:
        CheckpointError: The file cannot be read, is cut short, or its header contradicts itself.
        UnsupportedModelError: A tensor has an unsupported type.
    """
    try:
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    reader = _Reader(path, data)
    try:
        metadata = reader.metadata()
        entries = reader.entries(metadata.get("general.alignment", 32))
    except struct.error:
        reader.fail("its header is cut short")
    except UnicodeDecodeError:
        reader.fail("a text in it is not UTF-8")
    return GgufPart(path, metadata, entries, reader.position, data)


class _Reader:
    """Reads a header from the mapped file; ``struct`` raises at its end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path = path
        self._data = data
        self._buffer = data.data
        self.position = 0
        self._tensors = 0

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path} is no sound GGUF file: {reason}.", fix="Download it again; it may be cut short."
        )

    def metadata(self) -> dict[str, Any]:
        if bytes(self._buffer[:4]) != MAGIC:
            foreign = foreign_format(self._path)
            if foreign is not None:
                raise foreign
            self.fail("it does not begin with GGUF")
        self.position = 4
        version = self._number("I")
        if version >> 16 in VERSIONS_BIG_ENDIAN and not version & 0xFFFF:
            raise UnsupportedModelError(
                f"{self._path} is a big-endian GGUF file, for machines such as IBM Z; only little-endian "
                "ones are read.",
                fix="Convert it with `gguf-convert-endian FILE little`, or take a file for common machines.",
            )
        if version == 1:
            raise UnsupportedModelError(
                f"{self._path} is a GGUF file of version 1, of August 2023; versions 2 and 3 are read.",
                fix="Take a newer file of the model, or the Hugging Face checkpoint.",
            )
        if version not in VERSIONS:
            self.fail(f"its version is {version}, not one of {VERSIONS}")
        self._tensors, pairs = self._number("Q"), self._number("Q")
        self._check_count("tensors", self._tensors, SMALLEST_TENSOR)
        self._check_count("pairs", pairs, SMALLEST_PAIR)
        found: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._name()
            if name in found:
                self.fail(f"it states {name!r:.80} twice")
            found[name] = self._value(self._number("I"), name)
        return found

    def entries(self, alignment: object) -> dict[str, GgufEntry]:
        power_of_two = isinstance(alignment, int) and 0 < alignment <= LARGEST_ALIGNMENT
        if not isinstance(alignment, int) or not power_of_two or alignment & (alignment - 1):
            self.fail(f"its alignment is {alignment!r:.40}")
        described = [self._tensor() for _ in range(self._tensors)]
        start = round_up(self.position, alignment)
        found: dict[str, GgufEntry] = {}
        stop = start
        for name, kind, shape, offset, size in sorted(described, key=lambda one: one[3]):
            if name in found:
                self.fail(f"it has two tensors {name!r:.80}")
            if offset % alignment or start + offset < stop:
                self.fail(f"tensor {name!r:.80} lies at offset {offset}, in another one")
            stop = start + offset + size
            if stop > len(self._data):
                self.fail(f"tensor {name!r:.80} ends at byte {stop}, and the file at {len(self._data)}")
            found[name] = GgufEntry(kind, shape, start + offset, stop)
        return found

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self._name()
        count = self._number("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            self.fail(f"tensor {name!r:.80} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in BLOCK_TYPES:
            other = OTHER_TYPES.get(number, f"number {number}")
            raise UnsupportedModelError(
                f"{self._path}: tensor {name!r:.80} has the unsupported type {other}.",
                fix=f"Take a file of {', '.join(one.name for one in BLOCK_TYPES.values())}.",
            )
        kind = BLOCK_TYPES[number]
        if not all(shape) or shape[-1] % kind.block:
            self.fail(f"tensor {name!r:.80} of type {kind.name} has shape {list(shape)}")
        return name, kind.name, shape, offset, math.prod(shape) // kind.block * kind.block_bytes

    def _value(self, kind: int, name: str) -> Any:  # noqa: ANN401 - any of the format's types
        if kind in SCALARS:
            return self._scalar(kind)
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            self.fail(f"{name!r:.80} has the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        if item == STRING:
            self._check_count(name, count, 8)
            return [self._text() for _ in range(count)]
        if item not in SCALARS:
            self.fail(f"{name!r:.80} is a list of type {item}")
        self._check_count(name, count, SCALARS[item].size)
        found = struct.unpack_from(f"<{count}{SCALARS[item].format[1:]}", self._buffer, self.position)
        self.position += count * SCALARS[item].size
        return list(found)

    def _scalar(self, kind: int) -> Any:  # noqa: ANN401
        (value,) = SCALARS[kind].unpack_from(self._buffer, self.position)
        self.position += SCALARS[kind].size
        return value

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self._buffer, self.position)
        self.position += struct.calcsize(f"<{kind}")
        return int(value)

    def _name(self) -> str:
        name = self._text(LONGEST_NAME)
        if not name.isprintable():  # messages show it
            self.fail(f"it has the name {name!r:.80}")
        return name

    def _text(self, longest: int | None = None) -> str:
        (length,) = LENGTH.unpack_from(self._buffer, self.position)
        start = self.position + 8
        if length > len(self._buffer) - start or (longest is not None and length > longest):
            self.fail(f"a text in its header has {length} bytes")
        self.position = start + length
        return str(self._buffer[start : self.position], "utf-8")

    def _check_count(self, what: str, count: int, smallest: int) -> None:
        if count > (len(self._buffer) - self.position) // smallest:
            self.fail(f"it states {count} {what!r:.80}, more than it has room for")
