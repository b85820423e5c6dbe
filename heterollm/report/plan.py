"""Plans on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.base import format_bytes, format_duration
from heterollm.report.console import table
from heterollm.solver import describe

if TYPE_CHECKING:
    from heterollm.planning import LengthChoice, PassPlan, Planner
    from heterollm.solver import Choice, Priced

__all__ = ["lengths_table", "pass_table", "plan_report"]

RUNNERS_UP: Final = 3


def plan_report(
    planner: Planner, passes: Sequence[PassPlan], prompts: Sequence[int], *, explain: bool
) -> RenderableType:
    """Return the tables of some solved passes and what was learnt on the way.

    Args:
        planner: Solved them.
        passes: The passes.
        prompts: Lengths of the prompts that were asked for; long ones run in several passes.
        explain: Whether to say why others lost.
    """
    profile = planner.profile
    parts: list[RenderableType] = [
        Text(
            f"{profile.device} ({profile.time_kind} times), {planner.precision}, level {planner.plan.level}, "
            "predicted from the profile"
        )
    ]
    for solved in passes:
        parts += [Text(), pass_table(solved, explain=explain)]
    parts.append(
        Text(
            f"\nTimes of groups are of one of {planner.solver.layers} layers; those of passes count all "
            "layers and what runs between the groups, in an empty session: attention takes longer later."
        )
    )
    parts += [Text(chunked(planner, prompt)) for prompt in prompts if prompt > planner.plan.chunk_length]
    copies = planner.solver.budget.copies_by_length
    held = planner.plan.npu_bytes(planner.specs, copies_by_length=copies)
    words = ", each once for every length that it runs at; --npu-gib bounds them" if copies else ""
    parts.append(Text(f"The NPU holds slices of {format_bytes(held)} in all layers{words}."))
    if not planner.notes:
        parts.append(Text(verdict(passes)))
    if planner.length_choice is not None:
        parts += [Text(), lengths_table(planner.length_choice)]
        if not planner.length_choice.chosen.lengths:
            parts.append(Text("No graph that pays can be built in that time: the GPU computes everything."))
    parts += [Text(note) for note in planner.notes]
    if missing := planner.missing():
        parts.append(Text(f"Not in the profile, and left out of the times: {', '.join(sorted(missing))}."))
    return Group(*parts)


def chunked(planner: Planner, prompt: int) -> str:
    """Say in which passes a long prompt runs."""
    lengths = [length for _, length in planner.plan.chunks(prompt)]
    full = lengths.count(planner.plan.chunk_length)
    words = f"{full} of {planner.plan.chunk_length}" if full > 1 else f"one of {planner.plan.chunk_length}"
    last = f" and one of {lengths[-1]}" if lengths[-1] != planner.plan.chunk_length else ""
    return f"A prompt of {prompt} tokens runs in several passes: {words}{last}."


def lengths_table(choice: LengthChoice) -> Table:
    """Return which standard lengths were chosen, and what they mean beside all that there are."""
    columns = ["standard lengths", "lengths", ">graphs", ">to build", ">mean pass ms", ">padding on the NPU"]
    title = f"Standard lengths within {format_duration(choice.budget_us / 1e6)} of building, by the histogram"
    result = table(*columns, title=title)
    for name, use in (("chosen", choice.chosen), ("all", choice.every), ("one for all", choice.single)):
        result.add_row(
            name,
            ", ".join(map(str, use.lengths)) or "none",
            str(use.graphs),
            format_duration(use.build_us / 1e6),
            f"{use.pass_us / 1e3:.2f}",
            f"{use.padding_fraction:.1%}",
        )
    return result


def verdict(passes: Sequence[PassPlan]) -> str:
    """Say in words where splitting pays, by the numbers of the passes."""
    cut = [solved for solved in passes if any(choice.chosen.is_cut for choice in solved.choices)]
    if not cut:
        return "No operator is split: either part alone is as fast as both, by the profile."
    words = f"Operators are split in: {_named(cut)}."
    blocks = [solved for solved in passes if any(choice.spec.then for choice in solved.choices)]
    if blocks:
        words += f" The feed-forward network is placed as one block in: {_named(blocks)}."
    return words


def _named(passes: Sequence[PassPlan]) -> str:
    return ", ".join(
        "decode" if solved.phase == "decode" else f"prefill of {solved.tokens}" for solved in passes
    )


def pass_table(solved: PassPlan, *, explain: bool) -> Table:
    """Return the placements of one pass, with the runners-up if asked for."""
    title = (
        f"{solved.phase}, {solved.tokens} token{'s' if solved.tokens > 1 else ''}: "
        f"{solved.time_us / 1e3:.2f} ms, {solved.tokens_per_s:.1f} tokens/s predicted"
    )
    columns = ["group", "placement", ">NPU share", ">GPU us", ">NPU us", ">time us"]
    result = table(*columns, *(["why the others lost"] if explain else []), title=title)
    for choice in solved.choices:
        tokens = 1 if choice.spec.group == "head" else solved.tokens
        chosen = choice.chosen
        row = [
            choice.spec.group,
            describe(chosen.placement, choice.spec, tokens),
            f"{npu_share(choice, tokens):.0%}",
            f"{chosen.gpu_us:.0f}" if chosen.gpu_us else "",
            f"{chosen.npu_us:.0f}" if chosen.npu_us else "",
            f"{chosen.time_us:.0f}",
        ]
        if explain:
            reasons = _reasons(choice, tokens)
            if solved.other_way is not None and choice.spec.group in ("gate_up", "ffn"):
                other = solved.other_way
                reasons = [_reason(other.description, other.predicted_us, solved.network_us), *reasons]
            row.append("\n".join(reasons))
        result.add_row(*row)
    return result


def npu_share(choice: Choice, tokens: int) -> float:
    """Return the part of a group's work, 0 to 1, that the NPU computes, padding left out."""
    placement = choice.chosen.placement
    covered = min(tokens, sum(placement.npu_lengths))
    return sum(placement.npu_rows) / choice.spec.rows * covered / tokens


def _reasons(choice: Choice, tokens: int) -> list[str]:
    """Return the best of each other kind of placement and what it would have cost."""
    best: dict[str, Priced] = {}
    for other in sorted(choice.others, key=lambda item: item.cost):
        best.setdefault(other.placement.kind(choice.spec, tokens), other)
    chosen_us = choice.chosen.time_us
    return [
        _reason(describe(other.placement, choice.spec, tokens), other.time_us, chosen_us)
        for other in list(best.values())[:RUNNERS_UP]
    ]


def _reason(other: str, other_us: float, chosen_us: float) -> str:
    """Say how much slower another placement would be, or why it is none although it is faster."""
    slower = other_us / chosen_us - 1.0 if chosen_us else 0.0
    reason = f"{slower:+.0%}" if slower >= 0 else f"{slower:+.0%}, less than a cut must gain"
    return f"{other}: {other_us:.0f} us ({reason})"
