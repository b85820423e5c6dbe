"""Techniques of papers over a plan. llm.npu: graphs of chunks, shadow outliers, chunks out of order.

At level ``auto`` its plan is the paper's: every linear layer of a prompt on the NPU in graphs of one chunk
length, decode and the head on the GPU. At level ``tensor`` HeteroLLM's splits come on top: the solver decides
for each operator how many rows the NPU computes in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import structs

from heterollm.base import OptionError
from heterollm.kernels.npu import TILE_OF_INTEGERS
from heterollm.solver import (
    AUTOMATIC,
    BEST_TECHNIQUES,
    LEVELS,
    LLM_NPU,
    NPU_ATTENTION,
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    WORTH_DOUBLING,
    InFlight,
    Plan,
    PlanRequest,
    level_plan,
    relative_time,
    with_schedule,
)

if TYPE_CHECKING:
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.solver import Budget

AS_FAST: Final = 1e-3
"""Fraction by which longer chunks must be faster: their graphs take more memory."""


def check_technique(
    request: PlanRequest, precision: str, level: str, *, calibrated: bool, routed: bool = False
) -> None:
    """Refuse a technique that the weights or the level cannot have.

    Args:
        request: The request with its techniques.
        precision: Precision of the weights.
        level: Level of the plan.
        calibrated: Whether ranges of the activations are known.
        routed: Whether loads of experts are known.

    Raises:
        OptionError: The technique needs another precision, a calibration, another level, or a simulation.
    """
    if BEST_TECHNIQUES in request.techniques and level not in ("auto", *SOLVED_LEVELS):
        raise OptionError(
            f"The technique {BEST_TECHNIQUES} chooses among plans that are solved, and plan {level!r:.80} is "
            "given.",
            fix=f"Choose plan auto, {', '.join(SOLVED_LEVELS)}, or name a technique.",
        )
    calibrate = "Run `heterollm calibrate MODEL --precision w8a8 -o FILE`, and give --precision w8a8 "
    calibrate += "--calibration FILE."
    if SHADOW_ATTENTION in request.techniques:
        if not calibrated:
            raise OptionError(
                f"The technique {SHADOW_ATTENTION} needs calibrated attention heads.",
                fix="Run `heterollm calibrate MODEL -o FILE`, and give --scales stepped --calibration FILE.",
            )
        if level not in ("auto", *LEVELS, *SOLVED_LEVELS):
            raise OptionError(
                f"The technique {SHADOW_ATTENTION} adds attention to a plan that is made, and plan "
                f"{level!r:.80} is given.",
                fix="Leave the technique out, or choose a level.",
            )
    if NPU_EXPERTS in request.techniques:
        if not routed:
            raise OptionError(
                f"The technique {NPU_EXPERTS} needs calibrated loads of experts.",
                fix="Run `heterollm calibrate MODEL -o FILE`, and give --calibration FILE.",
            )
        if level not in ("auto", "npu", "layer", *SOLVED_LEVELS):
            raise OptionError(
                f"The technique {NPU_EXPERTS} adds experts to a plan that is made and uses the NPU, and plan "
                f"{level!r:.80} is given.",
                fix="Leave the technique out, or choose another level.",
            )
    if NPU_ATTENTION in request.techniques and level not in ("auto", "npu", "layer", *SOLVED_LEVELS):
        raise OptionError(
            f"The technique {NPU_ATTENTION} adds attention to a plan that is made and uses the NPU, and plan "
            f"{level!r:.80} is given.",
            fix="Leave the technique out, or choose another level.",
        )
    if LLM_NPU in request.techniques:
        if precision != "w8a8":
            raise OptionError(
                f"The technique {LLM_NPU} needs weights of precision w8a8, and these have {precision}.",
                fix=calibrate,
            )
        if not calibrated:
            raise OptionError(
                f"The technique {LLM_NPU} needs calibrated ranges of the activations.", fix=calibrate
            )
        if level not in ("auto", "tensor"):
            raise OptionError(
                f"The technique {LLM_NPU} makes the plan, and plan {level!r:.80} is given.",
                fix="Choose plan auto, which is the paper's, or tensor.",
            )


def request_of_solver(request: PlanRequest) -> PlanRequest:
    """Return a request with what its techniques ask of the solver."""
    if NPU_ATTENTION in request.techniques:
        return structs.replace(request, in_flight=1)
    return structs.replace(request, in_flight="auto") if LLM_NPU in request.techniques else request


def llm_npu_plan(
    model: ProfiledModel, request: PlanRequest, prompts: Mapping[int, float], budget: Budget
) -> Plan:
    """Return the plan of llm.npu, with the chunk length that is predicted to run prompts fastest.

    The paper chooses its 256 tokens so, for each NPU (section 3.2, Figure 8): longer chunks pad more of a
    prompt's last one, and shorter ones read the weights more often.

    Args:
        model: The model on the profiled device.
        request: The request with its technique, and the chunks in flight that it asks of the solver.
        prompts: Weights of prompts by length, for which chunk length and chunks in flight are chosen.
        budget: Memory of the NPU's graphs, which longer chunks may exceed.
    """
    assert model.limits is not None
    tile = TILE_OF_INTEGERS["static_int8"]
    lengths = [length for length in model.limits.standard_lengths if length % tile == 0]
    plans = [
        level_plan(
            "layer",
            model.specs,
            device=model.profile.device,
            precision=model.precision,
            standard_lengths=(length,),
            chunk_length=min(length, request.context),
        )
        for length in lengths
        if length <= request.context or length == lengths[0]
    ]
    plans = [plan for plan in plans if model.fits(plan, budget)] or plans
    losses = list(map(_loss_beside(model, plans[0], prompts), plans))
    as_fast = (one for one, loss in zip(plans, losses, strict=True) if loss <= min(losses) * (1.0 + AS_FAST))
    plan = next(as_fast, plans[0])
    if request.in_flight != 1 and not model.costs.overheads.empties_queue:
        plan = fastest_in_flight(model, plan, plans, prompts, request.in_flight)
    return plan


def faster_plan(model: ProfiledModel, plan: Plan, other: Plan, prompts: Mapping[int, float]) -> Plan:
    """Return the other plan if it is predicted to run prompts faster, relative to the first one's times.

    Args:
        model: The profiled model.
        plan: The plan to compare with.
        other: The other plan.
        prompts: Weights of prompts by length.
    """
    return other if _loss_beside(model, plan, prompts)(other) < 1.0 else plan


def fastest_in_flight(
    model: ProfiledModel,
    plan: Plan,
    plans: Sequence[Plan],
    prompts: Mapping[int, float],
    in_flight: InFlight,
) -> Plan:
    """Return the plan whose chunks, several at once, are predicted to run prompts fastest.

    Args:
        model: The profiled model.
        plan: The plan for one chunk after the other, which ``auto`` keeps where it is as fast.
        plans: Plans of several chunk lengths.
        prompts: Weights of prompts by length.
        in_flight: Chunks at once.
    """

    def fastest(count: int) -> Plan:
        costs_at, limits = model.costs.at, model.limits
        return min((with_schedule(one, model.specs, count, costs_at, limits) for one in plans), key=loss)

    loss = _loss_beside(model, plan, prompts)
    if in_flight != "auto":
        return fastest(in_flight)
    found = [(loss(one), one) for one in (plan, *map(fastest, AUTOMATIC))]
    least = min(own for own, _ in found)
    return next(one for own, one in found if own <= least * (1.0 + WORTH_DOUBLING))


def _loss_beside(model: ProfiledModel, first: Plan, prompts: Mapping[int, float]) -> Callable[[Plan], float]:
    """Return the relative time of prompts under a plan beside a first one, as a function of the plan."""

    def prompt_us(plan: Plan, prompt: int) -> float:
        found = model.prompt(plan, prompt)
        return math.inf if found is None else found.time_us

    before_us = {prompt: prompt_us(first, prompt) for prompt in prompts}
    return lambda plan: relative_time(prompts, before_us, lambda prompt: prompt_us(plan, prompt))
