"""The tables and the picture of bench/sparse_accuracy.py's rows, which bench/figures.py writes into docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from heterollm.solver.keep import HeadNeeds, keep_ratios

Row = Mapping[str, Any]
Lines = list[tuple[str, ...]]

KEEPS: Final = (0.2, 0.3, 0.4, 0.5)
SHOWN_MASSES: Final = (0.8, 0.9, 0.95, 0.99)
RULES: Final = {
    "mass": "by attention mass",
    "importance": "by importance, with floor and cap",
    "importance_literal": "by importance, literally",
    "uniform": "alike in all heads",
}
PICTURE_KEEP: Final = 0.2
CELL: Final = 20
"""Width of a head's column in the picture; rows are half as high."""


def needed_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of each model's shares of keys that hold shares of attention."""
    lines = []
    for model, tokens in _models(rows, "heads"):
        row = _last(rows, kind="heads", model=model, tokens=tokens)
        needed = np.array([head for layer in row["heads"] for head in layer["needed"]])
        found = needed[:, [row["masses"].index(mass) for mass in SHOWN_MASSES]]
        means, most = 100 * found.mean(0), 100 * found.max(0)
        cells = (f"{mean:.1f}, {largest:.0f} %" for mean, largest in zip(means, most, strict=True))
        lines.append((model, f"{tokens}", *cells))
    return ["model", "tokens", *(f"{mass:.0%} of the attention" for mass in SHOWN_MASSES)], lines


def loss_lines(rows: Sequence[Row], model: str, tokens: int) -> tuple[list[str], Lines]:
    """Return the columns, and a line for each way to select keys of one model."""
    own = [row for row in rows if row["kind"] == "loss" and (row["model"], row["tokens"]) == (model, tokens)]
    texts = list(dict.fromkeys(row["text"] for row in own))
    lines: Lines = []
    dense = [_last(own, text=text, rule="dense") for text in texts]
    lines.append(("dense", "", *(f"perplexity {row['perplexity']:.2f}" for row in dense)))
    ways: list[tuple[str, Row]] = [
        (name, {"rule": rule, "keep": keep, "buckets": 1, "whole": None})
        for rule, name in RULES.items()
        for keep in KEEPS
    ]
    at_first = {"rule": "mass", "keep": KEEPS[0], "whole": None}
    ways += [
        ("by attention mass, exact scores", {**at_first, "buckets": 0}),
        ("by attention mass, 5 buckets", {**at_first, "buckets": 5}),
        ("by attention mass, 9 buckets", {**at_first, "buckets": 9}),
        ("by attention mass, all of the text sparse", {**at_first, "buckets": 1, "whole": True}),
    ]
    for name, asked in ways:
        found = [_find(own, text=text, **asked) for text in texts]
        if any(found):
            cells = ("" if row is None else _loss(row) for row in found)
            lines.append((name, f"{asked['keep']:.0%}", *cells))
    return ["keys", "kept", *texts], lines


def agreement_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of recall and attention mass for each way to select keys."""
    models = _models(rows, "agreement")
    lines: Lines = []
    ways = [("uniform", keep, 1) for keep in KEEPS]
    ways += [("uniform", KEEPS[0], 5), ("uniform", KEEPS[0], 9), ("mass", KEEPS[0], 1)]
    for rule, keep, count in ways:
        cells = []
        for model, tokens in models:
            asked = {"model": model, "tokens": tokens, "rule": rule, "keep": keep, "buckets": count}
            row = _find(rows, kind="agreement", **asked)
            cells += ["", ""] if row is None else list(_agreement(row))
        buckets = "1 bucket" if count == 1 else f"{count} buckets"
        lines.append((f"{RULES[rule]}, {buckets}", f"{keep:.0%}", *cells))
    columns = ["keys", "kept"]
    for model, tokens in models:
        columns += [f"{model}, {tokens} tokens: recall", "attention kept"]
    return columns, lines


def retrieval_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line for each way to select keys, by the depth of the sentence."""
    own = [row for row in rows if row["kind"] == "retrieval" and "sentence" in row]
    depths = sorted({row["depth"] for row in own})
    sentences = dict.fromkeys(row["sentence"] for row in own)
    lines: Lines = []
    for rule in dict.fromkeys(row["rule"] for row in own):
        keep = _last(own, rule=rule)["keep"]
        name = "dense" if rule == "dense" else f"{RULES[rule]}, {keep:.0%}"
        cells = (
            _found([_last(own, rule=rule, depth=depth, sentence=one) for one in sentences])
            for depth in depths
        )
        lines.append((name, *cells))
    return ["keys", *(f"at {depth:.0%}" for depth in depths)], lines


def kept_picture(rows: Sequence[Row], model: str, tokens: int) -> str:
    """Return an SVG of what each head keeps by the rule of attention mass: a row for each layer."""
    row = _last(rows, kind="heads", model=model, tokens=tokens)
    needed = tuple(tuple(map(tuple, layer["needed"])) for layer in row["heads"])
    ratios = keep_ratios(HeadNeeds(tuple(row["masses"]), needed), PICTURE_KEEP)
    heads, layers = len(ratios[0]), len(ratios)
    width, height = 60 + heads * CELL + 120, 60 + layers * CELL // 2 + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="9" role="img">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-size="11">Keys that each query head keeps, {model}</text>',
        f'<text x="8" y="30">mean {PICTURE_KEEP:.0%}; calibrated on windows of {row["tokens"]} tokens</text>',
    ]
    for layer, kept in enumerate(ratios):
        y = 44 + layer * CELL // 2
        if layer % 5 == 0:
            parts.append(f'<text x="52" y="{y + 8}" text-anchor="end">layer {layer}</text>')
        for head, share in enumerate(kept):
            parts.append(
                f'<rect x="{56 + head * CELL}" y="{y}" width="{CELL - 1}" height="{CELL // 2 - 1}" '
                f'fill="{_colour(share)}"><title>layer {layer}, head {head}: {share:.0%}</title></rect>'
            )
    x = 56 + heads * CELL + 16
    for place, share in enumerate((0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)):
        y = 44 + place * 14
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="12" fill="{_colour(share)}"/>')
        parts.append(f'<text x="{x + CELL + 4}" y="{y + 9}">{share:.0%}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _colour(share: float) -> str:
    """Return a colour from pale to dark, by the logarithm of a share from 10 % on."""
    dark = float(np.clip(np.log(share / 0.1) / np.log(10), 0, 1))
    pale, deep = (222, 235, 247), (8, 48, 107)
    mixed = (round(a + (b - a) * dark) for a, b in zip(pale, deep, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _loss(row: Row) -> str:
    rise, error = row["rise_nats"], row["standard_error_nats"]
    return f"{rise:+.3f} ({error:.3f}), {row['top_1_agreement']:.0%}"


def _found(rows: Sequence[Row]) -> str:
    """Return how many sentences were found, and the mean loss of a digit."""
    nats = sum(row["nats"] for row in rows) / len(rows)
    return f"{sum(row['found'] for row in rows)} of {len(rows)} ({nats:.2f})"


def _agreement(row: Row) -> Iterator[str]:
    yield f"{100 * row['recall']:.1f}, {100 * row['worst_recall']:.1f} %"
    yield f"{100 * row['mass']:.1f}, {100 * row['worst_mass']:.0f} %"


def _models(rows: Sequence[Row], kind: str) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["model"], row["tokens"]) for row in rows if row["kind"] == kind))


def _find(rows: Sequence[Row], **asked: object) -> Row | None:
    """Return the last row with these values, None for those that it lacks."""
    found = (row for row in reversed(rows) if all(row.get(name) == value for name, value in asked.items()))
    return next(found, None)


def _last(rows: Sequence[Row], **asked: object) -> Row:
    row = _find(rows, **asked)
    if row is None:
        raise SystemExit(f"No row has {asked}.")
    return row
