"""GGUF: metadata and tensors in one file, or in several parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.model.stored.gguf_names import LAYER_TENSOR
from heterollm.model.stored.gguf_reader import MAGIC, GgufEntry, GgufPart, read_part
from heterollm.model.stored.gguf_split import other_parts

Lists: TypeAlias = Literal["alike", "hybrid", "first"]
"""Meaning of a list where one number is wanted: all layers have it, or 0, or the first layer's counts."""


class GgufRows(NamedTuple):
    """Rows of a tensor of the file.

    Args:
        own: Name of the tensor.
        start: First row of its matrix; an element of a vector counts as a row.
        stop: Row behind the last.
        heads: Heads whose rows stand in the order of rotated pairs; 0 for rows in order.
    """

    own: str
    start: int
    stop: int
    heads: int = 0


class GgufPlace(NamedTuple):
    """The place of a weight in the file.

    Args:
        shape: Its shape.
        parts: Its rows.
        columns: For each head, whose inputs are columns, where those stand; empty for columns in order.
        heads: Heads that have rows of the first part, transposed, and then of the second; 0 for others.
    """

    shape: tuple[int, ...]
    parts: tuple[GgufRows, ...]
    columns: tuple[int, ...] = ()
    heads: int = 0


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

    @property
    def layers(self) -> int:
        """Decoder layers, without those behind them that predict further tokens.

        Raises:
            CheckpointError: There is none.
        """
        blocks, further = self.count("block_count"), self.own("nextn_predict_layers") or 0
        if type(further) is not int or not 0 <= further < blocks:
            raise self._wrong("nextn_predict_layers", further, f"fewer than the {blocks} of block_count")
        return blocks - further

    def layer_tensors(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, layer and name below it of each tensor, but for layers that predict further tokens."""
        further = range(self.layers, self.count("block_count"))
        for own in self.entries:
            match = LAYER_TENSOR.fullmatch(own)
            if match and int(match[1]) not in further:
                yield own, match[1], match[2]

    def count(self, name: str, other: str = "", default: int | None = None, lists: Lists = "alike") -> int:
        """Return a whole number above 0 of the architecture.

        Args:
            name: The field.
            other: A field that stands for it where it is missing.
            default: Value where both are.
            lists: Meaning of a list with a number for each layer.

        Raises:
            CheckpointError: The number is missing or not possible.
        """
        value = self.own(name, self.own(other, default))
        if isinstance(value, list):
            stated = value[:1] if lists == "first" else {one for one in value if one or lists != "hybrid"}
            value = next(iter(stated)) if len(stated) == 1 else value
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
