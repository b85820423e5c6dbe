"""Predicted times of decode passes of several tokens, against the simulated clock that ran them."""

from __future__ import annotations

import numpy as np
import pytest

from heterollm.base import silent
from heterollm.engine import Engine
from heterollm.engine.speculators import measured_pass_s
from heterollm.kernels.devices import open_device
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import PlanInputs, ProfiledModel, predicted_pass_s
from heterollm.planning.planner import solve_plan
from heterollm.simulate.profile import profile_of
from heterollm.solver import PlanRequest

MODEL, SOC = "tinyllama-1.1b", "sim:snapdragon-8gen3"
LENGTHS = (1, 2, 3, 5, 8, 16)
TOLERANCE = 0.06  # 16 tokens: two kernels meet between those at which splits are measured


@pytest.fixture(scope="module")
def model() -> ProfiledModel:
    found = find_model(MODEL)
    specs = op_specs(found.config, "w4a16", 128, True)
    profile = profile_of(open_device(SOC), MODEL, found.config, specs, silent)
    return ProfiledModel(profile, found.config, specs, "w4a16")


def test_passes_of_several_tokens_take_as_long_as_predicted(model: ProfiledModel) -> None:
    """The head computes every token, and the NPU computes where that is faster."""
    plan, device = solve_plan(model, PlanRequest(level="tensor")).plan, open_device(SOC)
    engine = Engine(device, shape_only_weights(model.config, model.specs), plan, 512, silent)
    cache, ids = engine.new_cache(), np.zeros(max(LENGTHS), np.int32)
    ratios = {}
    for tokens in LENGTHS:
        for _ in range(3):  # graphs are built, and waits are learnt
            begin_s = device.now_s()
            engine.decode_several(cache, 256, ids[:tokens])
        found = model.predict(plan, "decode", tokens, position=256)
        assert found is not None
        ratios[tokens] = found.time_us / 1e6 / (device.now_s() - begin_s)
    assert all(abs(ratio - 1.0) < TOLERANCE for ratio in ratios.values()), ratios
    assert {step.processor for step in engine.steps("decode", 16)} >= {"gpu", "npu"}
    # The same predictions choose the number of guesses; without a profile, passes are timed.
    inputs = (
        PlanInputs(
            *(model.config, model.specs, "w4a16", SOC, "gpu", PlanRequest()),
            profile=lambda found=found: found,
        )
        for found in (model.profile, None)
    )
    predicted, none = (predicted_pass_s(one, plan, 16) for one in inputs)
    assert none is None
    assert predicted is not None
    typical = model.predict(plan, "decode", 8)
    assert typical is not None
    assert predicted[7] == pytest.approx(typical.time_us / 1e6)
    timed = measured_pass_s(engine, 16)
    assert len(timed) == len(predicted) == 16
    assert timed == sorted(timed)
    assert timed[0] == pytest.approx(predicted[0], rel=0.1)
