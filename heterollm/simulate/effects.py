"""Conditions under which the options of a simulated case have an effect on its plan or its times."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, Final

from heterollm.base import Effect, HeteroLLMError, OptionError, OptionFacts, idle_options, refuse_idle
from heterollm.kernels.sim import load_soc
from heterollm.model import find_model
from heterollm.simulate.request import SimulationRequest
from heterollm.solver import (
    LLM_NPU,
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    AttentionRequest,
    ExpertsRequest,
)

COVERED: Final = ("npu", "layer")
"""Levels at which the NPU computes whole groups, so that a length policy has an effect."""


def _is_solved(facts: OptionFacts) -> bool:
    return facts["level"] in SOLVED_LEVELS or LLM_NPU in facts["techniques"]


def _integer_graphs(facts: OptionFacts) -> bool:
    return bool(load_soc(facts["soc"], dict(facts["overrides"])).npu.integer_graphs)


CASE_EFFECTS: Final = (
    Effect(
        "keep keep_by score_buckets estimator head_pipeline",
        lambda facts: SHADOW_ATTENTION in facts["techniques"],
        f"attention is sparse with the technique {SHADOW_ATTENTION} alone",
        f"Add --technique {SHADOW_ATTENTION}",
    ),
    Effect(
        "pruned outlier_share",
        lambda facts: LLM_NPU in facts["techniques"],
        "only the technique llm.npu has shadows of outliers",
        "Add --technique llm.npu",
    ),
    Effect(
        "overflow",
        lambda facts: NPU_EXPERTS in facts["techniques"],
        "experts have capacities with the technique npumoe alone",
        "Add --technique npumoe",
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
        "calibrated",
        lambda facts: facts["level"] != "gpu",
        "level gpu has no integer NPU graphs",
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
        lambda facts: facts["level"] != "gpu",
        "level gpu has no NPU graphs",
        "Choose another level",
    ),
    Effect(
        "every_form",
        lambda facts: facts["offers_more_forms"] or facts["every_form"] is False,
        "this SoC, or level block, offers every form of a graph already",
        "Choose snapdragon-8gen3-paper and another level",
    ),
    Effect(
        "sync",
        lambda facts: facts["level"] != "gpu" or SHADOW_ATTENTION in facts["techniques"],
        "level gpu never waits for the NPU",
        "Choose another level",
    ),
    Effect(
        "plan_for",
        lambda facts: _is_solved(facts) or NPU_EXPERTS in facts["techniques"],
        "levels gpu, npu and layer follow a rule for all lengths",
        "Choose level tensor or block",
    ),
    Effect(
        "length_policy",
        lambda facts: facts["level"] in COVERED,
        "it is for levels npu and layer; others say how each length runs",
        "Choose level npu or layer",
    ),
    Effect(
        "in_flight",
        lambda facts: facts["level"] != "gpu",
        "chunks fill waits for the NPU, which level gpu does not use",
        "Choose another level",
    ),
)
"""Conditions by the names of the command's options."""

ATTENTION: Final = frozenset({"keep", "keep_by", "score_buckets", "estimator", "head_pipeline"})


def case_facts(request: SimulationRequest) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values of a case's options by name, and the names of those that are not defaults."""
    values: dict[str, Any] = {one.name: getattr(request, one.name) for one in fields(request)}
    usual: dict[str, Any] = {
        one.name: one.default_factory() if one.default_factory is not MISSING else one.default
        for one in fields(request)
    }
    for target, attention, experts in (
        (values, request.attention, request.experts),
        (usual, AttentionRequest(), ExpertsRequest()),
    ):
        target |= {"keep": attention.keep, "keep_by": attention.keep_by, "overflow": experts.overflow}
        target |= {"score_buckets": attention.buckets, "estimator": attention.estimator}
        target |= {"head_pipeline": attention.pipeline}
    given = frozenset(name for name, value in values.items() if value != usual[name])
    return values | {"offers_more_forms": not replace(request, every_form=None).forms}, given


def check_case(request: SimulationRequest) -> None:
    """Refuse an option of a case that changes neither its plan nor its times.

    Raises:
        OptionError: There is one; or there is no such model or SoC.
    """
    facts, given = case_facts(request)
    refuse_idle(CASE_EFFECTS, given, facts)


def check_grid(requests: Sequence[SimulationRequest], given: Collection[str]) -> None:
    """Refuse a given option that has no effect in any case of a grid.

    Args:
        requests: The cases.
        given: Names of the options, as the command has them.

    Raises:
        OptionError: There is one.
    """
    refused: dict[str, list[OptionError]] = {}
    for request in requests:
        facts, _ = case_facts(request)
        try:
            idle = dict(idle_options(CASE_EFFECTS, given, facts))
        except HeteroLLMError:  # no such model or SoC: the case itself says so
            return
        for name, effect in idle.items():
            refused.setdefault(name, []).append(effect.error(name, facts[name]))
    for errors in refused.values():
        if len(errors) == len(requests):
            raise errors[0]


def without_idle(request: SimulationRequest) -> SimulationRequest:
    """Return a case of a grid without the options that have no effect in it.

    An option that the case cannot have for another reason stays, and the case says why.
    """
    facts, given = case_facts(request)
    try:
        idle = {name for name, _ in idle_options(CASE_EFFECTS, given, facts)}
    except HeteroLLMError:
        return request
    usual = SimulationRequest(request.model)
    attention = request.attention if idle.isdisjoint(ATTENTION) else usual.attention
    experts = usual.experts if "overflow" in idle else request.experts
    reset = {name: getattr(usual, name) for name in idle if hasattr(usual, name)}
    return replace(request, attention=attention, experts=experts, **reset)
