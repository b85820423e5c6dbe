"""npu-attention on simulated SoCs: where the NPU attends, what that gains, and where the GPU goes on."""

import dataclasses

import pytest

from heterollm.base import GIB, OptionError, ProfileError, silent
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.profiler.records import SparseKey
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.profile import profile_of
from heterollm.solver import NpuAttention, PlannedAttention, PlanRequest

MODEL = "qwen1.5-0.5b"
CONTEXT = 2048
FAST_GPU = {"gpu.attention_tflops": 50.0}
SLOW_GPU = {"gpu.attention_tflops": 0.02}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("simulated")))
        yield


def modelled(overrides, name=MODEL, first=0):
    """Return two layers of a model on a simulated phone, with times of attention on the NPU."""
    found = find_model(name, closest=False)
    config = dataclasses.replace(found.config, per_layer=found.config.per_layer[first : first + 2])
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(overrides=overrides))
    specs = op_specs(config, "w4a16", 128, True, float_bits=16)
    profile = profile_of(device, f"two layers of {name}", config, specs, silent, ("npu-attention",))
    return device, ProfiledModel(profile, config, specs, "w4a16")


def solved(model, **options):
    asked = {"context": CONTEXT, "level": "tensor", "techniques": ("npu-attention",)} | options
    return solve_plan(model, PlanRequest(**asked))


@pytest.mark.parametrize("overrides", [{}, FAST_GPU])
def test_the_plan_follows_the_faster_processor(overrides):
    device, model = modelled(overrides)
    found = solved(model)
    record = found.plan.technique(PlannedAttention)
    plain = solved(model, techniques=()).plan
    before_us, after_us = (model.prompt(plan, CONTEXT).time_us for plan in (plain, found.plan))
    if overrides:
        assert not record.entries
        assert after_us == before_us
        assert any("Attention stays on the GPU" in note for note in found.notes)
        return
    assert record.on_npu
    assert after_us < 0.95 * before_us
    weights = shape_only_weights(model.config, model.specs)
    engine = Engine(device, weights, found.plan, CONTEXT, silent)
    steps = engine.planned_steps("prefill", 1024)
    assert [step.layer for step in steps if (step.operator, step.processor) == ("attention", "npu")] == [0, 1]
    assert not [step for step in steps if (step.operator, step.processor) == ("attention", "gpu")]


def test_auto_compares_it():
    for overrides, chosen in (({}, ("npu-attention",)), (FAST_GPU, ())):
        _, model = modelled(overrides)
        found = solved(model, techniques=("auto",), histogram={64: 1.0, 2048: 2.0})
        assert found.plan.request.techniques == chosen
        assert "npu-attention" in found.notes[0]


def test_little_memory_leaves_out_short_passes_or_all():
    _, model = modelled(SLOW_GPU)
    plain = solved(model, techniques=()).plan
    held = []
    for limit in (4 * GIB, model.npu_bytes(plain), 1 << 16):
        plan = solved(model, npu_gib=limit / GIB).plan
        held.append({tokens for tokens, _ in plan.technique(PlannedAttention).npu_graphs(CONTEXT)})
        assert model.npu_bytes(plan) <= limit
    assert held[0] > held[1] > held[2] == set()
    assert max(held[1]) == max(held[0])


def test_a_profile_without_its_times_says_so():
    _, model = modelled({})
    records = {key: own for key, own in model.profile.records.items() if not isinstance(key, SparseKey)}
    bare = dataclasses.replace(model, profile=dataclasses.replace(model.profile, records=records))
    with pytest.raises(ProfileError, match="no times of attention on the NPU"):
        solved(bare)


def test_a_prompt_on_the_npu_alone_has_its_attention_there():
    plain, found = (
        simulate(
            SimulationRequest(
                MODEL, prompt=CONTEXT, decode=0, level="npu", head_bits=8, techniques=techniques, trace=True
            )
        )
        for techniques in ((), ("npu-attention",))
    )
    assert found.plan.level == "npu"
    assert found.prefill.elapsed_us < 0.9 * plain.prefill.elapsed_us
    assert found.prefill.attention_us < plain.prefill.attention_us
    spans = {(span.track, span.operator) for span in found.trace.spans}
    assert ("npu", "attention") in spans
    assert ("gpu", "attention inputs") in spans
    assert not [span for span in found.prefill.spans if span.name in ("build", "open")]
    config = find_model(MODEL, closest=False).config
    device = open_device("sim:snapdragon-8gen3")
    specs = op_specs(config, "w4a16", 128, True)
    profile = profile_of(device, MODEL, config, specs, silent, ("npu-attention",))
    model = ProfiledModel(profile, config, specs, "w4a16")
    assert model.prompt(found.plan, CONTEXT).time_us == pytest.approx(found.prefill.elapsed_us, rel=0.05)


@pytest.mark.slow
def test_a_mixture_has_its_experts_and_its_attention_on_the_npu():
    """The operator split of NPUMoE: what is dense on the NPU, routing on the GPU."""
    large = {"npu.address_space_gib": 0.0, "memory.available_gib": 0.0}
    asked = {"prompt": CONTEXT, "decode": 0, "level": "tensor", "overrides": large}
    found = simulate(SimulationRequest("olmoe-1b-7b", techniques=("npumoe", "npu-attention"), **asked))
    assert found.plan.technique(PlannedAttention).on_npu
    assert found.experts.npu_rows > 0


def test_layers_with_a_window_attend_on_the_npu_while_it_holds_the_session():
    _, model = modelled(SLOW_GPU, "gemma-3-1b", first=4)
    found = solved(model)
    record = found.plan.technique(PlannedAttention)
    places = {
        (keys, layer): isinstance(record.of(512, keys, layer), NpuAttention)
        for keys in (512, 1024)
        for layer in (0, 1)
    }
    assert places == {(512, 0): True, (512, 1): True, (1024, 0): False, (1024, 1): True}
    told = "The GPU attends in 1 of 2 layers in longer sessions: such a layer has a window of 512 positions."
    assert told in found.notes


def test_a_model_that_caps_its_scores_is_refused():
    _, model = modelled({}, "gemma-2-2b")
    with pytest.raises(OptionError, match="The NPU attends in no layer of Gemma 2: one caps its scores"):
        solved(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "gpu"}, "places attention on the NPU"),
        ({"in_flight": 4}, "number of chunks in flight"),
        ({"techniques": ("npu-attention", "shadowattn")}, "both say how layers attend"),
    ],
)
def test_what_the_technique_cannot_have_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        SimulationRequest(MODEL, **{"techniques": ("npu-attention",), **options})
