"""Plans from a profile: made, shown, saved and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from heterollm import LLM
from heterollm.cli import main
from heterollm.config import ModelConfig
from heterollm.demo import bundled_model
from heterollm.errors import OptionError
from heterollm.kernels.device import open_device
from heterollm.layout import op_specs
from heterollm.model_shape import shape_of_specs
from heterollm.plan_command import solve_for
from heterollm.planning import Planner, PlanRequest
from heterollm.profiler.caches import last_level_cache_bytes
from heterollm.profiler.linear_bench import code_of
from heterollm.profiler.points import enumerate_points
from heterollm.profiler.profile import Profile, profile_path
from heterollm.profiler.records import LinearKey, Record
from heterollm.solver.plan import Plan

FIELDS = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
FIELDS |= {"head_dim": 64, "max_position_embeddings": 1024, "vocab_size": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_model) -> Path:
    target = tmp_path_factory.mktemp("model")
    write_model(target, "llama", **FIELDS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model() / name, target / name)
    return target


@pytest.fixture
def profile(folder, tmp_path, monkeypatch) -> Profile:
    """A profile of the host in which both parts are equally fast, so that everything is worth a cut."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    device = open_device("host")
    config = ModelConfig.from_folder(folder)
    shape = shape_of_specs(config, op_specs(config, "w4a16", 32, True, float_bits=32), "model")
    points, _ = enumerate_points(
        [shape],
        device.npu,
        cache_bytes=last_level_cache_bytes(),
        max_buffer_bytes=device.gpu.traits.max_buffer_bytes,
    )
    made = Profile.of(device)
    for work in points:
        key = LinearKey(work.part, work.point, code_of(work.part))
        made.add(Record(key, (5.0 + work.point.flops / 1e4,)))
    made.save(profile_path(device.name, device.fingerprint()))
    return made


def planner(profile: Profile, folder: Path, **request: object) -> Planner:
    config = ModelConfig.from_folder(folder)
    specs = op_specs(config, "w4a16", 32, True, float_bits=32)
    return Planner(profile, config, specs, "w4a16", PlanRequest(**request))


def test_parts_of_one_speed_share_the_work(profile, folder) -> None:
    solved = planner(profile, folder, context=512).one_pass("prefill", 256)
    shares = [
        sum(choice.chosen.placement.npu_rows)
        / choice.spec.rows
        * min(1.0, sum(choice.chosen.placement.npu_lengths) / 256)
        for choice in solved.choices
        if choice.spec.group != "head"
    ]
    assert all(0.3 <= share <= 0.7 for share in shares), shares


def test_auto_runs_the_solved_plan_with_the_gpus_answers(profile, folder) -> None:
    ids = np.random.default_rng(0).integers(1, 150, 435).tolist()
    logits = {}
    for plan in ("gpu", "auto"):
        with LLM.load(folder, device="host", plan=plan, context=512) as llm:
            session = llm.session()
            logits[plan] = [session.prefill(ids[:300]).copy(), session.prefill(ids[300:]).copy()]
            assert llm.plan.level == {"gpu": "gpu", "auto": "tensor"}[plan]
            assert llm.plan.uses_npu == (plan == "auto")
    for ours, theirs in zip(logits["auto"], logits["gpu"], strict=True):
        assert ((ours - theirs) ** 2).sum() < 1e-9 * (theirs**2).sum()


def test_without_a_profile_auto_is_the_gpu_and_tensor_says_what_to_run(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "empty"))
    with LLM.load(folder, device="host", context=64) as llm:
        assert llm.plan.level == "gpu"
    with pytest.raises(OptionError, match="heterollm profile"):
        LLM.load(folder, device="host", plan="tensor", context=64)


def test_exact_lengths_stay_within_the_slots(profile, folder) -> None:
    made = planner(profile, folder, context=300)
    spec = next(spec for spec in made.specs if spec.group == "gate_up")
    for tokens in range(1, 301):
        placement = made.placement("prefill", tokens, spec)
        placement.check(spec, tokens)
        assert sum(placement.npu_lengths) <= made._longest


def test_plan_shows_and_writes_what_generate_runs(profile, folder, tmp_path, capsys) -> None:
    target = tmp_path / "plan.json"
    assert (
        main(["plan", str(folder), "--device", "host", "--length", "64,300", "--explain", "-o", str(target)])
        == 0
    )
    shown = capsys.readouterr().out
    assert "prefill, 300 tokens" in shown
    assert "gate_up" in shown
    plan = Plan.load(target)
    assert plan.uses_npu
    with LLM.load(folder, device="host", plan=target) as llm:
        assert llm.plan == plan


def test_plan_as_json_is_the_plan(profile, folder, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", "--json"]) == 0
    assert Plan.from_json(json.dumps(json.loads(capsys.readouterr().out))).uses_npu


def test_requests_are_kept(profile, folder) -> None:
    assert not planner(profile, folder, forbidden="npu").plan.uses_npu
    assert not planner(profile, folder, npu_gib=0.0).plan.uses_npu
    with pytest.raises(OptionError, match="power"):
        _ = planner(profile, folder, energy_weight=0.5).plan


@pytest.mark.parametrize(
    "arguments",
    [
        ["--forbid", "cpu"],
        ["--histogram", "64:x"],
        ["--histogram", ""],
        ["--length", "none"],
        ["--gpu-share", "7"],
        ["--npu-gib", "-1"],
        ["--profile", "nowhere.json"],
    ],
)
def test_nonsense_is_one_panel(profile, folder, arguments, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", *arguments]) == 1
    assert "Error" in capsys.readouterr().err


def test_a_profile_file_needs_no_device(profile, folder, tmp_path) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(profile.to_json())
    assert solve_for(folder, profile=file).plan == solve_for(folder, device="host").plan
