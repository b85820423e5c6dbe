"""The technique auto: with and without each technique, and never a slower plan than the plain one."""

import dataclasses

import pytest

from heterollm.base import OptionError, silent
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.model import find_model, op_specs
from heterollm.planning import ProfiledModel, assumed_heads
from heterollm.planning.planner import solve_plan
from heterollm.planning.techniques.llm_npu import check_technique
from heterollm.simulate.profile import profile_of
from heterollm.solver import PlanRequest

CONTEXT = 2048
SLOW_ATTENTION = {"gpu.attention_tflops": 0.02}


def modelled(precision, overrides):
    """Return two layers of a model on a simulated phone, with times of sparse attention."""
    found = find_model("qwen1.5-0.5b", closest=False)
    config = dataclasses.replace(found.config, per_layer=found.config.per_layer[:2])
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(overrides=overrides))
    specs = op_specs(config, precision, 128, True, float_bits=16)
    profile = profile_of(device, "small", config, specs, silent, ("shadowattn",))
    return ProfiledModel(profile, config, specs, precision, "assumed")


def prompt_us(model, plan, prompt):
    return model.prompt(plan, prompt).time_us


@pytest.mark.parametrize(
    ("precision", "overrides", "expected"),
    [
        ("w4a16", {}, ()),
        ("w4a16", SLOW_ATTENTION, ("shadowattn",)),
        ("w8a8", {}, ("llm.npu", "shadowattn")),
        ("w8a8", SLOW_ATTENTION, None),
    ],
)
def test_the_fastest_techniques_are_chosen_and_none_where_none_gains(precision, overrides, expected):
    model = modelled(precision, overrides)
    prompts = {64: 1.0, 512: 1.0, 2048: 1.0}
    request = PlanRequest(context=CONTEXT, level="tensor", techniques=("auto",), histogram=prompts)
    heads = assumed_heads(model.config, request.attention)
    seen = []
    found = solve_plan(model, request, {"attention": heads}, None, lambda *step: seen.append(step))
    assert seen == [("Planning", done, len(seen) + 1) for done in range(1, len(seen) + 1)]
    assert len(seen) > 2
    chosen = found.plan.request.techniques
    assert "auto" not in chosen
    assert expected is None or chosen == expected
    assert found.notes[0].startswith(f"Techniques: {' and '.join(chosen) or 'none'}. Predicted times")
    every = [(), ("shadowattn",), *([("llm.npu",), ("llm.npu", "shadowattn")] if precision == "w8a8" else [])]
    plans = {
        names: solve_plan(
            model,
            PlanRequest(context=CONTEXT, level="tensor", techniques=names, histogram=prompts),
            {"attention": heads} if "shadowattn" in names else {},
        ).plan
        for names in every
    }
    sums = {
        names: sum(prompt_us(model, plan, prompt) / prompt_us(model, plans[()], prompt) for prompt in prompts)
        for names, plan in plans.items()
    }
    assert sums[chosen] == min(sums.values()) <= sums[()]


def test_it_needs_a_solved_plan_and_no_other_name():
    request = PlanRequest(techniques=("auto",))
    with pytest.raises(OptionError, match="chooses among plans that are solved, and plan 'npu'"):
        check_technique(request, "w4a16", "npu", calibrated=True)
    with pytest.raises(OptionError, match="name others beside auto"):
        PlanRequest(techniques=("auto", "shadowattn"))
