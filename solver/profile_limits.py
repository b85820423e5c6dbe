"""Limits of an NPU from a profile: lengths, alignment, and the forms of graphs that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeGuard

from heterollm.base import ProfileError
from heterollm.kernels.npu import (
    FUSED_FORMS,
    INTEGER_FORMS,
    K_SPLIT_COLUMNS,
    TILE_OF_INTEGERS,
    GraphForm,
)
from heterollm.kernels.ops import Activation, OpSpec, WeightFormat
from heterollm.profiler.records import LinearKey, Profile
from heterollm.profiler.work import FFN_ACTIVATION
from heterollm.solver.candidates import NpuLimits

K_SPLIT_FFNS: Final[tuple[GraphForm, ...]] = ("ffn_k_chunked", "ffn_k_chunked_int8")

_Formats: TypeAlias = tuple[WeightFormat, bool, bool, bool]
"""Weight format, whether inputs are rounded, whether it is an ffn, and whether a tensor has one scale: graph
forms depend on these."""

_Size: TypeAlias = tuple[int, int, bool]
"""Inputs, tokens, and whether ``down`` of an ffn is too wide for a graph without a k-split."""


def limits_of(
    profile: Profile, *, calibrated: bool = False, activation: Activation = FFN_ACTIVATION
) -> NpuLimits | None:
    """Return the limits of the profiled device's NPU; None without an NPU.

    A form is legal for a group or an ffn at a length if it was measured there; for other sizes, if it was
    measured at every size of the same formats.

    Args:
        profile: The profile.
        calibrated: Whether the model has calibrated ranges, so that integer forms may compute weights with
            stepped scales, or with one for a tensor.
        activation: Activation of the model's feed-forward networks: integer graphs have the measured one.

    Raises:
        ProfileError: The description of the device lacks its standard lengths.
    """
    description = profile.description
    lengths, alignment = description.get("npu_standard_lengths"), description.get("npu_row_alignment")
    if description.get("npu") is None:
        return None
    if not _are_lengths(lengths) or not isinstance(alignment, int) or alignment < 1:
        raise ProfileError(
            f"The profile of {profile.device} does not say what its NPU can be given: standard lengths "
            f"{lengths!r:.80}, row alignment {alignment!r:.80}.",
            fix="Run `heterollm profile` again.",
        )
    forms = _MeasuredForms.of(profile, calibrated, activation)
    return NpuLimits(tuple(lengths), alignment, forms.legal)


@dataclass(frozen=True)
class _MeasuredForms:
    """The forms that were measured, by formats and sizes, and what decides which of them a model can have."""

    measured: Mapping[_Formats, Mapping[_Size, frozenset[str]]]
    calibrated: bool
    activation: Activation

    @classmethod
    def of(cls, profile: Profile, calibrated: bool, activation: Activation) -> _MeasuredForms:
        measured: dict[_Formats, dict[_Size, frozenset[str]]] = {}
        for key, _ in profile.of_kind(LinearKey):
            if key.processor == "npu":
                point = key.point
                one_scale = point.bits == 8 and point.form in INTEGER_FORMS
                formats = point.weight.layout, point.integer_inputs, point.is_ffn, one_scale
                size = point.columns, point.tokens, point.is_ffn and point.member_rows[0] > K_SPLIT_COLUMNS
                sizes = measured.setdefault(formats, {})
                sizes[size] = sizes.get(size, frozenset()) | {point.form}
        return cls(measured, calibrated, activation)

    def legal(self, spec: OpSpec, length: int) -> tuple[str, ...]:
        """Return the legal forms of a group, or of a shard of an ffn, at a length."""
        one_scale, is_ffn = spec.weight.scales == "tensor", spec.then is not None
        formats = spec.weight.layout, spec.integer_inputs, is_ffn, one_scale
        sizes = self.measured.get(formats, {})
        wide = spec.then is not None and spec.then.columns > K_SPLIT_COLUMNS
        own = sizes.get((spec.columns, length, wide))
        found = _elsewhere(sizes, length, wide=wide) if own is None else own
        # Where only wide ffns were measured, their forms serve narrow ones too, except for k-splits.
        left_out: set[str] = set() if wide else set(K_SPLIT_FFNS)
        found = found & FUSED_FORMS if spec.fused else found
        other = is_ffn and (len(spec.members) == 1 or self.activation != FFN_ACTIVATION)
        if not self.calibrated or spec.weight.scales == "free" or other:
            left_out |= INTEGER_FORMS
        if one_scale:
            # Where the ranges of a layer have 16 bits, ``integer`` takes its place.
            left_out |= found - {"static_int8"}
        return tuple(sorted(found - left_out))


def _elsewhere(sizes: Mapping[_Size, frozenset[str]], length: int, *, wide: bool) -> frozenset[str]:
    """Return the forms that were measured at all other sizes of the same formats."""
    alike = [found for size, found in sizes.items() if size[2] == wide] or list(sizes.values())
    own = set(frozenset.intersection(*alike)) if alike else set()
    for form, tile in TILE_OF_INTEGERS.items():
        # Integer forms have no graphs of other lengths.
        tiles = [found for size, found in sizes.items() if size[1] % tile == 0 and size[2] == wide]
        if length % tile:
            own.discard(form)
        elif tiles and all(form in found for found in tiles):
            own.add(form)
    return frozenset(own)


def _are_lengths(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and item > 0 for item in value)
        and value == sorted(set(value))
    )
