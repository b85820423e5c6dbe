"""The report of a calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from heterollm.calibration import Calibration
from heterollm.report.console import note, table
from heterollm.solver import keep_ratios

SHOWN = 8
"""Most names or layers of a list."""

KEEP = 0.2
"""Ratio of the table of heads: the paper's."""


def calibration_report(found: Calibration, path: str) -> Group:
    """Return the worst operators of each kind, and the decisions or those that keep float activations."""
    shown = table("operators", ">number", ">worst error", ">failed", ">outlier channels")
    for group in dict.fromkeys(one.group for one in found.linears):
        linears = [one for one in found.linears if one.group == group]
        errors = [one.errors for one in linears if one.errors is not None]
        worst = max((one.nmse for one in errors), default=0.0)
        failed = sum(not one.passed for one in errors)
        outliers = sum(len(one.outliers) for one in linears)
        shown.add_row(group, str(len(linears)), f"{worst:.1e}", str(failed), str(outliers))
    joined = {
        "ffn": [one.errors for one in found.ffns],
        "norm_qkv": [one.norm_errors for one in found.streams],
        "o_ffn": [one.errors for one in found.streams],
    }
    for group, checks in joined.items():
        errors = [one for one in checks if one is not None]
        if errors:
            worst, failed = max(one.nmse for one in errors), sum(not one.passed for one in errors)
            shown.add_row(group, str(len(errors)), f"{worst:.1e}", str(failed), "")
    tokens = found.windows * found.window_tokens
    lines: list[RenderableType] = [
        Text(f"{found.model}: ranges of {tokens} tokens, checked on {found.checked_tokens} others"),
        shown,
    ]
    if found.decision is not None:
        lines += _int8(found)
    lines += _heads(found)
    lines += _routing(found)
    ways = [found.load_options, *(["--technique npumoe"] if found.routing else [])]
    options = " or ".join(f"{way} --calibration {path}" for way in ways)
    lines.append(Text(f"Wrote {path}; load the model with {options}."))
    if found.failed:
        what = "keep float activations" if found.decision is None else "have no ranges of 16 bits"
        lines.append(note(f"Below 60 dB (50 for a row or token), so they {what}: {_names(found.failed)}."))
    return Group(*lines)


def _int8(found: Calibration) -> list[RenderableType]:
    """Return the outliers and decisions of each layer, and how they were decided."""
    shown = table(
        *("layer", ">outlier channels", ">hot", ">importance", ">8 bits dB", ">shadow dB", "activations")
    )
    for layer in dict.fromkeys(one.layer for one in found.linears):
        linears = [one for one in found.linears if one.layer == layer]
        int8 = [one.int8 for one in linears if one.int8 is not None]
        counts = [one.shadow.window_channels / found.windows for one in int8]
        plain_db = [one.errors.sqnr_db for one in int8 if one.errors is not None]
        shadow_db = [one.shadow.errors.sqnr_db for one in int8 if one.shadow.errors is not None]
        shown.add_row(
            str(layer),
            _numbers(counts),
            _numbers([len(one.shadow.hot_channels) for one in int8]),
            _numbers([one.importance for one in linears]),
            _numbers(plain_db),
            _numbers(shadow_db),
            " ".join(str(one.activations) for one in int8),
        )
    assert found.decision is not None
    decision = found.decision
    counted = Counter(found.activations().values())
    decided = ", ".join(f"{number} {name}" for name, number in sorted(counted.items()))
    lines: list[RenderableType] = [
        Text("8-bit activations: qkv, o, gate_up and down of each layer; channels of a window of text,"),
        Text("those that have 80 % of all outliers, the largest input over the step, the mean token's SQNR"),
        shown,
        Text(f"{decided}; {decision.pruned:.0%} of the shadows pruned"),
    ]
    if decision.losses:
        tried = ", ".join(
            f"{one.pruned:.0%}: {one.loss_percent:+.1f} ({one.error_percent:.1f}) %"
            for one in decision.losses
        )
        limit = decision.loss_limit_percent
        lines += [
            Text("Rise of the perplexity over that with all shadows (standard error) by share; at most"),
            Text(f"{limit:g} % with the error added: {tried}"),
        ]
    return lines


def _heads(found: Calibration) -> list[RenderableType]:
    """Return the shares of keys that the heads of each layer keep in sparse attention."""
    shown = table("layer", ">least %", ">most %", ">importance")
    for one, kept in zip(found.heads, keep_ratios(found.head_needs(), KEEP), strict=True):
        importance = f"{one.layer_importance:.3f}" if one.layer_importance is not None else ""
        shown.add_row(str(one.layer), f"{100 * min(kept):.0f}", f"{100 * max(kept):.0f}", importance)
    return [
        Text(f"Keys that query heads keep at --keep {KEEP:g}, by windows of {found.window_tokens} tokens:"),
        shown,
    ]


def _routing(found: Calibration) -> list[RenderableType]:
    """Return the popularity of the experts of each layer."""
    if not found.routing:
        return []
    shown = table("layer", ">imbalance", "most popular experts")
    for one in found.routing:
        popular = one.most_popular(min(SHOWN, len(one.counts)))
        shown.add_row(str(one.layer), f"{one.imbalance:.2f}", " ".join(map(str, popular)))
    return [Text("Tokens of the busiest expert over the mean:"), shown]


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def calibration_json(found: Calibration, path: str) -> dict[str, Any]:
    """Return the summary of a calibration as JSON data."""
    summary: dict[str, Any] = {
        "path": path,
        "model": found.model,
        "weights_key": found.weights_key,
        "tokens": found.windows * found.window_tokens,
        "checked_tokens": found.checked_tokens,
        "linears": len(found.linears),
        "ffns": len(found.ffns),
        "failed": list(found.failed),
        "window_tokens": found.window_tokens,
        "keep": [list(layer) for layer in keep_ratios(found.head_needs(), KEEP)],
        "head_importance": all(one.ranked for one in found.heads),
    }
    if found.routing:
        summary["experts"] = [one.counts.tolist() for one in found.routing]
    if found.decision is None:
        return summary
    int8 = [one.int8 for one in found.linears if one.int8 is not None]
    hot = [len(one.shadow.hot_channels) for one in int8]
    counted = Counter(one.activations for one in int8)
    return summary | {
        "activations": {name: counted[name] for name in ("int8", "shadow", "int16")},
        "pruned": found.decision.pruned,
        "outlier_channels": float(np.mean([one.shadow.window_channels for one in int8])) / found.windows,
        "hot_channels": float(np.mean(hot)),
    }
