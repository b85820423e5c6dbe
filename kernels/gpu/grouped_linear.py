"""Linear layers of experts on the OpenCL device: each row is multiplied by the weights of its own expert."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_struct
from numpy.typing import DTypeLike

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import LinearWeight
from heterollm.kernels.gpu.expert_lists import ExpertLists, ExpertShape
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.packing import PackedArrays, array_bytes, pack_members, packed_arrays
from heterollm.kernels.gpu.parameters import KernelParameters, KernelStyle, LaunchGrid
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs
from heterollm.kernels.gpu.self_test import try_experts
from heterollm.kernels.gpu.tiled_weights import (
    LinearRequest,
    Piece,
    Tile,
    TiledWeights,
    TileMap,
    packed_members,
    upload_pieces,
)
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.gpu.work import GpuWork, grouped_work
from heterollm.kernels.ops import WeightFormat


@dataclass(frozen=True, slots=True)
class _Grouped(LinearRequest):
    """A request over the places of lists; ``tiles`` are those of one expert."""

    lists: ExpertLists
    shape: ExpertShape
    tiles: int

    @property
    def step(self) -> int:
        """Rows of one expert that a work-group takes."""
        return self.shape.step

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros of the kernel."""
        return {"GROUPED": 1}

    @property
    def is_plain(self) -> bool:
        """Whether a launch may take a normed input or an ending."""
        return False

    def grid(
        self, parameters: KernelParameters, tiles: int, units: int, block: int, all_tiles: int
    ) -> LaunchGrid:
        """Return a grid with one step of rows for each place."""
        del units, block, all_tiles
        parameters = replace_struct(parameters, token_step=max(self.step, parameters.token_step))
        grid = parameters.grid(self.step, tiles)
        width, items = grid.global_size
        return replace(grid, global_size=(width, items * self.shape.places))

    def leading(self, piece: Piece) -> tuple[Argument, ...]:
        """Return the places, the first expert of a piece, its experts, and the tiles of each."""
        numbers = (piece.first_tile // self.tiles, piece.tiles // self.tiles, self.tiles)
        return (self.lists.places, *map(np.int32, numbers))

    def work(self, weight: WeightFormat, tiles: TileMap, item_bytes: int, output_bytes: int) -> GpuWork:
        """Return the work of a kernel, for a modelled GPU."""
        shape, held = self.shape, tiles.piece.tiles // self.tiles
        return grouped_work(
            *(weight, tiles.rows, self.width, shape.routing, shape.tokens, held),
            *(item_bytes, output_bytes, self.lists.counted),
        )


class GroupedLinear(TiledWeights):
    """The linear layers of one group of each expert; made by :meth:`pack` or :meth:`reserve`.

    Attributes:
        member_rows: Output rows of each member of one expert.
    """

    KIND = "experts' "

    _staged: PackedArrays | None = None
    """One expert's weights on the way to its slot; None without slots."""

    @property
    def experts(self) -> int:
        """Number of experts that have weights of their own, or of slots for them."""
        return sum(piece.tiles for piece in self._pieces) // _tiles_of(self.member_rows)

    @classmethod
    def pack(
        cls,
        runtime: GpuRuntime,
        members: Sequence[LinearWeight],
        *,
        activation_dtype: DTypeLike,
        integer_inputs: bool = False,
        experts: int,
    ) -> GroupedLinear:
        """Pack the weights of all experts and upload them.

        Args:
            runtime: The device.
            members: Weights of the first expert's members, then those of the second with the same rows, and
                so on.
            activation_dtype: As for :meth:`heterollm.kernels.gpu.GpuLinear.pack`.
            integer_inputs: The same.
            experts: Number of experts.

        Raises:
            KernelError: The kernels do not support a shape or format, or device memory is short.
        """
        number_format, columns, every, arrays = packed_members(
            runtime, members, activation_dtype, integer_inputs=integer_inputs
        )
        rows = _rows_of_expert(every, experts)
        pieces, size = upload_pieces(runtime, arrays, _tiles_of(rows)), array_bytes(arrays)
        return cls(runtime, rows, columns, number_format, pieces, size, activation_dtype, integer_inputs)

    @classmethod
    def reserve(
        cls,
        runtime: GpuRuntime,
        member_rows: tuple[int, ...],
        columns: int,
        number_format: WeightFormat,
        *,
        activation_dtype: DTypeLike,
        integer_inputs: bool = False,
        slots: int,
    ) -> GroupedLinear:
        """Reserve slots for the weights of experts, which :meth:`fill` writes while passes use them.

        Args:
            runtime: The device.
            member_rows: Output rows of each member of an expert.
            columns: Inputs ``k``.
            number_format: Format of the weights.
            activation_dtype: As for :meth:`pack`.
            integer_inputs: As for :meth:`pack`.
            slots: Experts that it holds at once; the places of :meth:`launch` name slots
                (:meth:`heterollm.kernels.gpu.GpuExperts.place_in_slots`).

        Raises:
            KernelError: Device memory is short.
        """
        layout = number_format.layout
        one = packed_arrays(layout, columns, _tiles_of(member_rows))
        pieces, size = _reserve_pieces(runtime, one, slots), slots * array_bytes(one)
        found = cls(runtime, member_rows, columns, layout, pieces, size, activation_dtype, integer_inputs)
        found._staged = one
        return found

    def fill(self, slot: int, members: Sequence[LinearWeight]) -> None:
        """Write the weights of an expert into a slot, behind all kernels that were enqueued before.

        Args:
            slot: The slot.
            members: Weights ``[n, k]`` in the reserved format, one of each member.
        """
        assert self._staged is not None  # of reserve
        pack_members(members, self._staged)
        tiles = _tiles_of(self.member_rows)
        piece = next(own for own in reversed(self._pieces) if own.first_tile <= slot * tiles)
        place = slot - piece.first_tile // tiles
        for buffer, array in zip(piece.buffers, self._staged, strict=True):
            if array is not None:
                self._runtime.copy(buffer, array, offset_bytes=place * array.nbytes)

    def launch(
        self,
        x: DeviceMemory,
        y: DeviceMemory,
        lists: ExpertLists,
        *,
        shape: ExpertShape,
        rounded: RoundedInputs | None = None,
        style: KernelStyle | Variant | None = None,
        label: str,
    ) -> Launch:
        """Return the launch of ``y[p] = x[p] @ W[expert of p].T`` for all positions ``p``.

        Args:
            x: ``[pairs, k]`` in the activation type, in the order of the experts.
            y: ``[pairs, rows of an expert]``; rows of positions that are in no place stay unchanged.
            lists: The places, of :meth:`heterollm.kernels.gpu.GpuExperts.sort`; with slots of experts, of
                :meth:`heterollm.kernels.gpu.GpuExperts.place_in_slots`.
            shape: Sizes of the pass.
            rounded: Codes of ``x``, for integer inputs only; by default another launch rounds ``x`` first.
            style: Kernel style or variant; by default the tuned one or the first that works.
            label: Name for traces and errors.

        Raises:
            KernelError: The number of experts differs, a slot is too small, or codes are for other weights.
        """
        if self._staged is None and shape.routing.experts != self.experts:
            raise KernelError(f"{label}: {self.experts} experts have weights, not {shape.routing.experts}.")
        lists.require(shape)
        kept = tuple((0, rows) for rows in self.member_rows)
        sizes = shape.pairs, 0, kept, False, (0, self.columns), self._half
        return self._checked(
            _Grouped(x, y, *sizes, rounded, label, lists, shape, _tiles_of(self.member_rows)), style
        )

    # -- helpers -------------------------------------------------------------------------------------

    def _test(self, variant: Variant) -> None:
        dtype = np.float16 if self._half else np.float32
        pack = functools.partial(
            GroupedLinear.pack, self._runtime, activation_dtype=dtype, integer_inputs=self.integer_inputs
        )
        try_experts(pack, self._runtime, variant, self.format, dtype, integer_inputs=self.integer_inputs)

    def _mapped(self, tiles: Sequence[Tile]) -> Iterator[TileMap]:
        """Yield all pieces with the tiles of one expert; the launch's places name the expert."""
        uploaded = self._runtime.upload(np.array([(*tile, 0) for tile in tiles], np.int32))
        for piece in self._pieces:
            yield TileMap(piece, uploaded, len(tiles), sum(self.member_rows))


def _tiles_of(member_rows: Sequence[int]) -> int:
    return sum(round_up(rows, 64) // 64 for rows in member_rows)


def _rows_of_expert(rows: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """Return the rows of each member of one expert, from those of all members of all experts."""
    members = len(rows) // experts
    if not members or rows != rows[:members] * experts:
        raise KernelError(f"Members with {sorted(set(rows))} rows are not those of {experts} equal experts.")
    return rows[:members]


def _reserve_pieces(runtime: GpuRuntime, one: PackedArrays, slots: int) -> tuple[Piece, ...]:
    """Reserve memory for some experts, in several pieces if they exceed the device's largest buffer.

    Args:
        runtime: The device.
        one: Arrays of the size of one expert.
        slots: Number of experts.
    """
    tiles = len(one[0])
    most = max(1, runtime.traits.max_buffer_bytes // one[0].nbytes)
    pieces = []
    for first in range(0, slots, most):
        count = min(most, slots - first)
        values, scales, zeros = (
            None if array is None else runtime.scratch(count * array.nbytes) for array in one
        )
        # Some drivers need a buffer even for unused arguments.
        buffers = values, scales or values, zeros or values
        pieces.append(Piece(first * tiles, count * tiles, buffers))
    return tuple(pieces)
