"""Plans from a profile: the solver put to work for one model on one profiled device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from heterollm.config import ModelConfig
from heterollm.errors import OptionError, PlanError
from heterollm.kernels.ops import Group, OpSpec, Phase, Precision
from heterollm.load_options import CHUNK_LENGTH
from heterollm.model_shape import shape_of_specs
from heterollm.slots import HEAD_ROWS
from heterollm.solver.plan import Placement, Plan
from heterollm.units import GIB

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.profiler.profile import Profile
    from heterollm.solver.objective import Objective
    from heterollm.solver.search import Choice
    from heterollm.solver.slices import Slices
    from heterollm.solver.solve import Solver

__all__ = ["PassPlan", "PlanRequest", "Planner", "stored_profile"]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked to be.

    Args:
        context: Positions of a session.
        gpu_share: Largest part of an operator's time that the GPU may compute.
        energy_weight: 0 counts time alone, 1 energy alone.
        forbidden: ``gpu`` or ``npu``: a part that must not compute linear layers.
        npu_gib: What the NPU's slices may take together; None is no limit.
        histogram: How often prompts of each length come; None counts all lengths alike.
    """

    context: int = 4096
    gpu_share: float = 1.0
    energy_weight: float = 0.0
    forbidden: str | None = None
    npu_gib: float | None = None
    histogram: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One solved pass, for people.

    Args:
        phase: Prefill or decode.
        tokens: Tokens of the pass.
        choices: What was chosen for each group of a layer, and the head.
        time_us: Predicted time of the layers and the head.
    """

    phase: Phase
    tokens: int
    choices: tuple[Choice, ...]
    time_us: float

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
        ProfileError: The profile lacks what a plan needs.
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
        """The solver with the profile's costs."""
        from heterollm.profiler.caches import last_level_cache_bytes
        from heterollm.solver.profile_costs import ProfileCosts, limits_of
        from heterollm.solver.slices import Budget
        from heterollm.solver.solve import Solver

        shape = shape_of_specs(self.config, self.specs, "model")
        limits = limits_of(self.profile)
        budget = None if self.request.npu_gib is None else int(self.request.npu_gib * GIB)
        longest = CHUNK_LENGTH if limits is None else limits.standard_lengths[-1]
        return Solver(
            tuple(self.specs),
            limits,
            ProfileCosts(self.profile, shape, cache_bytes=last_level_cache_bytes()),
            self._objective(),
            # On the host one graph serves every length; static graphs hold their own weights each.
            Budget(budget, copies_by_length=self.profile.device != "host"),
            chunk_length=min(self.request.context, longest),
            head_rows=HEAD_ROWS,
        )

    @cached_property
    def slices(self) -> Slices:
        """What the NPU holds."""
        return self.solver.slices(self.request.histogram)

    @cached_property
    def plan(self) -> Plan:
        """The plan of every length."""
        return self.solver.plan(
            device=self.profile.device, precision=self.precision, weights=self.request.histogram
        )

    def one_pass(self, phase: Phase, tokens: int) -> PassPlan:
        """Return the solution of one exact length, with the slices that the plan holds.

        Raises:
            PlanError: The pass is longer than the plan's chunks.
        """
        if not 1 <= tokens <= self.solver.chunk_length:
            raise PlanError(
                f"A pass has 1 to {self.solver.chunk_length} tokens, not {tokens}.",
                fix="Longer prompts run in chunks.",
            )
        chain = self.solver.length(tokens, self.slices)
        head = self.solver.head_choice(1, self.slices)
        time_us = chain.time_us + head.chosen.time_us + self.solver.costs.between_us(head.spec, 1)
        return PassPlan(phase, tokens, (*chain.choices, head), time_us)

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group in a pass of exactly so many tokens.

        A prompt's length is solved when it first comes, with what the NPU holds; everything else is in the
        plan, and so is what would not fit into slots that are sized for it.

        Raises:
            PlanError: The plan has no entry for the case.
        """
        if phase == "prefill" and spec.group != "head":
            found = self._exact(length)[spec.group]
            if sum(found.npu_lengths) <= self._longest:
                return found
        return self.plan.placement(phase, length, spec)

    def block_placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement | None:
        """Return who computes a block of groups; None where its groups have placements of their own."""
        return self.plan.block_placement(phase, length, spec)

    def _exact(self, tokens: int) -> dict[Group, Placement]:
        if tokens not in self._lengths:
            chain = self.solver.length(tokens, self.slices)
            self._lengths[tokens] = {choice.spec.group: choice.chosen.placement for choice in chain.choices}
        return self._lengths[tokens]

    @cached_property
    def _longest(self) -> int:
        """The most rows that the slots hold."""
        padded = [sum(entry.placement.npu_lengths) for entry in self.plan.entries if entry.group != "head"]
        return max(self.plan.chunk_length, *padded)

    def length_us(self, spec: OpSpec, lengths: tuple[int, ...]) -> float:
        """Return the predicted time of a whole group on the NPU in graphs of these lengths, one by one."""
        costs, limits = self.solver.costs, self.solver.limits
        if limits is None:
            return math.inf
        return sum(
            min(
                (costs.npu_us(spec, spec.member_rows, length, form) for form in limits.forms(spec, length)),
                default=math.inf,
            )
            for length in lengths
        )

    def prompt_us(self, tokens: int) -> float:
        """Return the predicted time of a prompt of any length, in chunks."""
        chunk = self.solver.chunk_length
        whole, rest = divmod(tokens, chunk)
        total = whole * self.one_pass("prefill", chunk).time_us if whole else 0.0
        return total + (self.one_pass("prefill", rest).time_us if rest else 0.0)

    def missing(self) -> frozenset[str]:
        """Return the operators that the profile has no times of: predictions leave them out."""
        from heterollm.solver.profile_costs import ProfileCosts

        costs = self.solver.costs
        return frozenset(costs.missing) if isinstance(costs, ProfileCosts) else frozenset()

    def _objective(self) -> Objective:
        from heterollm.profiler.records import Part
        from heterollm.solver.objective import Objective
        from heterollm.solver.profile_costs import power_of

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
    from heterollm.profiler.profile import Profile, profile_path

    path: Path = profile_path(device.name, device.fingerprint())
    return Profile.load(path) if path.exists() else None
