"""Plans on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import structs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.base import GIB, format_bytes, format_duration
from heterollm.kernels.ops import FOLDED_COLUMNS, joined_specs
from heterollm.planning import profile_words
from heterollm.report.console import table
from heterollm.report.plan_experts import experts_report
from heterollm.solver import NPU_ATTENTION, SHADOW_ATTENTION, PlannedAttention, break_even, describe

if TYPE_CHECKING:
    from heterollm.kernels.ops import Phase
    from heterollm.planning import LengthChoice, Planned, ProfiledModel
    from heterollm.solver import (
        ChunkSchedule,
        GraphSharing,
        Plan,
        PredictedKind,
        PredictedOperator,
        PredictedPass,
        RejectedOption,
    )


def plan_report(planned: Planned, prompts: Sequence[int], decode: int, *, explain: bool) -> Group:
    """Return the tables of some passes under a plan by a profile, and its notes.

    Args:
        planned: The plan.
        prompts: Lengths of the prompts to show; long ones run in several passes.
        decode: Tokens decoded after each.
        explain: Whether to show rejected placements.
    """
    model, plan = planned.model, planned.plan
    assert model is not None
    lengths = {tokens for prompt in prompts for _, tokens in plan.chunks(prompt)} - {1}
    asked: list[tuple[Phase, int]] = [("decode", 1)] if decode else []
    asked += [("prefill", tokens) for tokens in sorted(lengths)]
    passes = [found for phase, tokens in asked if (found := model.predict(plan, phase, tokens)) is not None]
    parts: list[RenderableType] = [
        Text(
            f"{model.profile.device} ({model.profile.time_kind} times), {model.precision}, "
            f"level {plan.level}, predicted from the profile"
        ),
        Text(profile_words(model.profile)),
    ]
    if plan.calibration is not None:
        parts.append(Text(calibration_words(plan)))
    for found in passes:
        parts += [Text(), *pass_tables(found, explain=explain)]
    if decode > 1:
        parts.append(answers_table(model, plan, prompts, decode))
    kinds = [f"{kind.count} {kind.name}".rstrip() for kind in model.shape.kinds]
    parts.append(
        Text(
            f"\nTimes of groups are of one of {' and '.join(kinds)} layers; those of passes count all "
            "layers and the glue operators, in an empty session: attention takes longer later."
        )
    )
    parts += [Text(chunked(plan, prompt)) for prompt in prompts if prompt > plan.chunk_length]
    parts.append(Text(held_words(model, plan)))
    if explain and plan.slices:
        parts.append(slices_table(model, plan))
    if explain and plan.schedule is not None:
        parts.append(flights_table(model, plan, plan.schedule))
    if plan.request is not None and {SHADOW_ATTENTION, NPU_ATTENTION}.intersection(plan.request.techniques):
        if plan.technique(PlannedAttention).is_active:
            parts.append(Text(attention_words(model, plan)))
        if explain:
            parts.append(attention_table(model, plan, plan.request.context))
    parts += experts_report(model, plan, planned.evidence.get("experts"), explain=explain)
    if explain and plan.uses_npu:
        parts.append(bubbles_table(model, plan, prompts))
        longest = max(prompts)
        if longest > plan.chunk_length:
            parts.append(Text(sharing_words(model.sharing(plan, longest), longest)))
    if model.limits is None or model.has_linears:
        parts.append(Text(verdict(passes)))
        if explain:
            parts.append(Text(fusion_words(passes, model.unfused)))
    if planned.length_choice is not None:
        parts += [Text(), lengths_table(planned.length_choice)]
        if not planned.length_choice.chosen.lengths and not plan.uses_npu:
            parts.append(Text("No useful graph can be built in that time: the GPU computes everything."))
    parts += [Text(note) for note in planned.notes]
    if model.missing:
        parts.append(Text(f"Missing in the profile and in the times: {', '.join(sorted(model.missing))}."))
    return Group(*parts)


def held_words(model: ProfiledModel, plan: Plan) -> str:
    """Return a sentence about the memory of the NPU's graphs."""
    profile, limit = model.profile, plan.request.npu_gib if plan.request is not None else None
    words = [f"The NPU's graphs take {format_bytes(model.npu_bytes(plan))} in all layers"]
    memory = profile.graph_memory
    if memory.copies_by_length:
        words.append("weights counted for each length")
    elif profile.graphs_by_length:
        words.append("weights counted once for all lengths")
    if memory.unrolls_blocks:
        words.append(f"weights of at most {FOLDED_COLUMNS} inputs in 16 bits but for one token")
    if memory.activation_bytes:
        of = "the longest graph of each slice" if memory.reuses_io else "every graph"
        words.append(f"inputs and outputs of {of} included")
    if limit is not None:
        words.append(f"{format_bytes(int(limit * GIB))} were allowed")
    elif profile.addressable_bytes is not None:
        words.append(f"{format_bytes(profile.addressable_bytes)} can be addressed (--npu-gib)")
    return f"{', '.join(words)}."


def slices_table(model: ProfiledModel, plan: Plan) -> Table:
    """Return the resident slices of a plan with the lengths and the memory of their graphs."""
    made = table("group", ">rows of each member", "lengths", ">graphs", ">memory", title="The NPU's graphs")
    specs = (*model.specs, *joined_specs(model.specs))
    for held in plan.slices:
        layers = sum(held.holds(spec) for spec in specs)
        own = structs.replace(plan, slices=(held,), entries=(), schedule=None, techniques=())
        made.add_row(
            _in_kind(held.group, held.kind),
            " + ".join(map(str, held.npu_rows)),
            ", ".join(map(str, held.lengths)),
            str(layers * len(held.lengths)),
            format_bytes(model.npu_bytes(own)),
        )
    return made


def flights_table(model: ProfiledModel, plan: Plan, schedule: ChunkSchedule) -> Table:
    """Return the placements of whole chunks in flight, with the predicted times of both processors."""
    title = f"Whole chunks of {plan.chunk_length} tokens, up to {schedule.in_flight} at once"
    made = table("group", "placement", ">GPU before us", ">GPU us", ">NPU us", title=title)
    times = {(one.kind or "", one.group): one for one in schedule.times}
    first_layers = [spec for kind in model.shape.kinds for spec in kind.specs]
    for spec, placement in plan.of_flights.operators("prefill", plan.chunk_length, first_layers):
        if (one := times.get((spec.kind, spec.group))) is not None:
            words, group = describe(placement, spec, plan.chunk_length), _in_kind(spec.group, spec.kind)
            made.add_row(group, words, f"{one.before_us:.0f}", f"{one.gpu_us:.0f}", f"{one.npu_us:.0f}")
    return made


def _in_kind(group: str, kind: str) -> str:
    """Return a group with the kind of its layers, where there are several."""
    return f"{group} of {kind}" if kind else group


def bubbles_table(model: ProfiledModel, plan: Plan, prompts: Sequence[int]) -> Table:
    """Return predicted times of prompts and their bubbles, in order and with chunks in flight."""
    columns = [">prompt", ">chunks", ">one after the other, ms", ">NPU idle"]
    flown = plan.schedule is not None
    more = [f">up to {plan.lanes} at once, ms", ">NPU idle"] if flown else []
    made = table(*columns, *more, title="Bubbles: the share of the prompt without NPU work, predicted")
    plans = [structs.replace(plan, schedule=None), *([plan] if flown else [])]
    for prompt in prompts:
        found = [one for own in plans if (one := model.prompt(own, prompt)) is not None]
        if len(found) == len(plans):
            cells = [
                text for one in found for text in (f"{one.time_us / 1e3:.2f}", f"{one.npu_idle_fraction:.0%}")
            ]
            made.add_row(str(prompt), str(len(list(plan.chunks(prompt)))), *cells)
    return made


def attention_words(model: ProfiledModel, plan: Plan) -> str:
    """Return a sentence about where the attention of prompts is sparse, or on the NPU."""
    planned = plan.technique(PlannedAttention)
    entries, kind = planned.entries, "on the NPU" if planned.on_npu else "sparse"
    layers = {layer for entry in entries for layer in range(entry.layers[0], entry.layers[1] + 1)}
    least = min(entry.keys[0] for entry in entries)
    return (
        f"Attention of prompts is {kind} in {len(layers)} of {model.config.layers} layers from {least} "
        "tokens of a session on, where it is predicted to pay; decode is dense, on the GPU."
    )


def attention_table(model: ProfiledModel, plan: Plan, context: int) -> Table:
    """Return the predicted attention of passes that end at standard numbers of keys."""
    title = "Attention of all layers in the longest passes, predicted"
    columns = (
        *(">session after it", ">tokens of the pass", ">sparse layers"),
        *("estimated by", ">layers on the NPU", ">dense ms", ">planned ms"),
    )
    made = table(*columns, title=title)
    for one in break_even(plan, model.attention_costs, model.config.layers, context):
        times = (f"{time_us / 1e3:.2f}" for time_us in (one.dense_us, one.planned_us))
        by = ", ".join(one.estimators).upper()
        made.add_row(str(one.keys), str(one.tokens), str(one.sparse_layers), by, str(one.npu_layers), *times)
    return made


def sharing_words(sharing: GraphSharing, prompt: int) -> str:
    """Return what the chunks of a prompt share."""
    chunks = f"{sharing.chunks} chunk{'s' if sharing.chunks > 1 else ''}"
    return (
        f"The {sharing.graphs} NPU graphs of a prompt of {prompt} tokens in {chunks} take "
        f"{format_bytes(sharing.held_bytes)}. Graphs for each chunk apart would be {sharing.separate_graphs} "
        f"and take {format_bytes(sharing.separate_bytes)} ({sharing.saved_fraction:.0%} saved). Attention "
        "and norms, GPU kernels that read a chunk's position from a buffer, serve all chunks, too."
    )


def calibration_words(plan: Plan) -> str:
    """Return a sentence about the calibration of a plan that has one."""
    used = "some NPU graphs compute" if plan.has_integer_forms else "no NPU graph computes"
    return f"Calibration {plan.calibration}: {used} in integers."


def answers_table(model: ProfiledModel, plan: Plan, prompts: Sequence[int], decode: int) -> Table:
    """Return the predicted times of prompts and of the tokens after them."""
    title = f"Prompt and {decode} decoded tokens, predicted; attention at the middle of each phase"
    made = table(">prompt", ">prefill ms", ">decode ms", ">all ms", title=title)
    for prompt in prompts:
        found = model.prompt(plan, prompt)
        token = model.predict(plan, "decode", 1, position=prompt + decode // 2)
        if token is not None and found is not None:
            times_us = found.time_us, decode * token.time_us, found.time_us + decode * token.time_us
            made.add_row(str(prompt), *(f"{time_us / 1e3:.2f}" for time_us in times_us))
    return made


def chunked(plan: Plan, prompt: int) -> str:
    """Return the passes of a long prompt, in words."""
    lengths = [length for _, length in plan.chunks(prompt)]
    full = lengths.count(plan.chunk_length)
    words = f"{full} of {plan.chunk_length}" if full > 1 else f"one of {plan.chunk_length}"
    last = f" and one of {lengths[-1]}" if lengths[-1] != plan.chunk_length else ""
    at_once = f", up to {plan.lanes} at once" if plan.schedule is not None else ""
    return f"A prompt of {prompt} tokens runs in several passes: {words}{last}{at_once}."


def lengths_table(choice: LengthChoice) -> Table:
    """Return the chosen standard lengths and, for comparison, all lengths of the device."""
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


def verdict(passes: Sequence[PredictedPass]) -> str:
    """Return a sentence about the passes in which splitting pays."""
    split = [found for found in passes if any(item.option.is_split for item in found.operators)]
    if not split:
        return "No operator is split: none is predicted to gain more than the error of its prediction."
    words = f"Operators are split in: {_named(split)}."
    ffns = [found for found in passes if any(item.spec.group == "ffn" for item in found.operators)]
    if ffns:
        words += f" The feed-forward network is placed as one operator in: {_named(ffns)}."
    return words


def fusion_words(passes: Sequence[PredictedPass], unfused: str) -> str:
    """Return a sentence about the fused groups of passes, or on why there are none.

    Args:
        passes: The passes.
        unfused: What keeps the groups of every layer from being fused; empty for nothing.
    """
    fused = [found for found in passes if any(item.spec.fused for item in found.operators)]
    if fused:
        return f"One NPU graph has o, its sum with the stream, the norm and the network in: {_named(fused)}."
    return f"No groups are fused: {unfused or 'the passes are not predicted to gain by it'}."


def _named(passes: Sequence[PredictedPass]) -> str:
    return ", ".join(
        "decode" if found.phase == "decode" else f"prefill of {found.tokens}" for found in passes
    )


def pass_tables(found: PredictedPass, *, explain: bool) -> Iterator[Table]:
    """Yield the placements of one pass, a table for each kind of layers, the head in the last one.

    Args:
        found: The pass.
        explain: Whether to show the times to write and read codes, those of shadows (to find outliers, to
            multiply hot channels, to add the rest), and the rejected placements.
    """
    title = (
        f"{found.phase}, {found.tokens} token{'s' if found.tokens > 1 else ''}: "
        f"{found.time_us / 1e3:.2f} ms, {found.tokens_per_s:.1f} tokens/s predicted"
    )
    for number, kind in enumerate(found.kinds):
        layers = f"{kind.layers} layer{'s' if kind.layers > 1 else ''} of kind {kind.name}"
        named = f"{title}\n{layers}" if kind.name else title
        last = number == len(found.kinds) - 1
        yield _kind_table(found, kind, found.head if last else None, named, explain=explain)


def _kind_table(
    found: PredictedPass, kind: PredictedKind, head: PredictedOperator | None, title: str, *, explain: bool
) -> Table:
    operators = (*kind.operators, *([] if head is None else [head]))
    columns = ["group", "placement", ">NPU share", ">GPU us", ">NPU us", ">time us"]
    codes = explain and any(item.option.read_us for item in operators)
    shadows = explain and any(item.option.shadow.find_us for item in operators)
    more = [*([">codes us"] if codes else []), *([">shadow us"] if shadows else [])]
    more += ["rejected"] if explain else []
    result = table(*columns, *more, title=title)
    for item in operators:
        option = item.option
        row = [
            item.spec.group,
            describe(option.placement, item.spec, item.tokens),
            f"{item.npu_fraction:.0%}",
            f"{option.gpu_us:.0f}" if option.gpu_us else "",
            f"{option.npu_us:.0f}" if option.npu_us else "",
            f"{option.time_us:.0f}",
        ]
        if codes:
            row.append(f"{option.write_us:.0f} + {option.read_us:.0f}" if option.read_us else "")
        if shadows:
            row.append(" + ".join(f"{one_us:.0f}" for one_us in option.shadow) if any(option.shadow) else "")
        if explain:
            row.append("\n".join(_reasons(item, kind.ffn_us)))
        result.add_row(*row)
    if kind.mixture_us:
        of_layer = ["experts", "on the GPU", "", "", "", f"{found.experts_us:.0f}"]
        if found.experts_npu_us:
            of_layer[1] = "groups on the NPU, the rest on the GPU; of the mean layer"
        result.add_row(*of_layer)
    return result


def _reasons(item: PredictedOperator, ffn_us: float) -> list[str]:
    """Return the costs of rejected placements, by the plan."""
    placement = item.option.placement
    chosen_us = item.option.time_us if placement.predicted_us is None else placement.predicted_us
    return [_reason(other, ffn_us if other.of_ffn else chosen_us) for other in placement.rejected]


def _reason(other: RejectedOption, chosen_us: float) -> str:
    """Return the cost of a rejected placement against the chosen one, or why a cheaper one is rejected."""
    slower = other.predicted_us / chosen_us - 1.0 if chosen_us else 0.0
    reason = f"{slower:+.0%}"
    if slower < 0 and -slower * chosen_us <= other.error_us:
        reason += f", less than the error of its prediction, {other.error_us / chosen_us:.0%}"
    elif slower < 0:
        reason += ", less than a split must gain"
    return f"{other.description}: {other.predicted_us:.0f} us ({reason})"
