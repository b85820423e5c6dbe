"""shadowattn in plans: only asked for, with calibrated heads, and where it is predicted to pay."""

import dataclasses

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import CalibrationError, OptionError, ProfileError, silent
from heterollm.calibration import calibrate
from heterollm.cli import main
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation
from heterollm.model import ModelConfig, find_model, op_specs
from heterollm.planning import ProfiledModel, assumed_heads
from heterollm.planning.planner import solve_plan
from heterollm.planning.techniques import sparse_attention
from heterollm.planning.techniques.llm_npu import check_technique
from heterollm.profiler.records import Profile, SparseKey
from heterollm.report import console, plan_report
from heterollm.simulate.profile import profile_of
from heterollm.solver import AttentionRequest, Plan, PlannedAttention, PlanRequest, SparseAttention

CONTEXT = 4096
REQUEST = PlanRequest(
    context=CONTEXT, level="tensor", techniques=("shadowattn",), attention=AttentionRequest(estimator="gpu")
)


def attention(plan):
    return plan.technique(PlannedAttention)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of a model on a simulated device, with times of sparse attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = find_model("qwen2.5-0.5b", closest=False)
        config = dataclasses.replace(found.config, per_layer=found.config.per_layer[:2])
        device = open_device("sim:snapdragon-8gen3", simulation=Simulation())
        specs = op_specs(config, "w4a16", 128, True, float_bits=16)
        profile = profile_of(device, "small", config, specs, silent, ("shadowattn",))
        yield ProfiledModel(profile, config, specs, "w4a16", "assumed")


@pytest.fixture(scope="module")
def heads(model):
    return assumed_heads(model.config, REQUEST.attention)


@pytest.fixture(scope="module")
def solved(model, heads, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield solve_plan(model, REQUEST, {"attention": heads})


def without_sparse_times(model):
    profile = model.profile
    records = {key: record for key, record in profile.records.items() if not isinstance(key, SparseKey)}
    return dataclasses.replace(model, profile=Profile(profile.description, records, profile.runs))


@pytest.mark.slow
def test_the_technique_adds_attention_and_changes_nothing_else(model, solved):
    plain = solve_plan(model, structs.replace(REQUEST, techniques=(), attention=AttentionRequest())).plan
    assert not attention(plain).entries
    assert attention(solved.plan).sparse
    assert solved.plan.entries == plain.entries
    assert Plan.from_json(solved.plan.to_json()) == solved.plan
    assert solved.notes == ()


@pytest.mark.slow
def test_long_prompts_gain_and_short_ones_lose_nothing(model, solved):
    dense = solved.plan.with_technique(PlannedAttention(()))
    for prompt in (64, 256, 1024, 2048, CONTEXT):
        own, other = (model.prompt(plan, prompt).time_us for plan in (solved.plan, dense))
        assert own <= other
    assert own < other
    assert model.predict(solved.plan, "decode", 1) == model.predict(dense, "decode", 1)


@pytest.mark.slow
def test_heads_keep_what_was_asked_in_the_mean(model, heads, solved):
    assert all(one.estimator == "gpu" for one in attention(solved.plan).sparse)
    assert sum(map(sum, heads.keep)) / (2 * model.config.attention.heads) == pytest.approx(0.2, rel=0.01)


@pytest.mark.slow
def test_plan_explains_where_sparse_attention_pays(solved, capsys):
    console.present(plan_report(solved, (256, CONTEXT), 1, explain=True))
    shown = " ".join(capsys.readouterr().out.split())
    assert "Attention of prompts is sparse in" in shown
    assert "Attention of all layers in the longest passes, predicted" in shown


@pytest.mark.slow
def test_chunks_run_one_after_the_other_and_a_note_says_so(model, heads):
    several = structs.replace(REQUEST, in_flight=4)
    solved = solve_plan(model, several, {"attention": heads})
    assert solved.plan.schedule is None
    assert attention(solved.plan).sparse
    assert any("combined with several at once" in note for note in solved.notes)


@pytest.mark.slow
def test_profiles_without_its_times_are_refused_by_name(model, heads, solved):
    lacking = without_sparse_times(model)
    with pytest.raises(ProfileError, match="no times of sparse attention"):
        sparse_attention.placed(lacking, solved.plan, REQUEST, heads)
    # Without the technique nothing is missing.
    plain = solve_plan(lacking, PlanRequest(context=CONTEXT, level="tensor")).plan
    assert not attention(plain).entries


@pytest.mark.slow
def test_devices_whose_npu_estimates_no_scores_are_refused_by_name(model, heads, solved):
    profile = model.profile
    records = {
        key: record
        for key, record in profile.records.items()
        if not (isinstance(key, SparseKey) and key.operator == "scores")
    }
    lacking = dataclasses.replace(model, profile=Profile(profile.description, records, profile.runs))
    on_npu = structs.replace(REQUEST, attention=AttentionRequest(estimator="npu"))
    with pytest.raises(OptionError, match="has no NPU with graphs of attention scores"):
        sparse_attention.placed(lacking, solved.plan, on_npu, heads)
    assert sparse_attention.placed(lacking, solved.plan, REQUEST, heads).technique(PlannedAttention).sparse


@pytest.mark.parametrize(
    ("level", "calibrated", "message"),
    [
        ("auto", False, "needs calibrated attention heads"),
        ("of a file", True, "adds attention to a plan that is made"),
    ],
)
def test_what_the_technique_cannot_have_is_refused(level, calibrated, message):
    with pytest.raises(OptionError, match=message):
        check_technique(REQUEST, "w4a16", level, calibrated=calibrated)


@pytest.mark.parametrize("level", ["auto", "gpu", "npu", "layer", "tensor", "block"])
def test_every_level_can_have_the_technique(level):
    check_technique(REQUEST, "w4a16", level, calibrated=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 0.0}, "keep a share of 0.0"),
        ({"keep": 1.5}, "keep a share of 1.5"),
        ({"keep_by": "luck"}, "no rule to share out kept keys 'luck'"),
        ({"buckets": 3}, "no number of score buckets 3"),
        ({"estimator": "cpu"}, "no estimator of scores 'cpu'"),
        ({"pipeline": "none"}, "no pipeline over heads 'none'"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        AttentionRequest(**changes)


@pytest.mark.parametrize("command", [["plan", "MODEL"], ["generate", "MODEL", "text"]])
def test_commands_refuse_the_technique_without_a_calibration(command, capsys):
    assert main([*command, "--device", "host", "--technique", "shadowattn"]) != 0
    assert "needs calibrated attention heads" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_calibration_gives_ratios_and_exponents_of_its_own_model_alone(bundled_model, tmp_path):
    path = tmp_path / "calibration.json"
    calibrate(bundled_model, output=path, windows=2, gpu_threads=1)
    config = ModelConfig.from_folder(bundled_model)
    request = structs.replace(REQUEST, attention=AttentionRequest(keep=0.3))
    heads = sparse_attention.calibrated(path, config, request)
    assert [len(own) for own in heads.keep] == [config.attention.heads] * config.layers
    assert [len(own) for own in heads.exponents] == [config.attention.kv_heads] * config.layers
    assert sum(map(sum, heads.keep)) / (config.layers * config.attention.heads) == pytest.approx(
        0.3, rel=0.05
    )
    assert sparse_attention.calibrated(path, config, PlanRequest()) is None
    with pytest.raises(CalibrationError, match="no attention heads of this model"):
        sparse_attention.calibrated(
            path, dataclasses.replace(config, per_layer=(*config.per_layer, config.per_layer[0])), request
        )


@pytest.mark.slow
def test_sparse_placements_hold_every_key_head(model, solved):
    for one in attention(solved.plan).sparse:
        assert isinstance(one, SparseAttention)
        one.check(model.config.attention.heads, model.config.attention.kv_heads, (1, 1))


def test_assumed_heads_differ_as_asked_and_the_same_every_time(model):
    request, layers = AttentionRequest(keep=0.1), model.config.layers
    found = assumed_heads(model.config, request, 2.0)
    assert found == assumed_heads(model.config, request, 2.0)
    # The first layer keeps what it may, and no head less than half of the ratio.
    rest = np.array(found.keep[1:])
    assert 1.3 < (rest.max(axis=1) / rest.mean(axis=1)).min() <= 2.01
    assert rest.min() >= 0.05
    wider = assumed_heads(model.config, request, 4.0)
    assert np.array(wider.keep[1:]).max() > rest.max()
    shares = np.array(assumed_heads(model.config, AttentionRequest(keep_by="importance"), 2.0).keep)
    assert shares.mean() == pytest.approx(0.2)
    assert len({*shares.ravel().round(6)}) > 3
    alike = assumed_heads(model.config, request)
    assert [len({*layer}) for layer in (*alike.keep, *alike.exponents)] == [1] * 2 * layers
    for imbalance in (0.5, 100.0, float("nan")):
        with pytest.raises(OptionError, match="not possible"):
            assumed_heads(model.config, request, imbalance)
    with pytest.raises(OptionError, match="no importance of heads"):
        assumed_heads(model.config, AttentionRequest(keep_by="importance"))
