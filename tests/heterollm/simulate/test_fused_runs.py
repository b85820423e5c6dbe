"""Graph runs of Llama-3-8B with fused groups, counted in compiled steps on a simulated SoC."""

from dataclasses import replace
from typing import Literal

import pytest

from heterollm.base import silent
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import FfnRanges, FusedRanges, LinearRanges
from heterollm.kernels.ops import joined_specs
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solver_of
from heterollm.simulate.profile import profile_of
from heterollm.solver import PlanRequest, with_norms

MODEL, SOC = "llama-3-8b", "sim:snapdragon-8gen3"
LAYERS = 32


@pytest.mark.slow
def test_a_layer_of_8b_has_two_runs_in_place_of_four() -> None:
    found = find_model(MODEL)
    specs = op_specs(found.config, "w4a16", 128, True, scales="stepped")
    profile = profile_of(open_device(SOC), MODEL, found.config, specs, silent)
    model = ProfiledModel(profile, found.config, specs, "w4a16", "assumed")
    ranges = {(spec.layer, spec.group): LinearRanges(1.0, 1.0) for spec in specs}
    for spec in joined_specs(specs):
        fused = FusedRanges(1.0, 1.0, 1.0, 1.0) if spec.fused else None
        ffn = FfnRanges(*[1.0] * 7, fused=fused)
        own = LinearRanges(1.0, 1.0, normed=1.0) if spec.then is None else ffn
        ranges[spec.layer, spec.group] = own
    # Graphs of 256 tokens beside those of decode take more than a process addresses.
    wanted = {256: 1.0, 1: 1.0}
    solver = solver_of(model, PlanRequest(level="fused", npu_gib=7.0, histogram=wanted))
    weights = shape_only_weights(model.config, specs)

    def runs(level: Literal["tensor", "fused"]) -> dict[str, int]:
        made = replace(solver, level=level).plan(device="sim", precision="w4a16", weights=wanted)
        plan = with_norms(made, specs) if level == "fused" else made
        assert plan.npu_bytes(specs, profile.graph_memory) <= 7 * 2**30
        engine = Engine(open_device(SOC), weights, plan, 1024, silent, ranges=ranges)
        steps = {"prompt": engine.planned_steps("prefill", 256), "token": engine.planned_steps("decode", 1)}
        return {
            name: sum(step.action == "graph" and step.layer is not None for step in own)
            for name, own in steps.items()
        }

    assert runs("tensor") == {"prompt": 4 * LAYERS, "token": 4 * LAYERS}
    assert runs("fused") == {"prompt": 2 * LAYERS, "token": 2 * LAYERS}
