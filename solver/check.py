"""Checks of a plan before anything is built: every placement at every length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from msgspec.structs import replace

from heterollm.base import PlanError, format_bytes
from heterollm.kernels.npu import (
    ExpertsShape,
    FfnShape,
    GraphShape,
    LinearShape,
    NpuBackend,
    graph_memory,
)
from heterollm.kernels.ops import Activation, OpSpec, Phase
from heterollm.model import kinds_of_specs
from heterollm.solver.attention import SparseAttention
from heterollm.solver.expert_placements import ExpertGroup, ExpertsEntry
from heterollm.solver.ffn import split_alignment
from heterollm.solver.placements import Placement
from heterollm.solver.plan import Plan
from heterollm.solver.plan_records import PlanEntry


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
        flights = replace(plan.of_flights, attention=(), experts=())
        check_plan(flights, specs, npu, longest=longest, head_rows=head_rows, activation=activation)
    _check_experts(plan, specs, npu, activation)
    experts, specs = _parted(specs)
    groups = dict.fromkeys((*(spec.group for spec in specs), "ffn"))
    if unknown := next((entry.group for entry in plan.placed if entry.group not in groups), None):
        raise PlanError(
            f"The plan places {unknown}, and the model has no such linears.",
            fix=f"Name a group of the model: {', '.join(groups)}.",
        )
    _check_attention(plan, specs, npu, heads or (0, 0))
    _check_address_space(plan, specs, experts, npu, head_rows)
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


def _check_attention(
    plan: Plan, specs: Sequence[OpSpec], npu: NpuBackend | None, heads: tuple[int, int]
) -> None:
    """Refuse sparse attention that is not the model's, or that the device cannot estimate."""
    if plan.schedule is not None and plan.sparse_attention:
        raise PlanError(
            "Sparse attention and several chunks in flight are not combined.",
            fix="Leave the plan's schedule or its attention out.",
        )
    last = max((spec.layer for spec in specs), default=-1)
    for entry in plan.attention:
        placement, layers = entry.placement, f"layers {entry.layers[0]} to {entry.layers[1]}"
        if entry.layers[1] > last:
            raise PlanError(
                f"Attention of {layers} is planned, and layer {last} is the last.",
                fix="Name the model's layers.",
            )
        if isinstance(placement, SparseAttention):
            placement.check(*heads, entry.layers)
            if placement.estimator == "npu" and npu is None:
                raise PlanError(
                    f"Sparse attention of {layers} needs an NPU, and the device was opened without one.",
                    fix="Plan with --estimator gpu, or give the NPU at least one thread.",
                )


def _parted(specs: Sequence[OpSpec]) -> tuple[list[OpSpec], list[OpSpec]]:
    """Return the experts of a mixture, and all other groups."""
    of_experts = [spec for spec in specs if spec.experts is not None]
    return of_experts, [spec for spec in specs if spec.experts is None]


def _check_experts(
    plan: Plan, specs: Sequence[OpSpec], npu: NpuBackend | None, activation: Activation
) -> None:
    """Refuse experts on the NPU that are not the model's, or that the device cannot compute.

    Args:
        plan: The plan.
        specs: Every group of the model, and the experts of a mixture.
        npu: The device's NPU, if it has one.
        activation: Activation of the experts.
    """
    if plan.schedule is not None and plan.has_npu_experts:
        raise PlanError(
            "Experts on the NPU and several chunks in flight are not combined.",
            fix="Leave the plan's schedule or its experts out.",
        )
    mixtures, last = _parted(specs)[0], max((spec.layer for spec in specs), default=-1)
    for entry in plan.experts:
        where = f"The experts of layers {entry.layers[0]} to {entry.layers[1]}"
        spec = next((own for own in mixtures if entry.holds(own.layer)), None)
        if spec is None or entry.layers[1] > last:
            raise PlanError(
                f"{where} are planned, and the model has experts in {len(mixtures)} layers.",
                fix="Name the model's layers." if mixtures else "Leave them out.",
            )
        routing, down = spec.experts, spec.then
        assert routing is not None  # of a spec of experts
        assert down is not None  # the same
        entry.placement.capacities(routing.experts)
        if entry.placement.groups and npu is None:
            raise PlanError(
                f"{where} need an NPU, and the device was opened without one.",
                fix="Plan without the technique npumoe, or give the NPU at least one thread.",
            )
        if entry.placement.groups and spec.weight != down.weight:
            raise PlanError(
                f"{where} have weights of {spec.weight} and {down.weight}; a graph takes one format.",
                fix="Plan without the technique npumoe, or choose a group size that divides both widths.",
            )
        for group in entry.placement.groups:
            assert npu is not None  # checked above
            _check_group(where, group, entry.placement.form, spec, npu, activation)


def _check_group(
    where: str, group: ExpertGroup, form: str | None, spec: OpSpec, npu: NpuBackend, activation: Activation
) -> None:
    """Refuse a group of experts that is no graph of the NPU."""
    if group.capacity not in npu.standard_lengths:
        raise PlanError(
            f"{where}: {npu.name} has no graphs of {group.capacity} rows of each expert.",
            fix=f"Use capacities among {', '.join(map(str, npu.standard_lengths))}.",
        )
    limit, need = npu.graph_weight_bytes, len(group.experts) * spec.slice_bytes(spec.member_rows)
    if limit is not None and need > limit:
        raise PlanError(
            f"{where}: a group of {len(group.experts)} experts has {format_bytes(need)} of weights, and a "
            f"graph of {npu.name} takes {format_bytes(limit)}.",
            fix="Use smaller groups.",
        )
    one = FfnShape(spec.weight, spec.columns, spec.member_rows[0], activation, spec.integer_inputs)
    forms = npu.forms(ExpertsShape(one, len(group.experts)), group.capacity)
    if not forms or form not in (None, *forms):
        raise PlanError(
            f"{where}: {npu.name} does not run {spec.weight} weights in form {form!r} at {group.capacity} "
            "rows of each expert.",
            fix=f"Legal forms: {', '.join(forms) or 'none'}.",
        )


def _check_address_space(
    plan: Plan, specs: Sequence[OpSpec], experts: Sequence[OpSpec], npu: NpuBackend | None, head_rows: int
) -> None:
    """Refuse a pass whose NPU graphs cannot be open together; graphs of other passes may be closed."""
    if npu is None or npu.addressable_bytes is None:
        return
    memory = graph_memory(npu)
    for phase in get_args(Phase):
        entries = [entry for entry in plan.entries if entry.phase == phase]
        of_experts = plan.experts if phase == "prefill" else ()
        for length in _decisive_lengths((*entries, *of_experts), plan.chunk_length):
            rows = min(length, head_rows)
            need = sum(
                spec.graph_bytes(placement.npu_rows, set(placement.npu_lengths), memory)
                for spec, placement in plan.operators(phase, length, specs, rows=rows)
                if placement.npu_lengths
            )
            serving = tuple(entry for entry in of_experts if entry.lengths[0] <= length <= entry.lengths[1])
            need += replace(plan, experts=serving).npu_expert_bytes(experts, memory)
            if need > npu.addressable_bytes:
                raise PlanError(
                    f"A {phase} pass of {length} tokens needs NPU graphs of {format_bytes(need)}, and "
                    f"{npu.name} addresses {format_bytes(npu.addressable_bytes)}.",
                    fix="Use plan 'tensor' or 'auto', which keep the limit, or a smaller model.",
                )


def _decisive_lengths(entries: Sequence[PlanEntry | ExpertsEntry], last: int) -> list[int]:
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
        return LinearShape(spec.weight, spec.columns, spec.integer_inputs)
    return FfnShape(spec.weight, spec.columns, placement.npu_rows[0], activation, spec.integer_inputs)
