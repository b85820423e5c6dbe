"""Predicted times of passes with what techniques change in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, cast

import numpy as np

from heterollm.kernels.ops import OpSpec
from heterollm.solver.experts.placements import EXPERTS_ON_GPU, ExpertsPlacement, PlannedExperts
from heterollm.solver.experts.prices import ExpertPrices, ExpertsEstimate, estimate_experts
from heterollm.solver.plan import Plan
from heterollm.solver.predict import PredictedPass
from heterollm.solver.sparse.attention import PlannedAttention
from heterollm.solver.sparse.attention_times import AttentionCosts, with_attention_time
from heterollm.solver.techniques.record import TechniqueRecord


class TechniqueCosts(Protocol):
    """A model on a profiled device, as techniques ask for its times."""

    @property
    def experts(self) -> Sequence[OpSpec]:
        """The experts of each layer that has some."""
        ...

    @property
    def attention_costs(self) -> AttentionCosts:
        """Times of attention."""
        ...

    def expert_prices(self, tokens: int) -> ExpertPrices | None:
        """Return the prices of experts in passes of a length; None if the profile has no graphs of them."""
        ...


def with_technique_times(found: PredictedPass, plan: Plan, model: TechniqueCosts, keys: int) -> PredictedPass:
    """Return a predicted pass of prefill, so far without techniques, with those of a plan.

    Args:
        found: The pass.
        plan: The plan.
        model: Times of the model.
        keys: Tokens of the session after the pass.
    """
    for kind, add in TIMES.items():
        record = plan.technique(kind)
        if record.is_active:
            found = add(found, record, model, keys)
    return found


def with_experts_time(
    found: PredictedPass,
    planned: PlannedExperts,
    prices: ExpertPrices | None,
    experts: Sequence[OpSpec],
) -> PredictedPass:
    """Return a predicted pass of prefill, in which the GPU computes all experts, with the planned ones.

    Entries have the times of their shortest and longest pass, with calibrated loads; those between lie on a
    line. In an entry without them all experts have equal loads.

    Args:
        found: The pass.
        planned: Its experts.
        prices: Prices of passes of its length; None if the profile has no graphs of experts.
        experts: The experts of each layer that has some.
    """
    if prices is None or not experts:
        return found
    routing = experts[0].experts
    assert routing is not None  # of a spec of experts
    touched = round(routing.touched(found.tokens))
    each, more = divmod(found.tokens * routing.chosen, touched)
    loads = np.zeros((1, routing.experts), np.int64)
    loads[:, :touched] = each
    loads[:, :more] += 1

    def even(placement: ExpertsPlacement) -> ExpertsEstimate:
        return estimate_experts(placement, loads, prices)

    on_gpu_us = even(EXPERTS_ON_GPU).time_us
    more_us = npu_us = 0.0
    for spec in experts:
        entry = next((one for one in planned.entries if one.serves(found.tokens, spec.layer)), None)
        if entry is None or not entry.placement.groups:
            continue
        own, ends_us = even(entry.placement), (entry.shortest_us, entry.placement.predicted_us)
        time_us = own.time_us
        if None not in ends_us:
            time_us = float(np.interp(found.tokens, entry.lengths, cast("tuple[float, float]", ends_us)))
        more_us += time_us - on_gpu_us
        npu_us += own.npu_us - prices.hand_over_us
    return replace(
        found,
        time_us=found.time_us + more_us,
        experts_us=found.experts_us + more_us / len(experts),
        experts_npu_us=npu_us,
    )


TIMES: Final[
    Mapping[type[TechniqueRecord], Callable[[PredictedPass, Any, TechniqueCosts, int], PredictedPass]]
] = {
    PlannedExperts: lambda found, planned, model, _: with_experts_time(
        found, planned, model.expert_prices(found.tokens), model.experts
    ),
    PlannedAttention: lambda found, planned, model, keys: with_attention_time(
        found, planned, model.attention_costs, keys
    ),
}
