import json

import pytest
from transformers import AutoConfig

from heterollm.base import UnsupportedModelError
from heterollm.model import AttentionBlock, find_model

OTHER_LAYERS = {
    "bamba": "mamba_",
    "bert": "type_vocab_size",
    "deepseek_v32": "indexed_attention",
    "diffllama": "lambda_std_dev",
    "falcon_mamba": "conv_kernel",
    "granitemoehybrid": "linear_attention",
    "jamba": "attn_layer_",
    "kimi_linear": "linear_attention",
    "mamba2": "conv_kernel",
    "minicpm3": "kv_lora_rank",
    "minimax": "linear_attention",
    "modernbert-decoder": "local_attention",
    "olmo_hybrid": "linear_attention",
    "recurrent_gemma": "block_types|attention_window|conv1d|lru_width",
    "rwkv": "attention_hidden_size",
    "t5": "is_encoder_decoder",
    "zamba2": "adapter_rank|attention_hidden_size|layers_block_type",
}
"""Families with layers that no simulation models, and the field or kind that the message names."""

LIKE_LLAMA = {
    "cohere": False,
    "persimmon": False,
}
"""Families whose layers are attention and one network, and whether some of their layers slide by default."""

UNLIKE = {
    "attn_type_list": [0, 1],
    "block_types": ["recurrent", "attention"],
    "conv_L_cache": 3,
    "full_attention_interval": 4,
    "hybrid_override_pattern": "M-M*",
    "is_encoder_decoder": True,
    "kv_lora_rank": 512,
    "layer_types": ["full_attention", "conv"],
    "layers_block_type": ["mamba", "hybrid"],
    "linear_num_key_heads": 16,
    "mamba_d_state": 16,
    "num_kv_shared_layers": 10,
    "num_local_experts": 8,
    "q_lora_rank": 128,
    "sliding_window_pattern": "LLLG",
    "ssm_cfg": {"layer": "Mamba2"},
    "text_config": {"hidden_size": 256},
    "vision_config": {"depth": 32},
}
NEUTRAL = (None, 0, False, [], {}, "")

BAICHUAN = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
    "bias": False,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def config_file(folder, values):
    """Return the path of a configuration with some values."""
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def default_values(kind, folder):
    """Return the configuration of a model type by the defaults of transformers, as a checkpoint holds it."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_layers_that_are_not_modelled_are_refused_by_field_and_value(kind, tmp_path):
    path = config_file(tmp_path, default_values(kind, tmp_path))
    with pytest.raises(UnsupportedModelError, match=OTHER_LAYERS[kind]) as raised:
        find_model(path)
    assert repr(kind) in str(raised.value)


@pytest.mark.parametrize("kind", LIKE_LLAMA)
def test_other_decoders_are_taken_for_a_llama_with_their_windows(kind, tmp_path):
    values = default_values(kind, tmp_path)
    found = find_model(config_file(tmp_path, values))
    assert kind in found.note
    assert "Nobody has checked" not in found.note
    kinds = values.get("layer_types") or []
    windows = [block.window for block in found.config.blocks(AttentionBlock).values()]
    assert any(windows) is LIKE_LLAMA[kind]
    if kinds:
        assert [bool(window) for window in windows] == [one == "sliding_attention" for one in kinds]


@pytest.mark.parametrize("name", UNLIKE)
def test_a_field_of_other_layers_is_refused_unless_it_is_neutral(name, tmp_path):
    expected = find_model(config_file(tmp_path, BAICHUAN)).config
    for value in NEUTRAL:
        if name != "layer_types" or value is None:
            assert find_model(config_file(tmp_path, {**BAICHUAN, name: value})).config == expected
    with pytest.raises(UnsupportedModelError, match=name):
        find_model(config_file(tmp_path, {**BAICHUAN, name: UNLIKE[name]}))


def test_an_architecture_that_is_no_decoder_is_refused(tmp_path):
    path = config_file(tmp_path, {**BAICHUAN, "architectures": ["InternLM2ForRewardModel"]})
    with pytest.raises(UnsupportedModelError, match="InternLM2ForRewardModel"):
        find_model(path)


def test_a_pattern_of_windows_makes_every_nth_layer_full(tmp_path):
    more = {"num_hidden_layers": 4, "sliding_window": 64, "sliding_window_pattern": 2}
    found = find_model(config_file(tmp_path, {**BAICHUAN, **more})).config
    assert [block.window for block in found.blocks(AttentionBlock).values()] == [64, 0, 64, 0]
    unused = find_model(config_file(tmp_path, {**BAICHUAN, **more, "use_sliding_window": False})).config
    assert not any(block.window for block in unused.blocks(AttentionBlock).values())


def test_an_unknown_field_is_named_in_the_note(tmp_path):
    found = find_model(config_file(tmp_path, {**BAICHUAN, "warp_layers": [1]}))
    assert "warp_layers" in found.note
