"""The calibration of a load: its identity, which a plan carries, and the ranges for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group
from heterollm.model import ModelWeights

__all__ = ["calibrated_ranges", "calibration_key"]


def calibration_key(path: str | Path | None) -> str | None:
    """Return the identity of a calibration's file; None without one.

    Raises:
        CalibrationError: The file cannot be read, or is not a calibration.
    """
    if path is None:
        return None
    # A late import: most loads have no calibration.
    from heterollm.calibration import load_calibration

    return load_calibration(Path(path)).key


def calibrated_ranges(
    path: str | Path | None, weights: ModelWeights
) -> Mapping[tuple[int, Group], StaticRanges]:
    """Return the ranges of the operators that passed the check, by layer and group; none without a file.

    Raises:
        CalibrationError: The file cannot be read, is not a complete calibration, or is of other weights.
    """
    if path is None:
        return {}
    from heterollm.calibration import load_calibration

    found = load_calibration(Path(path))
    found.check_weights(weights.content_key)
    return found.ranges()
