"""Options: candidates with their predicted times and costs, and the threshold that allows a split.

A group's time includes the refill that it causes: where the NPU ends last, or shortly before the GPU, the
next kernel meets an empty queue. A GPU kernel follows every group, so the next group does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from heterollm.base import PlanError
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import rest_rows
from heterollm.solver.candidates import NpuLimits, Rows, Splits, candidates
from heterollm.solver.costs import (
    NO_SHADOW,
    Costs,
    Errors,
    Overheads,
    ShadowTimes,
    Slowdown,
    joint_time_us,
)
from heterollm.solver.ffn import gpu_shard_us
from heterollm.solver.objective import Objective
from heterollm.solver.placements import Placement

ALONE: Final = Slowdown()

SUBMISSIONS: Final = 2
"""Kernels to submit until one is long enough to keep the queue busy: a norm and the linear behind it."""

UNSURE_FRACTION: Final = 0.02
"""Fraction of its time by which an NPU graph may end later than predicted."""


class Option(Struct, frozen=True, gc=False):
    """A candidate with its predicted times and cost in one pass.

    Args:
        placement: The candidate.
        time_us: Time from the end of the operators before it until the next one can begin.
        gpu_us: Time of the GPU, slowed by the NPU where both run.
        npu_us: Time of the NPU, slowed by the GPU where both run.
        cost: Value of the objective.
        is_split: Whether both processors compute.
        shard_us: Time of the GPU, counted above, while the NPU computes, or of all where it does not.
        write_us: Time of the GPU, counted above, to write the input codes of integer graphs.
        read_us: Time of the GPU, counted above, to read their output codes.
        shadow: Times of the GPU, counted above, of shadow outliers, in the mean layer.
        alone_us: Time of each processor's shard, GPU first, while the other is idle.
        error_us: Error of the predicted gain over the GPU alone; the cost of a split counts it as time.
    """

    placement: Placement
    time_us: float
    gpu_us: float
    npu_us: float
    cost: float
    is_split: bool
    shard_us: float
    write_us: float = 0.0
    read_us: float = 0.0
    shadow: ShadowTimes = NO_SHADOW
    alone_us: tuple[float, float] = (0.0, 0.0)
    error_us: float = 0.0

    @property
    def ahead_us(self) -> float:
        """Time of the GPU before the NPU can begin, beside that of the glue operators."""
        return self.write_us + self.shadow.find_us

    @property
    def behind_us(self) -> float:
        """Time of the GPU behind the NPU, before the next group's glue operators."""
        return self.read_us + self.shadow.join_us


OptionTable: TypeAlias = Mapping[str, Mapping[int, list[Option]]]
"""Options by place, and by the last length of a range."""


def evaluate(
    spec: OpSpec, tokens: int, placement: Placement, costs: Costs, objective: Objective | None = None
) -> Option | None:
    """Return the times and cost of a placement; None where a processor cannot run its shard.

    Args:
        spec: The group or ffn.
        tokens: Tokens of the pass.
        placement: A legal placement.
        costs: Times of both processors.
        objective: The objective; time by default.
    """
    overheads = costs.overheads
    goal = objective or Objective()
    left_rows, left_tokens = _left_to_gpu(spec, tokens, placement)
    gpu_us = gpu_shard_us(costs, spec, left_rows, left_tokens) if left_tokens else 0.0
    form = placement.form or ""
    npu_us = sum([costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths])
    if not math.isfinite(gpu_us + npu_us):
        return None
    if not placement.npu_lengths:
        cost = goal.cost(gpu_us, gpu_us, 0.0)
        return Option(placement, gpu_us, gpu_us, 0.0, cost, False, gpu_us, alone_us=(gpu_us, 0.0))
    write_us, read_us, shadow = 0.0, 0.0, NO_SHADOW
    if form in INTEGER_FORMS:
        covered = min(tokens, sum(placement.npu_lengths))
        write_us, read_us = costs.codes_us(spec, placement.npu_rows, tokens, covered)
        if spec.then is None:
            shadow = costs.shadow_us(spec, placement.npu_rows, tokens, covered)
    beside = bool(left_tokens or shadow.product_us)
    npu_rows = sum(placement.npu_rows) if spec.then is None else spec.then.rows
    time_us, shard_us, npu_us, alone_us = _side_by_side(
        gpu_us + shadow.product_us,
        npu_us,
        overheads,
        map_us=overheads.mapping_us(sum(placement.npu_lengths) * (spec.graph_columns + npu_rows)),
        slowdown=slowdown_of(spec, tokens, placement, costs) if beside else None,
    )
    # Both processors wait for codes and lists of the input; the output is read behind the GPU's shard.
    alone = write_us, read_us, shadow.find_us, shadow.join_us
    time_us, gpu_us = sum(alone, start=time_us), sum(alone, start=shard_us)
    is_split, error_us = bool(left_tokens), gain_error_us(spec, tokens, placement, goal.errors)
    return Option(
        placement,
        time_us,
        gpu_us,
        npu_us,
        cost=goal.cost(time_us + (error_us if is_split else 0.0), gpu_us, npu_us),
        is_split=is_split,
        shard_us=shard_us,
        write_us=write_us,
        read_us=read_us,
        shadow=shadow,
        alone_us=alone_us,
        error_us=error_us,
    )


def _side_by_side(
    gpu_us: float, npu_us: float, overheads: Overheads, *, map_us: float, slowdown: Slowdown | None
) -> tuple[float, float, float, tuple[float, float]]:
    """Return the times of a group's shards with syncs: together, of GPU and NPU, and of both alone.

    The GPU's shard follows the operator before in its queue; the NPU waits for a sync.

    Args:
        gpu_us: Time of the GPU's shard.
        npu_us: Time of the NPU's graphs, each with its whole start.
        overheads: Times of syncs and submissions.
        map_us: Time to map the graphs' inputs and outputs, and that to unmap them.
        slowdown: Slowdown of both while both compute; None where the GPU has no shard.
    """
    begin_us, before_us = max(0.0, overheads.hand_over_us) + map_us, 0.0
    if overheads.empties_queue and slowdown is not None:
        # Both processors wait: the GPU's shard hides nothing of the hand-over.
        before_us, begin_us, gpu_us = begin_us, 0.0, gpu_us + overheads.refill_us
    npu_us = max(0.0, npu_us - max(0.0, -overheads.hand_over_us))
    shard_us, npu_end = joint_time_us(gpu_us, npu_us, slowdown or ALONE, begin_us)
    alone_us, npu_us, free_us = (gpu_us, npu_us), npu_end - begin_us, npu_end + map_us
    if overheads.return_us:
        end_us = before_us + max(shard_us, free_us) + overheads.return_us + overheads.refill_us
        return end_us, shard_us, npu_us, alone_us
    # The next kernel is submitted when the NPU ends. A queue that is surely still busy needs no refill.
    busy_us = SUBMISSIONS * overheads.submit_us + UNSURE_FRACTION * npu_us
    refill_us = overheads.refill_us if shard_us < free_us + busy_us else 0.0
    return before_us + max(shard_us, free_us + refill_us), shard_us, npu_us, alone_us


def gain_error_us(spec: OpSpec, tokens: int, placement: Placement, errors: Errors | None) -> float:
    """Return the error of the predicted gain of a placement over the GPU alone; 0 where times are exact."""
    if errors is None:
        return 0.0
    left_rows, left_tokens = _left_to_gpu(spec, tokens, placement)
    form = placement.form or ""
    return math.hypot(
        gpu_shard_us(errors, spec, spec.member_rows, tokens),
        gpu_shard_us(errors, spec, left_rows, left_tokens) if left_tokens else 0.0,
        sum(errors.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths),
        errors.sync_us,
    )


def slowdown_of(spec: OpSpec, tokens: int, placement: Placement, costs: Costs) -> Slowdown:
    """Return the slowdown of both processors by a placement's shards."""
    if placement.form in INTEGER_FORMS:
        return costs.slowdown(spec, tokens, placement.form or "", max(placement.npu_lengths))
    return costs.slowdown(spec, tokens)


def _left_to_gpu(spec: OpSpec, tokens: int, placement: Placement) -> tuple[tuple[int, ...], int]:
    """Return the GPU's shard: rows of each member, and tokens; 0 tokens where it computes nothing."""
    whole = spec.member_rows
    if not placement.npu_lengths:
        return whole, tokens
    if placement.npu_rows != whole:
        return rest_rows(whole, placement.npu_rows), tokens
    return whole, max(0, tokens - sum(placement.npu_lengths))


def group_options(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    splits: Splits | None = None,
    shortest: int | None = None,
) -> tuple[list[Option], list[Option]]:
    """Return the allowed and the rejected options of a group, each cheapest first.

    A split is rejected unless it beats the best option on one processor by the objective's margin and by the
    error of its prediction: a split without gain keeps the other processor busy for nothing.

    Args:
        spec: The group.
        tokens: Tokens of the pass.
        limits: Limits of the NPU; None without an NPU.
        costs: Times of both processors.
        objective: The objective.
        splits: Rows that the NPU may compute; default all aligned splits.
        shortest: Tokens of the shortest pass that must also be legal; default ``tokens``.

    Raises:
        PlanError: The group has no option.
    """
    options = all_options(spec, tokens, limits, costs, objective, splits, shortest)
    check_any(spec, tokens, options)
    allowed = [item for item in options if objective.allows(item.gpu_us, item.time_us)]
    if not allowed:
        # No option keeps the cap on the GPU's share: take the nearest.
        allowed = [min(options, key=lambda item: item.gpu_us / item.time_us if item.time_us else 0.0)]
    return _divided(options, allowed, whole_cost_of(allowed), objective)


def ffn_options(
    ffn: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    splits: Splits | None = None,
    shortest: int | None = None,
    whole_cost: float = math.inf,
) -> tuple[list[Option], list[Option]]:
    """Return the allowed and the rejected options of an ffn, as :func:`group_options`; both may be empty.

    Args:
        ffn: The ffn.
        tokens: Tokens of the pass.
        limits: Limits of the NPU; None without an NPU.
        costs: Times of both processors.
        objective: The objective; options over its cap on the GPU's share are always rejected.
        splits: Rows that the NPU may compute; default all aligned splits.
        shortest: Tokens of the shortest pass that must also be legal; default ``tokens``.
        whole_cost: Cost of the two groups without splits, activation included; a split must beat it too.
    """
    options = all_options(ffn, tokens, limits, costs, objective, splits, shortest)
    allowed = [item for item in options if objective.allows(item.gpu_us, item.time_us)]
    return _divided(options, allowed, min(whole_cost, whole_cost_of(allowed)), objective)


def check_any(spec: OpSpec, tokens: int, options: Sequence[Option]) -> None:
    """Raise :class:`PlanError` if a group has no option."""
    if not options:
        raise PlanError(
            f"No processor can compute {spec.group} at {tokens} tokens under the options given.",
            fix="Allow both processors, or choose another precision.",
        )


def all_options(
    spec: OpSpec,
    tokens: int,
    limits: NpuLimits | None,
    costs: Costs,
    objective: Objective,
    splits: Splits | None,
    shortest: int | None,
) -> list[Option]:
    """Return all options that the processors can run and the objective does not forbid, cheapest first.

    Args:
        spec: The group or ffn.
        tokens: Tokens of the pass.
        limits: Limits of the NPU; None without an NPU.
        costs: Times of both processors.
        objective: The objective.
        splits: Rows that the NPU may compute; None is all aligned splits.
        shortest: Tokens of the shortest pass that must also be legal; None is ``tokens``.
    """
    found = candidates(spec, tokens, limits, splits=splits, shortest=shortest)
    options = evaluated(spec, tokens, found, costs, objective)
    return sorted(options, key=lambda item: (item.cost, len(item.placement.npu_lengths)))


def evaluated(
    spec: OpSpec, tokens: int, placements: Iterable[Placement], costs: Costs, objective: Objective
) -> list[Option]:
    """Return the options of placements that the processors can run and the objective does not forbid."""
    return [
        item
        for placement in placements
        if objective.allows_processors(placement, spec, tokens)
        and (item := evaluate(spec, tokens, placement, costs, objective)) is not None
    ]


def whole_cost_of(items: Sequence[Option]) -> float:
    """Return the cost of the cheapest option on one processor; ``math.inf`` without one."""
    return min((item.cost for item in items if not item.is_split), default=math.inf)


def _divided(
    options: Sequence[Option], allowed: Sequence[Option], whole_cost: float, objective: Objective
) -> tuple[list[Option], list[Option]]:
    """Divide options into those on one processor or below the threshold, and all others."""
    threshold = whole_cost * (1.0 - objective.margin_fraction)
    taken = [item for item in allowed if not item.is_split or item.cost <= threshold]
    kept = set(map(id, taken))
    return taken, [item for item in options if id(item) not in kept]


def mean_options(found: Sequence[tuple[int, list[Option]]]) -> list[Option]:
    """Return options with the mean time and cost that they have in the chains of several kinds of layers.

    Args:
        found: Number of layers of each kind, and the options, the same and in the same order in all.
    """
    (_, first), *others = found
    if not others:
        return first
    layers = sum(count for count, _ in found)

    def mean(values: Sequence[float]) -> float:
        weighted = sum(count * value for (count, _), value in zip(found, values, strict=True))
        return values[0] if len(set(values)) == 1 else weighted / layers

    return [
        replace(
            same[0], time_us=mean([item.time_us for item in same]), cost=mean([item.cost for item in same])
        )
        for same in zip(*(items for _, items in found), strict=True)
    ]


def rows_of(table: OptionTable) -> dict[str, set[Rows]]:
    """Return the rows of a table's options, by place."""
    return {
        group: {item.placement.npu_rows for items in by_length.values() for item in items}
        for group, by_length in table.items()
    }


def with_new_rows(table: OptionTable, more: OptionTable) -> OptionTable:
    """Return a table with the options of another one that use rows new to their group."""
    result, known = dict(table), rows_of(table)
    for group, by_length in more.items():
        result[group] = {
            length: [
                *table[group][length],
                *(item for item in items if item.placement.npu_rows not in known[group]),
            ]
            for length, items in by_length.items()
        }
    return result


def restricted(table: OptionTable, rows: Mapping[str, Collection[Rows]]) -> OptionTable:
    """Return the options that use some rows of each group."""
    return {
        group: {
            length: [item for item in items if item.placement.npu_rows in rows[group]]
            for length, items in by_length.items()
        }
        for group, by_length in table.items()
    }
