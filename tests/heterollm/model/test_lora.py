"""LoRA adapters against PEFT's formulas in float64."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from heterollm.base import HeteroLLMError
from heterollm.kernels.formats import quantize
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.model import Checkpoint, ModelConfig, load_weights
from heterollm.model.fields.adapter import ADAPTER_FIELDS
from heterollm.model.lora import pissa

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


ADAPTER_VALUES = {
    "task_type": "SEQ_CLS",
    "bias": "lora_only",
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "alora_invocation_tokens": [5],
    "layer_replication": [[0, 2], [1, 2]],
    "lora_bias": True,
    "megatron_config": {"hidden_size": 64},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 8},
}
READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
}
"""Fields that the tests of this module change."""


@pytest.mark.parametrize("row", ADAPTER_FIELDS.fields, ids=lambda row: row.name)
def test_each_field_is_read_or_ignored_or_refused_by_name(folder, adapter, row):
    if row.effect == "refused":
        path, _ = adapter({row.name: ADAPTER_VALUES[row.name]})
        with pytest.raises(HeteroLLMError, match=f"{row.name} = .*{re.escape(row.meaning)}"):
            Checkpoint(folder, path)
        for place, neutral in enumerate((*row.neutral, None)):
            path, merged = adapter({row.name: neutral}, name=f"neutral {place}")
            found = Checkpoint(folder, path).read(f"{Q}.weight")
            assert np.abs(found - merged[Q]).max() < 1e-5 * np.abs(merged[Q]).max()
    elif row.effect == "none":
        path, merged = adapter({row.name: "any"})
        assert np.abs(Checkpoint(folder, path).read(f"{Q}.weight") - merged[Q]).max() < 1e-4
    else:
        assert row.name in READ


def test_every_field_that_peft_knows_has_a_row():
    peft = pytest.importorskip("peft", reason="the facts are PEFT's own")
    names = {one.name for kind in (peft.LoraConfig, peft.PeftConfig) for one in dataclasses.fields(kind)}
    assert {name for name in names if ADAPTER_FIELDS.find(name) is None} == set()


def test_a_field_that_no_table_has_is_noted(folder, adapter):
    path, _ = adapter({"use_new_thing": True, "empty_thing": None})
    weights = load_weights(Checkpoint(folder, path), ModelConfig.from_folder(folder))
    (note,) = [note for note in weights.notes if "use_new_thing" in note]
    assert str(path / "adapter_config.json") in note
    assert "empty_thing" not in note


def test_rank_and_alpha_are_eight_by_default(folder, adapter):
    path, merged = adapter({"r": 8, "lora_alpha": 8})
    stated = json.loads((path / "adapter_config.json").read_text())
    del stated["r"], stated["lora_alpha"]
    (path / "adapter_config.json").write_text(json.dumps(stated))
    assert np.abs(Checkpoint(folder, path).read(f"{Q}.weight") - merged[Q]).max() < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-LINEAR"},
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": [Q, DOWN]},
        {"target_modules": None},
        {"exclude_modules": ["k_proj"]},
        {"exclude_modules": r".*k_proj"},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": [], "layers_pattern": ["h", "layers"]},
    ],
)
def test_modules_are_named_as_in_peft(folder, adapter, config):
    path, merged = adapter(config)
    assert np.abs(Checkpoint(folder, path).read(f"{DOWN}.weight") - merged[DOWN]).max() < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": r"model\.layers\.1\..*"},
        {"exclude_modules": ["down_proj"]},
        {"exclude_modules": r".*q_proj"},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1], "layers_pattern": ["layers"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "h"},
    ],
)
def test_factors_that_peft_would_ignore_are_refused(folder, adapter, config):
    path, _ = adapter(config)
    with pytest.raises(HeteroLLMError, match=r"has factors of .*which adapter_config\.json does not name"):
        Checkpoint(folder, path)


@pytest.mark.parametrize("kind", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_model_alone_change_nothing(folder, adapter, kind):
    path, merged = adapter({"init_lora_weights": kind})
    assert np.abs(Checkpoint(folder, path).read(f"{Q}.weight") - merged[Q]).max() < 1e-4


@pytest.mark.parametrize("shape", [(160, 300), (300, 160), (30, 40)])
@pytest.mark.parametrize("decay", [0.0, 0.5, 3.0])
def test_the_largest_singular_values_are_those_of_the_whole_decomposition(shape, decay):
    random = np.random.default_rng(0)
    u, s, v = np.linalg.svd(random.standard_normal(shape), full_matrices=False)
    s *= np.arange(1.0, len(s) + 1.0) ** -decay
    weight, rank = ((u * s) @ v).astype(np.float32), 4
    found = pissa(weight, rank)
    assert np.abs(found.b @ found.a - (u[:, :rank] * s[:rank]) @ v[:rank]).max() < 1e-6 * s[0]
    assert (found.scale, len(found.a)) == (-1.0, rank)


def initial_of(kind, weight, rank, scale):
    """PEFT's pissa_init and olora_init (tuners/lora/layer.py), in float64."""
    if kind == "pissa":
        u, s, v = np.linalg.svd(weight, full_matrices=False)
        return (u[:, :rank] * s[:rank]) @ v[:rank]
    q, r = np.linalg.qr(weight)
    return scale * q[:, :rank] @ r[:rank]


@pytest.mark.parametrize("kind", ["pissa", "olora", "OLoRA"])
@pytest.mark.parametrize("rank", [2, 40])
def test_initial_factors_are_taken_off_as_peft_does(folder, adapter, kind, rank):
    path, merged = adapter({"init_lora_weights": kind, "r": rank, "lora_alpha": 3})
    changed = Checkpoint(folder, path)
    for module, wanted in merged.items():
        weight = Checkpoint(folder).read(f"{module}.weight").astype(np.float64)
        expected = wanted - initial_of(kind.lower(), weight, rank, 3 / rank)
        found = changed.read(f"{module}.weight")
        assert sqnr_db(found, expected) > 100
        assert np.array_equal(changed.read(f"{module}.weight", (3, 9)), found[3:9])
        assert sqnr_db(wanted, expected) < 60
    assert any(kind.lower() in note for note in changed.adapter.notes)


@pytest.mark.parametrize(
    "kind", ["pissa_niter_4", "corda", "loftq", "lora_ga", "PiSSA niter", "unknown", ["pissa"], 3]
)
def test_initialisations_that_cannot_be_repeated_are_refused(folder, adapter, kind):
    path, _ = adapter({"init_lora_weights": kind})
    with pytest.raises(HeteroLLMError, match=r"init_lora_weights = .*path_initial_model_for_weight"):
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
