"""Predicted times of passes under a plan, for ``plan --explain``, benchmarks and simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from heterollm.kernels.ops import PARTS, OpSpec, Phase
from heterollm.model import kinds_of_specs
from heterollm.solver.candidates import NpuLimits
from heterollm.solver.costs import Costs
from heterollm.solver.ffn import entry_group
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option, evaluate
from heterollm.solver.placements import Placement
from heterollm.solver.plan import Plan
from heterollm.solver.submissions import LayerGroup, kernels_before_us, layer_us, submits_singly


@dataclass(frozen=True, slots=True)
class PredictedOperator:
    """The predicted time of one operator of a layer, or of the head.

    Args:
        spec: The operator.
        tokens: Tokens that it computes.
        option: The placement with the predicted times of both processors.
        between_us: Time of the glue operators before it.
    """

    spec: OpSpec
    tokens: int
    option: Option
    between_us: float

    @property
    def npu_fraction(self) -> float:
        """The fraction of the work, 0 to 1, that the NPU computes, padding left out."""
        placement = self.option.placement
        covered = min(self.tokens, sum(placement.npu_lengths))
        return sum(placement.npu_rows) / self.spec.rows * covered / self.tokens


@dataclass(frozen=True, slots=True)
class PredictedKind:
    """The predicted time of the layers of a kind.

    Args:
        name: Name of the kind; empty if all layers of the model are alike.
        layers: Number of the layers.
        operators: Operators of one of them in order.
        layer_us: Time of one of them in the middle of the pass.
        mixture_us: The part of that which is the mixture of experts, all of it on the GPU; 0 without.
    """

    name: str
    layers: int
    operators: tuple[PredictedOperator, ...]
    layer_us: float
    mixture_us: float = 0.0

    @property
    def ffn_us(self) -> float:
        """Time of one layer's feed-forward network, of o before it, too, if a fused group is compared."""
        compared = {
            item.spec.group
            for item in self.operators
            if any(other.of_ffn for other in item.option.placement.rejected)
        }
        parts = PARTS["o_ffn" if compared & {"o", "o_ffn"} else "ffn"]
        own = [item for item in self.operators if item.spec.group in ("o_ffn", "ffn", *parts)]
        return sum(item.option.time_us for item in own) + sum(item.between_us for item in own[1:])


@dataclass(frozen=True, slots=True)
class PredictedPass:
    """The predicted time of a pass.

    Args:
        phase: Prefill or decode.
        tokens: Tokens of the pass.
        kinds: The kinds of layers.
        head: The head; None where the pass computes no logits.
        time_us: Time of the layers and the head.
        scores_us: Time of the NPU in attention of all layers: its estimates of scores, or its attention.
        experts_us: Mean time of a mixture of experts, over the layers that have one; 0 without.
        experts_npu_us: Time of the NPU's graphs of experts in all layers.
    """

    phase: Phase
    tokens: int
    kinds: tuple[PredictedKind, ...]
    head: PredictedOperator | None
    time_us: float
    scores_us: float = 0.0
    experts_us: float = 0.0
    experts_npu_us: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens a second."""
        return self.tokens / self.time_us * 1e6

    @property
    def operators(self) -> tuple[PredictedOperator, ...]:
        """The operators of one layer of each kind, and the head."""
        heads = () if self.head is None else (self.head,)
        return (*(item for kind in self.kinds for item in kind.operators), *heads)

    @property
    def npu_us(self) -> float:
        """Time during which the NPU computes."""
        own = [item.option.npu_us * kind.layers for kind in self.kinds for item in kind.operators]
        head_us = 0.0 if self.head is None else self.head.option.npu_us
        return self.scores_us + self.experts_npu_us + sum([*own, head_us])


def predict_pass(
    plan: Plan,
    specs: Sequence[OpSpec],
    costs: Costs,
    phase: Phase,
    tokens: int,
    *,
    limits: NpuLimits | None = None,
    logits: bool = True,
) -> PredictedPass | None:
    """Return the predicted time of a pass; None where the costs lack an operator.

    Args:
        plan: The plan.
        specs: Every group of the model.
        costs: Times of both processors, at the position where the pass begins.
        phase: Prefill or decode.
        tokens: Tokens of the pass.
        limits: Limits of the NPU: where the plan leaves the form to the backend, the fastest form counts.
        logits: Whether the head computes positions.

    Raises:
        PlanError: The plan has no entry for the pass.
    """
    # Decode computes the logits of every token, prefill those of the last one.
    positions = tokens if phase == "decode" else 1

    def operators(own: Sequence[OpSpec], rows: int) -> list[PredictedOperator] | None:
        found = []
        for spec, placement in plan.operators(phase, tokens, own, rows=positions):
            option = evaluate(spec, rows, _with_form(placement, spec, costs, limits), costs)
            if option is None:
                return None
            found.append(PredictedOperator(spec, rows, option, costs.between_us(entry_group(spec), rows)))
        return found

    kinds = []
    for kind in kinds_of_specs(specs):
        body = operators(kind.specs, tokens)
        if body is None:
            return None
        if submits_singly(tokens, costs.overheads):
            body = _as_submitted(body, costs)
        decisions = [(item.spec, item.option.placement) for item in body]
        layer_us = layer_time_us(decisions, tokens, costs, kind.name)
        mixture_us = sum(costs.mixture_us(tokens, kind.name))
        kinds.append(PredictedKind(kind.name, kind.count, tuple(body), layer_us, mixture_us))
    heads = operators([spec for spec in specs if logits and spec.group == "head"], positions)
    if heads is None:
        return None
    time_us = sum(kind.layers * kind.layer_us for kind in kinds)
    time_us += sum(item.between_us + item.option.time_us for item in heads)
    mixed = [kind for kind in kinds if kind.mixture_us]
    experts_us = sum(kind.mixture_us for kind in mixed)
    if len(mixed) > 1:
        experts_us = sum(kind.layers * kind.mixture_us for kind in mixed) / sum(kind.layers for kind in mixed)
    return PredictedPass(phase, tokens, tuple(kinds), next(iter(heads), None), time_us, experts_us=experts_us)


def _as_submitted(body: Sequence[PredictedOperator], costs: Costs) -> list[PredictedOperator]:
    """Return the operators of a layer without the time of those that linear layers compute."""
    groups = [LayerGroup.of(item.spec, (), costs) for item in body]
    launched = kernels_before_us(groups, [item.option.placement for item in body], costs.overheads)
    gone_us = [sum(group.before_us) - sum(own) for group, own in zip(groups, launched, strict=True)]
    pairs = zip(body, gone_us, strict=True)
    return [replace(item, between_us=item.between_us - own_us) for item, own_us in pairs]


def layer_cost(
    decisions: Iterable[tuple[OpSpec, Placement]], tokens: int, costs: Costs, objective: Objective
) -> float:
    """Return the cost of one layer; ``math.inf`` where a processor cannot run its shard.

    Args:
        decisions: The layer's operators in order with their placements.
        tokens: Tokens of the pass.
        costs: Times of both processors.
        objective: The objective.
    """
    total = 0.0
    for spec, placement in decisions:
        option = evaluate(spec, tokens, placement, costs, objective)
        between_us = costs.between_us(entry_group(spec), tokens)
        own = math.inf if option is None else option.cost
        total += own + objective.cost(between_us, between_us, 0.0)
    return total


def layer_time_us(
    decisions: Iterable[tuple[OpSpec, Placement]], tokens: int, costs: Costs, kind: str = ""
) -> float:
    """Return the predicted time of one layer in the middle of a pass; ``math.inf`` where one cannot run it.

    Args:
        decisions: The layer's operators in order with their placements.
        tokens: Tokens of the pass.
        costs: Times of both processors.
        kind: Name of the kind of layer.
    """
    specs, chosen, time_us, mixture_us = [], [], 0.0, costs.mixture_us(tokens, kind)
    for spec, placement in decisions:
        option = evaluate(spec, tokens, placement, costs)
        if option is None:
            return math.inf
        between_us = costs.between_us(entry_group(spec), tokens)
        specs.append(spec)
        chosen.append(option)
        time_us += between_us + option.time_us
    if submits_singly(tokens, costs.overheads):
        groups = [LayerGroup.of(spec, (), costs) for spec in specs]
        return layer_us(groups, chosen, costs.overheads, mixture_us)
    return time_us + sum(mixture_us)


def _with_form(placement: Placement, spec: OpSpec, costs: Costs, limits: NpuLimits | None) -> Placement:
    """Return a placement with the form that is predicted to be fastest, if it names none."""
    if limits is None or placement.form is not None or not placement.npu_lengths:
        return placement
    forms = set.intersection(*(set(limits.forms(spec, length)) for length in placement.npu_lengths))

    def npu_us(form: str) -> float:
        return sum(costs.npu_us(spec, placement.npu_rows, length, form) for length in placement.npu_lengths)

    return structs.replace(placement, form=min(sorted(forms), key=npu_us, default=None))
