"""Level ``auto``: the plan with the least predicted time among those that a profile can predict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import structs

from heterollm.solver import LEVELS, Plan, PlanRequest, gain_error_us, level_plan, model_shape, relative_time

if TYPE_CHECKING:
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.solver import Solver

Threads: TypeAlias = tuple[int, int]
"""Threads of the GPU and of the NPU, on a device whose processors share CPU cores."""

MARGIN: Final = 0.03
"""Fraction by which a plan must be predicted faster than a simpler one to take its place."""

DECODE: Final = 1
"""The length that stands for decode among lengths of prompts."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted times.

    Args:
        plan: The plan.
        times_us: Times of prompts by length, and of a decoded token under length 1; infinite if not known.
        threads: Split of the cores; None where the processors share none.
        error: Error of its predicted gain over the GPU alone, as a fraction of the time; 0 for exact times.
    """

    plan: Plan
    times_us: Mapping[int, float]
    threads: Threads | None = None
    error: float = 0.0

    @property
    def name(self) -> str:
        """Level and split of the cores, in words."""
        level = self.plan.level if self.plan.uses_npu else "gpu"
        if self.threads is None:
            return level
        gpu, npu = self.threads
        return f"{level} on {f'all {gpu}' if not npu else f'{gpu}+{npu}'} cores"

    @property
    def known(self) -> bool:
        """Whether the profile can predict every time."""
        return all(map(math.isfinite, self.times_us.values()))


def weights_of(request: PlanRequest, standard_lengths: Sequence[int]) -> dict[int, float]:
    """Return the weights of prompts by length, and of decode under length 1.

    Without a histogram prompts of every standard length, of 1.5 times that, and as long as a session count
    alike, so that a gain of the longest prompts alone does not decide; decode counts as much as all of them.
    """
    if request.histogram is not None:
        return dict(request.histogram)
    lengths = [length for length in standard_lengths if length > DECODE]
    every = {*lengths, *(3 * length // 2 for length in lengths), request.context}
    prompts = {length: 1.0 for length in sorted(every) if DECODE < length <= request.context}
    return {**prompts, DECODE: float(max(1, len(prompts)))}


def predicted(
    model: ProfiledModel, plan: Plan, lengths: Iterable[int], threads: Threads | None = None
) -> Candidate:
    """Return a plan with the times that the profile predicts."""

    def time_us(length: int) -> float:
        found = model.predict(plan, "decode", 1) if length == DECODE else model.prompt(plan, length)
        return math.inf if found is None else found.time_us

    times_us = {length: time_us(length) for length in lengths}
    return Candidate(plan, times_us, threads, _error(model, plan, times_us))


def _error(model: ProfiledModel, plan: Plan, lengths: Iterable[int]) -> float:
    """Return the error of a plan's predicted gain over the GPU alone, at half of the lengths less."""
    errors = model.costs.errors
    if errors is None or not plan.uses_npu:
        return 0.0
    fractions = []
    for tokens in {min(length, plan.chunk_length) for length in lengths}:
        found = model.predict(plan, "decode" if tokens == DECODE else "prefill", tokens)
        if found is not None:
            errors_us = [
                gain_error_us(item.spec, item.tokens, item.option.placement, errors)
                for item in found.operators
                if item.option.placement.npu_lengths
            ]
            own_us = sum(item.option.time_us + item.between_us for item in found.operators)
            fractions.append(math.hypot(*errors_us) / own_us)
    return statistics.median(fractions) if fractions else 0.0


def compared(
    candidates: Sequence[Candidate], weights: Mapping[int, float], margin: float = MARGIN
) -> list[tuple[float, Candidate]]:
    """Return candidates with their times relative to the first one's, the choice first, others by time.

    Args:
        candidates: Simpler ones first.
        weights: Weights of lengths.
        margin: Fraction of its time by which a later candidate must be faster than an earlier one. Where
            times are uncertain, the choice must also be faster than the GPU alone by more than its error.
    """
    if not candidates[0].known:
        return [(math.inf, one) for one in candidates]
    first = candidates[0].times_us
    timed = [(relative_time(weights, first, one.times_us.__getitem__), one) for one in candidates]
    least = min(time for time, _ in timed)
    own, best = next((time, one) for time, one in timed if time <= least / (1.0 - margin))
    if best.error:
        alone = [(time, one) for time, one in timed if not one.plan.uses_npu and one.threads == best.threads]
        best = next((one for time, one in alone if time < own * (1.0 + best.error)), best)
    return sorted(timed, key=lambda entry: (entry[1] is not best, entry[0]))


def rule_plans(model: ProfiledModel, request: PlanRequest, solver: Solver) -> list[Plan]:
    """Return the plans of the levels that follow a rule, as far as the NPU's memory holds them.

    None where the request or the weights ask for more than these levels know. Those that place a group on the
    NPU that was not measured there are left out: times of other formats say nothing about it.
    """
    limits = solver.limits
    plain = request.energy_weight == 0.0 and request.gpu_share >= 1.0 and not request.forbidden
    if limits is None or not plain or request.techniques or model.calibration is not None:
        return []
    measured = {spec.group for spec in model.specs if limits.runs(spec)}
    plans = (
        level_plan(
            level,
            model.specs,
            device=model.profile.device,
            precision=model.precision,
            standard_lengths=limits.standard_lengths,
            chunk_length=solver.chunk_length,
        )
        for level in (LEVELS if limits.standard_lengths else ("gpu",))
    )
    shape = model_shape(model.every_spec)
    return [
        structs.replace(plan, shape=shape)
        for plan in plans
        if model.fits(plan, solver.budget)
        and all(entry.group in measured for entry in plan.placed if entry.placement.npu_lengths)
    ]


def words(ranked: Sequence[tuple[float, Candidate]]) -> str:
    """Return the choice and its margin over the best other plan in words."""
    best = ranked[0][1]
    other = next((one for _, one in ranked[1:] if one.name != best.name), None)
    if other is None or not best.known or not other.known:
        return f"auto: {best.name}"
    times = {length: (best.times_us[length], other.times_us[length]) for length in best.times_us}
    prompts = {length: 1.0 for length in times if length != DECODE}
    gains = [
        f"{what} {1.0 / relative_time(weights, other.times_us, best.times_us.__getitem__):.2f} x"
        for what, weights in (("prompts", prompts), ("decode", {DECODE: 1.0}))
        if weights and all(length in times for length in weights)
    ]
    return f"auto: {best.name}, predicted {' and '.join(gains)} as fast as {other.name}"
