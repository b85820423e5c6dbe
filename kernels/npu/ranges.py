"""Static ranges of an integer graph: largest magnitudes that a calibration has seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from heterollm.base import GraphError
from heterollm.kernels.formats import CodeBits, CodeGrid, largest_code

HEADROOM: Final[Mapping[CodeBits, float]] = MappingProxyType({8: 1.0, 16: 1.5})
"""Factor of a range over the largest magnitude seen. One saturated output ruins a token; the lost bit does
not matter at 16 bits. A percentile in place of the maximum leaves 1 to 36 dB. At 8 bits the lost bit
costs more than saturation does."""


@dataclass(frozen=True, slots=True)
class ShadowRanges:
    """Ranges of a linear shard whose large inputs are clamped, while the GPU multiplies the rest of them.

    Args:
        inputs: Magnitude at which inputs are clamped.
        outputs: Largest magnitude of the output of clamped inputs, before a bias.
        members: The same of each member, if each has a grid of its own.
        hot: Channels that often have larger inputs, whose float weights stay in memory.
        expected: How many of them have larger inputs in one pass, for simulated times.

    Raises:
        GraphError: A magnitude is not positive and finite.
    """

    inputs: float
    outputs: float
    members: tuple[float, ...] = ()
    hot: tuple[int, ...] = ()
    expected: int = 0

    def __post_init__(self) -> None:
        _check((self.inputs, self.outputs, *self.members))


@dataclass(frozen=True, slots=True)
class FusedRanges:
    """Largest magnitudes between attention and a feed-forward network.

    Args:
        inputs: Of the input of o.
        stream: Of the residual stream.
        outputs: Of the output of o.
        sums: Of its sum with the stream.
        network: Of the network's output, to which that of o is added; None where it is not.

    Raises:
        GraphError: A magnitude is not positive and finite.
    """

    inputs: float
    stream: float
    outputs: float
    sums: float
    network: float | None = None

    def __post_init__(self) -> None:
        _check(astuple(self))


@dataclass(frozen=True, slots=True)
class LinearRanges:
    """Ranges of a linear shard.

    Args:
        outputs: Largest magnitude of the output, before a bias; without ``inputs`` over that of its token's
            input.
        inputs: Largest magnitude of the input; None divides the input by that of each token.
        bits: Of a code; static 8-bit graphs need ``inputs``.
        members: Largest magnitude of the output of each member, if each has a grid of its own.
        shadow: Ranges of the same shard with a shadow of outliers; None without one.
        normed: Largest magnitude of the norm of the input, which is the residual stream; None without norm.

    Raises:
        GraphError: A magnitude is not positive and finite, or 8-bit ranges lack ``inputs``.
    """

    outputs: float
    inputs: float | None = None
    bits: CodeBits = 16
    members: tuple[float, ...] = ()
    shadow: ShadowRanges | None = None
    normed: float | None = None

    def __post_init__(self) -> None:
        _check((self.outputs, self.inputs, self.normed, *self.members))
        if self.bits == 8 and self.inputs is None:
            raise GraphError("Ranges of 8-bit codes lack that of the input: they are static.")

    def of_placement(self, *, shadow: bool) -> LinearRanges | None:
        """Return the ranges with or without the shadow; None without suitable ones."""
        if not shadow:
            return replace(self, shadow=None)
        if self.shadow is None:
            return None
        own = self.shadow
        return replace(self, inputs=own.inputs, outputs=own.outputs, members=own.members, shadow=None)

    @property
    def grid(self) -> CodeGrid:
        """The grids of the graph's codes."""
        output_step = step_of(self.outputs, self.bits)
        members = tuple([step_of(own, self.bits) for own in self.members])
        per_token = self.inputs is None
        input_step = 1 / largest_code(self.bits) if self.inputs is None else step_of(self.inputs, self.bits)
        return CodeGrid(input_step, output_step, per_token, self.bits, members)


@dataclass(frozen=True, slots=True)
class FfnRanges:
    """Largest magnitudes in an ffn shard.

    Args:
        inputs: Of the input.
        gate: Of the gate's output.
        up: Of up's output.
        activated: Of the activated gate.
        product: Of its product with up, the input of down.
        outputs: Of the output.
        partial: Of the sums over leading channels of the width, which can be larger than the output; None if
            they are not known.
        fused: Of what lies before, with o in front; None without.

    Raises:
        GraphError: A magnitude is not positive and finite.
    """

    inputs: float
    gate: float
    up: float
    activated: float
    product: float
    outputs: float
    partial: float | None = None
    fused: FusedRanges | None = None

    def __post_init__(self) -> None:
        values = self.inputs, self.gate, self.up, self.activated, self.product, self.outputs, self.partial
        _check(values)

    @property
    def grid(self) -> CodeGrid:
        """The grids of the graph's codes; a factor for each token could not pass the SiLU."""
        inputs = self.inputs if self.fused is None else self.fused.inputs
        return CodeGrid(step_of(inputs), step_of(self.outputs), per_token=False)

    def of_shard(self, *, whole: bool) -> FfnRanges | None:
        """Return the ranges of the whole width, or of leading channels; None if these are not known."""
        if whole and self.fused is not None:
            fused = replace(self.fused, network=self.outputs)
            return replace(self, outputs=self.outputs + fused.outputs, partial=None, fused=fused)
        if whole:
            return replace(self, partial=None)
        return None if self.partial is None else replace(self, outputs=self.partial, partial=None)


StaticRanges: TypeAlias = LinearRanges | FfnRanges


def step_of(magnitude: float, bits: CodeBits = 16) -> float:
    """Return the quantisation step of a range with headroom."""
    return HEADROOM[bits] * magnitude / largest_code(bits)


def _check(magnitudes: Iterable[float | None]) -> None:
    for value in magnitudes:
        # Steps below float32's normal range would lose digits.
        if value is not None and not 1e-30 < value < 1e30:
            raise GraphError(
                f"A calibrated range has the magnitude {value}.", fix="Run `heterollm calibrate` again."
            )
