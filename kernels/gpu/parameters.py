"""Tuning parameters of the linear kernels, their legal values, and the launch grids that follow from them.

Each kernel (a style, for a few tokens or for many) has parameters of its own, listed in :data:`LEGAL`. The
rounding of inputs, the embedding and the packed layout have none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from heterollm.base import OptionError, round_up
from heterollm.kernels.ops import WeightFormat

KernelStyle = Literal["vector", "matrix", "simt", "half", "coalesced"]
"""``vector``: one work-item with explicit vectors, for CPUs; ``matrix``: a CPU's matrix unit, for linear$
``simt``: one column per work-item, for GPUs;
``half``: the same with half arithmetic, for linear layers of many tokens with float16 activations;
``coalesced``: the same with neighbours that read neighbouring parts of a key, for attention."""

CPU_STYLES: Final[tuple[KernelStyle, ...]] = ("vector", "matrix")
"""Styles with one work-item a work-group, which computes vectors of columns."""

TokenClass = Literal["one", "few", "many"]
"""Tokens of a launch: one, up to the largest of :data:`FEW_TOKEN_STEPS`, or more."""

Fields: TypeAlias = dict[str, tuple[int, ...]]

FEW_TOKEN_STEPS: Final = (1, 2, 4, 8)
"""Tokens that share one pass over the weights in the kernels for a few tokens. The kernels for many tokens
unpack the weights once for all tokens, which is no slower from 9 tokens on (measured on PoCL with
AVX-512)."""

MATRIX_TOKENS: Final = 16
"""Tokens of a tile of the matrix unit."""

LARGEST_COUNT: Final = 2**31 - 1

LANES: Final = 64
"""Output rows of a row tile, as in linear.h."""

SIMT_ITEM_COLUMNS: Final = 4
"""Columns of a work-item in the simt kernels for many tokens: one vector."""

SIMT_TILES: Final = (16, 32, 64)
"""Tokens of a work-group of the simt kernels for many tokens."""

INT8_STAGED_WORDS: Final = 96
"""Words that the simt kernel for a few tokens of int8 inputs stages of each token, at most."""

INT8_STAGED_INPUTS: Final = 256
"""Inputs of each token that it stages, of more than two tokens."""

DIVIDED_BYTES: Final = 16 << 10
"""Local memory for the inputs of a work-group of fewer rows than a tile."""

SIMT_FLOAT_STEP: Final = 16
"""Inputs of float weights that a slice takes at a time."""

VECTOR_STRIP_TOKENS: Final = 8
"""Largest strip of tokens that the vector kernels choose by the vector width."""

UNPACKING_TOKENS: Final = 6
"""Tokens that take a vector kernel as long as unpacking the weights for them (4.9 to 5.8 with AVX-512)."""

PREFETCH_BYTES: Final = (0, 1024, 2048, 4096, 8192, 16384)

LEGAL: Final[Mapping[tuple[KernelStyle, bool], Fields]] = {
    # (style, for many tokens): legal values of the kernel's parameters; its other fields are 0.
    ("vector", False): {
        "token_step": FEW_TOKEN_STEPS,
        "part_columns": (0, 16, 32, 64),
        "prefetch_bytes": PREFETCH_BYTES,
    },
    ("vector", True): {
        "token_step": (32, 48, 64, 96, 128, 192, 256),
        "items": (1, 2),
        "item_tokens": (0, 4, 6, 8, 12),
        "depth_inputs": (128, 256, 512),
        "prefetch_bytes": PREFETCH_BYTES,
    },
    ("matrix", False): {"token_step": (1, MATRIX_TOKENS), "prefetch_bytes": PREFETCH_BYTES},
    ("matrix", True): {"token_step": (16, 32, 64, 128), "prefetch_bytes": PREFETCH_BYTES},
    ("simt", False): {
        "token_step": FEW_TOKEN_STEPS,
        "items": (1, 2, 4, 8),
        "depth_inputs": (0, 256, 512, 1024),
        "subgroup": (0, 1),
        "image": (0, 1),
        "fewest_rows": (0, 16, 32, 64),
    },
    ("simt", True): {
        "token_step": SIMT_TILES,
        "item_tokens": (4, 8, 16),
        "depth_inputs": (16, 32),
        "image": (0, 1),
    },
    ("half", True): {
        "token_step": SIMT_TILES,
        "item_tokens": (4, 8, 16),
        # Half sums are added to float totals after so many products; after 64 they miss the gate of FP16.
        "depth_inputs": (16, 32),
        "image": (0, 1),
    },
}


class ShapeClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of linear launches that share tuned parameters.

    Rows and inputs do not matter: between the narrow and the wide layers of a TinyLlama-size model no
    difference exceeded the noise.

    Args:
        weight: Number format of the weights.
        integer_inputs: Whether inputs are rounded to int8.
        half: Whether activations are float16 rather than float32.
        tokens: Class of the launch's tokens.
    """

    weight: WeightFormat
    integer_inputs: bool
    half: bool
    tokens: TokenClass

    @classmethod
    def of(cls, weight: WeightFormat, *, integer_inputs: bool, half: bool, tokens: int) -> ShapeClass:
        """Return the class of a launch of ``tokens`` tokens."""
        kind: TokenClass = "one" if tokens == 1 else "few" if tokens <= FEW_TOKEN_STEPS[-1] else "many"
        return cls(weight, integer_inputs, half, kind)

    def __str__(self) -> str:
        inputs = ", int8 inputs" if self.integer_inputs else ""
        activations = "float16" if self.half else "float32"
        return f"{self.weight}{inputs}, {activations}, {self.tokens} token{'s' * (self.tokens != 'one')}"

    @property
    def layer(self) -> str:
        """Name of the linear layers in notes about their kernels."""
        return f"linear {self.weight}{' with int8 inputs' if self.integer_inputs else ''}"

    def check(self) -> None:
        """Refuse an impossible class.

        Raises:
            OptionError: The fields contradict each other.
        """
        bits, block = self.weight.bits, self.weight.block
        _check(block in ((16, 32, 64, 128) if bits <= 8 else (0,)), "weight block", block)
        _check(self.weight.symmetric or bits <= 8, "zero points of float weights", self.weight.symmetric)
        _check(not (self.weight.minimum and self.weight.symmetric), "minimums of symmetric weights", bits)
        _check(bits <= 8 or not self.integer_inputs, "int8 inputs of float weights", bits)


@dataclass(frozen=True, slots=True)
class LaunchGrid:
    """The division of a launch into work-groups.

    Args:
        suffix: Suffix of the kernel's name.
        token_step: Tokens of a work-group.
        global_size: Work-items in two dimensions.
        local_size: Work-items of a work-group.
        defines: Defines of the kernel.
    """

    suffix: Literal["few", "many", "tiles"]
    token_step: int
    global_size: tuple[int, int]
    local_size: tuple[int, int]
    defines: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Division:
    """Properties of a launch that give rows (simt, a few tokens) or tokens (vector, many) of a work-group.

    Args:
        units: Compute units of the device.
        inputs: Inputs of a row.
        block: Inputs that share a scale; 0 for float weights.
        tiles: Row tiles of all kernels of a layer, which add in one order.
        together: Row tiles of a work-group.
        fewest_rows: Rows of a tile that a work-group must have.
    """

    units: int
    inputs: int
    block: int
    tiles: int
    together: int = 1
    fewest_rows: int = 8


class KernelParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The tuning parameters of one linear kernel; those that it lacks are 0 (:data:`LEGAL`).

    Args:
        style: Kernel style.
        many: Whether this is the kernel for many tokens.
        token_step: Most tokens that share one pass over the weights.
        items: Work-items per row tile (vector) or per column (simt).
        item_tokens: Tokens whose sums a work-item holds in registers; 0 in the vector kernels for as many as
            fit. The others hold fewer of a short step, whose work-groups would lack work-items.
        part_columns: Columns whose sums a work-item holds in registers; 0 for as many as fit.
        depth_inputs: Inputs whose weights are unpacked at a time (vector) or staged in local memory (simt).
        prefetch_bytes: Distance of the weights' prefetch; 0 for none.
        subgroup: 1 if the work-items of a subgroup pass the inputs of one token to each other; 0 if they
            read them from local memory.
        image: 1 if the weights are read as an image, through a GPU's texture units; 0 if as a buffer.
        fewest_rows: Rows of a work-group at least, where the row tiles leave a compute unit less than two
            work-groups and are divided; the work-items of the other rows share the inputs then. 64 divides
            none, and 0 leaves 8: their words are the 32 bytes that a GPU reads at once.

    Raises:
        OptionError: A value is not legal for this kernel.
    """

    style: KernelStyle
    many: bool
    token_step: int
    items: int = 0
    item_tokens: int = 0
    part_columns: int = 0
    depth_inputs: int = 0
    prefetch_bytes: int = 0
    subgroup: int = 0
    image: int = 0
    fewest_rows: int = 0

    def __post_init__(self) -> None:
        _check((self.style, self.many) in LEGAL, "a kernel", self.kernel)
        legal = LEGAL[self.style, self.many]
        for name in NUMBERS:
            value = getattr(self, name)
            _check(value in legal.get(name, (0,)), f"{name} of {self.kernel}", value)

    @property
    def kernel(self) -> str:
        """Name of the kernel, such as ``vector_few``."""
        return f"{self.style}_{'many' if self.many else 'few'}"

    def __str__(self) -> str:
        names = LEGAL[self.style, self.many]
        return f"{self.kernel} " + " ".join(f"{name}={getattr(self, name)}" for name in names)

    def check_for(self, shape: ShapeClass) -> None:
        """Refuse parameters that do not fit a shape class.

        Raises:
            OptionError: They are for another number of tokens, or do not divide the scale block.
        """
        _check(self.many == (shape.tokens == "many"), f"a kernel for {shape.tokens} tokens", self.kernel)
        _check(shape.tokens != "one" or self.token_step == 1, "a token step for one token", self.token_step)
        if self.style == "simt" and not self.many:
            # The int8 kernel does not stage its inputs.
            _check((self.depth_inputs == 0) == shape.integer_inputs, f"depth for {shape}", self.depth_inputs)
        if self.style == "simt" and self.many:
            # Those of the int8 kernel take twice the registers.
            most = 8 if shape.integer_inputs else 16
            _check(self.item_tokens <= most, f"item_tokens for {shape}", self.item_tokens)
        _check(not (self.subgroup and self.fewest_rows), "rows of a subgroup", self.fewest_rows)
        if self.subgroup:
            suits = shape.tokens == "one" and shape.weight.quantized and not shape.integer_inputs
            _check(suits, f"subgroup for {shape}", self.subgroup)
        _check(not self.image or shape.weight.quantized, f"image for {shape}", self.image)
        if self.style == "half":
            _check(suits_half(shape), f"a kernel for {shape}", self.kernel)
        if self.style in ("simt", "half") and self.many:
            block = shape.weight.block or 16
            _check(block % self.depth_inputs == 0, f"depth for {shape}", self.depth_inputs)

    def work_group(self) -> int:
        """Return the work-items of a work-group."""
        if self.style in CPU_STYLES:
            return 1
        if self.many:
            return LANES // SIMT_ITEM_COLUMNS * (self.token_step // self._sums(self.token_step))
        return LANES * self.items

    def _sums(self, step: int) -> int:
        """Return the tokens of a work-item, so few of a step that a work-group has LANES work-items."""
        return min(self.item_tokens, step // SIMT_ITEM_COLUMNS)

    def local_bytes(self) -> int:
        """Return the local memory of a work-group."""
        if self.style in CPU_STYLES:
            return 0
        if self.many:
            # Those of the kernel for floats; that for int8 holds a quarter, and two numbers a token.
            return (2 if self.style == "half" else 4) * self.depth_inputs * (self.token_step + LANES)
        # The sums of the slices follow the inputs in the same memory.
        staged = 0 if self.subgroup else self.depth_inputs or INT8_STAGED_WORDS
        return 4 * self.token_step * max(staged, self.items * LANES)

    def grid(self, tokens: int, tiles: int, division: Division | None = None) -> LaunchGrid:
        """Return the launch grid of ``tokens`` tokens by ``tiles`` row tiles.

        Args:
            tokens: Tokens.
            tiles: Row tiles.
            division: Properties that give the rows of a work-group; None for whole tiles.
        """
        if self.style == "matrix":
            return self._matrix_grid(tokens, tiles)
        if self.many:
            return self._many_grid(tokens, tiles, division)
        step = min(self.token_step, next(step for step in FEW_TOKEN_STEPS if tokens <= step))
        steps = -(-tokens // step)
        defines: dict[str, str | int] = {"TOKENS": step}
        if self.style == "simt":
            together = 1 if division is None else division.together
            rows = self._rows(step, division)
            slices = max(1, self.items // together) * (LANES // rows)
            defines |= {"SLICES": slices} | self._image_define()
            depth = self.depth_inputs
            if rows < LANES:
                defines["ROWS"], depth = rows, self._deepest(step)
            if self.subgroup:
                defines["SUBGROUP"] = 1
            elif depth:
                defines["STAGED_INPUTS"] = depth
            local = rows, slices * together
            size = LANES * (tiles // together), local[1] * steps
            return LaunchGrid("few", step, size, local, defines)
        defines["PREFETCH_BYTES"] = self.prefetch_bytes
        if self.part_columns:
            defines["PART_COLUMNS"] = self.part_columns
        return LaunchGrid("few", step, (tiles, steps), (1, 1), defines)

    def _deepest(self, step: int) -> int:
        """Return the inputs that work-groups of fewer rows stage at a time; 0 for codes."""
        deepest = min(1024, DIVIDED_BYTES // (4 * step))
        return max(self.depth_inputs, deepest) if self.depth_inputs else 0

    def _rows(self, step: int, division: Division | None) -> int:
        """Return the rows of a work-group of the simt kernel for a few tokens."""
        if division is None or self.subgroup:
            return LANES
        # Each slice has a block of the inputs that are staged at a time.
        staged = self._deepest(step) or (INT8_STAGED_INPUTS if step > 2 else division.inputs)
        most = min(staged, division.inputs) // (division.block or SIMT_FLOAT_STEP)
        rows, slices = LANES, max(1, self.items // division.together)
        # So few that each compute unit has two work-groups.
        wanted = LANES * (division.tiles // division.together) // (2 * division.units)
        while rows > max(division.fewest_rows, self.fewest_rows, wanted) and 2 * slices <= most:
            rows, slices = rows // 2, 2 * slices
        return rows

    def _matrix_grid(self, tokens: int, tiles: int) -> LaunchGrid:
        steps = -(-tokens // self.token_step)
        step = -(-tokens // steps)
        held = next((few for few in FEW_TOKEN_STEPS if step <= few), MATRIX_TOKENS)
        defines: dict[str, str | int] = {"TOKENS": held, "PREFETCH_BYTES": self.prefetch_bytes}
        return LaunchGrid("tiles", step, (tiles, steps), (1, 1), defines)

    def _image_define(self) -> dict[str, str | int]:
        return {"WEIGHT_IMAGE": 1} if self.image else {}

    def _many_grid(self, tokens: int, tiles: int, division: Division | None) -> LaunchGrid:
        defines: dict[str, str | int] = {"DEPTH": self.depth_inputs}
        if self.style != "vector":
            # A short prompt gets the smallest tile that holds it.
            step = min(self.token_step, next((size for size in SIMT_TILES if tokens <= size), tokens))
            sums = self._sums(step)
            local = LANES // SIMT_ITEM_COLUMNS, step // sums
            defines |= {"TILE_TOKENS": step, "ITEM_TOKENS": sums} | self._image_define()
            size = local[0] * tiles, local[1] * -(-tokens // step)
            return LaunchGrid("many", step, size, local, defines)
        token_step = self._equal_steps(tokens, division)
        defines |= {"MAX_TOKEN_STEP": self.token_step, "ITEMS": self.items}
        defines["PREFETCH_BYTES"] = self.prefetch_bytes
        if self.item_tokens:
            defines["STRIP"] = self.item_tokens
        return LaunchGrid("many", token_step, (self.items * tiles, -(-tokens // token_step)), (1, 1), defines)

    def _equal_steps(self, tokens: int, division: Division | None) -> int:
        """Return the tokens of a work-group of the vector kernel, with which the busiest unit ends first.

        Steps are equal: a short last one would unpack all weights again for a few tokens.
        """
        strip = self.item_tokens or VECTOR_STRIP_TOKENS
        fewest = -(-tokens // self.token_step)
        items, units = (1, 1) if division is None else (self.items * division.tiles, division.units)
        step = functools.partial(self._step_of, tokens, strip)

        def busiest(steps: int) -> int:
            return -(-items * steps // units) * (step(steps) + UNPACKING_TOKENS)

        return step(min(range(fewest, max(fewest, -(-tokens // strip)) + 1), key=busiest))

    def _step_of(self, tokens: int, strip: int, steps: int) -> int:
        return min(self.token_step, round_up(-(-tokens // steps), strip))


NUMBERS: Final = KernelParameters.__struct_fields__[2:]


def suits_half(shape: ShapeClass) -> bool:
    """Return whether half arithmetic meets the gate of a shape class, which allows float16 rounding."""
    return shape.half and not shape.integer_inputs and shape.weight.bits <= 16 and shape.tokens == "many"


def linear_style(shape: ShapeClass, *, is_cpu: bool, has_half: bool, has_matrix: bool) -> KernelStyle:
    """Return the best style of a device's linear kernels.

    Args:
        shape: The launches.
        is_cpu: Whether the device is a CPU.
        has_half: Whether it is a GPU with half arithmetic.
        has_matrix: Whether it is a CPU with a matrix unit.
    """
    if is_cpu:
        return "matrix" if has_matrix and shape.weight.quantized else "vector"
    return "half" if has_half and suits_half(shape) else "simt"


def rows_alike(weight: WeightFormat, *, is_cpu: bool, has_matrix: bool) -> int:
    """Return the most rows of a pass whose sums the kernels add in the order of a pass of one row."""
    if not is_cpu:
        return 1
    return LARGEST_COUNT if has_matrix and weight.quantized else FEW_TOKEN_STEPS[-1]


def default_parameters(style: KernelStyle, shape: ShapeClass) -> KernelParameters:
    """Return the parameters that are used without tuning; for a few tokens ``half`` means ``simt``."""
    if style == "matrix":
        steps = {"one": 1, "few": MATRIX_TOKENS, "many": 32}
        many = shape.tokens == "many"
        return KernelParameters(style, many, steps[shape.tokens], prefetch_bytes=4096)
    if style == "vector" and shape.tokens == "many":
        return KernelParameters(style, True, 128, items=2, depth_inputs=128, prefetch_bytes=4096)
    if shape.tokens == "many":
        step, sums = (32, 8) if shape.integer_inputs else (64, 16)
        deep = shape.integer_inputs or style == "half"
        depth = 32 if deep and shape.weight.block and shape.weight.block % 32 == 0 else 16
        return KernelParameters(style, True, step, item_tokens=sums, depth_inputs=depth)
    if style == "half":
        style = "simt"
    step = 1 if shape.tokens == "one" else FEW_TOKEN_STEPS[-1]
    if style == "vector":
        return KernelParameters(style, False, step, prefetch_bytes=4096)
    depth = 0 if shape.integer_inputs else 1024 if shape.tokens == "one" else 256
    return KernelParameters(style, False, step, items=4, depth_inputs=depth)


def all_parameters(style: KernelStyle, shape: ShapeClass) -> list[KernelParameters]:
    """Return every legal combination for a shape class, those nearest to the default first."""
    default = default_parameters(style, shape)
    legal = LEGAL[default.style, default.many]
    found = []
    for values in itertools.product(*legal.values()):
        parameters = with_numbers(default, dict(zip(legal, values, strict=True)))
        try:
            parameters.check_for(shape)
        except OptionError:
            continue
        found.append(parameters)
    return sorted(found, key=lambda parameters: len(differences(parameters, default)))


def with_numbers(parameters: KernelParameters, numbers: Mapping[str, int]) -> KernelParameters:
    """Return ``parameters`` with some values changed.

    Raises:
        OptionError: A value is not legal.
    """
    changed: dict[str, Any] = dict(numbers)
    return replace(parameters, **changed)


def differences(parameters: KernelParameters, other: KernelParameters) -> dict[str, int]:
    """Return the values in which ``parameters`` differ from ``other``."""
    return {
        name: getattr(parameters, name)
        for name in NUMBERS
        if getattr(parameters, name) != getattr(other, name)
    }


def _check(right: object, what: str, value: object) -> None:
    if not right:
        raise OptionError(f"{value!r:.80} is not legal as {what}.")
