"""Predicted times of mixtures of experts, against the simulated clock that ran them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from heterollm.base import silent
from heterollm.calibration.routing import RoutingCalibration
from heterollm.engine import Engine, MixtureOptions
from heterollm.engine.blocks.mixture import ExpertRows
from heterollm.kernels.devices import open_device
from heterollm.model import ModelConfig, op_specs, shape_of_specs, shape_only_weights
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.profiler import SessionOptions, profile_device
from heterollm.profiler.records import ExpertsKey, Profile
from heterollm.simulate.experts import AssumedExperts
from heterollm.simulate.routing import AssumedRouting
from heterollm.solver import Plan, PlannedExperts, PlanRequest

SOC = "sim:snapdragon-8gen3"
PROMPTS = (16, 64, 300, 1024)
NPU_PROMPTS = (150, 300, 700, 1024)
TOLERANCE = 0.05  # 300 tokens: 19 rows of an expert, where the kernels for few and for many rows meet
UNEVEN_TOLERANCE = 0.1
"""The clock knows the mean rows of the GPU's experts, predictions the rows of each."""

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
)
assert CONFIG.mixture is not None
ROUTING = CONFIG.mixture.routing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ProfiledModel:
    specs = op_specs(CONFIG, "w4a16", 128, True)
    shape, path = shape_of_specs(CONFIG, specs, "mixture"), tmp_path_factory.mktemp("profile") / "p.json"
    options = SessionOptions.of(budget_s=None, expert_graphs=True)
    profile, _ = profile_device(open_device(SOC), [shape], options, path=path)
    return ProfiledModel(profile, CONFIG, specs, "w4a16", "assumed")


def simulated_us(
    plan: Plan, model: ProfiledModel, prompts: Sequence[int] = PROMPTS, rows: ExpertRows | None = None
) -> dict[int, float]:
    """Times of passes, 1 being decode."""
    device = open_device(SOC)
    weights = shape_only_weights(CONFIG, model.specs)
    engine = Engine(device, weights, plan, 2048, silent, mixture=MixtureOptions(assumed=rows))
    cache = engine.new_cache()

    def time_us(run: Callable[[], object]) -> float:
        for _ in range(3):  # graphs are built, and waits are learnt
            begin_s = device.now_s()
            run()
        return (device.now_s() - begin_s) * 1e6

    passes = {
        prompt: time_us(lambda: engine.prefill(cache, 0, np.zeros(prompt, np.int32), "prefill", None))  # noqa: B023
        for prompt in prompts
    }
    return passes | {1: time_us(lambda: engine.decode(cache, 256, 0))}


def predicted_us(plan: Plan, model: ProfiledModel, prompts: Sequence[int] = PROMPTS) -> dict[int, float]:
    passes = {prompt: model.predict(plan, "prefill", prompt) for prompt in prompts}
    passes[1] = model.predict(plan, "decode", 1)
    return {tokens: found.time_us for tokens, found in passes.items()}


def test_predicted_passes_with_experts_on_the_npu_take_as_long_on_the_simulated_clock(
    model: ProfiledModel,
) -> None:
    """The loads of the passes are as imbalanced as the calibrated ones, and not the same."""
    loads = AssumedRouting(ROUTING, 2.0)
    request = PlanRequest(level="tensor", techniques=("npumoe",), npu_gib=100)
    plan = solve_plan(model, request, {"experts": loads.calibrated(range(CONFIG.layers))}).plan
    assert all(plan.technique(PlannedExperts).of(tokens, 0).groups for tokens in NPU_PROMPTS)
    rows = AssumedExperts(plan, model.experts, loads).rows_on_gpu
    taken, predicted = simulated_us(plan, model, NPU_PROMPTS, rows), predicted_us(plan, model, NPU_PROMPTS)
    ratios = {tokens: predicted[tokens] / time_us for tokens, time_us in taken.items()}
    assert all(abs(ratio - 1.0) < UNEVEN_TOLERANCE for ratio in ratios.values()), ratios


@pytest.mark.parametrize("level", ["gpu", "tensor"])
def test_predicted_passes_take_as_long_on_the_simulated_clock(model: ProfiledModel, level: str) -> None:
    assert not model.missing
    plan = solve_plan(model, PlanRequest(level="tensor")).plan
    plan = plan.without_npu() if level == "gpu" else plan
    taken, predicted = simulated_us(plan, model), predicted_us(plan, model)
    ratios = {tokens: predicted[tokens] / time_us for tokens, time_us in taken.items()}
    assert all(abs(ratio - 1.0) < TOLERANCE for ratio in ratios.values()), ratios
    # Without their times, predictions are much too short.
    records = {key: own for key, own in model.profile.records.items() if not isinstance(key, ExpertsKey)}
    profile = Profile(model.profile.description, records, model.profile.runs)
    blind = ProfiledModel(profile, CONFIG, model.specs, model.precision, model.calibration)
    shorter = predicted_us(plan, blind)
    assert all(shorter[tokens] < 0.9 * predicted[tokens] for tokens in taken)
    assert blind.missing == {"experts"}


def test_predicted_passes_have_the_planned_time_of_experts_on_the_npu(model: ProfiledModel) -> None:
    """With equal loads, so that the plan's prediction and that of a pass are of the same work."""
    each = 64 * ROUTING.chosen // ROUTING.experts
    routing = tuple(
        RoutingCalibration(layer, (((each,) * ROUTING.experts,) * 16,)) for layer in range(CONFIG.layers)
    )
    plan = solve_plan(model, PlanRequest(level="tensor", techniques=("npumoe",)), {"experts": routing}).plan
    assert plan.technique(PlannedExperts).is_active
    longest = plan.chunk_length
    planned_us = [
        plan.technique(PlannedExperts).of(longest, layer).predicted_us for layer in range(CONFIG.layers)
    ]
    gpu_us = sum(model.costs.experts.kernels_us(longest))
    planned_us = [gpu_us if time_us is None else time_us for time_us in planned_us]
    found, without = (
        model.predict(one, "prefill", longest) for one in (plan, plan.with_technique(PlannedExperts(())))
    )
    gained_us = CONFIG.layers * gpu_us - sum(planned_us)
    assert gained_us > 0
    assert without.time_us - found.time_us == pytest.approx(gained_us, rel=0.01)
    assert found.npu_us > without.npu_us
    # Decode has no experts on the NPU.
    assert model.predict(plan, "decode", 1).experts_npu_us == 0
