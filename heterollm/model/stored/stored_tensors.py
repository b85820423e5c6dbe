"""The reader of tensors that are stored quantised, whatever the format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.model.stored.affine_blocks import AffineBlocks


class StoredTensors(Protocol):
    """Tensors by their Hugging Face names; ``rows`` are ranges ``[start, stop)`` of a tensor's matrix."""

    path: Path

    @property
    def names(self) -> Collection[str]:
        """The name of every tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in the file."""

    def kind(self, name: str) -> str:
        """Return the name of a tensor's format."""

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored as integers."""

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks | None:
        """Return rows of a quantised tensor; None if inputs that share a scale do not follow each other."""

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows of it, as float32."""
