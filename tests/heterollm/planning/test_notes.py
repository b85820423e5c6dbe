"""Notes on plans: each is tested against the plan that it accompanies."""

import random
import re

import pytest

from heterollm.base import OptionError, ProfileError
from heterollm.data import bundled_model
from heterollm.kernels.devices import open_device
from heterollm.model import ModelConfig, model_shape, op_specs
from heterollm.planning import ProfiledModel, profile_words
from heterollm.planning.notes import disturbed_note
from heterollm.planning.planner import solve_plan
from heterollm.profiler import SessionOptions, profile_device
from heterollm.profiler.predict import mark
from heterollm.profiler.records import LinearKey, Profile, Record
from heterollm.report.console import render
from heterollm.report.plan import plan_report
from heterollm.solver import PlannedAttention, PlannedExperts, PlanRequest

CONFIG = ModelConfig.from_folder(bundled_model())


@pytest.fixture(scope="module", params=["sim:snapdragon-8gen3", "sim:snapdragon-8elite"])
def measured(request, tmp_path_factory):
    """A profile of weights at precision w4a16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        shape = model_shape(CONFIG, "tiny", float_bits=16)
        path = tmp_path_factory.mktemp("profile") / "profile.json"
        yield profile_device(open_device(request.param), [shape], SessionOptions.of(quick=True), path=path)[0]


def model_of(profile, precision="w4a16", group_size=32):
    specs = op_specs(CONFIG, precision, group_size, True, float_bits=16)
    return ProfiledModel(profile, CONFIG, specs, precision)


def without(profile, draw):
    """Return a profile that lacks a random part of the NPU's linear layers."""
    groups = set(draw.sample(["qkv", "o", "gate_up", "down", "ffn", "head"], draw.choice((0, 1, 2, 4, 6))))
    records = {
        key: record
        for key, record in profile.records.items()
        if not (isinstance(key, LinearKey) and key.processor == "npu" and key.point.group in groups)
    }
    return Profile(profile.description, records, profile.runs)


def groups_on_npu(plan):
    found = {entry.group for entry in plan.placed if entry.placement.npu_lengths}
    return found | ({"gate_up", "down"} if "ffn" in found else set())


def check(text, plan):
    """Check the claims of a note, by its words."""
    on_npu = groups_on_npu(plan)
    if "GPU computes everything" in text:
        assert not plan.uses_npu
    if "GPU computes them" in text:
        named = set(re.findall(r"qkv|gate_up|down|\bo\b", text.partition(" of its NPU")[0]))
        assert not on_npu & (named or {"qkv", "o", "gate_up", "down"})
    if "computes all" in text or "Experts stay on the GPU" in text:
        assert not plan.technique(PlannedExperts).is_active
    if "one after the other" in text:
        assert plan.schedule is None
    if "Attention stays dense" in text:
        assert not plan.technique(PlannedAttention).sparse


@pytest.mark.parametrize("seed", range(5))
def test_no_note_contradicts_its_plan(measured, seed, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    draw = random.Random(f"{seed} {measured.device}")
    profile = without(measured, draw)
    model = model_of(profile, draw.choice(("w4a16", "w4a16", "fp16")), draw.choice((32, 64)))
    request = PlanRequest(
        context=draw.choice((64, 512)),
        level=draw.choice(("auto", "auto", "tensor", "block")),
        forbidden=draw.choice(((), (), ("npu",), ("row", "hybrid"))),
        npu_gib=draw.choice((None, None, 0.001)),
        in_flight=draw.choice((1, 1, 2)),
    )
    if request.level == "auto":
        solved = solve_plan(model, request)
    else:
        try:
            solved = solve_plan(model, request)
        except (OptionError, ProfileError):
            return  # a level that was asked for by name is refused where the profile lacks it
    for text in solved.notes[request.level == "auto" :]:  # the first is the choice of auto
        check(text, solved.plan)
    lacking = model.groups_without_npu_times
    assert not lacking & groups_on_npu(solved.plan)
    assert bool(lacking) == any("heterollm profile MODEL --device" in text for text in solved.notes)


def test_unmeasured_weights_stay_on_the_gpu_as_the_note_says(measured, tmp_path, monkeypatch):
    """Times of other formats made ``layer`` look fast, under a note that the GPU computes everything."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    solved = solve_plan(model_of(measured, group_size=64), PlanRequest(context=512))
    assert solved.plan.level == "gpu"
    choice, note = solved.notes
    assert choice.startswith("auto: gpu")
    assert "no linear layers of its NPU" in note
    assert "The GPU computes everything" in note
    assert not solved.plan.uses_npu


def test_a_build_budget_for_no_graph_leaves_none_to_other_levels(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    asked = PlanRequest(context=512, histogram={1: 1.0, 256: 1.0}, build_budget_s=1e-6)
    solved = solve_plan(model_of(measured), asked)
    assert solved.length_choice.chosen.lengths == ()
    assert not solved.plan.uses_npu


def test_a_disturbed_profile_is_said_with_its_points_and_the_next_step(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    assert disturbed_note(measured) == ""
    profile = Profile(measured.description, dict(measured.records), measured.runs)
    key = next(
        key
        for key in profile.records
        if isinstance(key, LinearKey) and (key.processor, key.point.tokens) == ("npu", 256)
    )
    truth_us = profile.records[key].median_us
    profile.records[key] = Record(key, (113.0 * truth_us,) * 5)
    undisturbed, poisoned = (
        solve_plan(model_of(one), PlanRequest(context=512)) for one in (measured, profile)
    )
    assert mark(profile) == 1
    found = solve_plan(model_of(profile), PlanRequest(context=512))
    _, note = found.notes
    assert f"1 of {len(profile.records)} points" in note
    assert f"npu, {key.point.group}" in note
    assert "`heterollm profile MODEL --update`" in note
    shown = render(plan_report(found, [64], 1, explain=False))
    assert "1 disturbed" in shown
    shown = render(plan_report(undisturbed, [64], 1, explain=False))
    assert profile_words(measured) in shown
    assert f"{len(measured.records)} points, none disturbed, the last 20" in shown

    def prompt_us(solved):
        return solved.model.prompt(solved.plan, 256).time_us

    assert prompt_us(found) == pytest.approx(prompt_us(undisturbed), rel=0.1)
    [choice] = poisoned.notes
    assert choice.startswith("auto: ")
