"""The HTML page of a plan: who computes what at every length, predicted times, and all tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from heterollm.report.charts import Curve, Strip, curves_html, strips_html
from heterollm.report.page_parts import (
    Bar,
    bars_html,
    kind_word,
    page_html,
    report_html,
    sentences_html,
    title_html,
)
from heterollm.report.plan import plan_report
from heterollm.solver import describe

if TYPE_CHECKING:
    from heterollm.kernels.ops import OpSpec, Phase
    from heterollm.planning import Planned, ProfiledModel
    from heterollm.solver import Plan, PredictedPass

DECODED: Final = 16
"""Longest pass of decode that plans place."""

SHARE_KEYS: Final = (("gpu", "GPU"), ("npu", "NPU"))
TIME_KEYS: Final = (
    ("gpu", "only the GPU computes linears"),
    ("both", "both do"),
    ("npu", "only the NPU does"),
    ("other", "the rest: attention, norms and synchronisation"),
)

Piece = tuple[float, str]
"""The NPU's share of an operator, and words for its placement."""


def plan_page(name: str, planned: Planned, prompts: Sequence[int], decode: int) -> str:
    """Return a plan as one HTML page.

    Args:
        name: The model.
        planned: The plan, with a profile.
        prompts: Lengths of the prompts whose passes have tables.
        decode: Tokens decoded after each.
    """
    model, plan = planned.model, planned.plan
    assert model is not None
    kind = kind_word(model.profile.time_kind)
    body: list[Markup] = [
        title_html("Who computes what", 2),
        *_shares(model, plan),
        title_html(f"Predicted times: from {kind} ones", 2),
        *_times(model, plan, prompts, decode, kind),
    ]
    if words := _ending_words(model):
        body.append(sentences_html([words]))
    body += report_html(plan_report(planned, prompts, decode, explain=True), f"predicted, {kind}")
    return page_html(f"Plan of {name} for {model.profile.device}, {kind}", body)


# -- shares ------------------------------------------------------------------------------------------


def _shares(model: ProfiledModel, plan: Plan) -> Iterator[Markup]:
    """Yield a chart for each phase: the NPU's share of every linear at every length."""
    phases: tuple[tuple[Phase, int], ...] = (("prefill", plan.chunk_length), ("decode", DECODED))
    for phase, longest in phases:
        strips = list(_strips(model, plan, phase, longest))
        what = "a prompt's pass" if phase == "prefill" else "a decode pass, several where tokens are guessed"
        caption = f"{phase}: shares of both processors in each linear, by the tokens of {what}."
        yield strips_html(strips, caption, (1, longest), SHARE_KEYS)


def _strips(model: ProfiledModel, plan: Plan, phase: Phase, longest: int) -> Iterator[Strip]:
    """Yield a row for each linear of each group of layers that the plan places alike."""
    rows: dict[tuple[str, str, tuple[Piece | None, ...]], list[int]] = {}
    for layers, specs in _layer_groups(model, plan):
        at_lengths = [_placed(plan, phase, tokens, specs) for tokens in range(1, longest + 1)]
        for spec in specs:
            pieces = tuple(found.get(spec.group) for found in at_lengths)
            rows.setdefault((spec.kind, spec.group, pieces), []).extend(layers)
    several = {key[:2] for key in rows if sum(other[:2] == key[:2] for other in rows) > 1}
    for (kind, group, pieces), layers in rows.items():
        parts = [group, kind, "" if group == "head" else f"\N{MULTIPLICATION SIGN} {len(layers)}"]
        if (kind, group) in several:
            parts.append(f"from layer {min(layers)}")
        merged, first = [], 1
        # Splits that differ by a few rows look alike.
        for _, alike in groupby(pieces, lambda piece: piece and round(piece[0], 2)):
            found = list(alike)
            last = first + len(found) - 1
            if found[0] is not None:
                share, words = found[0]
                lengths = f"{first} to {last} tokens" if last > first else f"{first} tokens"
                merged.append((first, last, share, f"{lengths}: {words}, NPU {share:.0%}"))
            first = last + 1
        yield Strip(" ".join(part for part in parts if part), tuple(merged))


def _layer_groups(model: ProfiledModel, plan: Plan) -> Iterator[tuple[list[int], list[OpSpec]]]:
    """Yield layers that no entry of the plan tells apart, with the linears of the first; then the head."""
    by_layer: dict[int, list[OpSpec]] = {}
    for spec in model.specs:
        by_layer.setdefault(-1 if spec.group == "head" else spec.layer, []).append(spec)
    groups: dict[tuple[object, ...], list[int]] = {}
    for layer, specs in by_layer.items():
        # The shapes of a kind are alike, and so are the entries that hold its layers.
        held = (entry.lengths + entry.layers for entry in plan.entries if any(map(entry.holds, specs)))
        groups.setdefault((tuple(spec.kind for spec in specs), *held), []).append(layer)
    for layers in sorted(groups.values(), key=lambda own: (own[0] < 0, own[0])):
        yield layers, by_layer[layers[0]]


def _placed(plan: Plan, phase: Phase, tokens: int, specs: Sequence[OpSpec]) -> Mapping[str, Piece]:
    """Return share and placement by linear; the parts of a whole network have those of the network."""
    found: dict[str, Piece] = {}
    rows = tokens if phase == "decode" else 1
    for spec, placement in plan.operators(phase, tokens, specs, rows=rows):
        own = rows if spec.group == "head" else tokens
        share = sum(placement.npu_rows) / spec.rows * min(own, sum(placement.npu_lengths)) / own
        words = describe(placement, spec, own)
        for group in spec.parts or (spec.group,):
            found[group] = share, words
    return found


# -- times -------------------------------------------------------------------------------------------


def _times(
    model: ProfiledModel, plan: Plan, prompts: Sequence[int], decode: int, kind: str
) -> Iterator[Markup]:
    """Yield bars of some passes, and curves of the plan and of the GPU alone over the length."""
    shown = sorted({tokens for prompt in prompts for _, tokens in plan.chunks(prompt)} - {1})
    asked: list[tuple[Phase, int]] = [("decode", 1)] if decode else []
    asked += [("prefill", tokens) for tokens in shown]
    bars = [
        _bar(found) for phase, tokens in asked if (found := model.predict(plan, phase, tokens)) is not None
    ]
    if bars:
        yield bars_html(bars, f"Predicted milliseconds of passes, from {kind} times.", TIME_KEYS)
    lengths = [2**power for power in range(1, plan.chunk_length.bit_length())]
    curves = []
    for name, style, one in (("this plan", "both", plan), ("the GPU alone", "gpu", plan.without_npu())):
        points = tuple(
            (tokens, found.time_us / 1e3)
            for tokens in lengths
            if (found := model.predict(one, "prefill", tokens)) is not None
        )
        if points and (style == "both" or plan.uses_npu):
            curves.append(Curve(name, points, style))
    if curves:
        caption = f"Predicted milliseconds of a prompt's pass by tokens, from {kind} times."
        yield curves_html(curves, caption, ("tokens", "ms"), logarithmic=(True, True))


def _bar(found: PredictedPass) -> Bar:
    """Return who computes the linears of a pass for how long, in ms."""
    counted = [(item.option, kind.layers) for kind in found.kinds for item in kind.operators]
    if found.head is not None:
        counted.append((found.head.option, 1))
    gpu = both = npu = 0.0
    for option, layers in counted:
        together = min(option.gpu_us, option.npu_us) if option.is_split else 0.0
        both += layers * together
        gpu += layers * (option.gpu_us - together)
        npu += layers * (option.npu_us - together)
    rest = max(0.0, found.time_us - gpu - both - npu)
    pieces = tuple(
        (us / 1e3, style) for us, style in ((gpu, "gpu"), (both, "both"), (npu, "npu"), (rest, "other"))
    )
    name = f"{found.phase}, {found.tokens} token{'s' if found.tokens > 1 else ''}"
    number = f"{found.time_us / 1e3:.1f} ms, {found.tokens_per_s:.1f} tokens/s"
    return Bar(name, pieces, number)


def _ending_words(model: ProfiledModel) -> str:
    """Return a sentence on the norms that linears of one token compute at their ends; empty without any."""
    endings = model.costs.overheads.endings
    if not endings:
        return ""
    listed = ", ".join(f"{place} (from {rows:g} rows)" for place, rows in endings)
    return f"In a pass of one token the linear before also computes the norm in front of: {listed}."
