"""Plans from a profile: the solver put to work for one model on one profiled device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from heterollm.base import GIB, OptionError, PlanError, ProfileError
from heterollm.engine import HEAD_ROWS
from heterollm.kernels.ops import Group, OpSpec, Phase, Precision, feed_forward_blocks
from heterollm.model import ModelConfig, shape_of_specs
from heterollm.planning.load_options import CHUNK_LENGTH
from heterollm.solver import SOLVED_LEVELS, Alternative, Placement, Plan, SolvedLevel

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.model import ModelShape
    from heterollm.planning.kept import Solution
    from heterollm.planning.lengths import LengthChoice
    from heterollm.profiler.records import Profile
    from heterollm.solver import Choice, NpuLimits, Objective, Slices, Solver

__all__ = ["PassPlan", "PlanRequest", "Planner", "RequestedLevel", "stored_profile"]

RequestedLevel: TypeAlias = Literal["auto"] | SolvedLevel
"""A level of the solver, or ``auto``: ``block`` where the profile has blocks and the solver takes one at any
length, else ``tensor``."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked to be.

    Args:
        context: Positions of a session.
        gpu_share: Largest part of an operator's time that the GPU may compute.
        energy_weight: 0 counts time alone, 1 energy alone.
        forbidden: ``gpu`` or ``npu``: a part that must not compute linear layers.
        npu_gib: What the NPU's slices may take together; None is no limit.
        histogram: How often prompts of each length come, and decode under length 1; None counts all alike.
        build_budget_s: What building the NPU's graphs may take: the standard lengths are then chosen for the
            histogram. None uses all that the device offers.
        level: What the solver may place as one.
    """

    context: int = 4096
    gpu_share: float = 1.0
    energy_weight: float = 0.0
    forbidden: str | None = None
    npu_gib: float | None = None
    histogram: Mapping[int, float] | None = None
    build_budget_s: float | None = None
    level: RequestedLevel = "auto"


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One solved pass, for people.

    Args:
        phase: Prefill or decode.
        tokens: Tokens of the pass.
        choices: What was chosen for each group or block of a layer, and the head.
        time_us: Predicted time of the layers and the head.
        network_us: Predicted time of one layer's feed-forward network, its activation included.
        other_way: The way through that network that was not taken, as a block or apart, where there are two.
    """

    phase: Phase
    tokens: int
    choices: tuple[Choice, ...]
    time_us: float
    network_us: float = 0.0
    other_way: Alternative | None = None

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens a second."""
        return self.tokens / self.time_us * 1e6


@dataclass
class Planner:
    """Solves one model on one profiled device.

    Args:
        profile: The device's profile.
        config: The model.
        specs: Every group of the model.
        precision: Precision of the linears.
        request: What the plan is asked to be.

    Raises:
        ProfileError: The profile lacks what a plan needs, or what the level that was asked for does.
        OptionError: The request is not legal.
    """

    profile: Profile
    config: ModelConfig
    specs: Sequence[OpSpec]
    precision: Precision
    request: PlanRequest = field(default_factory=PlanRequest)
    _lengths: dict[int, dict[Group, Placement]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def solver(self) -> Solver:
        """The solver with the profile's costs, of passes as long as the plan's."""
        return replace(self._solver, chunk_length=self.plan.chunk_length)

    @cached_property
    def _solver(self) -> Solver:
        """The solver of passes as long as the device allows."""
        if self.length_choice is None or self._of_all_lengths.limits is None:
            return self._of_all_lengths
        limits = replace(self._of_all_lengths.limits, standard_lengths=self.length_choice.chosen.lengths)
        return replace(self._of_all_lengths, limits=limits)

    @cached_property
    def length_choice(self) -> LengthChoice | None:
        """Which standard lengths are worth building; None where all are, or there is nothing to build."""
        from heterollm.planning.lengths import BuildCosts, choose

        budget_s, histogram = self.request.build_budget_s, self.request.histogram
        if budget_s is None or self.limits is None:
            return None
        if histogram is None:
            raise OptionError(
                "Standard lengths are chosen for the prompts that come, and none were named.",
                fix="Name them with --histogram, such as 1:200,64:10,256:3.",
            )
        solver = self._of_all_lengths
        builds = BuildCosts.of(self.profile, free=not solver.budget.copies_by_length)
        labels = {"device": self.profile.device, "precision": self.precision}
        return choose(solver, histogram, builds, budget_s * 1e6, **labels)

    @cached_property
    def _of_all_lengths(self) -> Solver:
        """The solver of all standard lengths that the device offers."""
        from heterollm.solver import Budget, ProfileCosts, Solver

        self._check_level()
        limits = self.limits
        budget = None if self.request.npu_gib is None else int(self.request.npu_gib * GIB)
        longest = CHUNK_LENGTH if limits is None else limits.standard_lengths[-1]
        return Solver(
            tuple(self.specs),
            limits,
            ProfileCosts(self.profile, self._shape),
            self._objective(),
            # On the host one graph serves every length; static graphs hold their own weights each.
            Budget(budget, copies_by_length=self.profile.device != "host"),
            chunk_length=min(self.request.context, longest),
            head_rows=HEAD_ROWS,
            level="tensor" if self.request.level == "tensor" or not self.has_blocks else "block",
        )

    @cached_property
    def limits(self) -> NpuLimits | None:
        """What the NPU can be given; None where the device has none."""
        from heterollm.solver import limits_of

        return limits_of(self.profile)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether the profile has times of the model's feed-forward network as a block."""
        return self._measured(feed_forward_blocks(self.specs)[:1])

    @property
    def slices(self) -> Slices:
        """What the NPU holds."""
        return self._solution.slices

    @property
    def plan(self) -> Plan:
        """The plan of every length."""
        return self._solution.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What the profile lacks, so that the plan may be worse than the device."""
        if self.limits is None or self._measured(self.specs):
            return ()
        said = self._unmeasured("linear layers")
        return (f"{said.message} The GPU computes everything. {said.fix}",)

    @cached_property
    def _solution(self) -> Solution:
        """The plan with its slices, solved once for equal inputs."""
        from heterollm.planning.kept import Solution, kept_solution, solution_path

        request, histogram = self.request, self.request.histogram
        inputs = {
            "specs": tuple(self.specs),
            "shape": self._shape,
            "precision": self.precision,
            "head rows": HEAD_ROWS,
            "chunk length": CHUNK_LENGTH,
            "request": replace(request, histogram=None),
            "histogram": None if histogram is None else sorted(histogram.items()),
        }

        def solve() -> Solution:
            solver, labels = self._solver, {"device": self.profile.device, "precision": self.precision}
            plan, slices = solver.solve(**labels, weights=histogram)
            chunk_length = self._chunk_length(slices)
            if chunk_length != solver.chunk_length:
                plan, slices = replace(solver, chunk_length=chunk_length).solve(**labels, weights=histogram)
            if request.level == "auto" and not plan.has_blocks:
                plan = replace(plan, level="tensor")
            return Solution(plan, slices)

        return kept_solution(solution_path(self.profile, inputs), solve)

    def _chunk_length(self, slices: Slices) -> int:
        """Return how long the passes are that long prompts run in.

        Without a histogram prompts of every standard length, of half as much again, and as long as a session
        count alike: a chunk that only the longest gain by is none.
        """
        from heterollm.solver import ProfileCosts, best_chunk

        solver, request, limits = self._solver, self.request, self.limits
        prompts = {tokens: weight for tokens, weight in (request.histogram or {}).items() if tokens > 1}
        if request.histogram is None and limits is not None:
            lengths = [length for length in limits.standard_lengths if length > 1]
            every = {*lengths, *(3 * length // 2 for length in lengths), request.context}
            prompts = {length: 1.0 for length in every if length <= request.context}
        longest, costs = max(prompts, default=0), solver.costs
        if longest <= solver.chunk_length or not isinstance(costs, ProfileCosts):
            return solver.chunk_length
        return best_chunk(solver, prompts, costs.at, slices)

    @cached_property
    def _shape(self) -> ModelShape:
        return shape_of_specs(self.config, self.specs, "model")

    def _measured(self, specs: Sequence[OpSpec]) -> bool:
        """Whether the NPU's times of any of some groups or blocks are known."""
        limits = self.limits
        # Layers are alike: one spec of each group is enough.
        each = {spec.group: spec for spec in specs}.values()
        return limits is not None and any(limits.runs(spec) for spec in each)

    def _check_level(self) -> None:
        """Refuse a level that was asked for by name and would be another one for want of measurements.

        Raises:
            OptionError: There is no such level.
            ProfileError: The profile lacks what the level is about.
        """
        level = self.request.level
        if level not in ("auto", *SOLVED_LEVELS):
            raise OptionError(
                f"The solver has no level {level!r:.40}.", fix=f"Choose auto, {' or '.join(SOLVED_LEVELS)}."
            )
        if level == "auto" or self.limits is None:
            return
        if not self._measured(self.specs):
            raise self._unmeasured("linear layers")
        if level == "block" and not self.has_blocks:
            raise self._unmeasured("feed-forward blocks")

    def _unmeasured(self, what: str) -> ProfileError:
        formats = " and ".join(dict.fromkeys(str(spec.weight) for spec in self.specs))
        return ProfileError(
            f"The profile of {self.profile.device} has no {what} of its NPU at precision {self.precision} "
            f"({formats} weights).",
            fix=f"Run `heterollm profile --device {self.profile.device} --model MODEL "
            f"--precision {self.precision} --update`, with the same --group-size.",
        )

    def one_pass(self, phase: Phase, tokens: int) -> PassPlan:
        """Return the solution of one exact length, with the slices that the plan holds.

        Raises:
            PlanError: The pass is longer than the plan's chunks.
        """
        from heterollm.solver import network_us

        if not 1 <= tokens <= self.solver.chunk_length:
            raise PlanError(
                f"A pass has 1 to {self.solver.chunk_length} tokens, not {tokens}.",
                fix="Longer prompts run in chunks.",
            )
        chain = self.solver.length(tokens, self.slices)
        head = self.solver.head_choice(1, self.slices)
        time_us = chain.time_us + head.chosen.time_us + self.solver.costs.between_us(head.spec, 1)
        own_us = network_us(chain.choices, tokens, self.solver.costs)
        other_way = self.solver.other_way(chain, tokens)
        return PassPlan(phase, tokens, (*chain.choices, head), time_us, own_us, other_way)

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group in a pass of exactly so many tokens.

        A prompt's length is solved when it first comes, with what the NPU holds; everything else is in the
        plan: standard lengths, and passes that would not fit into slots that are sized for it.

        Raises:
            PlanError: The plan has no entry for the case.
        """
        found = self._exact(length).get(spec.group) if phase == "prefill" else None
        return found or self.plan.placement(phase, length, spec)

    def block_placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement | None:
        """Return who computes a block of groups; None where its groups have placements of their own.

        At every length it agrees with :meth:`placement`.
        """
        exact = self._exact(length) if phase == "prefill" else None
        return exact.get(spec.group) if exact else self.plan.block_placement(phase, length, spec)

    def _exact(self, tokens: int) -> Mapping[Group, Placement]:
        """Return the placements of a prompt of so many tokens; none where the plan's own serve it."""
        if tokens not in self._lengths:
            self._lengths[tokens] = self._solve_exactly(tokens)
        return self._lengths[tokens]

    def _solve_exactly(self, tokens: int) -> dict[Group, Placement]:
        if self.limits is None or tokens in self.limits.standard_lengths:
            return {}
        chain = self.solver.length(tokens, self.slices)
        found = {choice.spec.group: choice.chosen.placement for choice in chain.choices}
        fits = all(sum(placement.npu_lengths) <= self._longest for placement in found.values())
        return found if fits else {}

    @cached_property
    def _longest(self) -> int:
        """The most rows that the slots hold."""
        padded = [sum(entry.placement.npu_lengths) for entry in self.plan.entries if entry.group != "head"]
        return max(self.plan.chunk_length, *padded)

    def length_us(self, spec: OpSpec, lengths: tuple[int, ...]) -> float:
        """Return the predicted time of a whole group on the NPU in graphs of these lengths, one by one."""
        costs, limits = self._solver.costs, self.limits
        if limits is None:
            return math.inf
        return sum(
            min(
                (costs.npu_us(spec, spec.member_rows, length, form) for form in limits.forms(spec, length)),
                default=math.inf,
            )
            for length in lengths
        )

    def missing(self) -> frozenset[str]:
        """Return the operators that the profile has no times of: predictions leave them out."""
        from heterollm.solver import ProfileCosts

        costs = self.solver.costs
        return frozenset(costs.missing) if isinstance(costs, ProfileCosts) else frozenset()

    def _objective(self) -> Objective:
        from heterollm.profiler.records import Part
        from heterollm.solver import Objective, power_of

        forbidden = self.request.forbidden
        if forbidden not in (None, *get_args(Part)):
            raise OptionError(f"There is no part {forbidden!r}.", fix="Choose gpu or npu.")
        return Objective(
            energy_weight=self.request.energy_weight,
            power=power_of(self.profile),
            gpu_share=self.request.gpu_share,
            forbidden=cast("Part | None", forbidden),
        )


def stored_profile(device: Device) -> Profile | None:
    """Return the profile of an opened device; None if it has none.

    Raises:
        ProfileError: The file is damaged.
    """
    from heterollm.profiler.records import Profile, profile_path

    path: Path = profile_path(device.name, device.fingerprint())
    return Profile.load(path) if path.exists() else None
