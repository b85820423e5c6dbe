"""Where the slots of a pass begin in an arena.

QNN registers a tensor's address once for a context, with the size of the first tensor there, and the graphs
of one slice at all lengths share a context. So passes of other lengths begin their slots some pages later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from heterollm.base import PAGE_BYTES
from heterollm.kernels.npu import INTEGER_FORMS, edge_dtype
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sync import SPARE_BYTES
from heterollm.solver import Placement

Placed: TypeAlias = Sequence[tuple[OpSpec, Placement]]


class SlotShifts:
    """The shifts of all passes so far, and the tensors at each address.

    Args:
        dtype: Element type of activations.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._lengths: dict[tuple[object, ...], int] = {}

    def find(self, lane: int, placed: Placed) -> int:
        """Return the bytes by which the slots of a pass begin later.

        Where no shift is left, it is 0, and graphs that find another tensor at their address copy.

        Args:
            lane: The lane of the pass.
            placed: Its operators.
        """
        for shift in range(0, SPARE_BYTES + 1, PAGE_BYTES):
            found = dict(self._tensors(lane, placed, shift))
            if all(self._lengths.get(place, length) == length for place, length in found.items()):
                self._lengths |= found
                return shift
        return 0

    def _tensors(self, lane: int, placed: Placed, shift: int) -> Iterator[tuple[tuple[object, ...], int]]:
        """Yield the place of each input and output, in a slice's context, and its tokens."""
        for spec, placement in placed:
            first, rows = 0, sum(placement.npu_rows) if spec.then is None else spec.then.rows
            form: Any = placement.form
            item = self._dtype.itemsize if form is None else edge_dtype(form, self._dtype).itemsize
            # The head has the same slots in all lanes.
            own = lane if spec.layer >= 0 else 0
            slice_of = own, spec.layer, spec.group, placement.npu_rows, form in INTEGER_FORMS
            for length in placement.npu_lengths:
                for edge, columns in (("x", spec.columns), ("y", rows)):
                    yield (*slice_of, edge, shift + first * columns * item), length
                first += length
