"""Simulations on the terminal; every number is labelled as simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from heterollm.base import Section
from heterollm.benchmarks import RIGHT, table_of
from heterollm.report.console import section_table, table
from heterollm.report.plan import sharing_words
from heterollm.simulate import beside_public
from heterollm.solver import LLM_NPU, NPU_ATTENTION, SHADOW_ATTENTION, PlannedAttention

if TYPE_CHECKING:
    from heterollm.benchmarks import BenchRow
    from heterollm.simulate import ExpertUse, GraphUse, PhaseUse, SimulationResult, TimeUse


def sweep_section(rows: Sequence[BenchRow]) -> Section:
    """Return the rows of a sweep, values that all share in the title, and the reasons of failed cases."""
    columns, cells = table_of([row for row in rows if row.error is None])
    values = dict(zip(columns, zip(*cells, strict=True), strict=True))
    alike = {name: own[0] for name, own in values.items() if name not in RIGHT and len(set(own)) == 1}
    words = ", ".join(f"{name} {value}" for name, value in alike.items() if name != "time")
    kept = [name for name in columns if name not in alike]
    reasons = [row.error for row in rows if row.error is not None]
    notes = [f"{reasons.count(one)} failed: {' '.join(one.split())}" for one in dict.fromkeys(reasons)]
    notes += ["Times are modelled. Energy is the middle of a range between assumptions; JSON has its ends."]
    return Section(
        f"Simulated, nothing here was measured{f': {words}' if words else ''}",
        tuple(f">{name}" if name in RIGHT else name for name in kept),
        tuple(zip(*(values[name] for name in kept), strict=True)),
        tuple(notes),
    )


def sweep_report(rows: Sequence[BenchRow]) -> RenderableType:
    """Return the section of a sweep for the terminal."""
    return sections_report([sweep_section(rows)])


def sections_report(sections: Sequence[Section]) -> RenderableType:
    """Return tables with their notes."""
    parts: list[RenderableType] = []
    for section in sections:
        parts += [section_table(section), *(Text(note) for note in section.notes), Text()]
    return Group(*parts)


FRAMES: Final = "frames in time"
RATES: Final[dict[str, Callable[[PhaseUse], str]]] = {
    "tokens": lambda use: f"{use.tokens}",
    "time": lambda use: f"{use.elapsed_us / 1e3:.1f} ms",
    "tokens a second": lambda use: f"{use.tokens_per_second:.2f}",
    "energy, J": lambda use: _range(use.energy.middle_joules, use.energy.low_joules, use.energy.high_joules),
    "power, W": lambda use: _range(use.energy.middle_watts, use.energy.low_watts, use.energy.high_watts),
    "GPU, NPU, control thread busy": lambda use: ", ".join(
        f"{use.busy_fraction[name]:.0%}" for name in ("gpu", "npu", "host")
    ),
    "NPU idle (bubbles)": lambda use: f"{use.npu_idle_fraction:.0%}",
    "bandwidth, GB/s (peak)": lambda use: f"{use.dram_gbps:.1f} ({use.peak_gbps:.1f})",
    "lost to synchronisation": lambda use: f"{sum(use.lost_us.values()) / 1e3:.1f} ms",
    "NPU time on padding": lambda use: f"{use.padding_us / 1e3:.1f} ms",
    FRAMES: lambda use: _frames(use),
}
"""Cells of a phase by the title of their row."""

ASSUMPTION: Final = (
    "Assumed: weights have stepped scales, and every operator has calibrated ranges that passed their check."
)


def simulation_report(result: SimulationResult, *, explain: bool = False) -> RenderableType:
    """Return the result of a simulation as tables.

    Args:
        result: The result.
        explain: Whether to say where the time went.
    """
    request = result.request
    head = (
        f"{result.model} on {result.device}, plan level {result.plan.level}, sync {request.sync}: "
        "simulated time, nothing here was measured"
    )
    parts: list[RenderableType] = [Text(head)]
    if result.note:
        parts.append(Text(result.note))
    if request.calibrated:
        parts.append(Text(ASSUMPTION))
    if request.techniques:
        parts.append(Text(_assumed(result)))
    if result.experts is not None:
        parts.append(Text(_routed(result.experts, result.prefill.tokens)))
    rates = table("simulated", "prefill", "decode")
    phases = [result.prefill, result.decode]
    for title, text in RATES.items():
        if title != FRAMES or result.prefill.frames is not None:
            rates.add_row(title, *("" if use is None else text(use) for use in phases))
    parts += [
        Text(),
        rates,
        Text(f"Time to the first token: {result.prefill.elapsed_us / 1e3:.1f} ms (simulated)."),
    ]
    if (before := result.in_order) is not None:
        parts.append(Text(_bubbles(result, before)))
    if not result.graphs.fits:
        parts.append(Text(_reopened(result.graphs)))
    slower = result.slowdown()
    if slower is not None:
        words = ", ".join(f"{phase} {factor:.2f} times" for phase, factor in slower.items())
        parts.append(Text(f"With the game it takes longer: {words}."))
    parts.append(Text("Energy is a range between assumptions: only two numbers about power are published."))
    if explain:
        parts += [Text(), *_explanation(result)]
    return Group(*parts)


USES: Final[dict[TimeUse, str]] = {
    "both": "both",
    "gpu": "GPU",
    "npu": "NPU",
    "start": "starts",
    "copies": "copies",
    "maps": "maps",
    "waits": "waits",
    "submission": "submits",
}
"""Titles of the uses of time."""


def _explanation(result: SimulationResult) -> Iterator[RenderableType]:
    """Yield a table for each phase with the time of each operator, and a line about the NPU's graphs."""
    graphs = result.graphs
    for use in result.phases:
        shown = table(f"simulated {use.phase}, ms", *(f">{title}" for title in (*USES.values(), "all")))
        account = use.account
        for one in account:
            shown.add_row(one.operator, *_ms([one.used_us[kind] for kind in USES]), *_ms([one.total_us]))
        sums = [sum(one.used_us[kind] for one in account) for kind in USES]
        shown.add_row("all", *_ms(sums), *_ms([sum(sums)]))
        yield shown
        integer_us, npu_us = use.npu_us
        if integer_us:
            percent = f"{integer_us / npu_us:.0%}"
            yield Text(f"Integer graphs take {integer_us / 1e3:.1f} ms of it, {percent} of the NPU's time.")
    yield Text(
        "Both compute, or one alone; while neither does, a graph starts, QNN copies its inputs and outputs, "
        "memory is mapped, or the control thread waits or submits. What a processor hides is in its column."
    )
    limit = "" if graphs.limit_gib is None else f" of {graphs.limit_gib:g} GiB that the NPU can address"
    yield Text(
        f"The plan has {graphs.count} NPU graphs, which take {graphs.held_gib:.1f} GiB{limit}; "
        f"opening them takes {graphs.opening_s:.1f} s (simulated)."
    )
    yield Text(sharing_words(result.sharing, result.prefill.tokens))
    yield from map(Text, beside_public(result))


def _ms(times_us: Sequence[float]) -> list[str]:
    return [f"{time_us / 1e3:.1f}" if time_us >= 50 else "" for time_us in times_us]


def _assumed(result: SimulationResult) -> str:
    """Return a sentence about the assumptions under a technique."""
    request = result.request
    words = f"Technique {', '.join(request.techniques)}."
    if SHADOW_ATTENTION in request.techniques:
        heads = (
            "all heads need as many keys and share one exponent"
            if request.head_imbalance is None
            else f"seeded needs of heads, the largest {request.head_imbalance:g} times the mean of a layer"
        )
        words += f" Assumed: {heads}; they keep {request.attention.keep:.0%} of the keys in the mean."
        if not result.plan.technique(PlannedAttention).is_active:
            words += " Attention stays dense: sparse attention pays at no length."
    if NPU_ATTENTION in request.techniques:
        is_on_npu = result.plan.technique(PlannedAttention).on_npu
        words += " Times of attention on the NPU follow from rates of its other graphs."
        words += "" if is_on_npu else " The GPU attends: the NPU gains too little, or has no memory left."
    if LLM_NPU not in request.techniques:
        return words
    words += (
        " Assumed: weights of 8 bits with one scale for a tensor, static "
        "ranges of 8 bits that passed their check"
    )
    if not result.plan.has_shadows:
        return f"{words}, and outliers without importance."
    return (
        f"{words}, outliers in {request.outlier_share:.1%} of the inputs of an operator at once, and "
        f"{request.pruned:.0%} of the layers, those in the middle, with their outliers pruned."
    )


def _routed(experts: ExpertUse, tokens: int) -> str:
    """Return the assumption about a mixture's loads, and where its experts computed the prompt."""
    words = (
        f"Assumed: seeded loads of experts, the largest {experts.imbalance:g} times the mean one. "
        f"The {tokens} tokens of the prompt choose {experts.pairs} experts in all layers"
    )
    if not experts.npu_rows:
        return f"{words}, and the GPU computes them."
    words += (
        f": the NPU computes {experts.npu_pairs}, in {experts.graphs_per_layer:.1f} graphs a layer, "
        f"{experts.padding_share:.0%} of whose rows are padding; the GPU computes {experts.gpu_pairs}, of "
        f"which {experts.overflow_pairs} exceed a capacity"
    )
    return f"{words}; {experts.dropped_pairs} are dropped." if experts.dropped_pairs else f"{words}."


def _bubbles(result: SimulationResult, before: PhaseUse) -> str:
    """Return what chunks in flight change about the share of the prompt in which the NPU is idle."""
    after, predicted = result.prefill, result.predicted_npu_idle_fraction
    plan = "" if predicted is None else f"; the solver predicts {predicted:.0%}"
    return (
        f"Prefill with up to {result.plan.lanes} chunks of {result.plan.chunk_length} tokens at once takes "
        f"{after.elapsed_us / 1e3:.1f} ms, of which the NPU is idle {after.npu_idle_fraction:.0%}{plan}. "
        f"Chunk after chunk it takes {before.elapsed_us / 1e3:.1f} ms, idle "
        f"{before.npu_idle_fraction:.0%} (simulated)."
    )


def _reopened(graphs: GraphUse) -> str:
    return (
        f"The NPU cannot hold the graphs of all lengths at once: they take {graphs.held_gib:.1f} GiB, and it "
        f"addresses {graphs.limit_gib:g} GiB. A pass of another length opens its own again, and these times "
        "leave that out."
    )


def _range(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _frames(use: PhaseUse) -> str:
    frames = use.frames
    if frames is None:
        return ""
    return f"{frames.in_time} of {frames.due}, slowest {frames.slowest_ms:.1f} ms"
