"""The file of a calibration: the magnitudes of every linear's input and output, and the checks of ranges.

Each record keeps the state of its measurement, so that a calibration that was stopped goes on from its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from heterollm.base import CalibrationError, Count, Positive, decode, decode_json, read_file, save_file
from heterollm.calibration.head_records import MASSES, HeadCalibration, head_mistakes
from heterollm.calibration.int8_records import Activations, Decision, int8_mistakes
from heterollm.calibration.range_records import (
    OCTAVES,
    STEPS_PER_OCTAVE,
    FfnCalibration,
    LinearCalibration,
    StreamCalibration,
    is_range,
    passed,
)
from heterollm.calibration.routing import RoutingCalibration, routing_mistakes
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group, Precision
from heterollm.solver import HeadNeeds

FIX: Final = "Run `heterollm calibrate MODEL -o FILE` with a new file."
SCHEMA_VERSION: Final = 5
MEMBERS: Final[Mapping[Group, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("o", "conv_out", "delta_out", "mamba_out", "latent_out", "down", "layer_gate", "layer_out"), (1,)
    ),
    "qkv": (1, 3, 4),
    "conv_in": (3,),
    "delta_in": (6,),
    "mamba_in": (5,),
    "latent_in": (3, 4),
    "latent_query": (2,),
    "gate_up": (1, 2),
}
"""Numbers of members that a group can have; qkv has one without keys, and four with a gate."""
LARGEST_FILE_BYTES: Final = 1 << 28


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Static ranges of a model's activations.

    Args:
        weights_key: Hash of the weights' content, their scales included; a calibration fits no others.
        model: Name of the model, for messages.
        text_key: Hash of the token ids.
        window_tokens: Tokens of a window, each from an empty KV cache.
        windows: Windows whose magnitudes the records have.
        windows_planned: Windows of the whole calibration.
        checked_tokens: Tokens of the check, from one more window.
        linears: By layer and group.
        ffns: By layer.
        heads: By layer.
        routing: By layer with experts.
        precision: Precision of the weights.
        decision: How the activations of the linears were decided; None but at ``w8a8``, and before.
        streams: By layer whose groups can be fused.
        version: Version of the file.
    """

    weights_key: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(max_length=500)]
    text_key: Annotated[str, Meta(max_length=64)]
    window_tokens: Positive
    windows: Count
    windows_planned: Positive
    checked_tokens: Count
    linears: tuple[LinearCalibration, ...]
    ffns: tuple[FfnCalibration, ...]
    heads: tuple[HeadCalibration, ...] = ()
    routing: tuple[RoutingCalibration, ...] = ()
    precision: Precision = "w4a16"
    decision: Decision | None = None
    streams: tuple[StreamCalibration, ...] = ()
    version: Literal[5] = SCHEMA_VERSION

    @property
    def key(self) -> str:
        """Identity of the calibration: a hash of all its records and of the weights' content."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    @property
    def complete(self) -> bool:
        """Whether all windows were run, the ranges checked, and activations decided."""
        decided = self.decision is not None or self.precision != "w8a8"
        return self.windows == self.windows_planned and self.checked_tokens > 0 and decided

    @property
    def load_options(self) -> str:
        """Options of a load of the calibrated weights."""
        return "--precision w8a8" if self.precision == "w8a8" else "--scales stepped"

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the operators whose ranges missed the gate; they keep float activations."""
        linears = [f"{one.layer}.{one.group}" for one in self.linears if not passed(one.errors)]
        fused = (
            f"{one.layer}.{group}"
            for one in self.streams
            for group, errors in (("norm_qkv", one.norm_errors), ("o_ffn", one.errors))
            if not passed(errors)
        )
        return (*linears, *(f"{one.layer}.ffn" for one in self.ffns if not passed(one.errors)), *fused)

    def ranges(self) -> dict[tuple[int, Group], StaticRanges]:
        """Return the ranges of the operators that passed the check, by layer and group.

        Those of an ffn serve shards of its width, too, if these passed.
        """
        found: dict[tuple[int, Group], StaticRanges] = {}
        linears = {(one.layer, one.group): one for one in self.linears}
        for one in self.linears:
            if passed(one.errors):
                found[one.layer, one.group] = one.static_ranges if one.static else one.token_ranges
        for ffn in self.ffns:
            if passed(ffn.errors):
                own = ffn.ranges(linears)
                found[ffn.layer, "ffn"] = own if passed(ffn.split_errors) else replace(own, partial=None)
        ffns = {one.layer: one for one in self.ffns}
        for stream in self.streams:
            if passed(stream.norm_errors):
                found[stream.layer, "norm_qkv"] = stream.norm_ranges(linears)
            if passed(stream.errors) and stream.layer in ffns:
                own = stream.fused_ranges(linears, ffns[stream.layer])
                partial = own.partial if passed(stream.split_errors) else None
                found[stream.layer, "o_ffn"] = replace(own, partial=partial)
        return found

    def activations(self) -> dict[tuple[int, Group], Activations]:
        """Return the decisions by layer and group; none but at ``w8a8``."""
        return {
            (one.layer, one.group): one.int8.activations
            for one in self.linears
            if one.int8 is not None and one.int8.activations is not None
        }

    def head_needs(self) -> HeadNeeds:
        """Return what the rules of keep ratios need.

        Raises:
            CalibrationError: The calibration has no heads yet.
        """
        if not self.heads:
            raise CalibrationError(f"The calibration of {self.model} has no attention heads.", fix=FIX)
        ranked = all(one.ranked for one in self.heads)
        return HeadNeeds(
            MASSES,
            tuple(one.needed for one in self.heads),
            tuple(one.importance for one in self.heads) if ranked else None,
            tuple(one.layer_importance or 0.0 for one in self.heads) if ranked else None,
        )

    def check_complete(self) -> None:
        """Refuse an incomplete calibration.

        Raises:
            CalibrationError: The calibration was stopped.
        """
        if not self.complete:
            raise CalibrationError(
                f"The calibration of {self.model} was stopped after {self.windows} of {self.windows_planned} "
                "windows.",
                fix="Run the same `heterollm calibrate` again: it goes on from its file.",
            )

    def check_weights(self, weights_key: str) -> None:
        """Refuse other weights than the calibrated ones, or an incomplete calibration.

        Raises:
            CalibrationError: The weights are others, or the calibration was stopped.
        """
        self.check_complete()
        if weights_key != self.weights_key:
            raise CalibrationError(
                f"The calibration is of {self.model} with other weights (key {self.weights_key[:12]}, not "
                f"{weights_key[:12]}).",
                fix=f"Load the calibrated checkpoint with {self.load_options} and the same group size, or "
                "run `heterollm calibrate` for this one.",
            )

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "calibration") -> Calibration:
        """Read a calibration from JSON text.

        Raises:
            CalibrationError: The text is not a calibration of this version; the message has the path of the
                wrong field.
        """
        data = decode_json(text, source=source, error=CalibrationError, fix=FIX)
        version = data.get("version", SCHEMA_VERSION) if isinstance(data, dict) else SCHEMA_VERSION
        if version != SCHEMA_VERSION:
            raise CalibrationError(
                f"{source} has version {version!r:.40}; this version of heterollm reads {SCHEMA_VERSION}.",
                fix=FIX,
            )
        source = f"{source} is not a calibration"
        found = decode(data, cls, source=source, error=CalibrationError, fix=FIX)
        if (mistake := next(_mistakes(found), None)) is not None:
            raise CalibrationError(f"{source}: {mistake}.", fix=FIX)
        return found

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            OptionError: The file cannot be written.
        """
        save_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1))


def load_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        CalibrationError: The file is missing, too large, damaged, or of another version.
    """
    try:
        text = read_file(path, LARGEST_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CalibrationError(
            f"The calibration {str(path)!r:.200} cannot be read: {reason}.", fix=FIX
        ) from error
    return Calibration.from_json(text, source=str(path))


def _mistakes(found: Calibration) -> Iterator[str]:
    """Yield mistakes in records beyond their types, each with the path of the field."""
    seen: dict[tuple[int, str], int] = {}
    for place, one in enumerate(found.linears):
        where, members = f"linears[{place}]", len(one.outputs)
        if one.group == "ffn" or (one.layer, one.group) in seen:
            yield f"{where}.group: {one.group} of layer {one.layer} is given twice, or is no group of linears"
        seen[one.layer, one.group] = members
        allowed = MEMBERS.get(one.group, (members,))
        if members not in allowed:
            yield f"{where}.outputs: {one.group} has {allowed[-1]} members, not {members}"
        if len(one.relative_outputs) != members:
            yield f"{where}.relative_outputs: {len(one.relative_outputs)} members, not {members} as outputs"
        if len(one.histogram) != OCTAVES * STEPS_PER_OCTAVE:
            yield f"{where}.histogram: {len(one.histogram)} counts, not {OCTAVES * STEPS_PER_OCTAVE}"
        largest = (one.inputs, max(one.outputs, default=0.0), max(one.relative_outputs, default=0.0))
        if passed(one.errors) and not all(map(is_range, largest)):
            yield f"{where}.inputs, outputs: no ranges, although the check of their ranges passed"
        if one.int8 is not None:
            yield from int8_mistakes(f"{where}.int8", one.int8, one.inputs, members)
        if found.decision is not None and (one.int8 is None or one.int8.activations is None):
            yield f"{where}.int8.activations: none, although there is a decision"
    for place, own in enumerate(found.streams):
        needed = ("qkv", "o", "gate_up", "down")
        if lacking := [group for group in needed if (own.layer, group) not in seen]:
            yield f"streams[{place}].layer: linears lack {lacking[0]} of layer {own.layer}"
        checks = own.norm_errors, own.errors, own.split_errors
        if any(map(passed, checks)) and not (is_range(own.stream) and is_range(own.sums)):
            yield f"streams[{place}]: no ranges, although the check of their ranges passed"
    yield from head_mistakes(found.heads)
    yield from routing_mistakes(found.routing, found.windows)
    for place, ffn in enumerate(found.ffns):
        where = f"ffns[{place}]"
        if (ffn.layer, "ffn") in seen:
            yield f"{where}.layer: layer {ffn.layer} is given twice"
        seen[ffn.layer, "ffn"] = 1
        for group, members in (("gate_up", 2), ("down", 1)):
            if seen.get((ffn.layer, group)) != members:
                yield f"{where}.layer: linears lack {group} of layer {ffn.layer}"
        for name, value, errors in (
            ("activated", ffn.activated, ffn.errors),
            ("partial", ffn.partial, ffn.split_errors),
        ):
            if passed(errors) and not is_range(value):
                yield f"{where}.{name}: {value} is no range, although the check of its range passed"
