"""Operators before and behind a linear layer of one token, computed in the layer's own launch.

An enqueue costs a GPU's host several microseconds, and a norm, an activation or RoPE of one token keeps one
work-group busy. So the work-groups of the linear layer compute them from their own sums
(``opencl/linear_endings.h``). The launch of such an operator carries an :class:`Ending`, with which that of
the layer is made again (:attr:`heterollm.kernels.gpu.Launch.remade`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.kernels.gpu.launch import Argument, OpenClLaunch
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.parameters import LANES
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs

Defines = dict[str, str | int]

FEWEST_ROWS: Final = 8
"""Rows of a work-group at least: words of 32 bytes side by side, the least that a GPU's memory reads."""


@dataclass(frozen=True, slots=True)
class NormedInput:
    """The normed input of a linear layer, not yet divided by the root mean square of its row.

    Args:
        x: float32 ``[columns]``.
        squares: float32, sums of squares of parts of the row.
        parts: Number of these.
        columns: Width of the row.
        epsilon: Added to the mean square.
    """

    x: Argument
    squares: Argument
    parts: int
    columns: int
    epsilon: float

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Return the kernel's arguments behind those of all linear layers."""
        return self.squares, np.int32(self.parts), np.int32(self.columns), np.float32(self.epsilon)


class Ending(ABC):
    """The operator behind a linear layer, computed with its sums.

    Attributes:
        NAME: The kernel's macro.
        y: The output of the kernel.
        bias: float32 of the layer's rows, or None.
        rounded: Target of the output's int8 codes, or None.
    """

    NAME: str
    y: DeviceMemory
    bias: Argument
    rounded: RoundedInputs | None
    is_float = True
    """Whether ``y`` is float32 whatever the activation type is."""

    @property
    def tiles(self) -> int:
        """Row tiles of a work-group."""
        return 1

    @property
    def fewest_rows(self) -> int:
        """Rows of a tile that a work-group must have."""
        return FEWEST_ROWS if self.rounded is None else self.rounded.block

    @property
    def pairs_members(self) -> bool:
        """Whether the tiles of a work-group are those of the same rows of two members."""
        return False

    @property
    def suits(self) -> bool:
        """Whether a layer can end so: whole heads and blocks of codes lie in a work-group."""
        return self.fewest_rows <= LANES

    def least_rows(self, units: int) -> int:
        """Return the rows of a layer that ends so from which each of so many compute units has work."""
        rows = self.tiles * self.fewest_rows
        return units * rows if rows > FEWEST_ROWS else 0

    def groups(self, launch: OpenClLaunch) -> int:
        """Return the most work-groups of a layer that ends so, from its launch without an ending."""
        return launch.global_size[0] // LANES // self.tiles * (LANES // self.fewest_rows)

    @property
    def defines(self) -> Defines:
        """Defines of the kernel."""
        codes = {} if self.rounded is None else {**self.rounded.defines, "LOCAL_VALUES": 1}
        own: Defines = {self.NAME: 1, "TILES": self.tiles}
        return own | codes | ({"OUT_FLOAT": 1} if self.is_float else {})

    @property
    @abstractmethod
    def own_arguments(self) -> tuple[Argument, ...]:
        """Arguments behind those of all endings."""

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's last arguments."""
        # Absent memory is never read, but OpenCL needs a valid argument.
        bias = (self.y if self.bias is None else self.bias), np.int32(self.bias is not None)
        codes = () if self.rounded is None else (self.rounded.codes, self.rounded.blocks)
        return (*bias, *self.own_arguments, *codes)


@dataclass(frozen=True, slots=True)
class AddedToStream(Ending):
    """``y += W x + bias`` in the residual stream, and the next norm of it without its division.

    Args:
        y: The residual stream, float32 ``[columns]``.
        bias: As of every ending.
        weight: The norm's weights, float32 ``[columns]``.
        columns: Width of the stream.
        epsilon: Of the norm.
        rounded: As of every ending.
        x: Target of the norm's output, float32 ``[columns]``.
        squares: Target of the work-groups' sums of squares, float32.
    """

    NAME = "ADDED"

    y: DeviceMemory
    bias: Argument
    weight: Argument
    columns: int
    epsilon: float
    rounded: RoundedInputs | None
    x: Argument
    squares: Argument

    @classmethod
    def of(
        cls,
        runtime: GpuRuntime,
        residual: DeviceMemory,
        bias: Argument,
        weight: Argument,
        columns: int,
        epsilon: float,
        rounded: RoundedInputs | None,
    ) -> AddedToStream:
        """Return the ending with memory for what it hands to the next linear layer."""
        x = runtime.shared_scratch("next_x", 4 * columns)
        squares = runtime.shared_scratch("next_squares", 4 * (columns // FEWEST_ROWS + LANES))
        return cls(residual, bias, weight, columns, epsilon, rounded, x, squares)

    @property
    def own_arguments(self) -> tuple[Argument, ...]:
        """See :class:`Ending`."""
        return self.weight, self.x, self.squares

    def handed(self, groups: int) -> NormedInput:
        """Return the input of the next linear layer, from so many work-groups."""
        return NormedInput(self.x, self.squares, groups, self.columns, self.epsilon)


@dataclass(frozen=True, slots=True)
class Gated(Ending):
    """``y = activation(gate) * up`` of the layer's two members, or the activation of a single one.

    Args:
        y: ``[rows of a member]`` in the activation type.
        bias: As of every ending.
        activation: Number of the activation in ``glue.h``.
        members: Members of the layer.
        rounded: As of every ending.
    """

    NAME = "GATED"
    is_float = False

    y: DeviceMemory
    bias: Argument
    activation: int
    members: int
    rounded: RoundedInputs | None

    @property
    def tiles(self) -> int:
        """See :class:`Ending`."""
        return self.members

    @property
    def pairs_members(self) -> bool:
        """See :class:`Ending`."""
        return self.members > 1

    @property
    def own_arguments(self) -> tuple[Argument, ...]:
        """See :class:`Ending`."""
        return (np.int32(self.activation),)


@dataclass(frozen=True, slots=True)
class Rotated(Ending):
    """RoPE of q and k with the norms of their heads, and the write of k and v to the cache.

    Args:
        y: The queries, float32 ``[heads * head_dim]``.
        bias: As of every ending.
        head_dim: Elements of a head.
        named: Further defines: ``ROTARY`` elements that turn, and those of the cache.
        others: Arguments from the head norms on.
    """

    NAME = "ROTATED"
    rounded = None

    y: DeviceMemory
    bias: Argument
    head_dim: int
    named: Defines
    others: tuple[Argument, ...]

    @property
    def tiles(self) -> int:
        """See :class:`Ending`."""
        return -(-self.head_dim // LANES)

    @property
    def fewest_rows(self) -> int:
        """See :class:`Ending`: whole heads."""
        return LANES

    @property
    def suits(self) -> bool:
        """See :class:`Ending`."""
        return not (self.head_dim % 8 or self.tiles * LANES % self.head_dim) and self.tiles <= 2

    @property
    def defines(self) -> Defines:
        """See :class:`Ending`."""
        own: Defines = {self.NAME: 1, "TILES": self.tiles, "OUT_FLOAT": 1, "HEAD_DIM": self.head_dim}
        return own | self.named

    @property
    def own_arguments(self) -> tuple[Argument, ...]:
        """See :class:`Ending`."""
        return self.others


def groups_of(launch: OpenClLaunch) -> int:
    """Return the work-groups of a launch in the first dimension."""
    return launch.global_size[0] // launch.local_size[0]
