"""The choice of standard lengths for a histogram of prompts, within a build budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from heterollm.base import PlanError
from heterollm.kernels.ops import OpSpec, joined_specs
from heterollm.profiler.predict import nonnegative_fit
from heterollm.profiler.records import GraphKey, Profile
from heterollm.solver import CachedCosts, choose_lengths, pass_weights

if TYPE_CHECKING:
    from heterollm.solver import Choice, Plan, Slices, Solver

LEAST_RECORDS: Final = 4
"""Fewest measured builds to fit costs by length and size; of fewer the mean counts."""


@dataclass(frozen=True, slots=True)
class BuildCosts:
    """Build times of NPU graphs, by the profile.

    Args:
        terms_us: Microseconds of a graph, for each token of it, and for each million weights.
        free: Whether one graph serves every length, so that another length costs nothing.
    """

    terms_us: tuple[float, float, float]
    free: bool = False

    @classmethod
    def of(cls, profile: Profile, *, free: bool) -> BuildCosts:
        """Fit the builds that a profile has; one that took no time was there already.

        Raises:
            PlanError: The profile has none.
        """
        found = [
            (key.point, record.values["build_us"])
            for key, record in profile.of_kind(GraphKey)
            if record.values.get("build_us", 0.0) > 0.0
        ]
        if not found:
            raise PlanError(
                f"The profile of {profile.device} has no build of an NPU graph, so that a budget for them "
                "says nothing.",
                fix="Run `heterollm profile --update`, or leave the budget out.",
            )
        times = np.array([build_us for _, build_us in found])
        if len(found) < LEAST_RECORDS:
            return cls((float(times.mean()), 0.0, 0.0), free)
        terms = np.array([[1.0, point.tokens, point.flops / point.tokens / 2e6] for point, _ in found])
        once, token, weights = nonnegative_fit(terms, times)
        return cls((once, token, weights), free)

    def graph_us(self, spec: OpSpec, rows: Sequence[int], length: int) -> float:
        """Return the time to build one graph of some rows of each member."""
        once, token, weights = self.terms_us
        millions = sum(rows) * spec.columns / 1e6
        if spec.then is not None:
            millions += rows[0] * spec.then.rows / 1e6
        if spec.first is not None:
            millions += spec.first.rows * spec.first.columns / 1e6
        return once + token * length + weights * millions


@dataclass(frozen=True, slots=True)
class LengthUse:
    """A set of standard lengths with its graphs, build time and mean pass time.

    Args:
        lengths: The set, ascending.
        graphs: Graphs to build for the plan, of all layers.
        build_us: How long building them takes.
        pass_us: Mean time of the layers in a pass, by the histogram.
        padding_fraction: Fraction of the NPU's work that is padding.
    """

    lengths: tuple[int, ...]
    graphs: int
    build_us: float
    pass_us: float
    padding_fraction: float


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """The chosen set of standard lengths, with others to compare it with.

    Args:
        chosen: The chosen set.
        every: All lengths.
        single: One token and the shortest length that every prompt can be padded to.
        budget_us: Limit of the build time.
    """

    chosen: LengthUse
    every: LengthUse
    single: LengthUse
    budget_us: float


def choose(
    solver: Solver,
    histogram: Mapping[int, float],
    builds: BuildCosts,
    budget_us: float,
    *,
    device: str,
    precision: str,
) -> LengthChoice:
    """Return the standard lengths that are worth building for some prompts.

    Every set is tried with the resident slices of a plan of all lengths, and the build time counts the slices
    that each length runs in that plan. If the plan of the chosen set takes longer to build than the budget,
    its build times count from then on, and a set is chosen again.

    Args:
        solver: The solver with all lengths.
        histogram: How often prompts of each length come, and decode under length 1.
        builds: Build times.
        budget_us: Limit of the build time of all graphs.
        device: Name of the device.
        precision: Precision of the linears.

    Raises:
        OptionError: A number is out of range.
        PlanError: With no set that can be built in time every pass can be run.
    """
    assert solver.limits is not None
    limits, passes = solver.limits, pass_weights(histogram, solver.chunk_length)
    labels = {"device": device, "precision": precision}

    def of(lengths: Sequence[int]) -> tuple[LengthUse, Plan, Slices]:
        own = replace(solver, limits=replace(limits, standard_lengths=tuple(lengths)))
        plan, slices = own.solve(**labels, weights=histogram)
        return _use(plan, slices, own, passes, builds), plan, slices

    def by_length_us(plan: Plan) -> dict[int, float]:
        return {length: _built_us(plan, solver, builds, (length,))[1] for length in offered}

    offered = limits.standard_lengths
    every, plan, slices = of(offered)
    widest = next((length for length in offered if length >= max(passes, default=1)), max(offered))
    single, _, _ = of(sorted({1, widest} & set(offered)))
    remembered = replace(solver, costs=CachedCosts(solver.costs))
    builds_us = by_length_us(plan)

    def time_us(tokens: int, lengths: tuple[int, ...]) -> float:
        own = replace(remembered, limits=replace(limits, standard_lengths=lengths))
        try:
            return own.length(tokens, slices).time_us
        except PlanError:
            return math.inf

    def build_us(length: int) -> float:
        return 0.0 if builds.free else builds_us[length]

    while True:
        lengths = choose_lengths(passes, offered, build_us, time_us, budget_us)
        chosen, own, _ = of(lengths)
        if chosen.build_us <= budget_us or builds.free:
            return LengthChoice(chosen, every, single, budget_us)
        # Where a plan with fewer lengths runs more graphs of one, this set has become too dear.
        builds_us = {length: max(builds_us[length], own_us) for length, own_us in by_length_us(own).items()}


def _use(
    plan: Plan, slices: Slices, solver: Solver, passes: Mapping[int, float], builds: BuildCosts
) -> LengthUse:
    """Return the lengths of a solver with their mean pass time, and the graphs of its plan."""
    assert solver.limits is not None
    graphs, build_us = _built_us(plan, solver, builds, solver.limits.standard_lengths)
    total_us = computed = padded = 0.0
    for tokens, weight in passes.items():
        chain = solver.length(tokens, slices)
        total_us += weight * chain.time_us
        for kind, own_chain in zip(solver.kinds, chain.chains, strict=True):
            for choice in own_chain.choices:
                own, wasted = _work(choice, tokens)
                computed += weight * kind.count * own
                padded += weight * kind.count * wasted
    mean_us = total_us / (sum(passes.values()) or 1.0)
    return LengthUse(
        solver.limits.standard_lengths, graphs, build_us, mean_us, padded / computed if computed else 0.0
    )


def _built_us(plan: Plan, solver: Solver, builds: BuildCosts, lengths: Collection[int]) -> tuple[int, float]:
    """Return how many graphs of some lengths a plan needs, and how long building them takes."""
    specs = (*solver.specs, *joined_specs(solver.specs))
    held = {
        (entry.group, entry.kind, entry.layers): [spec for spec in specs if entry.holds(spec)]
        for entry in plan.entries
    }
    graphs = {
        (entry.group, entry.kind, entry.layers, entry.placement.npu_rows, 1 if builds.free else length)
        for entry in plan.entries
        for length in entry.placement.npu_lengths
        if length in lengths
    }
    count, total_us = 0, 0.0
    for group, kind, layers, rows, length in graphs:
        own = held[group, kind, layers]
        count += len(own)
        total_us += len(own) * builds.graph_us(own[0], rows, length)
    return count, total_us


def _work(choice: Choice, tokens: int) -> tuple[float, float]:
    """Return the weights times tokens that the NPU computes of a group, and those that are padding."""
    placement = choice.chosen.placement
    run = sum(placement.npu_lengths)
    weights = float(sum(placement.npu_rows) * choice.spec.columns)
    return weights * run, weights * max(0, run - tokens)
