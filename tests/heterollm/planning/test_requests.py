"""What `heterollm plan` can be asked for: standard lengths within a time for building, chunks, options."""

from __future__ import annotations

import itertools
import math

import pytest

from heterollm.base import OptionError, PlanError
from heterollm.cli import main
from heterollm.model import find_model, op_specs, shape_of_specs
from heterollm.planning import Planned, ProfiledModel
from heterollm.planning.lengths import BuildCosts
from heterollm.planning.planner import solve_plan
from heterollm.profiler.records import GraphKey, LinearKey, LinearPoint, PowerKey, Profile, Record
from heterollm.profiler.work import rest_rows, split_rows
from heterollm.report.plan import chunked
from heterollm.solver import Plan
from heterollm.solver.request import PlanRequest

MODEL = "qwen2.5-0.5b"
CONFIG = find_model(MODEL).config
SPECS = op_specs(CONFIG, "w4a16", 32, True, float_bits=16)
SHAPE = shape_of_specs(CONFIG, SPECS, MODEL)
LENGTHS = (1, 32, 128, 256)
HISTOGRAM = {1: 20.0, 40: 4.0, 130: 2.0}
BUDGET_S = 12.0


def graph_us(length: int) -> float:
    """The facts' builds: affine through 408 ms at 135 tokens and 2050 ms at 1000, a tenth of it here."""
    return 0.1e3 * (408 + (2050 - 408) * (length - 135) / (1000 - 135))


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A device with static graphs, whose NPU is fast at prompts and slow at single tokens."""
    description = {
        "device": "made",
        "time": "real",
        "npu": "an NPU",
        "activation_dtype": "float16",
        "npu_copies_by_length": True,
        "cache_bytes": 0,
    }
    made = Profile({**description, "npu_standard_lengths": list(LENGTHS), "npu_row_alignment": 64})

    def add(part, spec, rows, tokens, form=""):
        point = LinearPoint.of(spec, tokens, member_rows=rows, form=form)
        weights = sum(rows) * spec.columns
        time_us = 5.0 + max(weights / 3e4, weights * tokens / 5e5)
        if part == "npu":
            time_us = 30.0 + max(weights / 1.5e4, weights * math.ceil(tokens / 32) * 32 / 1e6)
            made.add(Record(GraphKey(point, "code"), values={"build_us": graph_us(tokens)}))
        made.add(Record(LinearKey(part, point, "code"), (time_us,), taken_s=1.0))

    for spec in SHAPE.specs:
        half = split_rows(spec.member_rows, 0.5, 64)
        for tokens in (1, 32) if spec.group == "head" else (1, 32, 64, 256):
            add("gpu", spec, spec.member_rows, tokens)
            add("gpu", spec, rest_rows(spec.member_rows, half), tokens)
        for tokens in (1, 32) if spec.group == "head" else LENGTHS:
            add("npu", spec, spec.member_rows, tokens, "matmul_nbits")
            add("npu", spec, half, tokens, "matmul_nbits")
    for load, watts in {"idle": 1.0, "gpu": 6.0, "npu": 2.0}.items():
        made.add(Record(PowerKey("gauge", load), values={"watts": watts}))
    return made


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    # One for the module, so that the predictor is fitted once.
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.getbasetemp() / "length_choice"))


def solved(profile: Profile, **request: object) -> Planned:
    model = ProfiledModel(profile, CONFIG, SPECS, "w4a16")
    return solve_plan(model, PlanRequest(**{"context": 256, **request}))


@pytest.fixture(scope="module")
def built(profile, tmp_path_factory) -> Planned:
    """The plan of a budget that does not do for all lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.getbasetemp() / "length_choice"))
        made = solved(profile, histogram=HISTOGRAM, build_budget_s=BUDGET_S)
        assert made.length_choice is not None
    return made


def lengths_of(plan: Plan) -> set[int]:
    return {length for entry in plan.entries for length in entry.placement.npu_lengths}


def test_builds_are_predicted_from_those_measured(profile):
    builds = BuildCosts.of(profile, free=False)
    for spec, length in itertools.product(SHAPE.layer, LENGTHS):
        assert builds.graph_us(spec, spec.member_rows, length) == pytest.approx(graph_us(length), rel=0.05)
    without = Profile(profile.description, dict(profile.of_kind(LinearKey)))
    with pytest.raises(PlanError, match="no build of an NPU graph"):
        BuildCosts.of(without, free=False)


def test_the_chosen_lengths_are_built_in_time(built):
    choice = built.length_choice
    assert choice.chosen.build_us <= BUDGET_S * 1e6 < choice.every.build_us
    assert set(choice.chosen.lengths) < set(LENGTHS)
    assert lengths_of(built.plan) <= set(choice.chosen.lengths)
    # What is built is what the plan names, layer for layer.
    entries = {
        (own.group, own.placement.npu_rows, length, own.layers)
        for own in built.plan.entries
        for length in own.placement.npu_lengths
    }
    assert choice.chosen.graphs == sum(high - low + 1 for *_, (low, high) in entries)
    # Nearly as fast as all lengths, and faster than the longest alone.
    assert choice.every.pass_us <= 1.01 * choice.chosen.pass_us
    assert choice.chosen.pass_us < choice.single.pass_us


def test_hardly_any_time_builds_nothing(profile):
    made = solved(profile, histogram=HISTOGRAM, build_budget_s=0.01)
    assert made.length_choice.chosen.lengths == ()
    assert not made.plan.uses_npu


def test_the_command_says_what_is_built_and_writes_a_plan_of_it(profile, built, tmp_path, capsys):
    file, histogram, target = (tmp_path / name for name in ("profile.json", "prompts.txt", "plan.json"))
    profile.save(file)
    histogram.write_text("1:20\n40:4, 130\n130:1\n", encoding="utf-8")
    words = ["plan", MODEL, "--profile", str(file), "--context", "256", "--histogram", str(histogram)]
    assert main([*words, "--build-budget", "12s", "--prompt", "40", "-o", str(target)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Standard lengths within 12 s of building" in shown
    assert f"chosen {', '.join(map(str, built.length_choice.chosen.lengths))}" in shown
    assert Plan.load(target) == built.plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--build-budget", "20s"], "--histogram"),
        (["--build-budget", "x", "--histogram", "64:1"], "--build-budget"),
        (["--build-budget", "20s", "--histogram", "0:1"], "--histogram"),
        (["--build-budget", "20s", "--histogram", "64:-1"], "64"),
        (["--histogram", "FOLDER"], "--histogram"),
        (["--histogram", "64:0,128:0"], "--histogram"),
        (["--prompt", "64,0"], "--prompt"),
        (["--output", "FOLDER"], "folder"),
    ],
)
def test_nonsense_is_refused(profile, tmp_path, capsys, arguments, said):
    file = tmp_path / "profile.json"
    profile.save(file)
    arguments = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    assert main(["plan", MODEL, "--profile", str(file), "--context", "256", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_without_a_budget_all_lengths_are_offered(profile):
    made = solved(profile, histogram=HISTOGRAM)
    assert made.length_choice is None
    assert lengths_of(made.plan) > lengths_of(
        solved(profile, histogram=HISTOGRAM, build_budget_s=BUDGET_S).plan
    )
    with pytest.raises(OptionError, match="none were named"):
        solved(profile, build_budget_s=1.0)


# -- chunks -----------------------------------------------------------------------------------------------


def test_long_prompts_run_in_the_chunks_that_the_solver_chose(profile, monkeypatch):
    asked = []

    def best_chunk(solver, prompts, costs_at, slices):
        asked.append((dict(prompts), costs_at(700).position, set(slices)))
        return 128

    monkeypatch.setattr("heterollm.solver.shorter_chunks.best_chunk", best_chunk)
    monkeypatch.setattr("heterollm.solver.shorter_chunks.GAIN_FRACTION", -math.inf)
    made = solved(profile, context=1024, level="tensor")
    assert made.plan.chunk_length == 128
    assert [length for _, length in made.plan.chunks(300)] == [128, 128, 44]
    assert chunked(made.plan, 300) == "A prompt of 300 tokens runs in several passes: 2 of 128 and one of 44."
    assert chunked(made.plan, 256) == "A prompt of 256 tokens runs in several passes: 2 of 128."
    assert max(entry.lengths[1] for entry in made.plan.entries) == 128
    with pytest.raises(PlanError, match="prefill of 129 tokens"):
        made.model.predict(made.plan, "prefill", 129)
    lengths = (32, 128, 256, 48, 192, 384, 1024)
    assert asked == [(dict.fromkeys(lengths, 1.0), 700, {"qkv", "o", "gate_up", "down", "head"})]
    # As they come, if that is known; one token is decode.
    assert solved(profile, context=2048, histogram={1: 5.0, 900: 2.0, 60: 1.0}).plan.chunk_length == 128
    assert asked[-1][0] == {900: 2.0, 60: 1.0}
    # Nothing to choose where no prompt is longer than a pass.
    assert solved(profile, context=2048, histogram={1: 5.0, 250: 2.0}).plan.chunk_length == 256
    assert len(asked) == 2


# -- options ----------------------------------------------------------------------------------------------


def test_options_of_the_command_reach_the_solver(profile, tmp_path, capsys):
    """By the plan that is written: who computes how much of a prompt's layers."""
    file, target = tmp_path / "profile.json", tmp_path / "plan.json"
    profile.save(file)

    def npu_shares(*options: str) -> dict[str, float]:
        words = ["plan", MODEL, "--profile", str(file), "--context", "32", "--prompt", "32"]
        assert main([*words, "-o", str(target), *options]) == 0
        plan = Plan.load(target)
        placed = {spec.group: plan.placement("prefill", 32, spec) for spec in SHAPE.layer}
        return {spec.group: sum(placed[spec.group].npu_rows) / spec.rows for spec in SHAPE.layer}

    free = npu_shares()
    assert any(0.0 < share < 1.0 for share in free.values())
    assert set(npu_shares("--forbid", "npu").values()) == {0.0}
    assert set(npu_shares("--forbid", "gpu").values()) == {1.0}
    assert set(npu_shares("--npu-gib", "0").values()) == {0.0}
    # With hardly any of the GPU all is the NPU's, and so it is where energy alone counts: the GPU takes six
    # times as much power.
    assert set(npu_shares("--gpu-share", "0.01").values()) == {1.0}
    assert set(npu_shares("--energy-weight", "1").values()) == {1.0}
    between = npu_shares("--gpu-share", "0.9")
    assert all(between[group] >= share for group, share in free.items())
    capsys.readouterr()
    words = ["plan", MODEL, "--profile", str(file), "--context", "128", "--energy-weight", "2"]
    assert main(words) == 1
    assert "energy weight" in capsys.readouterr().err
