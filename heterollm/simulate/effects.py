"""Conditions under which the options of a simulated case have an effect on its plan or its times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from heterollm.base import (
    Effect,
    HeteroLLMError,
    OptionFacts,
    idle_options,
    refuse_idle,
    refuse_idle_everywhere,
)
from heterollm.kernels.sim import load_soc
from heterollm.model import find_model
from heterollm.planning import PLAN_EFFECTS, technique_facts
from heterollm.simulate.request import SimulationRequest
from heterollm.solver import LLM_NPU, NPU_EXPERTS, SHADOW_ATTENTION, SOLVED_LEVELS


def _is_solved(facts: OptionFacts) -> bool:
    return facts["plan"] in SOLVED_LEVELS or bool({LLM_NPU, NPU_EXPERTS}.intersection(facts["techniques"]))


def _integer_graphs(facts: OptionFacts) -> bool:
    return bool(load_soc(facts["soc"], dict(facts["overrides"])).npu.integer_graphs)


CASE_EFFECTS: Final = (
    *PLAN_EFFECTS,
    Effect(
        "pruned outlier_share",
        lambda facts: LLM_NPU in facts["techniques"],
        "only the technique llm.npu has shadows of outliers",
        "Add --technique llm.npu",
    ),
    Effect(
        "imbalance",
        lambda facts: find_model(facts["model"]).config.mixture is not None,
        "the model has no experts",
        "Choose a mixture of experts",
    ),
    Effect(
        "imbalance",
        lambda facts: not facts["numerics"],
        "with --numerics the router chooses the experts",
        "Leave out --numerics",
    ),
    Effect(
        "head_imbalance",
        lambda facts: SHADOW_ATTENTION in facts["techniques"],
        f"only the technique {SHADOW_ATTENTION} tells heads apart",
        f"Add --technique {SHADOW_ATTENTION}",
    ),
    Effect(
        "calibrated every_form in_flight",
        lambda facts: facts["plan"] != "gpu",
        "level gpu has no NPU graphs",
        "Choose another level",
    ),
    Effect(
        "calibrated",
        _integer_graphs,
        "this SoC has no integer NPU graphs at w4a16 (npu.integer_graphs is 0)",
        "Choose snapdragon-8gen3, or add --what-if npu.integer_graphs=1",
    ),
    Effect(
        "every_form",
        lambda facts: facts["offers_more_forms"] or facts["every_form"] is False,
        "this SoC, or the level, offers every form of a graph already",
        "Choose snapdragon-8gen3-paper and another level",
    ),
    Effect(
        "plan_for",
        _is_solved,
        "levels gpu, npu and layer follow a rule for all lengths",
        "Choose level tensor, block or fused",
    ),
)
"""Conditions by the names of the command's options."""


def _facts(request: SimulationRequest) -> dict[str, Any]:
    """Return the values of a case's options by name."""
    values = {one.name: getattr(request, one.name) for one in fields(request)}
    values |= technique_facts(request.attention, request.experts)
    more_forms = not replace(request, every_form=None).forms
    return values | {"plan": request.level, "offers_more_forms": more_forms}


def _given(facts: OptionFacts) -> frozenset[str]:
    """Return the names of the options that are not defaults."""
    usual = _facts(SimulationRequest(facts["model"]))
    return frozenset(name for name, value in facts.items() if value != usual.get(name))


def check_case(request: SimulationRequest) -> None:
    """Refuse an option of a case that changes neither its plan nor its times.

    Raises:
        OptionError: There is one; or there is no such model or SoC.
    """
    facts = _facts(request)
    refuse_idle(CASE_EFFECTS, _given(facts), facts)


def without_idle(requests: Sequence[SimulationRequest], given: OptionFacts) -> tuple[SimulationRequest, ...]:
    """Return the cases of a grid without the options that have no effect in them, each case once.

    An option that a case cannot have for another reason stays, and the case says why.

    Args:
        requests: The cases.
        given: Values of options by name that must have an effect in some case.

    Raises:
        OptionError: There is one without effect.
    """
    idle = [_idle(request, given) for request in requests]
    refuse_idle_everywhere(idle, given)
    reset = map(_reset, requests, idle)
    return tuple({repr(request): request for request in reset}.values())


def _idle(request: SimulationRequest, given: OptionFacts) -> dict[str, Effect]:
    facts = _facts(request)
    try:
        return dict(idle_options(CASE_EFFECTS, given.keys() | _given(facts), facts))
    except HeteroLLMError:  # no such model or SoC: the case itself says so
        return {}


def _reset(request: SimulationRequest, idle: Iterable[str]) -> SimulationRequest:
    usual = SimulationRequest(request.model)
    found = {name: getattr(usual, name) for name in idle if hasattr(usual, name)}
    if SHADOW_ATTENTION not in request.techniques:
        found["attention"] = usual.attention
    if NPU_EXPERTS not in request.techniques:
        found["experts"] = usual.experts
    return replace(request, **found)
