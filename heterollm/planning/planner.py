"""Plans a model on a profiled device: from profile, model and request to plan and report."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from heterollm.base import GIB, OptionError, ProfileError
from heterollm.engine import HEAD_ROWS
from heterollm.kernels.ops import OpSpec, Phase, Precision, ffn_specs
from heterollm.model import ModelConfig, ModelShape, block_norms, shape_of_specs
from heterollm.planning.load_options import CHUNK_LENGTH
from heterollm.planning.passes import check_pass, llm_npu_plan, request_of_solver
from heterollm.solver import (
    GraphSharing,
    NpuLimits,
    Objective,
    PhaseSync,
    Plan,
    PlanRequest,
    PredictedPass,
    PredictedPrompt,
    ProfileCosts,
    best_strategy,
    graph_sharing,
    limits_of,
    power_of,
    predict_pass,
    predict_prompt,
)

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.planning.lengths import LengthChoice
    from heterollm.profiler.records import Profile
    from heterollm.solver import Solver

__all__ = ["ProfiledModel", "Solved", "solve_plan", "stored_profile"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfiledModel:
    """A model on a profiled device, for solving plans and predicting passes.

    Args:
        profile: The device's profile.
        config: The model.
        specs: Every group of the model.
        precision: Precision of the linears.
        calibration: Identity of its calibration, whose ranges integer graphs need; None without one.
    """

    profile: Profile
    config: ModelConfig
    specs: tuple[OpSpec, ...]
    precision: Precision
    calibration: str | None = None

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model, on which its times depend."""
        return shape_of_specs(self.config, self.specs, "model")

    @cached_property
    def costs(self) -> ProfileCosts:
        """Times of the model's operators, by the profile."""
        return ProfileCosts(self.profile, self.shape)

    @cached_property
    def limits(self) -> NpuLimits | None:
        """Limits of the NPU; None without an NPU."""
        return limits_of(self.profile, calibrated=self.calibration is not None)

    @cached_property
    def has_ffn(self) -> bool:
        """Whether the profile has times of the model's feed-forward network as one operator."""
        return self._measured(ffn_specs(self.specs)[:1])

    @cached_property
    def has_linears(self) -> bool:
        """Whether the profile has times of the model's linear layers on the NPU."""
        return self._measured(self.specs)

    @property
    def copies_by_length(self) -> bool:
        """Whether each length of a resident slice holds weights of its own."""
        return self.profile.copies_by_length

    def npu_bytes(self, plan: Plan) -> int:
        """Return the bytes that the NPU's graphs of a plan take: weights, inputs and outputs."""
        return plan.npu_bytes(
            self.specs,
            copies_by_length=self.copies_by_length,
            activation_bytes=self.profile.graph_activation_bytes,
            reuses_io=self.profile.reuses_io,
        )

    def sharing(self, plan: Plan, prompt: int) -> GraphSharing:
        """Return what the chunks of a prompt share under a plan."""
        return graph_sharing(
            plan,
            self.specs,
            prompt,
            block_norms(self.config),
            copies_by_length=self.copies_by_length,
            activation_bytes=self.profile.graph_activation_bytes,
        )

    @property
    def missing(self) -> frozenset[str]:
        """The operators that the profile has no times of: predictions leave them out."""
        return frozenset(self.costs.missing)

    def predict(
        self, plan: Plan, phase: Phase, tokens: int, *, position: int | None = None, logits: bool = True
    ) -> PredictedPass | None:
        """Return the predicted time of a pass; None where the profile knows nothing of some operator.

        Args:
            plan: The plan.
            phase: Prefill or decode.
            tokens: Tokens of the pass.
            position: Position where it begins; by default that of an empty session, or a typical one of
                decode.
            logits: Whether the head computes one position.

        Raises:
            PlanError: The plan has no entry for the pass.
        """
        costs = self.costs if position is None else self.costs.at(position)
        return predict_pass(plan, self.specs, costs, phase, tokens, limits=self.limits, logits=logits)

    def prompt(self, plan: Plan, prompt: int) -> PredictedPrompt | None:
        """Return the predicted time of a prompt, chunk by chunk or with chunks in flight; None as above."""
        chunks = list(plan.chunks(prompt))
        if plan.schedule is None or len(chunks) == 1:
            passes = [self.predict(plan, "prefill", tokens, position=first) for first, tokens in chunks]
            found = [one for one in passes if one is not None]
            if len(found) < len(passes):
                return None
            layers = self.config.layers
            idle_us = (one.time_us - one.npu_us(layers) for one in found)
            return PredictedPrompt(sum(one.time_us for one in found), sum(idle_us))
        first, tokens = chunks[-1]
        last, body = (
            self.predict(plan, "prefill", tokens, position=first, logits=logits) for logits in (True, False)
        )
        if last is None or body is None:
            return None
        lengths = [length for _, length in chunks]
        flown = predict_prompt(plan.schedule, lengths, self.config.layers)
        head_us, head_npu_us = last.time_us - body.time_us, last.npu_us(0)
        return PredictedPrompt(flown.time_us + head_us, flown.npu_idle_us + head_us - head_npu_us)

    def npu_us(self, spec: OpSpec, lengths: tuple[int, ...]) -> float:
        """Return the predicted time of a whole group on the NPU in graphs of these lengths, one by one."""
        if self.limits is None:
            return math.inf
        costs, forms = self.costs, self.limits.forms
        return sum(
            min(
                (costs.npu_us(spec, spec.member_rows, length, form) for form in forms(spec, length)),
                default=math.inf,
            )
            for length in lengths
        )

    def unmeasured(self, what: str) -> ProfileError:
        """Return the error of a profile that lacks something at the model's precision."""
        formats = " and ".join(dict.fromkeys(str(spec.weight) for spec in self.specs))
        return ProfileError(
            f"The profile of {self.profile.device} has no {what} of its NPU at precision {self.precision} "
            f"({formats} weights).",
            fix=f"Run `heterollm profile MODEL --device {self.profile.device} "
            f"--precision {self.precision} --update`, with the same --group-size.",
        )

    def _measured(self, specs: Sequence[OpSpec]) -> bool:
        limits = self.limits
        # Layers are alike: one spec of each group is enough.
        each = {spec.group: spec for spec in specs}.values()
        return limits is not None and any(limits.runs(spec) for spec in each)


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan with the model and the notes of its solution.

    Args:
        model: The model on the profiled device.
        plan: The plan.
        notes: Measurements that the profile lacks, without which the plan may be slower than possible.
        length_choice: The standard lengths that are worth building; None without a build budget.
    """

    model: ProfiledModel
    plan: Plan
    notes: tuple[str, ...] = ()
    length_choice: LengthChoice | None = None


def solve_plan(model: ProfiledModel, request: PlanRequest) -> Solved:
    """Return the plan of a model by a profile; it is solved once for equal inputs, and kept.

    Args:
        model: The model on the profiled device.
        request: Options of the plan.

    Raises:
        ProfileError: The profile lacks measurements that a plan, or the requested level, needs.
        OptionError: The request is not legal.
        PlanError: No processor can compute a group.
    """
    from heterollm.planning.kept import kept_plan, plan_path

    check_pass(request, model.precision, request.level, calibrated=model.calibration is not None)
    _check_level(model, request)
    notes: tuple[str, ...] = ()
    if model.limits is not None and not model.has_linears:
        error = model.unmeasured("linear layers")
        notes = (f"{error.message} The GPU computes everything. {error.fix}",)
    every = solver_of(model, request)
    choice = _length_choice(model, request, every)
    solver = every
    if choice is not None and every.limits is not None:
        limits = replace(every.limits, standard_lengths=choice.chosen.lengths)
        solver = replace(every, limits=limits)
    histogram = request.histogram
    inputs = {
        "specs": model.specs,
        "shape": model.shape,
        "precision": model.precision,
        "calibration": model.calibration,
        "head rows": HEAD_ROWS,
        "chunk length": CHUNK_LENGTH,
        "request": structs.replace(request, histogram=None),
        "histogram": None if histogram is None else sorted(histogram.items()),
    }
    plan = kept_plan(plan_path(model.profile, inputs), lambda: _solve(model, request, solver))
    return Solved(model, plan, notes, choice)


def solver_of(model: ProfiledModel, request: PlanRequest) -> Solver:
    """Return the solver of a model: all standard lengths, passes as long as the device allows.

    Raises:
        OptionError: The request is not legal.
    """
    from heterollm.solver import Budget, Solver

    longest = CHUNK_LENGTH if model.limits is None else model.limits.standard_lengths[-1]
    return Solver(
        model.specs,
        model.limits,
        model.costs,
        Objective(
            energy_weight=request.energy_weight,
            power=power_of(model.profile),
            gpu_share=request.gpu_share,
            forbidden=request.forbidden,
        ),
        Budget(
            model.profile.addressable_bytes if request.npu_gib is None else int(request.npu_gib * GIB),
            copies_by_length=model.copies_by_length,
            activation_bytes=model.profile.graph_activation_bytes,
            reuses_io=model.profile.reuses_io,
        ),
        chunk_length=min(request.context, longest),
        head_rows=HEAD_ROWS,
        level="tensor" if request.level == "tensor" or not model.has_ffn else "block",
    )


def _solve(model: ProfiledModel, request: PlanRequest, solver: Solver) -> Plan:
    best = best_strategy(model.profile)
    if request.passes and request.level == "auto" and model.limits is not None:
        plan = llm_npu_plan(model, request, _prompts(model, request))
    else:
        plan = _solved(model, request_of_solver(request), solver)
    return structs.replace(
        plan,
        level="tensor"
        if request.level == "auto" and plan.level == "block" and not plan.has_ffn
        else plan.level,
        sync=PhaseSync(best, best) if best is not None and plan.uses_npu else PhaseSync(),
        request=request,
        calibration=model.calibration,
    )


def _solved(model: ProfiledModel, request: PlanRequest, solver: Solver) -> Plan:
    """Return the solver's plan."""
    from heterollm.solver import plan_chunks, plan_flights

    labels, weights = {"device": model.profile.device, "precision": model.precision}, request.histogram
    plan, slices = solver.solve(**labels, weights=weights)
    prompts = _prompts(model, request)
    if max(prompts, default=0) > solver.chunk_length:
        plan, slices = plan_chunks(solver, plan, slices, prompts, model.costs.at, weights)
    if request.in_flight != 1 and plan.uses_npu:
        plan = plan_flights(solver, plan, slices, request.in_flight, prompts, model.costs.at, weights)
    return plan


def _length_choice(model: ProfiledModel, request: PlanRequest, solver: Solver) -> LengthChoice | None:
    """Return the standard lengths that are worth building; None without a build budget or an NPU."""
    from heterollm.planning.lengths import BuildCosts, choose

    budget_s, histogram = request.build_budget_s, request.histogram
    if budget_s is None or model.limits is None:
        return None
    if histogram is None:
        raise OptionError(
            "Standard lengths are chosen for the prompts that come, and none were named.",
            fix="Name them with --histogram, such as 1:200,64:10,256:3.",
        )
    builds = BuildCosts.of(model.profile, free=not model.profile.graphs_by_length)
    labels = {"device": model.profile.device, "precision": model.precision}
    return choose(solver, histogram, builds, budget_s * 1e6, **labels)


def _prompts(model: ProfiledModel, request: PlanRequest) -> dict[int, float]:
    """Return the weights of the prompts that the chunk length is chosen for.

    Without a histogram prompts of every standard length, of 1.5 times that, and as long as a session count
    alike, so that a gain of the longest prompts alone does not decide.
    """
    if request.histogram is not None:
        return {tokens: weight for tokens, weight in request.histogram.items() if tokens > 1}
    if model.limits is None:
        return {}
    lengths = [length for length in model.limits.standard_lengths if length > 1]
    every = {*lengths, *(3 * length // 2 for length in lengths), request.context}
    return {length: 1.0 for length in sorted(every) if length <= request.context}


def _check_level(model: ProfiledModel, request: PlanRequest) -> None:
    """Refuse a level requested by name that lacks measurements and would give the plan of another level.

    Raises:
        ProfileError: The profile lacks measurements that the level needs.
    """
    if request.level == "auto" or model.limits is None:
        return
    if not model.has_linears:
        raise model.unmeasured("linear layers")
    if request.level == "block" and not model.has_ffn:
        raise model.unmeasured("feed-forward networks")


def stored_profile(device: Device) -> Profile | None:
    """Return the profile of an opened device; None if it has none, or none that can plan yet.

    A first profile that was stopped, or that another process is still measuring, holds too few linear layers
    to predict others from at first. From then on it counts, whatever its last run did.

    Raises:
        ProfileError: The file is damaged.
    """
    from heterollm.profiler.predict import fitted_predictor
    from heterollm.profiler.records import Profile, profile_path

    path: Path = profile_path(device.name, device.fingerprint())
    if not path.exists():
        return None
    profile = Profile.load(path)
    if not any(run["finished"] for run in profile.runs.values()):
        try:
            fitted_predictor(profile)
        except ProfileError as error:
            logger.warning("The profile is unfinished, and plans cannot use it yet: %s", error)
            return None
    return profile
