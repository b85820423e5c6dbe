"""The calibration of a load: its identity, which a plan carries, and ranges and scales for its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.base import CalibrationError
from heterollm.kernels.formats import ScoreScale, score_scales
from heterollm.kernels.npu import LinearRanges, ShadowRanges, StaticRanges
from heterollm.kernels.ops import Group
from heterollm.model import ModelWeights
from heterollm.solver import HeadNeeds, ScoreBuckets

if TYPE_CHECKING:
    from heterollm.calibration import Calibration

__all__ = [
    "calibrated_needs",
    "calibrated_ranges",
    "calibrated_scales",
    "calibrated_shadows",
    "calibration_key",
]


def calibration_key(path: str | Path | None) -> str | None:
    """Return the identity of a calibration's file; None without one.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return None
    return _loaded(path).key


def calibrated_shadows(path: str | Path | None) -> dict[tuple[int, Group], int]:
    """Return the operators that a calibration gives a shadow of outliers, and their hot channels.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return {}
    return {
        (one.layer, one.group): len(one.int8.shadow.hot_channels)
        for one in _loaded(path).linears
        if one.int8 is not None and one.int8.activations == "shadow"
    }


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
    ranges = _decided_ranges(found) if found.precision == "w8a8" else found.ranges()
    for spec in weights.specs:
        if spec.weight.scales == "tensor" and (spec.layer, spec.group) not in ranges:
            raise CalibrationError(
                f"The calibration {path} has no ranges of {spec.group} of layer {spec.layer}, without which "
                "the NPU cannot compute it at precision w8a8.",
                fix="Calibrate with other text, or choose plan gpu.",
            )
    return ranges


def calibrated_scales(path: str | Path | None, buckets: ScoreBuckets) -> dict[int, tuple[ScoreScale, ...]]:
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


def calibrated_needs(path: str | Path) -> HeadNeeds:
    """Return what the rules of keep ratios need of a calibration.

    Raises:
        CalibrationError: The file cannot be read, is not a calibration, or has no attention heads.
    """
    return _loaded(path).head_needs()


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
                shadow = ShadowRanges(own.threshold, max(own.outputs), members, own.hot_channels)
            members = one.outputs if several else ()
            ranges[one.layer, one.group] = LinearRanges(max(one.outputs), one.inputs, 8, members, shadow)
    return ranges
