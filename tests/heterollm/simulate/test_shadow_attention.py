"""shadowattn on simulated SoCs: where it pays, what it assumes, and the overlap of its pipeline."""

import json

import pytest

from heterollm.base import OptionError, silent
from heterollm.benchmarks import BenchRow, modelled_row
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.model import find_model, op_specs
from heterollm.planning import ProfiledModel
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.profile import profile_of
from heterollm.solver import AttentionRequest, PlannedAttention

MODEL = "qwen1.5-0.5b"
LITTLE_GPU = {"gpu.attention_tflops": 0.02}


def case(techniques=("shadowattn",), **options):
    attention = {name: options.pop(name) for name in ("estimator", "pipeline") if name in options}
    changed = {"prompt": 4096, "decode": 0, "level": "gpu", "head_bits": 8, "overrides": LITTLE_GPU} | options
    return SimulationRequest(MODEL, techniques=techniques, attention=AttentionRequest(**attention), **changed)


@pytest.fixture(scope="module")
def dense():
    return simulate(case(()))


@pytest.fixture(scope="module")
def sparse():
    return simulate(case(estimator="npu"))


def overlap_us(result):
    return sum(one.used_us["both"] for one in result.prefill.account if one.operator == "attention")


@pytest.mark.slow
def test_long_prompts_gain_where_little_of_the_gpu_is_left(dense, sparse):
    assert sparse.prefill.attention_us < dense.prefill.attention_us
    assert sparse.prefill.elapsed_us < dense.prefill.elapsed_us
    # What is no attention takes as long as before.
    others = [one.prefill.elapsed_us - one.prefill.attention_us for one in (dense, sparse)]
    assert others[1] == pytest.approx(others[0], rel=0.02)
    assert overlap_us(sparse) > 0.0 == overlap_us(dense)


@pytest.mark.slow
def test_graphs_of_scores_are_built_before_the_prompt(sparse):
    assert not [span for span in sparse.prefill.spans if span.name in ("build", "open")]


@pytest.mark.slow
def test_prompts_are_predicted_with_their_sparse_attention(dense, sparse):
    config = find_model(MODEL, closest=False).config
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(overrides=LITTLE_GPU))
    specs = op_specs(config, "w4a16", 128, True)
    profile = profile_of(device, MODEL, config, specs, silent, ("shadowattn",))
    model = ProfiledModel(profile, config, specs, "w4a16", "assumed")
    for one in (dense, sparse):
        predicted_us = model.prompt(one.plan, 4096).time_us
        assert predicted_us == pytest.approx(one.prefill.elapsed_us, rel=0.05)


@pytest.mark.slow
def test_whole_gpus_estimate_themselves():
    """By the fitted numbers the GPU attends to all keys faster than the NPU estimates their scores."""
    asked = {"level": "tensor", "prompt": 2048, "overrides": {}}
    plain, npu, auto = (
        simulate(case(techniques, estimator=estimator, **asked))
        for techniques, estimator in (((), "auto"), (("shadowattn",), "npu"), (("shadowattn",), "auto"))
    )
    assert npu.plan.technique(PlannedAttention).entries == ()
    assert npu.prefill.elapsed_us == plain.prefill.elapsed_us
    assert {one.estimator for one in auto.plan.technique(PlannedAttention).sparse} <= {"gpu"}
    assert auto.prefill.elapsed_us <= plain.prefill.elapsed_us


@pytest.mark.slow
def test_sparse_attention_needs_no_npu(dense):
    """All on the GPU, estimates too, unless the NPU is asked for."""
    own = simulate(case(overrides={"gpu.attention_tflops": 0.02}))
    assert own.plan.level == "gpu"
    assert not own.plan.uses_npu
    assert {one.estimator for one in own.plan.technique(PlannedAttention).sparse} == {"gpu"}
    assert own.prefill.elapsed_us < dense.prefill.elapsed_us


@pytest.mark.slow
def test_rows_name_the_options(sparse):
    row = modelled_row(case(estimator="npu"), sparse)
    data = json.loads(json.dumps(row.to_dict()))
    assert data["modelled"]["attention"]["keep"] == 0.2
    assert data["asked"]["technique"] == "shadowattn"
    attention_ms = data["modelled"]["prefill"]["attention_ms"]
    assert attention_ms == pytest.approx(sparse.prefill.attention_us / 1e3)
    assert BenchRow.from_dict(data) == row
    assert modelled_row(case(())).modelled.attention is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"numerics": True}, "no calibration is assumed"),
        ({"in_flight": 4}, "number of chunks in flight"),
        ({"techniques": ("shadowattn", "shadowattn")}, "name one twice"),
    ],
)
def test_what_the_technique_cannot_have_is_refused(changed, message):
    with pytest.raises(OptionError, match=message):
        case(**changed)
