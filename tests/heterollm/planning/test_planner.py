"""Plans from a profile: made, shown, saved and run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import OptionError, ProfileError, list_cache
from heterollm.cli import main
from heterollm.data import bundled_model
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import Member, OpSpec, Phase, Precision, WeightFormat, ffn_specs
from heterollm.llm import LLM
from heterollm.loading import plan_for
from heterollm.model import ModelConfig, op_specs
from heterollm.planning import LoadOptions, Planned, ProfiledModel
from heterollm.planning.planner import solve_plan, solver_of
from heterollm.profiler.records import FenceKey, LinearKey, LinearPoint, Profile, Record, profile_path
from heterollm.report.plan import _reasons
from heterollm.solver import NpuLimits, Plan, PlanRequest, Solver, predict_pass
from heterollm.solver.costs import Overheads, Slowdown

FIELDS = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
FIELDS |= {"head_dim": 64, "max_position_embeddings": 1024, "vocab_size": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_model) -> Path:
    target = tmp_path_factory.mktemp("model")
    write_model(target, "llama", **FIELDS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model() / name, target / name)
    return target


@pytest.fixture(scope="module")
def cache(folder, keep_even_profile, tmp_path_factory) -> Path:
    """A cache folder with a profile of the host and its predictor."""
    target: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(target))
        keep_even_profile(open_device("host"), folder, "w4a16")
    return target


@pytest.fixture
def profile(cache, tmp_path, monkeypatch) -> Profile:
    """The profile, in a cache folder of the test's own."""
    shutil.copytree(cache, tmp_path / "cache")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    [path] = (tmp_path / "cache" / "profiles").glob("*.json")
    return Profile.load(path)


def solved(profile: Profile, folder: Path, precision: Precision = "w4a16", **request: object) -> Planned:
    config = ModelConfig.from_folder(folder)
    specs = op_specs(config, precision, 32, True, float_bits=32)
    return solve_plan(ProfiledModel(profile, config, specs, precision), PlanRequest(**request))


def test_parts_of_one_speed_share_the_work(profile, folder) -> None:
    made = solved(profile, folder, context=512)
    found = made.model.predict(made.plan, "prefill", 256, logits=False)
    shares = [item.npu_fraction for item in found.operators]
    assert all(0.3 <= share <= 0.7 for share in shares), shares


def test_solved_plans_run_with_the_gpus_answers(profile, folder) -> None:
    """Level ``auto`` takes blocks here, for both parts are equally fast at them."""
    ids = np.random.default_rng(0).integers(1, 150, 435).tolist()
    logits = {}
    for plan in ("gpu", "tensor", "auto"):
        with LLM.load(folder, device="host", plan=plan, context=512) as llm:
            session = llm.session()
            logits[plan] = [session.prefill(ids[:300]).copy(), session.prefill(ids[300:]).copy()]
            logits[plan].append(session.decode(ids[0]).copy())
            assert llm.plan.level == {"auto": "block"}.get(plan, plan)
            assert (llm.plan.uses_npu, llm.plan.has_ffn) == (plan != "gpu", plan == "auto")
            assert [note.startswith("auto: block, predicted") for note in llm.notes] == [True] * (
                plan == "auto"
            )
    for plan in ("tensor", "auto"):
        for ours, theirs in zip(logits[plan], logits["gpu"], strict=True):
            assert ((ours - theirs) ** 2).sum() < 1e-9 * (theirs**2).sum()


def test_a_kept_predictor_or_plan_needs_no_library_that_fits(profile, folder, tmp_path) -> None:
    script = (
        "import sys\n"
        "from heterollm.llm import LLM\n"
        "with LLM.load(sys.argv[1], device='host', context=64) as llm:\n"
        "    heavy = sorted({'joblib', 'sklearn', 'scipy', 'transformers'} & set(sys.modules))\n"
        "    print(llm.plan.uses_npu, *heavy)\n"
    )
    command = [sys.executable, "-P", "-c", script, str(folder)]
    cache, found = tmp_path / "cache", []
    for seed in range(4):  # of hashes, by which sets are ordered
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        found.append((done.stdout.strip(), len(list(cache.glob("plans/*.json")))))
        for kept in cache.glob("p*s/*.json") if seed == 2 else ():
            if kept.parent.name != "profiles":
                kept.unlink()
    assert found == [*[("True", 1)] * 3, ("True joblib scipy sklearn", 1)]


def test_without_a_profile_auto_is_the_gpu_and_tensor_says_what_to_run(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "empty"))
    with LLM.load(folder, device="host", context=64) as llm:
        assert llm.plan.level == "gpu"
    with pytest.raises(ProfileError, match="heterollm profile"):
        LLM.load(folder, device="host", plan="tensor", context=64)


@pytest.mark.parametrize("held", ["nothing", "hand-overs", "a linear layer"])
def test_an_unfinished_first_profile_counts_as_none(held, folder, tmp_path, monkeypatch, capsys) -> None:
    """One that was stopped by Ctrl-C, or that another process is still measuring."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    device = open_device("host")
    begun = Profile.of(device)
    begun.runs["1.000"] = {"started_s": 1.0, "since_s": 1.0, "finished": False}
    if held != "nothing":
        begun.add(Record(FenceKey("sleep_poll", 300), (41.0,)))
    if held == "a linear layer":
        point = LinearPoint("o", (256,), 256, 32, 4, 32, form="matmul_nbits")
        begun.add(Record(LinearKey("npu", point, "graph-1"), (100.0,)))
    begun.save(profile_path(device.name, device.fingerprint()))

    assert main(["generate", str(folder), "a", "--max-new-tokens", "2", "--device", "host"]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "plan gpu" in shown
    assert "The profile is unfinished, and plans cannot use it yet" in shown
    assert main(["plan", str(folder), "--device", "host"]) == 1
    assert "Run `heterollm profile" in " ".join(capsys.readouterr().err.split())


def test_a_profile_that_can_plan_counts_while_a_run_on_it_is_unfinished(profile, folder) -> None:
    profile.runs["1.000"] = {"started_s": 1.0, "since_s": 1.0, "finished": False}
    profile.save(profile_path(profile.device, profile.fingerprint))
    with LLM.load(folder, device="host", context=256) as llm:
        assert llm.plan.level in ("tensor", "block")


@pytest.mark.parametrize("level", ["tensor", "block"])
def test_no_length_costs_much_more_than_its_own_solution(profile, folder, level) -> None:
    """Nothing is solved at run time: ranges are so fine that no pass loses by sharing a placement."""
    made = solved(profile, folder, context=300, level=level)
    solver = solver_of(made.model, made.plan.request)
    slices = {
        spec.group: {
            held.npu_rows: solver.limits.standard_lengths
            for held in made.plan.slices
            if held.group == spec.group
        }
        for spec in (*solver.kinds[0].specs, solver.head, *ffn_specs(solver.specs))
    }
    for phase, tokens in itertools.product(
        get_args(Phase), (*range(1, 34), 50, 63, 65, 100, 127, 129, 200, 299)
    ):
        own = made.model.predict(made.plan, phase, tokens, logits=False).time_us
        assert own <= 1.05 * solver.length(tokens, slices).time_us, (phase, tokens)


def test_decode_of_few_tokens_has_entries_of_its_own(profile, folder) -> None:
    plan = solved(profile, folder, context=300).plan
    for group in ("qkv", "o", "head"):
        ranges = [entry.lengths for entry in plan.entries if (entry.phase, entry.group) == ("decode", group)]
        assert ranges[:16] == [(tokens, tokens) for tokens in range(1, 17)]
        tops = {
            entry.lengths[1] for entry in plan.entries if (entry.phase, entry.group) == ("prefill", group)
        }
        assert tops >= {1, 2, 4, 8, 16}


def test_plan_shows_and_writes_what_generate_runs(profile, folder, tmp_path, capsys) -> None:
    target = tmp_path / "plan.json"
    assert (
        main(["plan", str(folder), "--device", "host", "--prompt", "64,300", "--explain", "-o", str(target)])
        == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "prefill, 300 tokens" in shown
    assert "level block" in shown
    assert "ffn" in shown
    assert "apart: " in shown
    assert "placed as one operator in" in shown
    plan = Plan.load(target)
    assert plan.uses_npu
    with LLM.load(folder, device="host", plan=target) as llm:
        assert llm.plan == plan


def test_plan_shows_chunks_in_flight_and_generate_runs_them(profile, folder, tmp_path, capsys) -> None:
    """Without splits, whole operators of two chunks keep both processors busy."""
    target = tmp_path / "plan.json"
    options = ["--context", "512", "--in-flight", "3", "--forbid", "row,hybrid,sequence,block"]
    command = ["plan", str(folder), "--device", "host", *options, "--prompt", "64,400", "--explain"]
    assert main([*command, "-o", str(target)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at once" in shown
    assert "Bubbles: the share of the prompt without NPU work, predicted" in shown
    assert "Graphs for each chunk apart would be" in shown
    plan = Plan.load(target)
    assert plan.schedule is not None
    ids = np.random.default_rng(0).integers(1, 150, 400).tolist()
    with LLM.load(folder, device="host", plan=target, context=512) as llm:
        found = llm.session().prefill(ids).copy()
    with LLM.load(folder, device="host", plan=structs.replace(plan, schedule=None), context=512) as llm:
        assert np.allclose(found, llm.session().prefill(ids), atol=1e-4)


def test_level_tensor_shows_no_block(profile, folder, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", "--prompt", "64", "--plan", "tensor"]) == 0
    shown = capsys.readouterr().out
    assert "level tensor" in shown
    assert "gate_up" in shown
    assert "block" not in shown


def test_plan_as_json_is_the_plan(profile, folder, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", "--json"]) == 0
    assert Plan.from_json(json.dumps(json.loads(capsys.readouterr().out))).uses_npu


def test_requests_are_kept(profile, folder) -> None:
    assert not solved(profile, folder, forbidden=("npu",)).plan.uses_npu
    assert not solved(profile, folder, npu_gib=0.0).plan.uses_npu
    with pytest.raises(OptionError, match="power"):
        _ = solved(profile, folder, energy_weight=0.5).plan


def test_decoded_tokens_are_counted(profile, folder, capsys) -> None:
    def lines(decode: int) -> list[str]:
        given = ["plan", str(folder), "--device", "host", "--prompt", "64", "--decode", str(decode)]
        assert main(given) == 0
        return capsys.readouterr().out.splitlines()

    assert not any(line.strip().startswith("decode, 1 token") for line in lines(0))
    shown = lines(8)
    assert any(line.strip().startswith("decode, 1 token") for line in shown)
    (title,) = (number for number, line in enumerate(shown) if "8 decoded tokens" in line)
    row = next(line.split() for line in shown[title:] if line.split()[:1] == ["64"])
    prefill_ms, decode_ms, all_ms = map(float, row[1:])
    assert 0 < decode_ms < all_ms
    assert all_ms == pytest.approx(prefill_ms + decode_ms, abs=0.02)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--forbid", "cpu"],
        ["--histogram", "64:x"],
        ["--histogram", ""],
        ["--prompt", "none"],
        ["--gpu-share", "7"],
        ["--npu-gib", "-1"],
        ["--profile", "nowhere.json"],
    ],
)
def test_nonsense_is_one_error(profile, folder, arguments, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", *arguments]) in (1, 2)
    assert "Error" in capsys.readouterr().err


def test_a_profile_file_needs_no_device(profile, folder, tmp_path) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(profile.to_json())
    assert plan_for(folder, LoadOptions(), file).plan == plan_for(folder, LoadOptions(device="host")).plan


# -- what the profile lacks -------------------------------------------------------------------------------


def without(profile: Profile, *, blocks: bool = False, npu: bool = False) -> Profile:
    """Return a profile without blocks, or without linear layers of the NPU."""
    kept = {
        key: record
        for key, record in profile.records.items()
        if not (
            isinstance(key, LinearKey) and key.processor == "npu" and (npu or (blocks and key.point.is_ffn))
        )
    }
    return Profile(profile.description, kept)


def test_a_profile_without_blocks_has_level_tensor(profile, folder) -> None:
    made = solved(without(profile, blocks=True), folder, context=64)
    assert (made.plan.level, made.plan.has_ffn, made.plan.uses_npu) == ("tensor", False, True)
    [choice] = made.notes
    assert choice.startswith("auto: tensor, predicted")
    with pytest.raises(ProfileError, match="no feed-forward networks of its NPU at") as caught:
        _ = solved(without(profile, blocks=True), folder, context=64, level="block").plan
    assert "heterollm profile MODEL --device host --precision w4a16" in caught.value.fix


def test_level_block_needs_a_feed_forward_network(profile, tmp_path) -> None:
    """A mixture has one only with shared experts."""
    sizes = {**FIELDS, "num_hidden_layers": 2}
    for family, shared in (("granitemoe", {}), ("granitemoeshared", {"shared_intermediate_size": 768})):
        (tmp_path / family).mkdir()
        fields = {**sizes, **shared, "model_type": family}
        (tmp_path / family / "config.json").write_text(json.dumps(fields))
    with pytest.raises(OptionError, match="no feed-forward network that level block") as caught:
        solved(profile, tmp_path / "granitemoe", context=64, level="block")
    assert "--plan tensor" in caught.value.fix
    assert solved(profile, tmp_path / "granitemoe", context=64).plan.level == "tensor"
    assert solved(profile, tmp_path / "granitemoeshared", context=64, level="block").plan.level == "block"


@pytest.mark.parametrize("level", ["tensor", "block"])
def test_a_precision_that_was_not_measured_is_named(profile, folder, level) -> None:
    """Another precision's linears say nothing of this one's: the plan would be the GPU's in silence."""
    made = solved(profile, folder, "w4a8", context=64)
    assert not made.plan.uses_npu
    assert made.plan.level == "gpu"
    assert "no linear layers of its NPU at precision w4a8 (int4 block 32" in made.notes[1]
    assert "--precision w4a8" in made.notes[1]
    with pytest.raises(ProfileError, match="at precision w4a8") as caught:
        solved(profile, folder, "w4a8", context=64, level=level)
    assert "--precision w4a8 --update" in caught.value.fix


def test_the_note_is_shown_and_told(profile, folder, capsys) -> None:
    assert main(["plan", str(folder), "--device", "host", "--prompt", "64", "--precision", "w4a8"]) == 0
    assert "The GPU computes everything" in " ".join(capsys.readouterr().out.split())
    with LLM.load(folder, device="host", precision="w4a8", context=64) as llm:
        assert any("w4a8" in note and "heterollm profile" in note for note in llm.notes)
    assert main(["plan", str(folder), "--device", "host", "--precision", "w4a8", "--plan", "tensor"]) == 1
    assert "--precision w4a8" in capsys.readouterr().err


# -- plans that are kept ----------------------------------------------------------------------------------


def forbid_solving(monkeypatch) -> None:
    def solve(*_args: object, **_options: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(Solver, "solve", solve)


def kept_files(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache" / "plans").glob("*.json"))


def test_a_plan_is_solved_once(profile, folder, tmp_path, monkeypatch) -> None:
    plan = solved(profile, folder, context=128).plan
    assert len(kept_files(tmp_path)) == 1
    forbid_solving(monkeypatch)
    assert solved(Profile.from_json(profile.to_json()), folder, context=128).plan == plan
    [kind] = list_cache(["plans"])
    assert kind.files == 1


@pytest.mark.parametrize(
    "request_",
    [
        {"level": "tensor"},
        {"level": "block"},
        {"context": 96},
        {"gpu_share": 0.5},
        {"forbidden": ("npu",)},
        {"npu_gib": 0.001},
        {"histogram": {64: 1.0}},
    ],
)
def test_another_request_is_solved_anew(profile, folder, tmp_path, request_) -> None:
    _ = solved(profile, folder, context=128).plan
    _ = solved(profile, folder, **{"context": 128, **request_}).plan
    assert len(kept_files(tmp_path)) == 2


def test_another_profile_or_solver_is_solved_anew(profile, folder, tmp_path, monkeypatch) -> None:
    _ = solved(profile, folder, context=128).plan
    key, record = next((key, record) for key, record in profile.records.items() if isinstance(key, LinearKey))
    changed = Profile(profile.description, {**profile.records, key: Record(key, (record.median_us * 2,))})
    _ = solved(changed, folder, context=128).plan
    assert len(kept_files(tmp_path)) == 2
    monkeypatch.setattr("heterollm.planning.kept.solver_hash", lambda: "other")
    _ = solved(profile, folder, context=128).plan
    assert len(kept_files(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "changed", "version"])
def test_a_damaged_plan_is_solved_again(profile, folder, tmp_path, damage, caplog) -> None:
    plan = solved(profile, folder, context=64).plan
    [path] = kept_files(tmp_path)
    text = path.read_text()
    data = json.loads(text)
    if damage == "changed":
        data["plan"]["chunk_length"] = 32
    elif damage == "version":
        data["plan"]["schema_version"] = 1
    written = {"cut": text[: len(text) // 2], "empty": "", "text": "[]"}.get(damage, json.dumps(data))
    path.write_text(written)
    with caplog.at_level("WARNING"):
        assert solved(profile, folder, context=64).plan == plan
    assert "solving again" in caplog.text
    assert path.read_text() == text


def test_a_plan_that_cannot_be_kept_is_used(profile, folder, tmp_path, caplog) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "plans").write_text("in the way")
    with caplog.at_level("WARNING"):
        assert solved(profile, folder, context=64).plan.uses_npu
    assert "not kept" in caplog.text


# -- reasons ----------------------------------------------------------------------------------------------


def test_runners_up_are_ordered_by_all_that_they_cost() -> None:
    """What the next operator waits for an empty queue counts: the NPU alone loses to the GPU here."""

    class Costs:
        overheads = Overheads(refill_us=50.0)

        def gpu_us(self, spec, member_rows, tokens):
            return 100.0 if sum(member_rows) == spec.rows else 40.0

        def npu_us(self, spec, member_rows, length, form):
            return 80.0 if sum(member_rows) == spec.rows else 30.0

        def slowdown(self, spec, tokens, form="", length=0):
            return Slowdown()

        def between_us(self, spec, tokens):
            return 0.0

        def mixture_us(self, tokens, kind=""):
            return ()

    specs = tuple(
        OpSpec(group, layer, (Member(group, 128),), 64, WeightFormat(16), "a", "b")
        for group, layer in (("o", 0), ("head", -1))
    )
    limits = NpuLimits((32,), 64, lambda _spec, _length: ("plain",))
    plan = Solver(specs, limits, Costs(), chunk_length=32).plan(device="d", precision="fp16")
    found = predict_pass(plan, specs, Costs(), "prefill", 32)
    item = found.operators[0]
    assert item.option.time_us == 80.0
    assert _reasons(item, found.kinds[0].ffn_us) == ["GPU: 100 us (+25%)", "NPU at 32, plain: 130 us (+62%)"]
