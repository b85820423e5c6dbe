"""Predicted times of plans with integer graphs, against the simulated clock that ran them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from heterollm.base import silent
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import FfnRanges, FusedRanges, LinearRanges
from heterollm.kernels.ops import joined_specs
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel, planner
from heterollm.planning.auto import compared
from heterollm.planning.planner import solve_plan
from heterollm.profiler.records import LayerKey, Profile
from heterollm.simulate.profile import profile_of
from heterollm.solver import PlanRequest

MODEL, SOC = "llama-3.2-1b", "sim:snapdragon-8gen3"
PROMPTS = (64, 256, 300)
TOLERANCE = {"block": 0.02, "fused": 0.08}
"""Both processors end together in a decoded layer of the fused plan, so that a refill, 7 % of the layer, is a
matter of luck."""


@pytest.fixture(scope="module")
def model() -> ProfiledModel:
    """A model with stepped scales on a simulated SoC with integer graphs."""
    found = find_model(MODEL)
    specs = op_specs(found.config, "w4a16", 128, True, scales="stepped")
    profile = profile_of(open_device(SOC), MODEL, found.config, specs, silent)
    return ProfiledModel(profile, found.config, specs, "w4a16", "assumed")


@pytest.mark.parametrize("level", ["block", "fused"])
def test_predicted_passes_take_as_long_on_the_simulated_clock(
    model: ProfiledModel, monkeypatch: pytest.MonkeyPatch, level: Literal["block", "fused"]
) -> None:
    # The gain of fused groups is about the margin by which a plan must be faster than a simpler one.
    monkeypatch.setattr(planner, "compared", functools.partial(compared, margin=0.0))
    plan = solve_plan(model, PlanRequest(level=level)).plan
    assert plan.has_integer_forms
    assert plan.has_fused is (level == "fused")
    device = open_device(SOC)
    ranges = {(spec.layer, spec.group): LinearRanges(1.0, 1.0) for spec in model.specs}
    fused = FusedRanges(1.0, 1.0, 1.0, 1.0)
    for spec in joined_specs(model.specs):
        ffn = FfnRanges(*[1.0] * 7, fused=fused if spec.fused else None)
        own = LinearRanges(1.0, 1.0, normed=1.0) if spec.then is None else ffn
        ranges[spec.layer, spec.group] = own
    weights = shape_only_weights(model.config, model.specs)
    engine = Engine(device, weights, plan, 1024, silent, ranges=ranges)
    cache = engine.new_cache()

    def simulated_us(run: Callable[[], object]) -> float:
        for _ in range(3):  # graphs are built, and waits are learnt
            begin_s = device.now_s()
            run()
        return (device.now_s() - begin_s) * 1e6

    passes = {
        prompt: (
            simulated_us(lambda: engine.prefill(cache, 0, np.zeros(prompt, np.int32), "prefill", None)),  # noqa: B023
            model.predict(plan, "prefill", prompt),
        )
        for prompt in PROMPTS
    }
    passes[1] = simulated_us(lambda: engine.decode(cache, 256, 0)), model.predict(plan, "decode", 1)
    ratios = {tokens: found.time_us / time_us for tokens, (time_us, found) in passes.items()}
    assert all(abs(ratio - 1.0) < TOLERANCE[level] for ratio in ratios.values()), ratios
    assert not model.missing
    # Without the kernels on codes, predictions of prompts are too short.
    of_codes = {
        key: record
        for key, record in model.profile.records.items()
        if isinstance(key, LayerKey) and key.operator.endswith(("_uint16", "_codes"))
    }
    records = {key: record for key, record in model.profile.records.items() if key not in of_codes}
    blind = ProfiledModel(
        Profile(model.profile.description, records, model.profile.runs),
        *(model.config, model.specs, model.precision, model.calibration),
    )
    for prompt in PROMPTS:
        shorter = blind.predict(plan, "prefill", prompt)
        assert shorter.time_us < (1.0 - TOLERANCE["block"]) * passes[prompt][1].time_us
    assert blind.missing == {key.operator for key in of_codes}
