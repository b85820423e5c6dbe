"""The files of an exported model in place of a checkpoint's: settings, and the floats that a run reads.

A run reads float tensors at precision ``fp16``, and tables with a row for each token. Their file holds each
under its name in the runtime, as its checkpoint has it where reading changes nothing, else as float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.model.checkpoint import Checkpoint
from heterollm.model.config import ModelConfig
from heterollm.model.layout import expected_tensors
from heterollm.model.tensor_file import TensorFile, layout_tensors, written_tensors
from heterollm.model.weight_cache import SLAB_WEIGHTS


class ExportedCheckpoint(Checkpoint):
    """The settings and the float tensors of an exported model.

    Args:
        folder: The folder.
        floats: The file of float tensors; None without.
        file_bytes: Size of all weights.
        is_gguf: Whether the model came from a GGUF file.
    """

    def __init__(self, folder: Path, floats: Path | None, file_bytes: int, *, is_gguf: bool) -> None:
        self.folder = folder
        self.factors = {}
        self.adapter = None
        self._stored = None
        self._unread = 0
        self._hashed_paths = []
        self._exported = file_bytes, is_gguf
        self._shapes = expected_tensors(ModelConfig.from_folder(folder))
        file = None if floats is None else TensorFile.open(floats)
        self._files = {} if file is None else dict.fromkeys(file.entries, file)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every tensor of the model, also of quantised ones."""
        return tuple(self._shapes)

    @property
    def is_gguf(self) -> bool:
        """Whether the model came from a GGUF file."""
        return self._exported[1]

    @property
    def file_bytes(self) -> int:
        """Size of all weights."""
        return self._exported[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, also of a quantised one."""
        return self._shapes[name]


def write_floats(path: Path, checkpoint: Checkpoint, names: Iterable[str], key: str) -> None:
    """Write the file of float tensors, unless it is there.

    Args:
        path: The file.
        checkpoint: Source of the tensors.
        names: Their names.
        key: Hash of everything that determines the values.

    Raises:
        CheckpointError: A value cannot be used.
        CacheError: The file cannot be written.
    """
    if path.is_file():  # it is whole: a finished one took the place of a temporary one
        return
    stored = {name: checkpoint.unchanged(name) for name in names}
    described = {
        name: (_type(checkpoint, name, values), checkpoint.shape(name)) for name, values in stored.items()
    }
    with written_tensors(path, layout_tensors(described), {"key": key}) as put:
        for name, values in stored.items():
            rows, columns = checkpoint.matrix_shape(name)
            offset, rows_at_once = 0, max(1, SLAB_WEIGHTS // columns)
            for start in range(0, rows, rows_at_once):
                place = start, min(start + rows_at_once, rows)
                slab: NDArray[Any] = checkpoint.read(name, place)
                if values is not None:
                    slab = values.reshape(rows, columns)[place[0] : place[1]]
                put(name, np.ascontiguousarray(slab).view(np.uint8), offset)
                offset += slab.nbytes


def _type(checkpoint: Checkpoint, name: str, values: NDArray[Any] | None) -> str:
    stated = checkpoint.dtype(name)
    return "F32" if values is None or stated is None else stated
