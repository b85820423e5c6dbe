"""Weights that are read on access: unquantised ones from the checkpoint, and rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.formats import LinearWeight, take_rows
from heterollm.model.checkpoint import Checkpoint
from heterollm.model.tensor_rows import TensorRows
from heterollm.model.weight_cache import SLAB_WEIGHTS


def beyond_float16(name: str) -> CheckpointError:
    """Return the error of a tensor with a value beyond the range of FP16."""
    return CheckpointError(
        f"Tensor {name} holds values beyond {np.finfo(np.float16).max:g}, the range of FP16.",
        fix="Use precision w4a16.",
    )


class FloatLinears(Mapping[str, LinearWeight]):
    """Unquantised weights, read from the checkpoint on each access, so that memory holds one copy."""

    def __init__(self, checkpoint: Checkpoint, names: tuple[str, ...], dtype: np.dtype[Any]) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._dtype = dtype

    def __getitem__(self, name: str) -> LinearWeight:
        return self.rows(name, (0, self._checkpoint.matrix_shape(name)[0]))

    def rows(self, name: str, rows: tuple[int, int]) -> LinearWeight:
        """Return the rows ``[start, stop)`` of a weight."""
        columns = self._checkpoint.matrix_shape(name)[1]
        weight = np.empty((rows[1] - rows[0], columns), self._dtype)
        rows_at_once = max(1, SLAB_WEIGHTS // columns)
        for start in range(0, len(weight), rows_at_once):
            stop = min(start + rows_at_once, len(weight))
            with np.errstate(over="ignore"):
                weight[start:stop] = self._checkpoint.read(name, (rows[0] + start, rows[0] + stop))
            if not np.isfinite(weight[start:stop]).all():
                raise beyond_float16(name)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class TokenRows:
    """A table with a row for each token, of which a pass reads those of its tokens from the mapped file."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def read(self, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Write the rows of some tokens to ``out [n, columns]``.

        Raises:
            CheckpointError: A value is NaN or infinite.
        """
        out[:] = self._checkpoint.gather(self._name, ids)


class Members(Sequence[LinearWeight]):
    """Rows of tensors, each read on access, so that the members of a group are never in memory at once."""

    def __init__(self, linears: Mapping[str, LinearWeight], places: Sequence[TensorRows]) -> None:
        self._linears = linears
        self._places = places

    @overload
    def __getitem__(self, index: int) -> LinearWeight: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LinearWeight]: ...

    def __getitem__(self, index: int | slice) -> LinearWeight | Sequence[LinearWeight]:
        if isinstance(index, slice):
            return Members(self._linears, self._places[index])
        place = self._places[index]
        rows = place.start, place.stop
        if isinstance(self._linears, FloatLinears):
            return self._linears.rows(place.name, rows)
        return take_rows(self._linears[place.name], [rows])

    def __len__(self) -> int:
        return len(self._places)
