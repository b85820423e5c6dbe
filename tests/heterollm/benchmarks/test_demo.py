import json
import math

import numpy as np
import pytest

from heterollm.benchmarks import demo, run_demo
from heterollm.benchmarks.demo import write_layer_checkpoint
from heterollm.data import bundled_model
from heterollm.model import Checkpoint, ModelConfig
from heterollm.report import demo_report
from heterollm.report.console import render


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
    assert (config.heads, config.kv_heads, config.head_dim, config.layers) == (32, 4, 64, 1)


@pytest.mark.slow  # checks of the project run the command itself
@pytest.mark.parametrize("budget_s", [600.0, 0.001])
def test_the_demo_profiles_and_runs_every_level_in_both_phases(small_layer, monkeypatch, tmp_path, budget_s):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "PROFILE_BUDGET_S", budget_s)
    planned = budget_s > 1  # the other profile has no feed-forward network
    pieces, stages = [], []
    result = run_demo(
        device="host",
        max_new_tokens=8,
        on_text=pieces.append,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert "".join(pieces) == result.text != ""
    assert result.levels_agree
    assert result.time == "real"
    assert [workload.name for workload in result.workloads] == ["bundled model", "TinyLlama layer"]
    for workload in result.workloads:
        found = [(row.test, row.asked.asked_level, row.error) for row in workload.bench.rows]
        levels = ["gpu", "npu", "layer", "tensor", *(["block"] if planned else []), "gpu"]
        assert found == [(test, level, None) for test in ("pp64", "tg4") for level in levels]
        assert workload.bench.rows[-1].asked.baseline
        assert workload.verdicts
    assert {"Profiling the device", "Taking samples, bundled model"} <= set(stages)
    json.dumps(result.to_dict(), allow_nan=False)
    shown = render(demo_report(result))
    assert ("Level block is left out" in shown) is not planned
    assert "TinyLlama layer, tg4, w4a16" in shown
    assert "All plan levels write the same text" in shown
