"""Packed weights of linear layers on the OpenCL device, and the launches that read them.

Weights keep their number format. Output rows are stored in tiles of 64 with the words of the same inputs side
by side (`kernels/gpu/opencl/linear.h`), so that 64 work-items of a GPU, or one work-item of a CPU with
vectors, read one contiguous run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import LinearWeight
from heterollm.kernels.gpu.endings import FEWEST_ROWS, Ending, NormedInput
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.matrix import split_inputs
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.packing import PackedArrays, check_members, codes, pack_members, packed_arrays
from heterollm.kernels.gpu.parameters import (
    CPU_STYLES,
    Division,
    KernelParameters,
    KernelStyle,
    LaunchGrid,
    ShapeClass,
    default_parameters,
    linear_style,
)
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs, rounding_launch, scratch_codes
from heterollm.kernels.gpu.variants import BuildError, Variant, variants_for, whole_eights
from heterollm.kernels.gpu.work import GpuWork, linear_work
from heterollm.kernels.ops import WeightFormat

RowRange: TypeAlias = tuple[int, int]
"""Output rows ``[start, stop)`` of one member."""

ROW_ALIGNMENT: Final = 64
"""Multiple at which a row range of a member may start; it may stop anywhere."""

Tile: TypeAlias = tuple[int, int, int]
"""Position of a tile, first output column of its rows, and number of these."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights in buffers of their own: whole tiles of 64 rows, all of them where one buffer takes them.

    Args:
        first_tile: Position of its first tile among all tiles.
        tiles: Number of its tiles.
        buffers: Weights, scales and zero points on the device.
    """

    first_tile: int
    tiles: int
    buffers: tuple[Argument, Argument, Argument]


@dataclass(frozen=True, slots=True)
class TileMap:
    """The tiles of a piece that a launch computes: ``[count, 4]`` int32 on the device, and their rows."""

    piece: Piece
    tiles: Argument
    count: int
    rows: int


@dataclass(frozen=True, slots=True)
class LinearRequest:
    """The arguments of a launch with all defaults resolved."""

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
    normed: NormedInput | None = field(default=None, kw_only=True)
    ending: Ending | None = field(default=None, kw_only=True)

    @property
    def width(self) -> int:
        """Inputs of every row."""
        return self.columns[1] - self.columns[0]

    @property
    def step(self) -> int:
        """Tokens by which the shape of a launch is classed."""
        return self.tokens

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros of the kernel."""
        found: dict[str, str | int] = {} if self.normed is None and self.ending is None else {"ENDING": 1}
        found |= {} if self.normed is None else {"NORMED": 1}
        return found | ({} if self.ending is None else self.ending.defines)

    @property
    def trailing(self) -> tuple[Argument, ...]:
        """Arguments behind those of all kernels."""
        before = () if self.normed is None else self.normed.arguments
        return before if self.ending is None else (*before, *self.ending.arguments)

    @property
    def is_plain(self) -> bool:
        """Whether a single token's launch may take a normed input or an ending."""
        return self.tokens == 1 and not self.first_token and not self.in_place

    def grid(
        self, parameters: KernelParameters, tiles: int, units: int, block: int, all_tiles: int
    ) -> LaunchGrid:
        """Return the launch grid over row tiles of all of a layer, for a device of so many compute units."""
        ending = self.ending
        together, fewest = (1, FEWEST_ROWS) if ending is None else (ending.tiles, ending.fewest_rows)
        division = Division(units, self.width, block, all_tiles, together, fewest)
        return parameters.grid(self.tokens, tiles, division)

    def leading(self, piece: Piece) -> tuple[Argument, ...]:
        """Return arguments before those of all kernels."""
        del piece
        return ()

    def work(self, weight: WeightFormat, tiles: TileMap, item_bytes: int, output_bytes: int) -> GpuWork:
        """Return the work of a kernel, for a modelled GPU."""
        return linear_work(weight, tiles.rows, self.width, self.tokens, item_bytes, output_bytes)


class TiledWeights:
    """Packed weights that lie in pieces, each of which a launch reads in one kernel.

    Weights that exceed the device's largest buffer are in several.

    Attributes:
        member_rows: Output rows of each member.
        columns: Inputs ``k``.
        format: Number format of the weights.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weights.
        size_bytes: Device memory that the weights take.
    """

    KIND = ""
    """Prefix of the name under which a variant that works is kept."""

    def __init__(
        self,
        runtime: GpuRuntime,
        member_rows: tuple[int, ...],
        columns: int,
        number_format: WeightFormat,
        pieces: tuple[Piece, ...],
        size_bytes: int,
        activation_dtype: DTypeLike,
        integer_inputs: bool,
    ) -> None:
        self.member_rows = member_rows
        self.integer_inputs = integer_inputs
        self.columns = columns
        self.format = number_format
        self.size_bytes = size_bytes
        self._runtime = runtime
        self._half = np.dtype(activation_dtype) == np.float16
        self._pieces = pieces
        self._parameters = (np.int32(number_format.block), np.int32(not number_format.symmetric))
        self._tiles: dict[tuple[tuple[RowRange, ...], bool, bool], tuple[TileMap, ...]] = {}
        self._images: dict[int, Argument] = {}

    def _test(self, variant: Variant) -> None:
        """Compute a small layer of the same kind.

        Raises:
            BuildError: The variant does not build or run, or its numbers are wrong.
        """
        raise NotImplementedError

    def _mapped(self, tiles: Sequence[Tile]) -> Iterator[TileMap]:
        """Yield the map of each piece that has some of the tiles."""
        for piece in self._pieces:
            end = piece.first_tile + piece.tiles
            own = [
                (tile - piece.first_tile, column, width, 0)
                for tile, column, width in tiles
                if piece.first_tile <= tile < end
            ]
            if own:
                uploaded = self._runtime.upload(np.array(own, np.int32))
                yield TileMap(piece, uploaded, len(own), sum(width for _, _, width, _ in own))

    def _checked(self, request: LinearRequest, style: KernelStyle | Variant | None) -> Launch:
        """Return the launch of a request whose codes fit the weights."""
        rounded, label = request.rounded, request.label
        if rounded is not None:
            if not self.integer_inputs:
                raise KernelError(f"{label}: inputs that are not rounded cannot be read as int8 codes.")
            rounded.check(self.format, request.tokens, request.width, label)
        return self._first_that_works(request, style)

    def _first_that_works(self, request: LinearRequest, style: KernelStyle | Variant | None) -> Launch:
        """Return the launch of the tuned variant, or else of the first variant that works."""

        def build(variant: Variant) -> Launch:
            with self._blamed(variant, shape):
                return self._launch(variant, request)

        def try_out(variant: Variant) -> None:
            with self._blamed(variant, shape):
                self._test(variant)

        test = try_out if self._runtime.tests_kernels and style is None else None
        variants = variants_for(is_cpu=self._runtime.traits.is_cpu, style=style)
        traits, shape = self._runtime.traits, self._shape_class(request)
        is_cpu, has_half = variants[0].style == "vector", traits.has_half
        best = linear_style(shape, is_cpu=is_cpu, has_half=has_half, has_matrix=traits.has_matrix)
        if style is None and best != variants[0].style:
            variants = (Variant(best), *variants)
        tuned = self._runtime.tuning.parameters(shape) if style is None else None
        if tuned is not None:
            variants = (Variant(tuned.style, parameters=tuned), *variants)
        return self._runtime.variants.first(f"{self.KIND}{shape.layer}", variants, build, test)

    def _shape_class(self, request: LinearRequest) -> ShapeClass:
        return ShapeClass.of(
            self.format, integer_inputs=self.integer_inputs, half=self._half, tokens=request.step
        )

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

    def _launch(self, variant: Variant, request: LinearRequest) -> Launch:
        ending, is_plain = request.ending, request.is_plain
        kept_rows = sum(stop - start for start, stop in request.kept)
        rows = sum(self.member_rows) if request.in_place else kept_rows
        paired = ending is not None and ending.pairs_members
        tile_maps = self._tile_map(request.kept, request.in_place, request.label, paired=paired)
        last = request.first_token + request.tokens
        y = request.y if ending is None else ending.y
        request.x.require(last * request.width * (2 if self._half else 4), f"{request.label} input")
        if ending is None:
            y.require(last * rows * (2 if request.half_output else 4), f"{request.label} output")
        chosen, parameters, shape = variant.style, variant.parameters, self._shape_class(request)
        if parameters is None or parameters.many != (shape.tokens == "many"):
            parameters = default_parameters(chosen, shape)
        chosen = parameters.style
        defines = variant.defines | {"BITS": self.format.bits} | request.defines
        if self._half:
            defines["ACT_HALF"] = 1
            if not request.half_output:
                defines["OUT_FLOAT"] = 1
        ends = "ENDING" in defines
        files = ["common.h", *(("rounding.h", "glue.h") if ends else ()), "linear.h"]
        inputs: tuple[Argument, ...] = (request.x if request.normed is None else request.normed.x,)
        before = None
        if self.integer_inputs:
            files.append("linear_int8.h")
            rounded, before = self._rounded(variant, request)
            inputs = (rounded.codes, rounded.blocks)
            if chosen == "simt" and self._runtime.traits.has_integer_dot and not variant.plain:
                defines["INTEGER_DOT"] = 1
        if chosen in ("simt", "half"):
            # Inputs are a multiple of COLUMNS_MULTIPLE, and rows of slots start at multiples of a page.
            defines |= whole_eights(variant, has_half=self._runtime.traits.has_half)
        if chosen != "vector" and self.format.quantized:
            defines["BLOCK"] = self.format.block
            if not self.format.symmetric:
                defines["ASYMMETRIC"] = 1
        if self.format.minimum:
            defines["MINIMUMS"] = 1
        files.append("linear_wide.h" if chosen in CPU_STYLES else "linear_tiles.h")
        files += ["linear_endings.h"] if ends else []
        is_plain &= before is None and chosen == "simt" and len(tile_maps) == 1
        is_plain &= (kept_rows, request.width) == (sum(self.member_rows), self.columns)
        if chosen == "half":
            defines["HALF_SUMS"] = 1
        source = chosen if chosen in CPU_STYLES else "simt"
        name = f"linear_{'int8_' if self.integer_inputs else ''}{source}"
        if chosen == "matrix":
            name = "linear_matrix"
            files.append("matrix.h")
            if self.integer_inputs:
                files.append("matrix_codes.h")
            else:
                inputs, before = self._split(request)
                files += ("matrix_parts.h", "matrix_floats.h")
        sizes = (np.int32(request.width), np.int32(rows), *self._parameters)
        part = (np.int32(self.columns), np.int32(request.columns[0]))
        item_bytes = 1 if self.integer_inputs else 2 if self._half else 4
        output_bytes = 2 if request.half_output else 4
        units, all_tiles = self._runtime.traits.compute_units, sum(tiles.count for tiles in tile_maps)
        for tiles in tile_maps:
            grid = request.grid(parameters, tiles.count, units, self.format.block, all_tiles)
            kernel = self._runtime.kernel(
                (*files, f"{name}.cl"), f"{name}_{grid.suffix}", defines | grid.defines
            )
            span = (np.int32(request.first_token), np.int32(request.tokens), np.int32(grid.token_step))
            arguments: tuple[Argument, ...]
            weights, *others = tiles.piece.buffers
            if parameters.image:
                weights = self._image(tiles.piece)
            arguments = (*request.leading(tiles.piece), weights, *others, *inputs, y, tiles.tiles)
            arguments = (*arguments, *sizes, *part, *span, *request.trailing)
            work = functools.partial(request.work, self.format, tiles, item_bytes, output_bytes)
            size = grid.global_size, grid.local_size
            before = self._runtime.launch(kernel, arguments, *size, request.label, before, work=work)
        assert before is not None  # there is a tile
        if is_plain and self._runtime.has_endings:
            before.remade = functools.partial(self._remade, variant, request)
        return before

    def _remade(
        self, variant: Variant, request: LinearRequest, normed: NormedInput | None, ending: Ending | None
    ) -> Launch:
        """Return the launch of a request with a normed input and an ending.

        Raises:
            KernelError: The device refuses the kernel.
        """
        return self._launch(variant, replace(request, normed=normed, ending=ending))

    def _image(self, piece: Piece) -> Argument:
        """Return the weights of a piece as an image."""
        if piece.first_tile not in self._images:
            self._images[piece.first_tile] = self._runtime.word_image(piece.buffers[0])
        return self._images[piece.first_tile]

    def _rounded(self, variant: Variant, request: LinearRequest) -> tuple[RoundedInputs, Launch | None]:
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

    def _split(self, request: LinearRequest) -> tuple[tuple[Argument, Argument], Launch]:
        """Return the parts of the inputs that a matrix unit multiplies, and the launch that makes them."""
        return split_inputs(
            *(self._runtime, request.x, self.format),
            columns=request.width,
            tokens=request.tokens,
            first_token=request.first_token,
            half=self._half,
        )

    def _tile_map(
        self, kept: tuple[RowRange, ...], in_place: bool, label: str, *, paired: bool = False
    ) -> tuple[TileMap, ...]:
        """Return the tiles of some rows; ``paired`` ones of both members alternate."""
        key = kept, in_place, paired
        if key in self._tiles:
            return self._tiles[key]
        if len(kept) != len(self.member_rows):
            raise KernelError(f"{label}: {len(kept)} row ranges for {len(self.member_rows)} members.")
        tiles: list[Tile] = []
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
        if paired:
            half = len(tiles) // 2
            tiles = [tile for pair in zip(tiles[:half], tiles[half:], strict=True) for tile in pair]
        self._tiles[key] = tuple(self._mapped(tiles))
        return self._tiles[key]


def packed_members(
    runtime: GpuRuntime, members: Sequence[LinearWeight], activation_dtype: DTypeLike, *, integer_inputs: bool
) -> tuple[WeightFormat, int, tuple[int, ...], PackedArrays]:
    """Return the format, the inputs, the rows of each member, and the packed weights of a group.

    Raises:
        KernelError: The kernels do not support a shape or format.
    """
    number_format, columns = check_members(members)
    if np.dtype(activation_dtype) not in (np.float32, np.float16):
        raise KernelError(f"Activations are float32 or float16, not {np.dtype(activation_dtype)}.")
    if integer_inputs and not number_format.quantized:
        raise KernelError(f"Inputs cannot be rounded to int8 for {number_format} weights.")
    rows = tuple(codes(member).shape[0] for member in members)
    arrays = packed_arrays(number_format, columns, sum(round_up(own, 64) // 64 for own in rows))
    if runtime.computes:
        pack_members(members, arrays)
    return number_format, columns, rows, arrays


def upload_pieces(runtime: GpuRuntime, arrays: PackedArrays, unit: int = 1) -> tuple[Piece, ...]:
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
        pieces.append(Piece(first, len(weights[span]), buffers))
    return tuple(pieces)
