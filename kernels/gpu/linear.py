"""Linear layers on the OpenCL device: packing of the weights, and launches for any split of a group.

Weights keep their number format. Output rows are stored in tiles of 64 with the words of the same inputs side
by side (`kernels/gpu/opencl/linear.h`), so that 64 work-items of a GPU, or one work-item of a CPU with
vectors, read one contiguous run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec.structs import replace as replace_struct
from numpy.typing import DTypeLike

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import LinearWeight
from heterollm.kernels.gpu.expert_lists import ExpertLists, ExpertShape
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.packing import (
    COLUMNS_MULTIPLE,
    PackedArrays,
    array_bytes,
    check_members,
    codes,
    pack_members,
    packed_arrays,
)
from heterollm.kernels.gpu.parameters import (
    KernelParameters,
    KernelStyle,
    LaunchGrid,
    ShapeClass,
    default_parameters,
    gpu_style,
)
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs, rounding_launch, scratch_codes
from heterollm.kernels.gpu.self_test import try_experts, try_linear
from heterollm.kernels.gpu.variants import BuildError, Variant, variants_for, whole_eights
from heterollm.kernels.gpu.work import GpuWork, embedding_work, grouped_work, linear_work
from heterollm.kernels.ops import WeightFormat

RowRange: TypeAlias = tuple[int, int]
"""Output rows ``[start, stop)`` of one member."""

ROW_ALIGNMENT: Final = 64
"""Multiple at which a row range of a member may start; it may stop anywhere."""

SIMT_EMBEDDING_SPAN: Final = 16
SIMT_EMBEDDING_ITEMS: Final = 64


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of :meth:`GpuLinear.launch` with all defaults resolved."""

    x: DeviceMemory
    y: DeviceMemory
    tokens: int
    first_token: int
    kept: tuple[RowRange, ...]
    in_place: bool
    columns: tuple[int, int]
    half_output: bool
    rounded: RoundedInputs | None
    label: str
    experts: tuple[ExpertLists, ExpertShape] | None = None

    @property
    def width(self) -> int:
        """Inputs of every row."""
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Weights in buffers of their own: whole tiles of 64 rows, all of them where one buffer takes them.

    Args:
        first_tile: Position of its first tile among all tiles.
        tiles: Number of its tiles; with experts those of whole experts.
        buffers: Weights, scales and zero points on the device.
    """

    first_tile: int
    tiles: int
    buffers: tuple[Argument, Argument, Argument]


@dataclass(frozen=True, slots=True)
class _TileMap:
    """The tiles of a piece that a launch computes: ``[count, 4]`` int32 on the device, and their rows."""

    piece: _Piece
    tiles: Argument
    count: int
    rows: int


class GpuLinear:
    """The linear layers of one group, packed and uploaded; made by :meth:`pack`.

    Weights that exceed the device's largest buffer are in several, and each launch is one for each of them.

    Attributes:
        member_rows: Output rows of each member, with experts of one expert.
        experts: Number of experts that have weights of their own; 0 if all rows have the same.
        columns: Inputs ``k``.
        format: Number format of the weights.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weights.
        size_bytes: Device memory that the weights take.
    """

    def __init__(
        self,
        runtime: GpuRuntime,
        member_rows: tuple[int, ...],
        columns: int,
        number_format: WeightFormat,
        arrays: PackedArrays | None,
        activation_dtype: DTypeLike,
        integer_inputs: bool,
        experts: int,
    ) -> None:
        self.member_rows = member_rows
        self.experts = experts
        self.integer_inputs = integer_inputs
        self.columns = columns
        self.format = number_format
        self._runtime = runtime
        self._half = np.dtype(activation_dtype) == np.float16
        tiles = sum(round_up(rows, 64) // 64 for rows in member_rows)
        self._expert_tiles = tiles if experts else 1
        # One expert's weights on the way to its slot; without slots None.
        self._staged: PackedArrays | None = None
        if arrays is None:
            arrays = self._staged = packed_arrays(number_format, columns, tiles)
            self._pieces = _reserve_pieces(runtime, arrays, experts)
            self.size_bytes = experts * array_bytes(arrays)
        else:
            self._pieces = _upload_pieces(runtime, arrays, self._expert_tiles)
            self.size_bytes = array_bytes(arrays)
        self._parameters = (np.int32(number_format.block), np.int32(not number_format.symmetric))
        self._tiles: dict[tuple[tuple[RowRange, ...], bool], tuple[_TileMap, ...]] = {}
        self._images: dict[int, Argument] = {}

    @classmethod
    def pack(
        cls,
        runtime: GpuRuntime,
        members: Sequence[LinearWeight],
        *,
        activation_dtype: DTypeLike,
        integer_inputs: bool = False,
        experts: int = 0,
    ) -> GpuLinear:
        """Pack the weights of a group and upload them.

        Args:
            runtime: The device.
            members: Weights ``[n, k]`` of one format and one ``k``.
            activation_dtype: float32 or float16, type of inputs and outputs.
            integer_inputs: Round the inputs of each block to int8 before multiplying, as ONNX Runtime's
                MatMulNBits does at accuracy level 4 (:func:`heterollm.kernels.formats.round_inputs`).
            experts: Number of experts, for :meth:`grouped_launch`: the members are those of the first one,
                then those of the second with the same rows, and so on; 0 without experts.

        Raises:
            KernelError: The kernels do not support a shape or format, or device memory is short.
        """
        number_format, columns = check_members(members)
        if np.dtype(activation_dtype) not in (np.float32, np.float16):
            raise KernelError(f"Activations are float32 or float16, not {np.dtype(activation_dtype)}.")
        if integer_inputs and not number_format.quantized:
            raise KernelError(f"Inputs cannot be rounded to int8 for {number_format} weights.")
        rows = tuple(codes(member).shape[0] for member in members)
        if experts:
            rows = _rows_of_expert(rows, experts)
        tiles = sum(round_up(member.shape[0], 64) // 64 for member in map(codes, members))
        arrays = packed_arrays(number_format, columns, tiles)
        if runtime.computes:
            pack_members(members, arrays)
        return cls(runtime, rows, columns, number_format, arrays, activation_dtype, integer_inputs, experts)

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
    ) -> GpuLinear:
        """Reserve slots for the weights of experts, which :meth:`fill` writes while passes use them.

        Args:
            runtime: The device.
            member_rows: Output rows of each member of an expert.
            columns: Inputs ``k``.
            number_format: Format of the weights.
            activation_dtype: As for :meth:`pack`.
            integer_inputs: As for :meth:`pack`.
            slots: Experts that it holds at once; the places of :meth:`grouped_launch` name slots
                (:meth:`heterollm.kernels.gpu.GpuExperts.place_in_slots`).

        Raises:
            KernelError: Device memory is short.
        """
        layout = number_format.layout
        return cls(runtime, member_rows, columns, layout, None, activation_dtype, integer_inputs, slots)

    def fill(self, slot: int, members: Sequence[LinearWeight]) -> None:
        """Write the weights of an expert into a slot, behind all kernels that were enqueued before.

        Args:
            slot: The slot.
            members: Weights ``[n, k]`` in the reserved format, one of each member.
        """
        assert self._staged is not None  # of reserve
        pack_members(members, self._staged)
        piece = next(own for own in reversed(self._pieces) if own.first_tile <= slot * self._expert_tiles)
        place = slot - piece.first_tile // self._expert_tiles
        for buffer, array in zip(piece.buffers, self._staged, strict=True):
            if array is not None:
                self._runtime.copy(buffer, array, offset_bytes=place * array.nbytes)

    def launch(
        self,
        x: SharedArray,
        y: DeviceMemory,
        *,
        tokens: int,
        first_token: int = 0,
        kept: Sequence[RowRange] | None = None,
        in_place: bool = False,
        columns: tuple[int, int] | None = None,
        output_dtype: DTypeLike | None = None,
        rounded: RoundedInputs | None = None,
        style: KernelStyle | Variant | None = None,
        label: str,
    ) -> Launch:
        """Return the launch of ``y[t] = x[t] @ W[kept rows].T`` for ``tokens`` rows.

        Args:
            x: Slot of the activations, ``[first_token + tokens, k]`` in the activation type; with ``columns``
                its rows hold those inputs only.
            y: Slot of the output, ``[first_token + tokens, kept rows]``.
            tokens: Rows ``m`` to compute.
            first_token: First row to compute; both slots start at token 0.
            kept: Row range of each member, starting at multiples of :data:`ROW_ALIGNMENT`; all rows by
                default. The output columns are the kept rows of the members in order.
            in_place: Whether ``y`` has all rows of the members instead, of which the kept ones are written.
            columns: Inputs ``[start, stop)``, for a partial sum: multiples of the scale block and of
                :data:`COLUMNS_MULTIPLE`; all inputs by default.
            output_dtype: float32 for a float32 output of float16 activations.
            rounded: Codes of ``x`` from the kernel that wrote ``x``, starting at ``first_token``; by default
                a launch before this one rounds ``x``. For integer inputs only.
            style: Kernel style or variant; by default the tuned one or the first that works.
            label: Name for traces and errors.

        Raises:
            KernelError: A range does not fit, a slot is too small, or the codes are for other weights.
        """
        if tokens < 1 or first_token < 0 or self.experts:
            layer = f" of a layer with {self.experts} experts" if self.experts else ""
            raise KernelError(f"{label}: cannot compute {tokens} tokens from token {first_token}{layer}.")
        half_output = self._half and (output_dtype is None or np.dtype(output_dtype) == np.float16)
        ranges = tuple(kept) if kept is not None else tuple((0, rows) for rows in self.member_rows)
        taken = self._check_columns((0, self.columns) if columns is None else columns, label)
        request = _Request(*(x, y, tokens, first_token, ranges, in_place, taken, half_output, rounded, label))
        return self._checked(request, style)

    def grouped_launch(
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
        return self._checked(_Request(x, y, *sizes, rounded, label, (lists, shape)), style)

    def _checked(self, request: _Request, style: KernelStyle | Variant | None) -> Launch:
        """Return the launch of a request whose codes fit the weights."""
        rounded, label = request.rounded, request.label
        if rounded is not None:
            if not self.integer_inputs:
                raise KernelError(f"{label}: inputs that are not rounded cannot be read as int8 codes.")
            rounded.check(self.format, request.tokens, request.width, label)
        return self._first_that_works(request, style)

    def _first_that_works(self, request: _Request, style: KernelStyle | Variant | None) -> Launch:
        """Return the launch of the tuned variant, or else of the first variant that works."""

        def build(variant: Variant) -> Launch:
            with self._blamed(variant, shape):
                return self._launch(variant, request)

        def try_out(variant: Variant) -> None:
            with self._blamed(variant, shape):
                self._try(variant, grouped=request.experts is not None)

        test = try_out if self._runtime.tests_kernels and style is None else None
        variants = variants_for(is_cpu=self._runtime.traits.is_cpu, style=style)
        traits, shape = self._runtime.traits, self._shape_class(request)
        best = gpu_style(shape, has_half=traits.has_half)
        if style is None and not traits.is_cpu and best != variants[0].style:
            variants = (Variant(best), *variants)
        tuned = self._runtime.tuning.parameters(shape) if style is None else None
        if tuned is not None:
            variants = (Variant(tuned.style, parameters=tuned), *variants)
        layer = shape.layer if request.experts is None else f"experts' {shape.layer}"
        return self._runtime.variants.first(layer, variants, build, test)

    def _shape_class(self, request: _Request) -> ShapeClass:
        tokens = request.tokens if request.experts is None else request.experts[1].step
        return ShapeClass.of(self.format, integer_inputs=self.integer_inputs, half=self._half, tokens=tokens)

    @contextlib.contextmanager
    def _blamed(self, variant: Variant, shape: ShapeClass) -> Iterator[None]:
        """Quarantine a variant's tuned parameters if the variant fails."""
        try:
            yield
        except BuildError as error:
            tuning, parameters = self._runtime.tuning, variant.parameters
            if parameters is not None and tuning.parameters(shape) == parameters:
                tuning.quarantine(shape, parameters, error.message.splitlines()[0])
            raise

    def _try(self, variant: Variant, *, grouped: bool) -> None:
        dtype = np.float16 if self._half else np.float32
        pack = functools.partial(
            GpuLinear.pack, self._runtime, activation_dtype=dtype, integer_inputs=self.integer_inputs
        )
        test = try_experts if grouped else try_linear
        test(pack, self._runtime, variant, self.format, dtype, integer_inputs=self.integer_inputs)

    def _launch(self, variant: Variant, request: _Request) -> Launch:
        kept_rows = sum(stop - start for start, stop in request.kept)
        rows = sum(self.member_rows) if request.in_place else kept_rows
        tile_maps = self._tile_map(request.kept, request.in_place, request.label)
        last = request.first_token + request.tokens
        request.x.require(last * request.width * (2 if self._half else 4), f"{request.label} input")
        request.y.require(last * rows * (2 if request.half_output else 4), f"{request.label} output")
        chosen, parameters, shape = variant.style, variant.parameters, self._shape_class(request)
        if parameters is None or parameters.many != (shape.tokens == "many"):
            parameters = default_parameters(chosen, shape)
        chosen = parameters.style
        defines = variant.defines | {"BITS": self.format.bits}
        if request.experts is not None:
            defines["GROUPED"] = 1
        if self._half:
            defines["ACT_HALF"] = 1
            if not request.half_output:
                defines["OUT_FLOAT"] = 1
        files = ["common.h", "linear.h"]
        inputs: tuple[Argument, ...] = (request.x,)
        before = None
        if self.integer_inputs:
            files.append("linear_int8.h")
            rounded, before = self._rounded(variant, request)
            inputs = (rounded.codes, rounded.blocks)
            if chosen == "simt" and self._runtime.traits.has_integer_dot and not variant.plain:
                defines["INTEGER_DOT"] = 1
        if chosen != "vector":
            # Inputs are a multiple of COLUMNS_MULTIPLE, and rows of slots start at multiples of a page.
            defines |= whole_eights(variant, has_half=self._runtime.traits.has_half)
        if chosen != "vector" and self.format.quantized:
            defines["BLOCK"] = self.format.block
            if not self.format.symmetric:
                defines["ASYMMETRIC"] = 1
        if self.format.minimum:
            defines["MINIMUMS"] = 1
        files.append("linear_wide.h" if chosen == "vector" else "linear_tiles.h")
        if chosen == "half":
            defines["HALF_SUMS"] = 1
        source = "vector" if chosen == "vector" else "simt"
        name = f"linear_{'int8_' if self.integer_inputs else ''}{source}"
        sizes = (np.int32(request.width), np.int32(rows), *self._parameters)
        part = (np.int32(self.columns), np.int32(request.columns[0]))
        item_bytes = 1 if self.integer_inputs else 2 if self._half else 4
        output_bytes = 2 if request.half_output else 4
        for tiles in tile_maps:
            grid = _grid(parameters, request, tiles.count)
            kernel = self._runtime.kernel(
                (*files, f"{name}.cl"), f"{name}_{grid.suffix}", defines | grid.defines
            )
            span = (np.int32(request.first_token), np.int32(request.tokens), np.int32(grid.token_step))
            arguments: tuple[Argument, ...]
            weights, *others = tiles.piece.buffers
            if parameters.image:
                weights = self._image(tiles.piece)
            arguments = (weights, *others, *inputs, request.y, tiles.tiles, *sizes, *part, *span)
            work: Callable[[], GpuWork] = functools.partial(
                linear_work, self.format, tiles.rows, request.width, request.tokens, item_bytes, output_bytes
            )
            if request.experts is not None:
                lists, pairs = request.experts
                first, held = (at // self._expert_tiles for at in (tiles.piece.first_tile, tiles.piece.tiles))
                arguments = (lists.places, *map(np.int32, (first, held, self._expert_tiles)), *arguments)
                work = functools.partial(
                    grouped_work,
                    *(self.format, tiles.rows, request.width, pairs.routing, pairs.tokens, held),
                    *(item_bytes, output_bytes, lists.counted),
                )
            size = grid.global_size, grid.local_size
            before = self._runtime.launch(kernel, arguments, *size, request.label, before, work=work)
        assert before is not None  # there is a tile
        return before

    def _image(self, piece: _Piece) -> Argument:
        """Return the weights of a piece as an image."""
        if piece.first_tile not in self._images:
            self._images[piece.first_tile] = self._runtime.word_image(piece.buffers[0])
        return self._images[piece.first_tile]

    def _rounded(self, variant: Variant, request: _Request) -> tuple[RoundedInputs, Launch | None]:
        """Return the codes of the inputs, and the launch that makes them if no earlier kernel did."""
        if request.rounded is not None:
            return request.rounded, None
        rounded = scratch_codes(self._runtime, self.format, request.tokens, request.width)
        before = rounding_launch(
            self._runtime,
            request.x,
            rounded,
            columns=request.width,
            tokens=request.tokens,
            first_token=request.first_token,
            half=self._half,
            variant=variant,
        )
        return rounded, before

    def _check_columns(self, columns: tuple[int, int], label: str) -> tuple[int, int]:
        """Check a range of inputs."""
        (start, stop), unit = columns, max(self.format.block, COLUMNS_MULTIPLE)
        if not 0 <= start < stop <= self.columns or start % unit or stop % unit:
            raise KernelError(
                f"{label}: inputs [{start}, {stop}) of {self.columns}; a range starts and stops at multiples "
                f"of {unit}, inside, and is not empty."
            )
        return columns

    def embed_launch(
        self,
        tokens: SharedArray,
        y: DeviceMemory,
        *,
        count: int,
        scale: float = 1.0,
        style: KernelStyle | None = None,
        label: str = "embedding",
    ) -> Launch:
        """Return the launch of ``y[t] = scale * W[tokens[t]]`` for ``count`` tokens.

        The table is the only member, so that a tied head and the embedding share one copy.

        Args:
            tokens: Slot of int32 row ids; the kernel clamps them to the table.
            y: Slot of the float32 residual stream ``[count, k]``.
            count: Tokens to look up.
            scale: Factor on every element.
            style: Kernel style; by default the device's.
            label: Name for traces and errors.

        Raises:
            KernelError: There are several members, or a slot is too small.
        """
        if len(self.member_rows) != 1 or count < 1:
            raise KernelError(f"{label}: cannot look up {count} tokens in {len(self.member_rows)} tables.")
        tokens.require(count * 4, f"{label} token")
        y.require(count * self.columns * 4, f"{label} output")

        def build(variant: Variant) -> tuple[list[Any], KernelStyle]:
            defines = variant.defines | {"BITS": self.format.bits}
            if variant.style == "simt" and self.format.quantized:
                defines["BLOCK"] = self.format.block
            if self.format.minimum:
                defines["MINIMUMS"] = 1
            files = ("common.h", "linear.h", "embedding.cl")
            kernels = [self._runtime.kernel(files, "embedding", defines) for _ in self._pieces]
            return kernels, variant.style

        variants = variants_for(is_cpu=self._runtime.traits.is_cpu, style=style)
        kernels, chosen = self._runtime.variants.first(f"embedding {self.format}", variants, build)
        span, items = self.columns, 1
        if chosen == "simt":
            span, items = SIMT_EMBEDDING_SPAN, SIMT_EMBEDDING_ITEMS
        sizes = (np.int32(self.columns), np.int32(self.member_rows[0]))
        global_size = (round_up(self.columns // span, items), count)
        launch: Launch | None = None
        for piece, kernel in zip(self._pieces, kernels, strict=True):
            # A table in several buffers is read by as many launches, each of which skips the others' tokens.
            rows = (np.int32(piece.first_tile * 64), np.int32((piece.first_tile + piece.tiles) * 64))
            arguments: tuple[Argument, ...] = (*piece.buffers, tokens, y, *sizes, *rows, *self._parameters)
            arguments = (*arguments, np.int32(span), np.float32(scale))
            share = count if launch is None else 0
            work = functools.partial(embedding_work, self.format, self.columns, share)
            size = global_size, (items, 1)
            launch = self._runtime.launch(kernel, arguments, *size, label, launch, work=work)
        assert launch is not None  # a table has rows
        return launch

    def _tile_map(self, kept: tuple[RowRange, ...], in_place: bool, label: str) -> tuple[_TileMap, ...]:
        if (kept, in_place) in self._tiles:
            return self._tiles[kept, in_place]
        if len(kept) != len(self.member_rows):
            raise KernelError(f"{label}: {len(kept)} row ranges for {len(self.member_rows)} members.")
        tiles: list[tuple[int, int, int]] = []
        first_block = column = first_row = 0
        for (start, stop), rows in zip(kept, self.member_rows, strict=True):
            if not 0 <= start <= stop <= rows or (start < stop and start % ROW_ALIGNMENT):
                raise KernelError(
                    f"{label}: rows [{start}, {stop}) of a member with {rows} rows; a range starts at a "
                    f"multiple of {ROW_ALIGNMENT} and lies inside."
                )
            column = first_row + start if in_place else column
            first_row += rows
            for row in range(start, stop, 64):
                width = min(64, stop - row)
                tiles.append((first_block + row // 64, column, width))
                column += width
            first_block += round_up(rows, 64) // 64
        if not tiles:
            raise KernelError(f"{label}: no rows are kept, so there is nothing to launch.")
        if self.experts:
            # All pieces have the tiles of whole experts; the launch's places name the expert.
            uploaded, rows = self._runtime.upload(np.array([(*tile, 0) for tile in tiles], np.int32)), column
            found = tuple(_TileMap(piece, uploaded, len(tiles), rows) for piece in self._pieces)
            self._tiles[kept, in_place] = found
            return found
        maps = []
        for piece in self._pieces:
            end = piece.first_tile + piece.tiles
            own = [
                (tile - piece.first_tile, column, width, 0)
                for tile, column, width in tiles
                if piece.first_tile <= tile < end
            ]
            if own:
                uploaded = self._runtime.upload(np.array(own, np.int32))
                maps.append(_TileMap(piece, uploaded, len(own), sum(width for _, _, width, _ in own)))
        self._tiles[kept, in_place] = tuple(maps)
        return self._tiles[kept, in_place]


def _rows_of_expert(rows: tuple[int, ...], experts: int) -> tuple[int, ...]:
    """Return the rows of each member of one expert, from those of all members of all experts."""
    members = len(rows) // experts
    if not members or rows != rows[:members] * experts:
        raise KernelError(f"Members with {sorted(set(rows))} rows are not those of {experts} equal experts.")
    return rows[:members]


def _grid(parameters: KernelParameters, request: _Request, tiles: int) -> LaunchGrid:
    """Return the launch grid of a request over row tiles, with experts one step of rows for each place."""
    if request.experts is None:
        return parameters.grid(request.tokens, tiles)
    _, shape = request.experts
    parameters = replace_struct(parameters, token_step=max(shape.step, parameters.token_step))
    grid = parameters.grid(shape.step, tiles)
    width, items = grid.global_size
    return replace(grid, global_size=(width, items * shape.places))


def _reserve_pieces(runtime: GpuRuntime, one: PackedArrays, slots: int) -> tuple[_Piece, ...]:
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
        pieces.append(_Piece(first * tiles, count * tiles, buffers))
    return tuple(pieces)


def _upload_pieces(runtime: GpuRuntime, arrays: PackedArrays, unit: int) -> tuple[_Piece, ...]:
    """Upload packed weights, in several pieces if they exceed the device's largest buffer.

    Args:
        runtime: The device.
        arrays: Weights, scales and zero points, a tile of 64 rows after the other.
        unit: Tiles that stay together.
    """
    weights = arrays[0]
    most = max(1, runtime.traits.max_buffer_bytes // (unit * weights[0].nbytes)) * unit
    pieces = []
    for first in range(0, len(weights), most):
        span = slice(first, first + most)
        values, scales, zeros = (None if array is None else runtime.upload(array[span]) for array in arrays)
        # Some drivers need a buffer even for unused arguments.
        buffers = values, scales or values, zeros or values
        pieces.append(_Piece(first, len(weights[span]), buffers))
    return tuple(pieces)
