"""A mixture from its calibration to the answer of a saved plan with experts on the NPU."""

import json

import pytest

from heterollm.cli import main
from heterollm.solver import Plan, PlannedExperts

TEXT = "def main(argument):\n    return argument + 1\n" * 8
SIZES = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


def call(capsys, *arguments):
    code = main([str(one) for one in arguments])
    shown = capsys.readouterr()
    return code, shown.out, " ".join((shown.out + shown.err).split())


@pytest.mark.slow
def test_a_saved_plan_of_experts_answers_as_the_gpu(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    folder = checkpoint("qwen3_moe", **SIZES)
    calibration, saved, text = tmp_path / "cal.json", tmp_path / "plan.json", tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    host = ("--device", "host")
    asked = ("--technique", "npumoe", "--calibration", calibration)
    plan = ("plan", folder, *host, *asked, "--prompt", "128", "--explain", "-o", saved)
    calibrate = ("calibrate", folder, text, "-o", calibration, "--gpu-threads", 1)
    code, _, shown = call(capsys, *calibrate, "--windows", 2, "--window", 128)
    assert code == 0, shown
    assert call(capsys, *plan)[0] != 0  # no profile
    code, _, shown = call(capsys, "profile", folder, *host, "--quick", "--technique", "npumoe")
    assert code == 0, shown
    code, _, shown = call(capsys, *plan)
    assert code == 0, shown
    assert "Experts on the NPU in passes of 128 tokens" in shown
    assert "2 of 2 layers" in shown
    read = Plan.load(saved)
    assert read.technique(PlannedExperts).is_active
    assert read.calibration is None  # its weights have free scales, and run with none

    data = json.loads(saved.read_text())
    for entry in data["experts"]:  # shorter prompts, too
        entry["lengths"][0] = min(entry["lengths"][0], 32)
    saved.write_text(json.dumps(data))
    answers = {}
    for level in (saved, "gpu"):
        answer = ("generate", folder, TEXT[:200], *host, "--plan", level, "--max-new-tokens", 8)
        code, answers[level], shown = call(capsys, *answer)
        assert code == 0, shown
    assert answers[saved] == answers["gpu"]

    data["experts"][0]["placement"]["groups"][0]["experts"].append(99)
    saved.write_text(json.dumps(data))
    code, _, shown = call(capsys, "generate", folder, TEXT, *host, "--plan", saved)
    assert code != 0
    assert "Expert 99" in shown
    code, _, shown = call(capsys, "plan", folder, *host, "--technique", "npumoe")
    assert code != 0
    assert "needs calibrated loads of experts" in shown
