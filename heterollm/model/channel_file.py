"""Float weights of a group of linears by input channel, in a cache file, so that a channel is one read.

A checkpoint holds a weight by output rows: the weights of one input lie far apart in it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import CheckpointError, locked
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.tensor_file import TensorEntry, TensorFile, layout_tensors, written_tensors
from heterollm.model.tensor_rows import TensorRows

NAME = "channels"
SLAB_ROWS = 1024
TYPES = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}


class ChannelFile:
    """Weights ``[channels, rows]`` of a group, mapped from a file.

    Args:
        path: The file.
        weights: The mapped weights.
    """

    def __init__(self, path: Path, weights: NDArray[Any]) -> None:
        self.weights = weights
        self._raw = path.open("rb")
        self._first_byte = path.stat().st_size - weights.nbytes
        self._row_bytes = weights[0].nbytes
        # Only Linux has this call; elsewhere a channel is read when it is copied.
        self._advise = getattr(os, "posix_fadvise", None)
        self._will_need = getattr(os, "POSIX_FADV_WILLNEED", 0)

    def read_ahead(self, channel: int) -> None:
        """Ask the system to read a channel in the background."""
        if self._advise is not None:
            start = self._first_byte + channel * self._row_bytes
            self._advise(self._raw.fileno(), start, self._row_bytes, self._will_need)

    def close(self) -> None:
        """Close the file; the mapped weights stay readable."""
        self._raw.close()


def channel_file(
    path: Path, key: str, checkpoint: Checkpoint, members: Sequence[TensorRows], dtype: DTypeLike
) -> ChannelFile:
    """Return the float weights of a group by channel; write the file first if it is missing or stale.

    Args:
        path: The cache file.
        key: Hash of the checkpoint's content.
        checkpoint: Source of the weights.
        members: Tensor and rows of each member, in order.
        dtype: float16 or float32.

    Raises:
        CheckpointError: A weight is beyond the range of float16.
        CacheError: The file cannot be written.
    """
    kind = np.dtype(dtype)
    columns = checkpoint.shape(members[0].name)[1]
    shape = columns, sum(member.count for member in members)
    entries = layout_tensors({NAME: (TYPES[kind], shape)})
    file = _opened(path, key, entries)
    if file is None:
        with locked(path):
            # Another process may have written it meanwhile.
            file = _opened(path, key, entries)
            if file is None:
                weights = _channels(checkpoint, members, shape, kind)
                with written_tensors(path, entries, {"key": key}) as put:
                    put(NAME, weights)
                file = TensorFile.open(path)
    return ChannelFile(path, file.bits(NAME))


def _opened(path: Path, key: str, entries: dict[str, TensorEntry]) -> TensorFile | None:
    """Map the file; return None if it is missing, damaged, or of other weights."""
    try:
        file = TensorFile.open(path) if path.exists() else None
    except CheckpointError:
        return None
    return file if file is not None and file.metadata.get("key") == key and file.entries == entries else None


def _channels(
    checkpoint: Checkpoint, members: Sequence[TensorRows], shape: tuple[int, int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    weights, column = np.empty(shape, dtype), 0
    for member in members:
        slabs = (
            (row, min(row + SLAB_ROWS, stop))
            for start, stop in member.ranges
            for row in range(start, stop, SLAB_ROWS)
        )
        for rows in slabs:
            stop = column + rows[1] - rows[0]
            with np.errstate(over="ignore"):
                weights[:, column:stop] = checkpoint.read(member.name, rows).T
            if not np.isfinite(weights[:, column:stop]).all():
                raise CheckpointError(
                    f"Tensor {member.name} holds values beyond the range of {dtype}.",
                    fix="Calibrate without shadow outliers: `heterollm calibrate --pruned 1`.",
                )
            column = stop
    return weights
