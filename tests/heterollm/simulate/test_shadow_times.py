"""Predicted times of plans with shadow outliers, against the simulated clock that ran them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from heterollm.base import silent
from heterollm.kernels.devices import open_device
from heterollm.model import find_model, op_specs
from heterollm.planning import ProfiledModel, make_plan
from heterollm.profiler.records import LayerKey, Profile
from heterollm.simulate import SimulationRequest
from heterollm.simulate.inputs import assumed_shadows
from heterollm.simulate.profile import profile_of
from heterollm.simulate.run import simulated

MODEL, SOC = "qwen1.5-0.5b", "snapdragon-8gen3"
KERNELS = {
    "find_outliers",
    "multiply_outliers",
    "rms_norm_sum",
    "rope_and_store_sum",
    "gated_activation_sum",
}
TOLERANCE = 0.02


def simulate(request):
    """Simulate chunks one after the other."""
    return simulated(request, plan_of=lambda inputs: structs.replace(make_plan(inputs).plan, schedule=None))


def case(**options):
    chosen = {"prompt": 256, "decode": 0, "level": "layer", "head_bits": 8, "pruned": 0.0} | options
    return SimulationRequest(MODEL, soc=SOC, techniques=("llm.npu",), **chosen)


def model_of(request, lacking=frozenset()):
    found = find_model(MODEL)
    specs = op_specs(found.config, "w8a8", 128, True)
    profile = profile_of(open_device(f"sim:{SOC}"), MODEL, found.config, specs, silent)
    records = {
        key: record
        for key, record in profile.records.items()
        if not (isinstance(key, LayerKey) and key.operator in lacking)
    }
    profile = Profile(profile.description, records, profile.runs)
    return ProfiledModel(profile, found.config, specs, "w8a8", "assumed", assumed_shadows(specs, request))


@pytest.mark.parametrize(("pruned", "prompt"), [(0.0, 256), (0.5, 256), (0.0, 512), (0.0, 100)])
def test_predicted_prompts_with_shadows_take_as_long_on_the_simulated_clock(pruned, prompt):
    request = case(pruned=pruned, prompt=prompt)
    found = simulate(request)
    assert found.plan.has_shadows
    model = model_of(request)
    predicted = model.prompt(found.plan, prompt)
    assert predicted.time_us / found.prefill.elapsed_us == pytest.approx(1.0, abs=TOLERANCE)
    assert not model.missing
    # Without times of their kernels predictions are too short.
    blind = model_of(request, KERNELS)
    assert blind.prompt(found.plan, prompt).time_us < (1.0 - TOLERANCE * (1 - pruned)) * predicted.time_us
    assert blind.missing == KERNELS


def test_more_channels_with_outliers_keep_the_gpu_busier_in_predictions_and_simulations():
    """The product is hidden behind the NPU's graph as long as it is short."""
    predicted, taken = [], []
    for share in (0.0, 0.02, 0.1):
        request = case(outlier_share=share)
        found = simulate(request)
        own = model_of(request).predict(found.plan, "prefill", 256)
        predicted.append(sum(item.option.gpu_us for item in own.operators))
        taken.append(found.prefill.busy_fraction["gpu"] * found.prefill.elapsed_us)
    assert predicted == sorted(set(predicted))
    assert taken == sorted(set(taken))


def test_the_solver_counts_shadows_in_every_operator():
    request = case(level="tensor", prompt=256, plan_for="prompt")
    plan = simulate(request).plan
    model, without = model_of(request), model_of(replace(request, pruned=1.0))
    own, other = (one.predict(plan, "prefill", 256) for one in (model, without))
    integer = [item for item in own.operators if item.option.read_us]
    assert integer
    for item in own.operators:
        assert bool(item.option.shadow.find_us) == (item in integer)
    assert own.time_us > other.time_us
    assert not any(any(item.option.shadow) for item in other.operators)
