"""Experts in one tensor for all: floats with inputs first, or MXFP4 blocks.

Published gpt-oss checkpoints have ``*_blocks`` ``[experts, rows, k / 32, 16]`` and ``*_scales``
``[experts, rows, k / 32]``, those that transformers writes floats ``[experts, k, rows]``; biases are
``[experts, rows]``. MXFP4: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.formats import as_float32
from heterollm.model.stored.affine_blocks import AffineBlocks
from heterollm.model.stored.gguf_blocks import MXFP4_VALUES
from heterollm.model.stored.packed_linears import PackedTensor

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
BLOCK: Final = 32
"""Values of a block, two in a byte."""

FLOATS: Final = ("F16", "BF16", "F32")


class _Place(NamedTuple):
    """The place of a weight, or of a bias of all experts.

    Args:
        stack: Name of the tensor of all experts, without the ending of blocks.
        expert: The expert; None for biases.
        rows: Its rows in the stack.
        members: Members of the stack.
        shape: Its shape.
    """

    stack: str
    expert: int | None
    rows: slice
    members: int
    shape: tuple[int, ...]


class StackedExperts:
    """The experts of a checkpoint, as weights ``[rows, k]`` of each, and biases ``[experts, rows]``.

    Args:
        path: The checkpoint, for messages.
        tensors: Every tensor of the files by name.
        read: Returns a tensor's elements as they are stored.
        stacks: For each module with a stack, the modules of its members, with ``{expert}`` for the number.
        alternating: Whether rows of the members alternate; else they follow each other.

    Raises:
        CheckpointError: Shapes contradict each other, or a stack has another type.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, PackedTensor],
        read: Callable[[str], NDArray[Any]],
        stacks: Mapping[str, tuple[str, ...]],
        *,
        alternating: bool,
    ) -> None:
        self.path, self._alternating = path, alternating
        self._tensors, self._read = tensors, read
        self._places: dict[str, _Place] = {}
        self.parts: set[str] = set()
        for name in tensors:
            for module, members in stacks.items():
                for ending in ("", BLOCKS, BIAS):
                    if name.endswith(f".{module}{ending}"):
                        self._add(name, module, ending, members)

    @property
    def names(self) -> Collection[str]:
        """The name of every weight, and of biases."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._places[name].shape

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in the files."""
        place = self._places[name]
        tensor = self._tensors.get(place.stack) or self._tensors[f"{place.stack}{BLOCKS}"]
        parts = 1 if place.expert is None else tensor.shape[0]
        return tensor.size_bytes // (parts * place.members)

    def kind(self, name: str) -> str:
        """Return the name of a tensor's format."""
        return "MXFP4" if self.is_quantized(name) else self._tensors[self._places[name].stack].dtype

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored in blocks."""
        return f"{self._places[name].stack}{BLOCKS}" in self._tensors

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks:
        """Return rows ``[start, stop)`` of a weight in blocks."""
        place, part = self._places[name], slice(*rows)
        stacks = (self._read(f"{place.stack}{ending}") for ending in (BLOCKS, SCALES))
        packed, exponents = (stack[place.expert, place.rows][part] for stack in stacks)
        codes = MXFP4_VALUES[np.stack([packed & 15, packed >> 4], axis=-1)]
        # Half the power of two, since the codes are twice the format's values.
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
        return AffineBlocks(codes.reshape(len(packed), -1), scales, None, BLOCK)

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows ``[start, stop)`` of it, as float32."""
        place = self._places[name]
        if self.is_quantized(name):
            return self.blocks(name, rows or (0, place.shape[0])).values()
        values = self._read(place.stack)
        values = values if place.expert is None else values[place.expert]
        values = values[:, place.rows]
        if place.expert is not None:
            values = values.T
        return as_float32(np.ascontiguousarray(values[slice(*(rows or (None,)))]))

    def _add(self, name: str, module: str, ending: str, members: tuple[str, ...]) -> None:
        """Add the weights of all experts in a stack, or their biases."""
        self._check(name, ending, len(members))
        shape, count = self._tensors[name].shape, len(members)
        experts, rows = shape[0], shape[-1 if ending != BLOCKS else 1] // count
        prefix, stack = name.removesuffix(f"{module}{ending}"), name.removesuffix(BLOCKS)
        self.parts |= {name} | ({f"{stack}{SCALES}"} if ending == BLOCKS else set())
        for number, member in enumerate(members):
            part = slice(number * rows, (number + 1) * rows)
            part = slice(number, None, count) if self._alternating else part
            if ending == BIAS:
                own = f"{prefix}{member.replace('{expert}.', '')}.bias"
                self._places[own] = _Place(stack, None, part, count, (experts, rows))
                continue
            columns = shape[2] * BLOCK if ending == BLOCKS else shape[1]
            for expert in range(experts):
                own = f"{prefix}{member.format(expert=expert)}.weight"
                self._places[own] = _Place(stack, expert, part, count, (rows, columns))

    def _check(self, name: str, ending: str, members: int) -> None:
        dtype, shape, _ = self._tensors[name]
        if ending == BLOCKS:
            scales = self._tensors.get(f"{name.removesuffix(BLOCKS)}{SCALES}")
            sound = len(shape) == 4 and shape[3] == BLOCK // 2 and shape[1] % members == 0
            sound = sound and dtype == "U8" and scales is not None and scales[:2] == ("U8", shape[:3])
        else:
            sound = len(shape) == (2 if ending == BIAS else 3) and not shape[-1] % members and dtype in FLOATS
        if not sound:
            raise CheckpointError(
                f"{self.path}: {name} ({dtype} {list(shape)}), a stack of experts, lacks its scales or has "
                "another type or shape.",
                fix="Download it again.",
            )
