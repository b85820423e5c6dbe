"""Files of the state behind the beginning of a prompt, from which a later process goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CacheError, CheckpointError
from heterollm.engine.state import SessionState
from heterollm.model import CHECKSUMS, TensorEntry, TensorFile, checksums, layout_tensors, written_tensors

SCHEMA: Final = "heterollm-prefix-2"
IDS: Final = "ids"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens and the state behind them, in the host's memory.

    Args:
        tensors: Tokens ``ids``, and the blocks of each state and layer, by name.
    """

    tensors: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, state: SessionState, ids: NDArray[np.int32]) -> Prefix:
        """Copy a state behind tokens that it holds; for the engine thread."""
        tensors: dict[str, NDArray[Any]] = {IDS: ids}
        for number, own in enumerate(state.states):
            for part, values in enumerate(own.read(len(ids))):
                tensors[f"{number}.{part}"] = values
        return cls(tensors)

    def write(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write a file, or leave none.

        Raises:
            CacheError: The file cannot be written.
        """
        shapes = {name: (_KINDS[values.dtype], values.shape) for name, values in self.tensors.items()}
        with written_tensors(path, _with_checksums(shapes), {**metadata, "schema": SCHEMA}) as put:
            for name, values in self.tensors.items():
                put(name, values)


def open_prefix(path: Path) -> TensorFile:
    """Map a file, unchecked but for its form.

    Raises:
        CacheError: It is none.
    """
    try:
        file = TensorFile.open(path)
    except CheckpointError as error:
        raise CacheError(error.message) from error
    entry = file.entries.get(IDS)
    if (
        file.metadata.get("schema") != SCHEMA
        or entry is None
        or entry.dtype != "I32"
        or len(entry.shape) != 1
    ):
        raise CacheError(f"{path} has no tokens of this version.")
    return file


def fill_state(state: SessionState, file: TensorFile, context: int) -> NDArray[np.int32]:
    """Put a state from a file into an empty session's, and return its tokens; for the engine thread.

    Args:
        state: The state of the session.
        file: The file.
        context: Positions of the session.

    Raises:
        CacheError: The file is damaged, or belongs to a state of other sizes.
    """
    ids: NDArray[np.int32] = np.array(file.bits(IDS))
    shapes = {IDS: ("I32", ids.shape)}
    for number, own in enumerate(state.states):
        for part, shape in enumerate(own.shapes(len(ids))):
            shapes[f"{number}.{part}"] = ("U8", shape)
    if len(ids) > context or file.entries != _with_checksums(shapes):
        raise CacheError(f"{file.path} belongs to another model, precision or context.")
    if not np.array_equal(checksums(file), file.bits(CHECKSUMS)):
        raise CacheError(f"{file.path} is damaged: its checksums do not match.")
    for number, own in enumerate(state.states):
        parts = sum(1 for _ in own.shapes(len(ids)))
        own.fill(len(ids), [file.bits(f"{number}.{part}") for part in range(parts)])
    return ids


_KINDS: Final = {np.dtype(np.int32): "I32", np.dtype(np.uint8): "U8"}


def _with_checksums(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    return layout_tensors({**shapes, CHECKSUMS: ("U32", (len(shapes),))})
