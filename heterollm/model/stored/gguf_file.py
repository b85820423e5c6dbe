"""GGUF: metadata and tensors in one file, all of whose numbers are checked against its size.

The ``gguf`` package trusts the file: a false count makes it raise bare errors, or read for minutes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
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
PART: Final = re.compile(r"-\d{5}-of-(\d{5})$")
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
    """Type, shape (rows first) and byte range in the file of a tensor."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A GGUF file whose header agrees with its size.

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
    data: NDArray[np.uint8] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Check and map a file.

        Raises:
            CheckpointError: The file cannot be read, is cut short, or its header contradicts itself.
            UnsupportedModelError: It is part of a split file, or a tensor has an unsupported type.
        """
        try:
            data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"Cannot read {path}: {error}.") from error
        reader = _Reader(path, data)
        try:
            metadata = reader.metadata()
            parts = metadata.get("split.count", 1)
            if parts not in (0, 1):
                raise UnsupportedModelError(
                    f"{path} is one of {parts!r:.20} parts of a GGUF file (split.count).",
                    fix=f"Join them: `llama-gguf-split --merge {_first_part(path)} WHOLE.gguf`.",
                )
            entries = reader.entries(metadata.get("general.alignment", 32))
        except struct.error:
            reader.fail("its header is cut short")
        except UnicodeDecodeError:
            reader.fail("a text in it is not UTF-8")
        return cls(path, metadata, entries, reader.position, data)

    def own(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - any metadata
        """Return the metadata ``<architecture>.<name>``."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{name}", default)

    def count(self, name: str, other: str = "", default: int | None = None, *, hybrid: bool = False) -> int:
        """Return a whole number above 0 of the architecture; a list, one for each layer, must repeat it.

        Args:
            name: The field.
            other: A field that stands for it where it is missing.
            default: Value where both are.
            hybrid: Whether a list has 0 for some layers.

        Raises:
            CheckpointError: The number is missing or not possible.
        """
        value = self.own(name, self.own(other, default))
        if isinstance(value, list):
            stated = {one for one in value if one or not hybrid}
            value = stated.pop() if len(stated) == 1 else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self._wrong(name, value, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number of the architecture that is not negative.

        Raises:
            CheckpointError: The number is missing or not possible.
        """
        value = self.own(name, default)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._wrong(name, value, "a number that is not negative")
        return float(value)

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        said = "is missing" if value is None else f"is {value!r:.40}"
        stated = self.metadata["general.architecture"]
        return CheckpointError(f"{self.path}: {stated}.{name} {said}; expected {expected}.")

    def bits(self, name: str) -> NDArray[np.uint8]:
        """Return a read-only view of the bytes of a tensor, ``[rows, bytes of a row]``."""
        entry = self.entries[name]
        return self.data[entry.start : entry.stop].reshape(math.prod(entry.shape[:-1]), -1)


def is_gguf(path: Path) -> bool:
    """Return whether a file has the ending or the first bytes of GGUF."""
    try:
        if path.is_file() and path.suffix.lower() != ".gguf":
            with path.open("rb") as file:
                return file.read(4) == MAGIC
        return path.is_file()
    except OSError:
        return False


def _first_part(path: Path) -> str:
    """Return the name of the first of the parts of a split file."""
    return PART.sub(r"-00001-of-\1", path.stem) + path.suffix


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
