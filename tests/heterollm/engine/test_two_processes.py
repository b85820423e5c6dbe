"""Two processes that load one model at once, with an empty cache: each thing is made once, and right."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heterollm.kernels.npu import qnn_available
from heterollm.llm import LLM

USABLE, REASON, _ = qnn_available(emulator=True)

OPTIMISED = True
"""This process builds the programs of those that it starts, whose logits it compares."""

PROMPT = [5, 6, 7, 8, 9]
BEGIN = """
import hashlib, json, sys, time
from pathlib import Path
model, meeting, mine, other = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
def meet(place=""):
    (meeting / (mine + place)).touch()
    wait_for_other(place)
def wait_for_other(place):
    end = time.monotonic() + 600
    while not (meeting / (other + place)).exists():
        assert time.monotonic() < end, "the other process did not come"
        time.sleep(0.001)
"""
LOAD = """
from heterollm import LLM
from heterollm.model import weight_cache
write, locked, written = weight_cache._write, weight_cache.locked, []
def counted(*arguments):
    written.append(1)
    wait_for_other("at the lock")
    return write(*arguments)
def asking(path):
    # The process has found the file missing.
    (meeting / (mine + "at the lock")).touch()
    return locked(path)
weight_cache._write, weight_cache.locked = counted, asking
meet()
with LLM.load(model, device="host", plan="layer") as llm:
    logits = llm.session().prefill(json.loads(sys.argv[5]))
print(json.dumps({"written": len(written), "logits": hashlib.sha256(logits.tobytes()).hexdigest()}))
"""
COMPILE = """
from heterollm.planning.ahead import precompile
meet()
result = precompile(model, soc="57", prompts=[32], decode=0)
builds = [[build.graphs, build.compiled, build.loadable] for build in result.builds]
print(json.dumps({"builds": builds, "size_bytes": result.size_bytes}))
"""


def run_two(script: str, model: Path, folder: Path, *arguments: str) -> list[dict]:
    """Run a script in two processes that begin together; return what each printed."""
    meeting = folder / "meeting"
    meeting.mkdir()
    environment = os.environ | {"HETEROLLM_CACHE": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN + script, str(model), str(meeting), mine, other, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert "damaged" not in err
        assert "again" not in err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def assert_nothing_is_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_weights_are_quantised_once(tmp_path: Path, bundled_model: Path) -> None:
    answers = run_two(LOAD, bundled_model, tmp_path, json.dumps(PROMPT))
    assert sorted(answer["written"] for answer in answers) == [0, 1]
    assert answers[0]["logits"] == answers[1]["logits"]
    weights = tmp_path / "cache" / "weights"
    assert len(list(weights.glob("*.safetensors"))) == 1
    assert_nothing_is_left(weights)
    with LLM.load(bundled_model, device="host", plan="layer") as llm:
        logits = llm.session().prefill(PROMPT)
    assert np.isfinite(logits).all()
    assert hashlib.sha256(logits.tobytes()).hexdigest() == answers[0]["logits"]


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_graphs_are_compiled_once(tmp_path: Path, bundled_model: Path) -> None:
    answers = run_two(COMPILE, bundled_model, tmp_path)
    assert answers[0]["size_bytes"] == answers[1]["size_bytes"]
    for one, other in zip(answers[0]["builds"], answers[1]["builds"], strict=True):
        assert one[0] == other[0] == one[1] + other[1] == 4
        assert one[2] == other[2] == 4
    assert_nothing_is_left(tmp_path / "cache" / "graphs")
