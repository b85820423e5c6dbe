"""Checks of a plan before anything is built: every placement at every length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from heterollm.base import PlanError, format_bytes
from heterollm.kernels.npu import FfnShape, GraphShape, LinearShape, NpuBackend, fits_domains, graph_memory
from heterollm.kernels.ops import Activation, GraphMemory, OpSpec, Phase, joined_specs
from heterollm.model import kinds_of_specs
from heterollm.solver.contexts import context_sizes
from heterollm.solver.ffn import split_alignment
from heterollm.solver.placements import Placement
from heterollm.solver.plan import Plan
from heterollm.solver.sparse.attention import PlannedAttention
from heterollm.solver.techniques.record import PlanTarget


def check_plan(
    plan: Plan,
    specs: Sequence[OpSpec],
    npu: NpuBackend | None,
    *,
    longest: int,
    head_rows: int,
    activation: Activation = "silu",
    heads: tuple[int, int] | None = None,
) -> None:
    """Refuse a plan, such as one edited by hand, that would fail later.

    Args:
        plan: The plan.
        specs: Every group of the model, and the experts of a mixture.
        npu: The device's NPU, if it has one.
        longest: Most positions of the model; no pass is longer.
        head_rows: Most positions that the head computes at a time.
        activation: Activation of the model's feed-forward networks.
        heads: Query heads and key heads of the model; without them no plan with sparse attention passes.

    Raises:
        PlanError: A case has no entry, or its placement is not legal on the device; the message names it.
    """
    if not 1 <= plan.chunk_length <= longest:
        raise PlanError(
            f"The plan's chunk_length of {plan.chunk_length} is outside what the model takes, 1 to {longest}."
        )
    if plan.schedule is not None:
        flights = replace(plan.of_flights, techniques=())
        check_plan(flights, specs, npu, longest=longest, head_rows=head_rows, activation=activation)
        if plan.technique(PlannedAttention).on_npu:
            raise PlanError(
                "Attention on the NPU and several chunks in flight are not combined.",
                fix="Leave the plan's schedule or its attention out.",
            )
    for record in plan.techniques:
        record.check(PlanTarget(specs, npu, activation, heads or (0, 0)))
    _check_address_space(plan, specs, npu, head_rows)
    specs = [spec for spec in specs if spec.experts is None]
    joined = (spec.group for spec in joined_specs(specs))
    groups = dict.fromkeys((*(spec.group for spec in specs), "ffn", *joined))
    if unknown := next((entry.group for entry in plan.placed if entry.group not in groups), None):
        raise PlanError(
            f"The plan places {unknown}, and the model has no such linears.",
            fix=f"Name a group of the model: {', '.join(groups)}.",
        )
    # Layers of a kind have the same shapes, so the first one of each range of layers stands for the range.
    begins = {0, *(start for entry in plan.entries for start in (entry.layers[0], entry.layers[1] + 1))}
    firsts = {
        next((layer for layer in kind.layers if layer >= begin), None)
        for kind in kinds_of_specs(specs)
        for begin in begins
    }
    layers = [spec for spec in specs if spec.group != "head" and spec.layer in firsts]
    for phase in get_args(Phase):
        entries = [entry for entry in plan.entries if entry.phase == phase]
        for head in (False, True):
            own = [spec for spec in specs if spec.group == "head"] if head else layers
            last = min(head_rows, plan.chunk_length) if head else plan.chunk_length
            for length in _decisive_lengths([e for e in entries if (e.group == "head") is head], last):
                for spec, placement in plan.operators(phase, length, own, rows=length):
                    if placement.npu_lengths:
                        _check_on_npu(placement, spec, length, npu, activation)


def pass_sizes(
    plan: Plan, specs: Sequence[OpSpec], memory: GraphMemory, phase: Phase, tokens: int, head_rows: int
) -> list[int]:
    """Return the bytes of the contexts of the NPU's graphs of one pass.

    Args:
        plan: The plan.
        specs: Every group of the model, and the experts of a mixture.
        memory: How they count.
        phase: Phase of the pass.
        tokens: Its tokens.
        head_rows: Most rows of the head.
    """
    linears = [spec for spec in specs if spec.experts is None]
    graphs = (
        (spec, placement.npu_rows, set(placement.npu_lengths))
        for spec, placement in plan.operators(phase, tokens, linears, rows=min(tokens, head_rows))
        if placement.npu_lengths
    )
    records = plan.techniques if phase == "prefill" else ()
    return context_sizes(graphs, memory, sum(one.npu_bytes(specs, memory, tokens) for one in records))


def _check_address_space(plan: Plan, specs: Sequence[OpSpec], npu: NpuBackend | None, head_rows: int) -> None:
    """Refuse a pass whose NPU graphs cannot be open together; graphs of other passes may be closed."""
    if npu is None or npu.addressable_bytes is None:
        return
    domain_bytes = npu.domain_bytes or npu.addressable_bytes
    memory = graph_memory(npu)
    for phase in get_args(Phase):
        entries = [entry for entry in plan.entries if entry.phase == phase]
        records = plan.techniques if phase == "prefill" else ()
        added = (entry for record in records for entry in record.entries)
        for length in _decisive_lengths((*entries, *added), plan.chunk_length):
            sizes = pass_sizes(plan, specs, memory, phase, length, head_rows)
            if not fits_domains(sizes, npu.addressable_bytes, domain_bytes):
                parts = ""
                if npu.addressable_bytes > domain_bytes:
                    parts = f" in process domains of {format_bytes(domain_bytes)}"
                raise PlanError(
                    f"A {phase} pass of {length} tokens needs NPU graphs of {format_bytes(sum(sizes))}, and "
                    f"{npu.name} addresses {format_bytes(npu.addressable_bytes)}{parts}.",
                    fix="Use plan 'tensor' or 'auto', which keep the limit, or a smaller model.",
                )


def _decisive_lengths(entries: Iterable[Any], last: int) -> list[int]:
    """Return both ends of every range within ``[1, last]`` that one entry covers.

    A placement that is legal at both ends of a range is legal between them: its conditions are bounds.
    """
    starts = {1, last + 1}
    for entry in entries:
        starts.update((entry.lengths[0], entry.lengths[1] + 1))
    ends = {start - 1 for start in starts}
    return sorted(length for length in starts | ends if 1 <= length <= last)


def _check_on_npu(
    placement: Placement, spec: OpSpec, length: int, npu: NpuBackend | None, activation: Activation
) -> None:
    where = f"group {spec.group} of layer {spec.layer} at {length} tokens"
    if npu is None:
        raise PlanError(
            f"{where}: the plan needs an NPU, and the device was opened without one.",
            fix="Use plan level 'gpu', or give the NPU at least one thread.",
        )
    missing = sorted(set(placement.npu_lengths).difference(npu.standard_lengths))
    if missing:
        raise PlanError(
            f"{where}: {npu.name} has no graphs of {missing[0]} tokens.",
            fix=f"Use lengths among {', '.join(map(str, npu.standard_lengths))}.",
        )
    alignment = split_alignment(spec, npu.row_alignment)
    for rows, whole in zip(placement.npu_rows, spec.member_rows, strict=True):
        if rows % alignment and rows != whole:
            raise PlanError(
                f"{where}: a split after {rows} of {whole} rows.",
                fix=f"Split at multiples of {alignment}, or not at all.",
            )
    for tokens in placement.npu_lengths:
        forms = npu.forms(_shape(placement, spec, activation), tokens)
        if not forms or placement.form not in (None, *forms):
            raise PlanError(
                f"{where}: {npu.name} does not run {spec.weight} weights in form {placement.form!r} "
                f"at {tokens} tokens.",
                fix=f"Legal forms: {', '.join(forms) or 'none'}.",
            )


def _shape(placement: Placement, spec: OpSpec, activation: Activation) -> GraphShape:
    if spec.then is None:
        return LinearShape(spec.weight, spec.columns, spec.integer_inputs, spec.fused)
    return FfnShape.of(spec, placement.npu_rows[0], activation)
