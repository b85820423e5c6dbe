"""One plan, one list of steps: solved on the spot, kept, saved and reloaded, or edited and saved."""

import json

import pytest
from msgspec import structs

from heterollm import LLM, Plan
from heterollm.base import silent
from heterollm.cli import main
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.model import op_specs, shape_only_weights
from heterollm.model.known import ModelSize
from heterollm.planning import PlanInputs, make_plan
from heterollm.simulate.profile import profile_of
from heterollm.solver import PlanRequest, Solver

DEVICE = "sim:snapdragon-8gen3"
CONTEXT = 1100
LENGTHS = (
    *range(1, 68),
    *range(68, 1101, 29),
    127,
    128,
    129,
    255,
    256,
    257,
    300,
    511,
    512,
    513,
    600,
    1023,
    1024,
)
"""Prompts; those beyond the longest pass run in chunks."""

# Two layers of each model say what all of them do.
SIZES = {
    "llama-3.2-1b": ModelSize(2048, 8192, 2, 32, 8, 128256, True, 64, 4096),
    "qwen2.5-0.5b": ModelSize(896, 4864, 2, 14, 2, 151936, True, 64, 4096),
    "llama-3-8b": ModelSize(4096, 14336, 2, 32, 8, 128256, False, 128, 8192),
}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("identity")))
        yield


@pytest.fixture(scope="module")
def profiled(bundled_model, keep_even_profile):
    """The bundled model, for which the host has a profile."""
    keep_even_profile(open_device("host"), bundled_model, "w4a16")
    return bundled_model


def opened():
    return open_device(DEVICE, simulation=Simulation())


def edited(plan):
    """Return a plan as a person may change it: one placement to the GPU, and other waits."""
    data = json.loads(plan.to_json())
    entry = next(
        item for item in data["entries"] if item["group"] == "o" and item["placement"]["npu_lengths"]
    )
    entry["placement"] = {"type": "rows", "npu_rows": [], "npu_lengths": []}
    data["sync"] = {"prefill": "finish", "decode": "poll"}
    data["slices"] = []
    return Plan.from_json(json.dumps(data))


def steps_of(plan, weights):
    """Return the steps of every pass that a plan's prompts run in, and of decode."""
    engine = Engine(opened(), weights, plan, CONTEXT, silent)
    passes = sorted({length for prompt in LENGTHS for _, length in plan.chunks(prompt)})
    found = {("prefill", tokens): engine.steps("prefill", tokens) for tokens in passes}
    found |= {("decode", tokens): engine.steps("decode", tokens) for tokens in range(1, 17)}
    engine.close()
    return found


@pytest.mark.parametrize(
    "model", [pytest.param("llama-3.2-1b", marks=pytest.mark.slow), "qwen2.5-0.5b", "llama-3-8b"]
)
def test_a_simulated_plan_is_one_list_of_steps(model, tmp_path, monkeypatch):
    config = SIZES[model].config()
    specs = op_specs(config, "w4a16", 128, True)
    weights = shape_only_weights(config, specs)
    device = opened()
    profile = profile_of(device, model, config, specs, silent)

    def planned(plan):
        request, lengths = PlanRequest(context=CONTEXT), device.standard_lengths
        return make_plan(
            PlanInputs(config, specs, "w4a16", DEVICE, plan, request, lengths, lambda: profile)
        ).plan

    solved = planned("auto")
    assert solved.uses_npu
    with monkeypatch.context() as patch:
        patch.setattr(Solver, "solve", lambda *_, **__: pytest.fail("solved again"))
        kept = planned("auto")
    solved.save(tmp_path / "plan.json")
    loaded = planned(tmp_path / "plan.json")
    assert solved == kept == loaded
    changed = edited(solved)
    changed.save(tmp_path / "changed.json")
    reloaded = planned(tmp_path / "changed.json")
    assert reloaded == changed != solved

    steps = steps_of(solved, weights)
    assert steps == steps_of(loaded, weights)
    other = steps_of(changed, weights)
    assert other == steps_of(reloaded, weights)
    assert other != steps, "the edit shows"


def test_a_plan_on_host_is_one_list_of_steps(profiled, tmp_path):
    target = tmp_path / "plan.json"
    assert main(["plan", str(profiled), "--device", "host", "-o", str(target)]) == 0
    found = []
    for plan in ("auto", target, Plan.load(target)):
        with LLM.load(profiled, device="host", plan=plan, allow_fallback=True) as llm:
            # Some of the lengths: here each pass compiles kernels.
            prompts = (*LENGTHS[::8], 1100)
            passes = sorted({length for prompt in prompts for _, length in llm.plan.chunks(prompt)})
            steps = [llm.steps("prefill", tokens) for tokens in passes]
            steps += [llm.steps("decode", tokens) for tokens in (1, 2, 7, 16)]
            found.append((llm.plan, steps))
    assert found[0] == found[1] == found[2]


def test_a_request_reaches_the_plan_of_a_load(profiled):
    request = PlanRequest(forbidden=("npu",), gpu_share=1.0)
    with LLM.load(profiled, device="host", plan="tensor", request=request, context=256) as llm:
        assert not llm.plan.uses_npu
        assert llm.plan.request == structs.replace(request, context=256, level="tensor")
