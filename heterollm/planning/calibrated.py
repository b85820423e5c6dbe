"""The calibration of a load: its identity, which a plan carries, and ranges and scales for its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.base import CalibrationError, PlanError
from heterollm.kernels.formats import BucketCount, ScoreScale, score_scales
from heterollm.kernels.npu import LinearRanges, ShadowRanges, StaticRanges
from heterollm.kernels.ops import Group
from heterollm.model import ModelWeights
from heterollm.solver import HeadNeeds, ShadowChannels

if TYPE_CHECKING:
    from heterollm.calibration import Calibration, RoutingCalibration
    from heterollm.solver import Plan


def calibration_key(path: str | Path | None) -> str | None:
    """Return the identity of a calibration's file; None without one.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return None
    return _loaded(path).key


def calibrated_shadows(path: str | Path | None) -> dict[tuple[int, Group], ShadowChannels]:
    """Return the operators that a calibration gives a shadow of outliers, and its channels.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return {}
    found = _loaded(path)
    return {
        (one.layer, one.group): _channels(
            len(one.int8.shadow.hot_channels), one.int8.shadow.window_channels, found.windows
        )
        for one in found.linears
        if one.int8 is not None and one.int8.activations == "shadow"
    }


def _channels(held: int, window_channels: int, windows: int) -> ShadowChannels:
    """Return the channels of a shadow, of those that had outliers in a window of the calibration.

    Args:
        held: Hot channels, which have outliers before others do.
        window_channels: Sum of the channels with outliers in each window.
        windows: Windows.
    """
    mean = window_channels / max(1, windows)
    hot = min(held, mean)
    return ShadowChannels(held, hot, mean - hot)


def calibrated_ranges(
    path: str | Path | None, weights: ModelWeights
) -> Mapping[tuple[int, Group], StaticRanges]:
    """Return the ranges of the operators that passed the check, by layer and group; none without a file.

    Raises:
        CalibrationError: The file cannot be read, is not a complete calibration, is of other weights, or, at
            precision ``w8a8``, lacks an operator.
    """
    if path is None:
        return {}
    found = _loaded(path)
    found.check_weights(weights.content_key)
    ranges = _ranges_of(found)
    for spec in weights.specs:
        if spec.weight.scales == "tensor" and (spec.layer, spec.group) not in ranges:
            raise CalibrationError(
                f"The calibration {path} has no ranges of {spec.group} of layer {spec.layer}, without which "
                "the NPU cannot compute it at precision w8a8.",
                fix="Calibrate with other text, or choose plan gpu.",
            )
    return ranges


def check_shadows(plan: Plan, path: str | Path | None) -> None:
    """Refuse a plan, such as one edited by hand, that shadows an operator without calibrated outliers.

    Args:
        plan: The plan.
        path: File of the calibration that is loaded with it.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
        PlanError: The calibration has no ranges with a shadow for an operator; the message names it.
    """
    if not plan.has_shadows:
        return
    ranges = {} if path is None else _ranges_of(_loaded(path))
    for entry in plan.placed:
        shadowed = entry.placement.shadow and entry.placement.npu_lengths
        for layer in range(entry.layers[0], entry.layers[1] + 1) if shadowed else ():
            own = ranges.get((layer, entry.group))
            if not isinstance(own, LinearRanges) or own.shadow is None:
                raise PlanError(
                    f"The plan has a shadow of outliers for {entry.group} of layer {layer}, and "
                    f"{_lack(own, calibrated=path is not None)}.",
                    fix=f"Remove `shadow` from the plan's entries of {entry.group} for layer {layer}, or "
                    "make the plan again with `heterollm plan`.",
                )


def _lack(own: StaticRanges | None, *, calibrated: bool) -> str:
    """Return the reason why an operator cannot have a shadow."""
    if not calibrated:
        return "no calibration is given"
    if own is None:
        return "the calibration has no ranges of it"
    if isinstance(own, LinearRanges) and own.bits == 16:
        return "the calibration keeps its activations in 16 bits"
    return "the calibration found no outliers in its input"


def calibrated_scales(path: str | Path | None, buckets: BucketCount) -> dict[int, tuple[ScoreScale, ...]]:
    """Return the scales of each layer's key heads for estimated scores; none without a file.

    Static scales hold the largest magnitudes of all windows. With several buckets the middle one holds the
    mean of the windows' largest magnitudes.

    Args:
        path: File of the calibration.
        buckets: Scale factors to choose among.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return {}
    found = {}
    for one in _loaded(path).heads:
        queries, keys, scores = one.queries, one.keys, one.scores
        if buckets > 1:
            queries, keys, scores = one.mean_queries, one.mean_keys, one.mean_scores
        group = len(queries) // len(keys)
        found[one.layer] = tuple(
            score_scales(queries[first : first + group], key, scores[first : first + group])
            for first, key in zip(range(0, len(queries), group), keys, strict=True)
        )
    return found


def calibrated_experts(path: str | Path | None) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each expert by layer; none without a file, or in one of a model without experts.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return {}
    return {one.layer: tuple(one.counts.tolist()) for one in _loaded(path).routing}


def calibrated_needs(path: str | Path) -> HeadNeeds:
    """Return what the rules of keep ratios need of a calibration.

    Raises:
        CalibrationError: The file cannot be read, is not a calibration, or has no attention heads.
    """
    return _loaded(path).head_needs()


def routing_of(path: str | Path) -> tuple[RoutingCalibration, ...]:
    """Return the calibrated routing of each layer with experts; none of a model without.

    Raises:
        CalibrationError: The file cannot be read, is not a calibration, or the calibration was stopped.
    """
    found = _loaded(path)
    found.check_complete()
    return found.routing


def _loaded(path: str | Path) -> Calibration:
    """Return the calibration of a file; a load asks several times, and reads an unchanged file once."""
    path = Path(path)
    try:
        stat = path.stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except OSError:  # reading the file says what is wrong
        version = None
    return _read(path, version)


@functools.lru_cache(maxsize=1)
def _read(path: Path, _version: tuple[int, int, int] | None) -> Calibration:
    # A late import: most loads have no calibration.
    from heterollm.calibration import load_calibration

    return load_calibration(path)


def _ranges_of(found: Calibration) -> dict[tuple[int, Group], StaticRanges]:
    return _decided_ranges(found) if found.precision == "w8a8" else found.ranges()


def _decided_ranges(found: Calibration) -> dict[tuple[int, Group], StaticRanges]:
    """Return the ranges of precision ``w8a8``: static ones of 8 bits, or 16 bits where decided."""
    ranges: dict[tuple[int, Group], StaticRanges] = {}
    for one in found.linears:
        if min(one.inputs, *one.outputs) <= 0 or one.int8 is None:
            continue
        if one.int8.activations == "int16":
            ranges[one.layer, one.group] = one.static_ranges if one.static else one.token_ranges
        else:
            several, own, shadow = len(one.outputs) > 1, one.int8.shadow, None
            if own.outliers and min(own.outputs) > 0:
                members = own.outputs if several else ()
                hot = own.hot_channels
                expected = round(_channels(len(hot), own.window_channels, found.windows).hot)
                shadow = ShadowRanges(own.threshold, max(own.outputs), members, hot, expected)
            members = one.outputs if several else ()
            ranges[one.layer, one.group] = LinearRanges(max(one.outputs), one.inputs, 8, members, shadow)
    return ranges
