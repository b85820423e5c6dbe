"""Static ranges of an integer graph: largest magnitudes that a calibration has seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from heterollm.base import GraphError
from heterollm.kernels.formats import CodeBits, CodeGrid, largest_code

__all__ = ["HEADROOM", "FfnRanges", "LinearRanges", "StaticRanges", "step_of"]

HEADROOM: Final[Mapping[CodeBits, float]] = MappingProxyType({8: 1.0, 16: 1.5})
"""Factor of a range over the largest magnitude seen. One saturated output ruins a token; the lost bit does
not matter at 16 bits. A percentile in place of the maximum leaves 1 to 36 dB. At 8 bits the lost bit
costs more than saturation does."""


@dataclass(frozen=True, slots=True)
class LinearRanges:
    """Ranges of a linear shard.

    Args:
        outputs: Largest magnitude of the output, before a bias; without ``inputs`` over that of its token's
            input.
        inputs: Largest magnitude of the input; None divides the input by that of each token.
        bits: Of a code; static 8-bit graphs need ``inputs``.

    Raises:
        GraphError: A magnitude is not positive and finite, or 8-bit ranges lack ``inputs``.
    """

    outputs: float
    inputs: float | None = None
    bits: CodeBits = 16

    def __post_init__(self) -> None:
        _check((self.outputs, self.inputs))
        if self.bits == 8 and self.inputs is None:
            raise GraphError("Ranges of 8-bit codes lack that of the input: they are static.")

    @property
    def grid(self) -> CodeGrid:
        """The grids of the graph's codes."""
        output_step = step_of(self.outputs, self.bits)
        if self.inputs is None:
            return CodeGrid(1 / largest_code(self.bits), output_step, per_token=True, bits=self.bits)
        return CodeGrid(step_of(self.inputs, self.bits), output_step, per_token=False, bits=self.bits)


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

    def __post_init__(self) -> None:
        _check(astuple(self))

    @property
    def grid(self) -> CodeGrid:
        """The grids of the graph's codes; a factor for each token could not pass the SiLU."""
        return CodeGrid(step_of(self.inputs), step_of(self.outputs), per_token=False)

    def of_shard(self, *, whole: bool) -> FfnRanges | None:
        """Return the ranges of the whole width, or of leading channels; None if these are not known."""
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
