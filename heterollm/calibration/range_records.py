"""Records of a calibration by operator: magnitudes, the ranges that follow from them, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from msgspec import Struct

from heterollm.base import Amount, Count, GraphError
from heterollm.calibration.int8_records import ChannelOutliers, Int8Calibration
from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR, largest_code
from heterollm.kernels.npu import FfnRanges, FusedRanges, LinearRanges
from heterollm.kernels.ops import Group

STEPS_PER_OCTAVE: Final = 8
LOWEST_OCTAVE: Final = -24
OCTAVES: Final = 48


class RangeErrors(Struct, frozen=True, forbid_unknown_fields=True):
    """NMSE of a linear or ffn with 16-bit activations on its ranges, in exact arithmetic.

    Args:
        nmse: Of the whole output.
        worst_row: Of the worst output row.
        worst_token: Of the worst token.
    """

    nmse: Amount
    worst_row: Amount
    worst_token: Amount

    @property
    def passed(self) -> bool:
        """Whether the errors are within the gate of one linear: 60 dB, 50 dB for a single row or token."""
        gate = LINEAR_NMSE["fp16"]
        single = SINGLE_FACTOR * gate
        return self.nmse <= gate and self.worst_row <= single and self.worst_token <= single


class LinearCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Magnitudes at a group of linears.

    Args:
        layer: Decoder layer.
        group: The group.
        inputs: Largest magnitude of the input.
        outputs: Largest magnitude of each member's output, before biases.
        relative_outputs: The same of each output over the largest magnitude of its token's input.
        histogram: Numbers of input values by magnitude, in steps of an eighth of an octave from 2⁻²⁴ on.
        threshold: Magnitude above which an input is an outlier: eight times the root mean square of the first
            window.
        outliers: Channels with outliers, by channel.
        errors: The check of the ranges; None as long as there was none.
        static: Whether the check is of one grid for all tokens, on which alone it passed, and not of inputs
            that are divided by the largest magnitude of their token.
        int8: Magnitudes and errors of 8-bit activations, at precision ``w8a8``.
    """

    layer: Count
    group: Group
    inputs: Amount
    outputs: tuple[Amount, ...]
    relative_outputs: tuple[Amount, ...]
    histogram: tuple[Count, ...]
    threshold: Amount
    outliers: tuple[ChannelOutliers, ...]
    errors: RangeErrors | None = None
    static: bool = False
    int8: Int8Calibration | None = None

    @property
    def token_ranges(self) -> LinearRanges:
        """Ranges with a scale for each token."""
        return LinearRanges(max(self.relative_outputs))

    @property
    def static_ranges(self) -> LinearRanges:
        """Ranges of one grid for all tokens."""
        return LinearRanges(max(self.outputs), self.inputs)

    @property
    def importance(self) -> float:
        """The largest input over the quantisation step of the shadow's threshold, as llm.npu ranks layers.

        It is 0 without 8-bit activations.
        """
        if self.int8 is None or not self.int8.shadow.threshold:
            return 0.0
        return self.inputs * largest_code(8) / self.int8.shadow.threshold


Linears: TypeAlias = Mapping[tuple[int, Group], LinearCalibration]
"""Magnitudes by layer and group."""


class FfnCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Magnitudes inside the feed-forward network of a layer with SiLU and without biases.

    Args:
        layer: Decoder layer.
        activated: Largest magnitude of the activated gate.
        partial: Largest magnitude of the output's sums over leading channels of the width, which is the range
            of a shard; 0 if it was not measured.
        errors: The check of the ranges; None as long as there was none.
        split_errors: The worst check of shards of a quarter, a half and three quarters of the width, to
            which the exact rest is added.
    """

    layer: Count
    activated: Amount
    partial: Amount = 0.0
    errors: RangeErrors | None = None
    split_errors: RangeErrors | None = None

    def ranges(self, linears: Linears) -> FfnRanges:
        """Return all ranges, those of shards among them, with the layer's linears."""
        first, last = linears[self.layer, "gate_up"], linears[self.layer, "down"]
        gate, up = first.outputs
        partial = self.partial if is_range(self.partial) else None
        outer = last.inputs, max(last.outputs), partial
        return FfnRanges(first.inputs, gate, up, self.activated, *outer)


class StreamCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Magnitudes of the residual stream of a layer whose groups can be fused.

    Args:
        layer: Decoder layer.
        stream: Largest magnitude before attention and behind it.
        sums: Largest magnitude of the sum with the output of ``o``.
        norm_errors: The check of the norm with ``qkv``; None as long as there was none.
        errors: That of ``o``, the sum, the norm and the whole network.
        split_errors: The worst check of shards, as of :class:`FfnCalibration`.
    """

    layer: Count
    stream: Amount
    sums: Amount
    norm_errors: RangeErrors | None = None
    errors: RangeErrors | None = None
    split_errors: RangeErrors | None = None

    def norm_ranges(self, linears: Linears) -> LinearRanges:
        """Return the ranges of the norm with ``qkv``."""
        qkv = linears[self.layer, "qkv"]
        return LinearRanges(max(qkv.outputs), self.stream, normed=qkv.inputs)

    def fused_ranges(self, linears: Linears, ffn: FfnCalibration) -> FfnRanges:
        """Return those of ``o`` with the network, shards among them."""
        o = linears[self.layer, "o"]
        fused = FusedRanges(o.inputs, self.stream, max(o.outputs), self.sums)
        return replace(ffn.ranges(linears), fused=fused)


def is_range(magnitude: float) -> bool:
    """Return whether a magnitude can be that of a range."""
    try:
        return bool(LinearRanges(magnitude))
    except GraphError:
        return False


def passed(errors: RangeErrors | None) -> bool:
    """Return whether there was a check, and it passed."""
    return errors is not None and errors.passed
