"""Level ``auto``: the fastest plan that profiles can predict, the split of the cores included."""

import math
import shutil
from dataclasses import replace

import pytest

from heterollm.data import bundled_model
from heterollm.kernels.devices import open_device
from heterollm.kernels.threads import allowed_cores, split_threads
from heterollm.llm import LLM
from heterollm.loading import plan_for
from heterollm.model import ModelConfig, op_specs
from heterollm.planning import CoreSplit, LoadOptions, ProfiledModel
from heterollm.planning.auto import Candidate, compared, predicted, rule_plans, weights_of, words
from heterollm.planning.planner import solve_plan, solver_of
from heterollm.profiler.records import LinearKey, Profile, profile_path
from heterollm.solver import Plan, PlanRequest, level_plan

MODEL = bundled_model()
CORES = len(allowed_cores())
HALVES = tuple(map(len, (split_threads().gpu_cores, split_threads().npu_cores)))

pytestmark = pytest.mark.skipif(CORES < 2, reason="one core cannot be split")


@pytest.fixture(scope="module")
def halves(keep_even_profile, tmp_path_factory):
    """A cache folder with a profile of the cores in halves, on which both processors are equally fast."""
    target = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(target))
        keep_even_profile(open_device("host"), MODEL, "w4a16")
    [path] = (target / "profiles").glob("*.json")
    made = Profile.load(path)
    made.runs["1.000"] = {
        "started_s": 1.0,
        "since_s": 1.0,
        "finished": True,
        "drift_fraction": {"gpu": 0.5},
    }
    path.write_text(made.to_json())
    return target


@pytest.fixture
def profile(halves, tmp_path, monkeypatch):
    shutil.copytree(halves, tmp_path / "cache")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    [path] = (tmp_path / "cache" / "profiles").glob("*.json")
    return Profile.load(path)


def add_all_cores(profile, fraction):
    """Keep a profile of the GPU on all cores, with times that are a fraction of those on half of them."""
    without = {"npu": None, "npu_versions": {}, "npu_standard_lengths": [], "npu_row_alignment": 0}
    made = Profile(profile.description | without | {"gpu_threads": CORES, "npu_threads": 0})
    made.runs.update(profile.runs)
    for key, record in profile.of_kind(LinearKey):
        if key.processor == "gpu":
            samples = tuple(sample * fraction for sample in record.samples_us)
            made.add(replace(record, samples_us=samples))
    made.save(profile_path("host", made.fingerprint))


def choose(gpu_threads=None, **options):
    split = CoreSplit(LoadOptions(device="host", **options), ModelConfig.from_folder(MODEL), 512)
    return split(gpu_threads), split.reason


def test_the_gpu_on_all_cores_runs_everything_where_it_is_faster(profile):
    add_all_cores(profile, 0.3)
    threads, reason = choose()
    assert threads == (CORES, 0)
    assert reason.startswith(f"auto: gpu on all {CORES} cores, predicted prompts 1.")
    assert f"as fast as block on {HALVES[0]}+{HALVES[1]} cores" in reason


def test_both_processors_share_the_work_where_they_are_much_faster(profile):
    add_all_cores(profile, 2.0)
    threads, reason = choose()
    assert threads == HALVES
    assert f"as fast as gpu on all {CORES} cores" in reason
    assert "within the machine's drift" not in reason


def test_a_small_gain_does_not_take_a_core_from_the_gpu(profile):
    add_all_cores(profile, 0.65)
    threads, reason = choose()
    assert threads == (CORES, 0)
    assert reason.endswith(
        "; another split of the cores must be predicted 2.0 x as fast, as predictions are rough"
    )


def test_a_margin_within_the_drift_of_the_profiles_is_said(profile):
    add_all_cores(profile, 0.4)
    assert choose()[1].endswith("; within the machine's drift while it was profiled, 50%")


def test_without_a_profile_of_all_cores_the_gpu_gets_them(profile):
    """A profile of the halves alone shows nothing about the other split, and took half of the speed."""
    assert choose() == ((CORES, 0), "")
    # OpenCL is open on half of them: the GPU cannot get the others.
    assert choose(gpu_threads=HALVES[0])[0] == HALVES


def test_without_a_profile_no_core_idles(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    assert choose() == ((CORES, 0), "")
    assert choose(gpu_threads=HALVES[0]) == ((HALVES[0], None), "")


def test_profiles_that_do_not_fit_here_do_not_count(profile, tmp_path):
    folder = tmp_path / "cache" / "profiles"
    for name, value in (("gpu_threads", CORES + 1), ("npu_versions", {"onnxruntime": "0.1"})):
        made = Profile(profile.description | {name: value})
        made.runs.update(profile.runs)
        made.save(profile_path("host", made.fingerprint))
    (folder / f"host-{'0' * 16}.json").write_text("damaged")
    profile_path("host", profile.fingerprint).unlink()
    assert choose() == ((CORES, 0), "")


def test_a_process_whose_opencl_is_open_keeps_its_threads(profile):
    add_all_cores(profile, 0.3)
    assert choose(gpu_threads=HALVES[0])[0] == HALVES


def test_levels_and_saved_plans_win(profile, tmp_path):
    assert choose(plan="tensor") == ((None, None), "")
    made = plan_for(MODEL, LoadOptions(device="host", gpu_threads=HALVES[0], npu_threads=HALVES[1])).plan
    assert made.threads == HALVES
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    add_all_cores(profile, 0.3)
    assert choose(plan=tmp_path / "plan.json") == (HALVES, "")
    assert choose(plan=made, gpu_threads=CORES) == ((None, None), "")


def test_a_load_says_which_plan_it_took_and_by_how_much(profile):
    add_all_cores(profile, 2.0)
    with LLM.load(MODEL, device="host", context=512) as llm:
        [choice] = [text for text in llm.plan_notes if text.startswith("auto: ")]
        assert llm.plan.level == "block"
    assert choice.startswith(f"auto: block on {HALVES[0]}+{HALVES[1]} cores")


def test_a_plan_takes_the_place_of_a_simpler_one_only_if_it_is_clearly_faster():
    specs = op_specs(ModelConfig.from_folder(MODEL), "w4a16", 32, True)
    labels = {"device": "host", "precision": "w4a16", "standard_lengths": (1, 64), "chunk_length": 64}
    gpu, layer, npu = (level_plan(level, specs, **labels) for level in ("gpu", "layer", "npu"))
    times = {64: 9.0, 1: 3.0}, {64: 8.9, 1: 3.0}, {64: 1.0, 1: 2.0}
    first, alike, best = map(Candidate, (gpu, layer, npu), times)
    weights = {64: 1.0, 1: 1.0}
    assert compared([first, alike], weights)[0][1] is first
    ranked = compared([first, alike, best], weights)
    assert [one for _, one in ranked] == [best, alike, first]
    assert words(ranked) == "auto: npu, predicted prompts 8.90 x and decode 1.50 x as fast as layer"


def test_a_plan_takes_the_place_of_the_gpu_only_beyond_the_error_of_its_prediction():
    specs = op_specs(ModelConfig.from_folder(MODEL), "w4a16", 32, True)
    labels = {"device": "host", "precision": "w4a16", "standard_lengths": (1, 64), "chunk_length": 64}
    gpu, layer = (level_plan(level, specs, **labels) for level in ("gpu", "layer"))
    alone, weights = Candidate(gpu, {64: 10.0, 1: 2.0}), {64: 1.0, 1: 1.0}
    for error, best in ((0.0, layer), (0.05, layer), (0.15, gpu)):
        both = Candidate(layer, {64: 9.0, 1: 1.8}, error=error)
        assert compared([both, alone], weights)[0][1].plan is best
        # The GPU alone on other cores has times of another profile, and a margin of its own.
        elsewhere = replace(alone, threads=HALVES)
        assert compared([both, elsewhere], weights)[0][1].plan is layer


def test_the_error_of_a_plan_is_that_of_its_profile(profile):
    request = PlanRequest(context=512)
    weights = weights_of(request, (1, 64, 256))
    noisy = Profile(profile.description, dict(profile.records), profile.runs)
    for key, record in profile.of_kind(LinearKey):
        [time_us] = record.samples_us
        noisy.records[key] = replace(record, samples_us=(0.5 * time_us, time_us, 1.5 * time_us))
    errors = []
    for own in (profile, noisy):
        model = model_of(own)
        gpu, npu, _ = rule_plans(model, request, solver_of(model, request))
        assert predicted(model, gpu, weights).error == 0.0
        errors.append(predicted(model, npu, weights).error)
    assert 0.005 < errors[0] < 0.05 < errors[1] < 0.5


def test_the_levels_that_follow_a_rule_are_compared_as_far_as_they_fit(profile):
    model = model_of(profile)
    request = PlanRequest(context=512)
    solver = solver_of(model, request)
    assert [plan.level for plan in rule_plans(model, request, solver)] == ["gpu", "npu", "layer"]
    none = solver_of(model, PlanRequest(context=512, npu_gib=0.0))
    assert [plan.level for plan in rule_plans(model, request, none)] == ["gpu"]
    assert rule_plans(model, PlanRequest(context=512, gpu_share=0.5), solver) == []


def model_of(profile):
    config = ModelConfig.from_folder(MODEL)
    return ProfiledModel(profile, config, op_specs(config, "w4a16", 32, True, float_bits=32), "w4a16")


def test_prompts_and_decode_count_alike_unless_a_histogram_says_otherwise():
    weights = weights_of(PlanRequest(context=128), (1, 32, 64, 128, 256))
    assert weights == {32: 1.0, 48: 1.0, 64: 1.0, 96: 1.0, 128: 1.0, 1: 5.0}
    assert weights_of(PlanRequest(histogram={1: 3.0, 64: 1.0}), (1, 64)) == {1: 3.0, 64: 1.0}


def test_a_profile_that_cannot_predict_a_time_is_not_compared(profile):
    plan = solve_plan(model_of(profile), PlanRequest(context=512)).plan
    unknown = Candidate(plan, {64: math.inf, 1: 1.0})
    assert not unknown.known
    ranked = compared([unknown, Candidate(plan, {64: 1.0, 1: 1.0}, HALVES)], {64: 1.0})
    assert ranked[0][1] is unknown
    assert words(ranked) == "auto: block"
