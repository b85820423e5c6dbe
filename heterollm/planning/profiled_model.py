"""A model on a profiled device: its costs, and the times that the profile predicts for plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import structs

from heterollm.base import ProfileError
from heterollm.kernels.devices import shares_cores
from heterollm.kernels.npu import fits_domains
from heterollm.kernels.ops import Group, OpSpec, Phase, Precision, ffn_specs, joined_specs
from heterollm.model import (
    ModelConfig,
    ModelShape,
    expert_specs,
    fusion_obstacle,
    shape_of_specs,
)
from heterollm.profiler.records import Profile
from heterollm.solver import (
    Budget,
    ExpertPrices,
    GraphSharing,
    NpuLimits,
    Plan,
    PredictedPass,
    PredictedPrompt,
    ProfileAttentionCosts,
    ProfileCosts,
    ShadowChannels,
    graph_sharing,
    group_shadows,
    kind_counts,
    limits_of,
    predict_pass,
    predict_prompt,
    with_technique_times,
)


@dataclass(frozen=True)
class ProfiledModel:
    """A model on a profiled device, for solving plans and predicting passes.

    Args:
        profile: The device's profile.
        config: The model.
        specs: Every group of the model but the experts of a mixture.
        precision: Precision of the linears.
        calibration: Identity of its calibration, whose ranges integer graphs need; None without one.
        shadows: Operators that get a shadow of outliers wherever the NPU computes them in integers.
    """

    profile: Profile
    config: ModelConfig
    specs: tuple[OpSpec, ...]
    precision: Precision
    calibration: str | None = None
    shadows: Mapping[tuple[int, Group], ShadowChannels] = field(default_factory=dict)

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model, on which its times depend."""
        return shape_of_specs(self.config, self.specs, "model")

    @cached_property
    def costs(self) -> ProfileCosts:
        """Times of the model's operators, by the profile."""
        shadows = group_shadows(self.shadows, self.specs)
        return ProfileCosts(self.profile, self.shape, shadows=shadows)

    @cached_property
    def attention_costs(self) -> ProfileAttentionCosts:
        """Times of dense and of sparse attention, by the profile."""
        return ProfileAttentionCosts(self.profile, self.costs)

    @cached_property
    def experts(self) -> tuple[OpSpec, ...]:
        """The experts of each layer of a mixture."""
        return expert_specs(self.config, self.specs)

    @property
    def threads(self) -> tuple[int, int] | None:
        """Threads of GPU and NPU where both are cores of one CPU; else None."""
        described = self.profile.description
        if not shares_cores(self.profile.device):
            return None
        return int(described["gpu_threads"]), int(described["npu_threads"])

    @property
    def every_spec(self) -> tuple[OpSpec, ...]:
        """Every group of the model, and the experts of a mixture."""
        return (*self.specs, *self.experts)

    def expert_prices(self, tokens: int) -> ExpertPrices | None:
        """Return times and sizes of a layer's experts in passes of a length; None where none are measured."""
        return self.costs.expert_prices(tokens, self.profile.graph_memory)

    @cached_property
    def limits(self) -> NpuLimits | None:
        """Limits of the NPU; None without an NPU."""
        calibrated, activation = self.calibration is not None, self.config.activation
        return limits_of(self.profile, calibrated=calibrated, activation=activation)

    @cached_property
    def has_ffn(self) -> bool:
        """Whether the profile has times of the model's feed-forward network as one operator."""
        return self._measured(ffn_specs(self.specs))

    @cached_property
    def has_fused(self) -> bool:
        """Whether the profile has times of the network as one operator, and o can be fused with it."""
        return self._measured([spec for spec in joined_specs(self.specs) if spec.group == "o_ffn"])

    @cached_property
    def unfused(self) -> str:
        """The reason, in words, why no layer's groups are fused; empty where some may be."""
        if self.has_fused:
            return ""
        found = (fusion_obstacle(self.config, layer) for layer in range(self.config.layers))
        return next(filter(None, found), "fused graphs have weights in blocks and no 8-bit activations")

    @cached_property
    def has_linears(self) -> bool:
        """Whether the profile has times of the model's linear layers on the NPU."""
        return self._measured(self.specs)

    @cached_property
    def groups_without_npu_times(self) -> frozenset[Group]:
        """Groups of a layer whose weights the profile has not measured on the NPU, in any number of rows."""
        limits = self.limits
        layer = [spec for spec in self.specs if spec.group != "head"]
        if limits is None:
            return frozenset()
        return frozenset(spec.group for spec in layer if not limits.runs(spec))

    def npu_bytes(self, plan: Plan) -> int:
        """Return the bytes that the NPU's graphs of a plan take: weights, inputs and outputs."""
        return sum(self.context_sizes(plan))

    def context_sizes(self, plan: Plan) -> list[int]:
        """Return the bytes of the contexts of the NPU's graphs of a plan."""
        return plan.context_sizes(self.every_spec, self.profile.graph_memory)

    def fits(self, plan: Plan, budget: Budget) -> bool:
        """Return whether the NPU's process domains hold the contexts of a plan within a budget."""
        limit = budget.npu_bytes
        if limit is None:
            return True
        return fits_domains(self.context_sizes(plan), limit, self.profile.domain_bytes or max(1, limit))

    def sharing(self, plan: Plan, prompt: int) -> GraphSharing:
        """Return what the chunks of a prompt share under a plan."""
        return graph_sharing(plan, self.specs, prompt, self.profile.graph_memory)

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
            logits: Whether the head computes positions: the last one of prefill, all of decode.

        Raises:
            PlanError: The plan has no entry for the pass.
        """
        costs = self.costs if position is None else self.costs.at(position)
        found = predict_pass(plan, self.specs, costs, phase, tokens, limits=self.limits, logits=logits)
        if found is None or phase == "decode":
            return found
        return with_technique_times(found, plan, self, (position or 0) + tokens)

    def prompt(self, plan: Plan, prompt: int, *, position: int = 0) -> PredictedPrompt | None:
        """Return the predicted time of a prompt, chunk by chunk or with chunks in flight; None as above.

        Args:
            plan: The plan.
            prompt: Tokens of the prompt.
            position: Tokens before it.
        """
        chunks = [(position + first, tokens) for first, tokens in plan.chunks(prompt)]
        if plan.schedule is None or len(chunks) == 1:
            passes = [
                self.predict(plan, "prefill", tokens, position=first, logits=(first, tokens) == chunks[-1])
                for first, tokens in chunks
            ]
            found = [one for one in passes if one is not None]
            if len(found) < len(passes):
                return None
            idle_us = (one.time_us - one.npu_us for one in found)
            return PredictedPrompt(sum(one.time_us for one in found), sum(idle_us))
        first, tokens = chunks[-1]
        last, body = (
            self.predict(plan, "prefill", tokens, position=first, logits=logits) for logits in (True, False)
        )
        if last is None or body is None:
            return None
        lengths = [length for _, length in chunks]
        more_us = sum(self._technique_us(plan, tokens, first) for first, tokens in chunks)
        flown = predict_prompt(plan.schedule, lengths, kind_counts(self.specs), position=position)
        head_us, head_npu_us = last.time_us - body.time_us, last.head.option.npu_us if last.head else 0.0
        time_us = flown.time_us + head_us + more_us
        return PredictedPrompt(time_us, max(0.0, flown.npu_idle_us + head_us - head_npu_us + more_us))

    def _technique_us(self, plan: Plan, tokens: int, position: int) -> float:
        """Return the time that techniques add to a chunk, as if nothing of it ran beside other chunks."""
        if not any(record.is_active for record in plan.techniques):
            return 0.0
        plain = structs.replace(plan, techniques=())
        found = [self.predict(one, "prefill", tokens, position=position) for one in (plan, plain)]
        added, before = (0.0 if one is None else one.time_us for one in found)
        return added - before

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
        # Layers of a kind are alike: one spec of each place is enough.
        each = {spec.place: spec for spec in specs}.values()
        return limits is not None and any(limits.runs(spec) for spec in each)
