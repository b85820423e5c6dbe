"""The report of a calibration."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from heterollm.calibration import Calibration
from heterollm.report.console import note, table

__all__ = ["calibration_json", "calibration_report"]


def calibration_report(found: Calibration, path: str) -> Group:
    """Return the worst operators of each kind, and those that keep float activations."""
    shown = table("operators", ">number", ">worst error", ">failed", ">outlier channels")
    for group in dict.fromkeys(one.group for one in found.linears):
        linears = [one for one in found.linears if one.group == group]
        errors = [one.errors for one in linears if one.errors is not None]
        worst = max((one.nmse for one in errors), default=0.0)
        failed = sum(not one.passed for one in errors)
        outliers = sum(len(one.outliers) for one in linears)
        shown.add_row(group, str(len(linears)), f"{worst:.1e}", str(failed), str(outliers))
    if found.ffns:
        errors = [one.errors for one in found.ffns if one.errors is not None]
        worst = max((one.nmse for one in errors), default=0.0)
        shown.add_row("ffn", str(len(errors)), f"{worst:.1e}", str(sum(not one.passed for one in errors)), "")
    tokens = found.windows * found.window_tokens
    lines: list[RenderableType] = [
        Text(f"{found.model}: ranges of {tokens} tokens, checked on {found.checked_tokens} others"),
        shown,
        Text(f"Wrote {path}; load the model with --scales stepped --calibration {path}."),
    ]
    if found.failed:
        names = ", ".join(found.failed[:8]) + (", …" if len(found.failed) > 8 else "")
        lines.append(note(f"Below 60 dB (50 for a row or token), so with float activations: {names}."))
    return Group(*lines)


def calibration_json(found: Calibration, path: str) -> dict[str, Any]:
    """Return the summary of a calibration as JSON data."""
    return {
        "path": path,
        "model": found.model,
        "weights_key": found.weights_key,
        "tokens": found.windows * found.window_tokens,
        "checked_tokens": found.checked_tokens,
        "linears": len(found.linears),
        "ffns": len(found.ffns),
        "failed": list(found.failed),
    }
