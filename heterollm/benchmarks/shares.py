"""What a plan does in a test: the GPU's share, padded tokens, whether it cuts, and the predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.work import passes_of
from heterollm.kernels.ops import OpSpec, Phase, feed_forward_blocks
from heterollm.solver import Placement, price

if TYPE_CHECKING:
    from heterollm.planning import Planner
    from heterollm.profiler.records import Part

__all__ = ["Placed", "Shares", "predicted_us", "shares_of"]


class Placed(Protocol):
    """Says who computes what: a plan, or a planner that solves exact lengths."""

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group."""
        ...

    def block_placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement | None:
        """Return who computes a block of groups; None where its groups have placements of their own."""
        ...


@dataclass(frozen=True, slots=True)
class Shares:
    """What a plan does in one sample of a test.

    Args:
        gpu_share: Fraction of the arithmetic of linear layers that the GPU part does, padding left out.
        padded_tokens: Rows past the end of its passes that the NPU's graphs compute, in the group that has
            most of them.
        parts: The parts that compute linear layers at the same time: both only where something is cut.
        cut_groups: Groups that are cut.
    """

    gpu_share: float
    padded_tokens: int
    parts: tuple[Part, ...]
    cut_groups: tuple[str, ...]


def shares_of(placed: Placed, specs: Sequence[OpSpec], case: Case, *, chunk: int) -> Shares:
    """Return what a plan does in a test.

    Args:
        placed: The plan.
        specs: All groups of the model.
        case: The test.
        chunk: Longest pass.
    """
    total = on_gpu = 0.0
    padded = 0
    cut: dict[str, None] = {}
    for (phase, tokens, logits), times in _counted(case, chunk).items():
        most = 0
        for spec, rows, placement in _placements(placed, specs, phase, tokens, logits):
            flops = spec.flops(rows)
            covered = min(rows, sum(placement.npu_lengths)) / rows
            npu = covered * sum(placement.npu_rows) / spec.rows
            total += times * flops
            on_gpu += times * flops * (1.0 - npu)
            if placement.npu_lengths:
                most = max(most, sum(placement.npu_lengths) - rows)
            if 0.0 < npu < 1.0:
                cut[spec.group] = None
        padded += times * most
    share = on_gpu / total
    parts: tuple[Part, ...] = ("gpu", "npu") if cut else ("gpu",) if share > 0.5 else ("npu",)
    return Shares(share, padded, parts, tuple(cut))


def predicted_us(planner: Planner, placed: Placed, case: Case, *, chunk: int) -> float | None:
    """Return the time that the profile predicts for a sample; None where it lacks something.

    Every pass is priced where it begins, as attention depends on that; the tokens behind a prompt at their
    mean position.

    Args:
        planner: The model on its profile.
        placed: The plan.
        case: The test.
        chunk: Longest pass.
    """
    total = 0.0
    gens = [position for tokens, position, _ in passes_of(case, chunk)[-case.n_gen :]] if case.n_gen else []
    prompt = passes_of(replace(case, n_gen=0), chunk) if case.n_prompt else []
    for tokens, position, logits in prompt:
        found = _pass_us(planner, placed, "prefill", tokens, position, logits)
        if found is None:
            return None
        total += found
    if gens:
        found = _pass_us(planner, placed, "decode", 1, sum(gens) // len(gens), True)
        if found is None:
            return None
        total += len(gens) * found
    return total


def _pass_us(
    planner: Planner, placed: Placed, phase: Phase, tokens: int, position: int, logits: bool
) -> float | None:
    from heterollm.solver import ProfileCosts

    solver, costs = planner.solver, planner.solver.costs
    if isinstance(costs, ProfileCosts):
        costs = costs.at(position)
    time_us = 0.0
    blocks = {block.layer: block for block in feed_forward_blocks(solver.layer)}
    layer = solver.layer[0].layer
    block = blocks.get(layer)
    whole = None if block is None else placed.block_placement(phase, tokens, block)
    for spec in (*solver.layer, *((solver.head,) if logits else ())):
        head = spec.group == "head"
        rows, times = (1, 1) if head else (tokens, solver.layers)
        if whole is not None and spec.group == "down":
            continue  # inside the block
        between_us = costs.between_us(spec, rows)
        if whole is not None and spec.group == "gate_up" and block is not None:
            spec, placement = block, whole
        else:
            placement = placed.placement(phase, rows, spec)
        priced = price(spec, rows, _with_form(planner, spec, placement), costs)
        if priced is None:
            return None
        time_us += times * (between_us + priced.time_us)
    return time_us


def _with_form(planner: Planner, spec: OpSpec, placement: Placement) -> Placement:
    """Name the form that a placement leaves to the backend: the one that is predicted to be fastest."""
    limits = planner.solver.limits
    if limits is None or placement.form is not None or not placement.npu_lengths:
        return placement
    costs = planner.solver.costs
    forms = set.intersection(*(set(limits.forms(spec, length)) for length in placement.npu_lengths))

    def npu_us(form: str) -> float:
        return sum(costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths)

    return replace(placement, form=min(sorted(forms), key=npu_us, default=None))


def _counted(case: Case, chunk: int) -> dict[tuple[Phase, int, bool], int]:
    """Return the kinds of passes of a test and how often each comes."""
    counts: dict[tuple[Phase, int, bool], int] = {}
    for index, (tokens, _, logits) in enumerate(passes_of(case, chunk)):
        phase: Phase = "prefill" if index < -(-case.n_prompt // chunk) else "decode"
        key = phase, tokens, logits
        counts[key] = counts.get(key, 0) + 1
    return counts


def _placements(
    placed: Placed, specs: Sequence[OpSpec], phase: Phase, tokens: int, logits: bool
) -> Iterator[tuple[OpSpec, int, Placement]]:
    """Yield every group of a pass with its rows and its placement, blocks as one group."""
    blocks = {
        block.layer: (block, placement)
        for block in feed_forward_blocks(specs)
        if (placement := placed.block_placement(phase, tokens, block)) is not None
    }
    for spec in specs:
        if spec.group == "head":
            if logits:
                yield spec, 1, placed.placement(phase, 1, spec)
        elif spec.layer not in blocks or spec.group not in ("gate_up", "down"):
            yield spec, tokens, placed.placement(phase, tokens, spec)
        elif spec.group == "gate_up":
            block, placement = blocks[spec.layer]
            yield block, tokens, placement
