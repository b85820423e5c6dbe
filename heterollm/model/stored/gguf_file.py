"""GGUF: metadata and tensors in one file, or in several parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.model.stored.gguf_reader import MAGIC, GgufEntry, GgufPart, read_part
from heterollm.model.stored.gguf_split import other_parts


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A GGUF file, which may consist of several.

    Args:
        path: The file, or the first of its parts.
        metadata: Numbers, texts, flags and lists of them.
        entries: Every tensor by name.
        parts: The file, or all its parts in order.
    """

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, GgufEntry]
    parts: tuple[GgufPart, ...] = field(default=(), repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Check and map a file, and the others of a split one.

        Raises:
            CheckpointError: A file cannot be read, is cut short, or its header contradicts itself; or a part
                of a split file is missing, or belongs to another one.
            UnsupportedModelError: A tensor has an unsupported type.
        """
        first = read_part(path)
        parts = (first, *other_parts(first))
        entries = {
            name: entry._replace(part=number)
            for number, part in enumerate(parts)
            for name, entry in part.entries.items()
        }
        return cls(path, first.metadata, entries, parts)

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
        data = self.parts[entry.part].data[entry.start : entry.stop]
        return data.reshape(math.prod(entry.shape[:-1]), -1)


def is_gguf(path: Path) -> bool:
    """Return whether a file has the ending or the first bytes of GGUF."""
    try:
        if path.is_file() and path.suffix.lower() != ".gguf":
            with path.open("rb") as file:
                return file.read(4) == MAGIC
        return path.is_file()
    except OSError:
        return False
