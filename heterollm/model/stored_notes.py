"""Says which weights that a checkpoint stores quantised keep their values, and how far the others are off."""

from __future__ import annotations

import math
from collections.abc import Mapping

from heterollm.kernels.ops import WeightFormat
from heterollm.model.checkpoint import Checkpoint


def stored_notes(
    checkpoint: Checkpoint, formats: Mapping[str, WeightFormat], errors: Mapping[str, float]
) -> tuple[str, ...]:
    """Return a note for each pair of a stored and a canonical format with errors, and one for the others.

    Args:
        checkpoint: The tensors.
        formats: Canonical format of each.
        errors: Squares of the errors over those of the values, for tensors that are stored quantised.
    """
    pairs: dict[tuple[str | None, WeightFormat], list[str]] = {}
    for name in errors:
        pairs.setdefault((checkpoint.kind(name), formats[name]), []).append(name)
    notes = []
    for (kind, weight), names in pairs.items():
        off = [name for name in names if errors[name] > 0]
        many = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        if not off:
            notes.append(f"{many} of {kind} as {weight}: bit for bit the checkpoint's values.")
            continue
        ratio_db = -10 * math.log10(max(errors[name] for name in off))
        notes.append(
            f"{many} of {kind} as {weight}: at least {ratio_db:.0f} dB signal to error against the "
            "checkpoint's values."
        )
    return tuple(notes)
