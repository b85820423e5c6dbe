import json
import math

import numpy as np
import pytest

from heterollm import demo
from heterollm.checkpoint import Checkpoint
from heterollm.config import ModelConfig
from heterollm.demo import Comparison, bundled_model, run_demo, write_layer_checkpoint
from heterollm.profiler.measure import Measurement


def compare(phase, **levels):
    return Comparison("bundled model", phase, 100, {name: Measurement(us) for name, us in levels.items()})


def test_the_npu_pays_where_it_is_clearly_faster():
    verdict = compare("prefill", gpu=(200.0,) * 4, npu=(150.0,) * 4, layer=(100.0,) * 4).verdict()
    assert verdict == "bundled model, prefill: the NPU pays; layer is fastest, 2.00 times as fast as gpu."


def test_the_npu_does_not_pay_where_it_is_clearly_slower():
    verdict = compare("prefill", gpu=(100.0,) * 4, npu=(300.0,) * 4, layer=(150.0,) * 4).verdict()
    assert verdict == "bundled model, prefill: the NPU does not pay; gpu is 1.50 times as fast as layer."


def test_in_decode_the_layer_level_says_nothing_about_the_npu():
    verdict = compare("decode", gpu=(100.0,) * 4, npu=(500.0,) * 4, layer=(10.0,) * 4).verdict()
    assert verdict == "bundled model, decode: the NPU does not pay; gpu is 5.00 times as fast as npu."


def test_overlapping_times_give_no_verdict():
    samples = {"gpu": (90.0, 100.0, 110.0, 120.0), "npu": (80.0, 95.0, 105.0, 130.0)}
    assert "no clear difference" in compare("decode", layer=(1.0,), **samples).verdict()


def test_rates_and_ratios():
    measured = compare("prefill", gpu=(200.0,), npu=(50.0,), layer=(400.0,))
    assert measured.rate("gpu") == pytest.approx(500_000.0)
    assert measured.speedup("npu") == pytest.approx(4.0)
    assert measured.speedup("layer") == pytest.approx(0.5)
    data = json.loads(json.dumps(measured.to_dict()))
    assert data["levels"]["npu"]["samples_us"] == [50.0]
    assert data["verdict"] == measured.verdict()


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
    monkeypatch.setattr(demo, "MIN_TIME_S", 0.0)
    monkeypatch.setattr(demo, "REPEATS", 2)


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


def test_the_demo_runs_every_level_in_both_phases(small_layer):
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
    assert [(entry.workload, entry.phase, entry.tokens) for entry in result.comparisons] == [
        ("bundled model", "prefill", 256),
        ("bundled model", "decode", 1),
        ("TinyLlama layer", "prefill", 256),
        ("TinyLlama layer", "decode", 1),
    ]
    for entry in result.comparisons:
        assert list(entry.measurements) == ["gpu", "npu", "layer"]
        assert all(len(measured.samples_us) == 2 for measured in entry.measurements.values())
        assert entry.rate("gpu") > 0
    assert "Measuring decode, bundled model" in stages
    json.dumps(result.to_dict(), allow_nan=False)
