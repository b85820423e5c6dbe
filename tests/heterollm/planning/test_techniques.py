"""The technique llm.npu on the host: plans follow the calibration, and answers stay those of other orders."""

import json

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import OptionError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.cli import main
from heterollm.kernels.devices import open_device
from heterollm.llm import LLM
from heterollm.planning import LoadOptions
from heterollm.planning.techniques.llm_npu import check_technique
from heterollm.solver import Plan, PlanRequest

CONTEXT = 600


@pytest.fixture(scope="module")
def calibration(bundled_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    calibrate(
        bundled_model, output=path, precision="w8a8", windows=3, gpu_threads=1, policy=Policy(pruned=0.5)
    )
    return path


@pytest.fixture(scope="module", autouse=True)
def profiled(bundled_model, keep_even_profile, tmp_path_factory):
    """A profile of the host for integer graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        keep_even_profile(open_device("host", gpu_threads=1), bundled_model, "w8a8")
        yield


def load(model, calibration, name=None, **options):
    return LLM.load(
        model,
        device="host",
        gpu_threads=1,
        precision="w8a8",
        calibration=calibration,
        context=CONTEXT,
        request=None if name is None else PlanRequest(techniques=(name,)),
        **options,
    )


def prefill_placements(plan):
    return [entry for entry in plan.entries if entry.phase == "prefill" and entry.placement.npu_lengths]


@pytest.mark.slow
def test_plans_have_one_chunk_length_and_the_shadows_of_the_calibration(bundled_model, calibration):
    linears = load_calibration(calibration).linears
    shadowed = {(one.layer, one.group) for one in linears if one.int8.activations == "shadow"}
    assert shadowed
    with load(bundled_model, calibration, "llm.npu") as llm:
        plan = llm.plan
    entries = prefill_placements(plan)
    assert {entry.placement.npu_lengths for entry in entries} == {(plan.chunk_length,)}
    assert {entry.placement.form for entry in entries} == {"static_int8"}
    assert plan.request.techniques == ("llm.npu",)
    assert shadowed == {
        (layer, entry.group)
        for entry in entries
        if entry.placement.shadow
        for layer in range(entry.layers[0], entry.layers[1] + 1)
    }


@pytest.mark.slow
def test_chunks_in_flight_with_shadows_answer_as_one_after_the_other(bundled_model, calibration, tmp_path):
    ids = np.random.default_rng(0).integers(1, 400, 560).tolist()
    path = tmp_path / "plan.json"
    with load(bundled_model, calibration, "llm.npu") as llm:
        plan = structs.replace(llm.plan, schedule=None)
    with load(bundled_model, calibration, plan=plan) as llm:
        before = llm.session().prefill(ids).copy()
    times = tuple(
        {"group": group, "before_us": 50.0, "before_us_per_position": 0.1, "gpu_us": 10.0, "npu_us": 100.0}
        for group in ("qkv", "o", "gate_up", "down")
    )
    text = structs.replace(plan, request=None).to_json()
    data = json.loads(text) | {
        "schedule": {"policy": "out_of_order", "in_flight": 3, "times": times, "entries": []}
    }
    path.write_text(json.dumps(data))
    flown = Plan.load(path)
    assert flown.has_shadows
    assert flown.lanes == 3
    with load(bundled_model, calibration, plan=path) as llm:
        assert np.array_equal(llm.session().prefill(ids), before)


@pytest.mark.parametrize(
    ("request_of", "precision", "level", "calibrated", "message"),
    [
        ("llm.npu", "w4a16", "auto", True, "precision w8a8, and these have w4a16"),
        ("llm.npu", "w8a8", "auto", False, "needs calibrated ranges"),
        ("llm.npu", "w8a8", "gpu", True, "makes the plan, and plan 'gpu' is given"),
        ("llm.npu", "w8a8", "block", True, "makes the plan, and plan 'block' is given"),
    ],
)
def test_what_a_pass_cannot_have_is_refused(request_of, precision, level, calibrated, message):
    with pytest.raises(OptionError, match=message):
        check_technique(PlanRequest(techniques=(request_of,)), precision, level, calibrated=calibrated)


def test_a_load_refuses_a_pass_before_it_opens_a_device():
    with pytest.raises(OptionError, match="needs weights of precision w8a8"):
        LoadOptions(request=PlanRequest(techniques=("llm.npu",)))


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["llm.npu", "auto"])
def test_generate_takes_a_technique(bundled_model, calibration, capsys, technique):
    command = ["generate", str(bundled_model), "import os", "--device", "host", "--gpu-threads", "1"]
    command += ["--precision", "w8a8", "--calibration", str(calibration), "--context", str(CONTEXT)]
    assert main([*command, "--technique", technique, "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert ("Techniques: " in captured.err) == (technique == "auto")


@pytest.mark.slow
def test_plan_explains_a_pass(bundled_model, calibration, capsys):
    command = ["plan", str(bundled_model), "--device", "host", "--gpu-threads", "1", "--precision", "w8a8"]
    command += ["--calibration", str(calibration), "--context", str(CONTEXT), "--prompt", "64,512"]
    assert main([*command, "--technique", "llm.npu", "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "level layer, predicted from the profile" in shown
    assert "Bubbles: the share of the prompt without NPU work, predicted" in shown
    assert "Graphs for each chunk apart would be" in shown
