import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import CheckpointError
from heterollm.benchmarks import demo, run_demo
from heterollm.benchmarks.demo import write_layer_checkpoint
from heterollm.cli import complete
from heterollm.data import BUNDLED_NAME, bundled_model
from heterollm.model import Checkpoint, ModelConfig, checkpoint_folder, find_model
from heterollm.report import demo_report
from heterollm.report.console import render

NPU_NOTE = (
    "NPU, simulated: the graphs of all lengths take 34.1 GiB, and this phone's NPU addresses 3.5 GiB: "
    "a phone would refuse to open them all."
)


def test_the_bundled_model_is_a_checkpoint():
    config = ModelConfig.from_folder(bundled_model())
    Checkpoint(bundled_model()).validate(config)


@pytest.fixture
def small_layer(monkeypatch):
    """A layer that takes no time; the real one is 44 million weights."""
    changes = {
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(demo, "LAYER_CONFIG", demo.LAYER_CONFIG | changes)
    monkeypatch.setattr(demo, "REPETITIONS", 1)
    monkeypatch.setattr(demo, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(demo, "DECODE_TOKENS", 4)


def test_the_layer_is_a_checkpoint_with_the_same_weights_every_time(small_layer, tmp_path):
    digests = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        write_layer_checkpoint(folder)
        checkpoint = Checkpoint(folder)
        checkpoint.validate(ModelConfig.from_folder(folder))
        digests.append((folder / "model.safetensors").read_bytes())
    assert digests[0] == digests[1]


@pytest.fixture
def layer_folder(tmp_path, monkeypatch):
    """The real layer with weights that take no time to draw."""

    class Zeros:
        def standard_normal(self, shape, dtype):
            return np.zeros(shape, dtype)

    monkeypatch.setattr(np.random, "default_rng", lambda _seed: Zeros())
    write_layer_checkpoint(tmp_path)
    return tmp_path


def test_the_layer_has_the_size_of_tinyllama(layer_folder):
    config = ModelConfig.from_folder(layer_folder)
    checkpoint = Checkpoint(layer_folder)
    linears = [name for name in checkpoint.names if "proj" in name]
    assert sum(math.prod(checkpoint.shape(name)) for name in linears) == 44_040_192
    own = config.attention
    assert (own.heads, own.kv_heads, own.head_dim, config.layers) == (32, 4, 64, 1)


PROFILES = """
import sys
from pathlib import Path
from heterollm.base import silent
from heterollm.benchmarks import demo
from heterollm.profiler.records import Profile, list_profiles

path = demo.profile_layer("host", Path(sys.argv[1]), silent)
first = len(Profile.load(path).records)
again = demo.profile_layer("host", Path(sys.argv[1]), silent)
runs = len(Profile.load(path).runs)
print(path.name.startswith("demo-host-"), first > 20, path == again, runs == 1, list_profiles())
"""

LOADS = """
import sys
from heterollm.llm import LLM
from heterollm.kernels.threads import allowed_cores

with LLM.load(sys.argv[1], device="host", context=64) as llm:
    described = llm.device.description()
    threads = described["gpu_threads"], described["npu_threads"]
    print(llm.plan.level, threads == (len(allowed_cores()), 0), *llm.notes)
"""


def test_the_profile_of_a_demo_serves_the_demo_alone(small_layer, tmp_path):
    """It is of halves of the cores: level ``auto`` would plan for them, at half of the speed."""
    layer = tmp_path / "layer"
    layer.mkdir()
    write_layer_checkpoint(layer)
    env = {**os.environ, "HETEROLLM_CACHE": str(tmp_path / "cache")}
    env.pop("POCL_MAX_PTHREAD_COUNT", None)  # each process splits the cores in its own way

    def output(script):
        command = [sys.executable, "-P", "-c", script, str(layer)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert output(PROFILES) == "True True True True []\n"
    level, on_all_cores, *words = output(LOADS).split()
    assert (level, on_all_cores) == ("gpu", "True")
    assert "has no profile with these threads" in " ".join(words)


@pytest.mark.slow  # checks of the project run the command itself
def test_the_demo_measures_three_rows_and_simulates_three(small_layer, monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    started, pieces, stages = [], [], []
    result = run_demo(
        device="host",
        max_new_tokens=8,
        on_start=lambda device, size: started.append((device["device"], size)),
        on_text=pieces.append,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert "".join(pieces) == result.text != ""
    assert started == [("host", 3_672_320)]
    assert result.same_text
    assert result.notes == (NPU_NOTE,)
    for rows in (result.measured, result.simulated):
        assert [row.processors for row in rows] == ["GPU", "NPU", "both"]
        assert all(row.prefill > 0 and row.decode > 0 for row in rows)
    assert [text.partition(":")[0] for text in result.sentences[:2]] == ["Prefill", "Decode"]
    assert all("on the cores of both" in text for text in result.sentences[:2])
    assert {"Profiling the device", "Taking samples", "Simulating a phone"} <= set(stages)
    json.dumps(result.to_dict(), allow_nan=False)
    shown = render(demo_report(result))
    assert "This machine (host), measured" in shown
    assert "sim:snapdragon-8gen3, SIMULATED, nothing measured: llama-3-8b" in shown
    assert "GPU and NPU write the same text" in shown


def test_the_demo_of_a_modelled_phone_measures_nothing():
    result = run_demo(device="sim:snapdragon-8elite", max_new_tokens=2)
    assert (result.phone, result.time, result.measured) == ("sim:snapdragon-8elite", "simulated", ())
    assert [row.processors for row in result.simulated] == ["GPU", "NPU", "both"]
    gpu, npu, both = (row.prefill for row in result.simulated)
    assert both > max(gpu, npu)
    [note] = result.notes  # the row has rates without limits
    assert note.startswith("NPU, simulated: the graphs of all lengths take")
    assert "measured:" not in render(demo_report(result)).replace("nothing measured:", "")


def test_the_commands_take_the_bundled_model_by_name_unless_a_folder_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder(BUNDLED_NAME) == bundled_model()
    assert find_model(BUNDLED_NAME).name == BUNDLED_NAME
    assert BUNDLED_NAME in complete.models("tiny")
    (tmp_path / BUNDLED_NAME).mkdir()
    assert checkpoint_folder(BUNDLED_NAME) == Path(BUNDLED_NAME)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_model(BUNDLED_NAME)
