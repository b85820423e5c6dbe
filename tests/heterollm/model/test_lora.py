"""LoRA adapters against PEFT's formulas in float64."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from heterollm.base import HeteroLLMError
from heterollm.kernels.formats import quantize
from heterollm.model import Checkpoint, ModelConfig, load_weights

CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama")


@pytest.fixture
def adapter(folder, tmp_path, monkeypatch):
    """Writes an adapter; returns its folder and the merged weights in float64."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    shapes = Checkpoint(folder)

    def write(config=None, ranks=None, modules=(Q, DOWN), name="adapter", scale=1.0):
        stated, own = {**CONFIG, **(config or {})}, tmp_path / name
        rng, tensors, merged = np.random.default_rng(1), {}, {}
        for module in modules:
            rank = (ranks or {}).get(module, stated["r"])
            known = f"{module}.weight" in shapes.names
            rows, columns = shapes.shape(f"{module}.weight") if known else (8, 8)
            a, b = (rng.standard_normal(size, np.float32) * scale for size in ((rank, columns), (rows, rank)))
            tensors |= {f"base_model.model.{module}.lora_{x}.weight": y for x, y in (("A", a), ("B", b))}
            if known:
                alpha = stated.get("alpha_pattern", {}).get(module, stated["lora_alpha"])
                factor = alpha / (math.sqrt(rank) if stated.get("use_rslora") else rank)
                merged[module] = shapes.read(f"{module}.weight") + factor * b.astype(np.float64) @ a.astype(
                    np.float64
                )
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(stated))
        save_file(tensors, own / "adapter_model.safetensors")
        return own, merged

    return write


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({}, None),
        ({"use_rslora": True, "fan_in_fan_out": True}, None),
        ({"rank_pattern": {r"layers\.1\.mlp\.down_proj": 7}, "alpha_pattern": {DOWN: 3}}, {DOWN: 7}),
    ],
)
def test_weights_are_those_of_the_formula(folder, adapter, config, ranks):
    path, merged = adapter(config, ranks)
    plain, changed = Checkpoint(folder), Checkpoint(folder, path)
    for module, wanted in merged.items():
        found = changed.read(f"{module}.weight")
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
        assert np.array_equal(changed.read(f"{module}.weight", (3, 9)), found[3:9])
    other = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(changed.read(other), plain.read(other))


def test_weights_are_merged_before_they_are_quantised_and_cached_apart(folder, adapter):
    loaded = []
    for scale in (1.0, 0.5):
        path, _ = adapter(name=f"by {scale}", scale=scale)
        weights = load_weights(Checkpoint(folder, path), ModelConfig.from_folder(folder))
        assert f"{path} is merged into 2 linears." in weights.notes
        merged = Checkpoint(folder, path).read(f"{Q}.weight")
        wanted = quantize(merged, bits=4, block=32).dequantize()
        assert np.array_equal(weights.linears[f"{Q}.weight"].dequantize(), wanted)
        loaded.append(weights)
    keys = {own.content_key for own in loaded}
    assert len(keys | {load_weights(Checkpoint(folder), ModelConfig.from_folder(folder)).content_key}) == 3


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (
            {"target_modules": ["q_proj", "down_proj", "c_fc"]},
            {"modules": ("model.layers.0.mlp.c_fc", Q, DOWN)},
            "changes model.layers.0.mlp.c_fc, which the model lacks",
        ),
        (
            {"target_modules": ["q_proj", "down_proj", "k_proj"]},
            {},
            "no factors of the target module 'k_proj'",
        ),
        ({"r": 5}, {"ranks": {Q: 4, DOWN: 4}}, "has rank 4, but adapter_config.json says 5"),
        ({"use_dora": True}, {}, "DoRA"),
        ({"peft_type": "IA3"}, {}, "peft_type = 'IA3'"),
        ({"bias": "all"}, {}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"lora_alpha": -1}, {}, "lora_alpha is -1"),
    ],
)
def test_other_adapters_are_refused_by_name(folder, adapter, config, changes, said):
    path, _ = adapter(config, **changes)
    with pytest.raises(HeteroLLMError, match=said):
        Checkpoint(folder, path)


def test_damaged_adapters_are_refused(folder, adapter, tmp_path):
    path, _ = adapter()
    with pytest.raises(HeteroLLMError, match=r"adapter_config\.json is missing"):
        Checkpoint(folder, tmp_path)
    data = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(data[:-9])
    with pytest.raises(HeteroLLMError, match="no sound safetensors"):
        Checkpoint(folder, path)


def test_answers_follow_the_adapter(folder, adapter, host_llm, token_ids):
    """The logits of the model whose checkpoint has the merged weights."""
    path, _ = adapter()
    ids = token_ids(20)
    plain = host_llm(folder, plan="gpu").session().prefill(ids)
    changed = [host_llm(folder, plan=plan, lora=path).session().prefill(ids) for plan in ("gpu", "npu")]
    assert np.abs(changed[0] - changed[1]).max() < 1e-3 * np.abs(changed[0]).max()
    assert np.abs(changed[0] - plain).max() > 0.01 * np.abs(plain).max()
