"""Configurations and tensors of mixtures of experts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import Routing, WeightFormat
from heterollm.model import (
    AttentionBlock,
    Checkpoint,
    FfnBlock,
    ModelConfig,
    expert_specs,
    load_weights,
    op_specs,
)
from heterollm.model.config import check_config
from heterollm.model.expert_layout import TensorRows, expert_rows
from heterollm.model.layout import expected_tensors

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "gpt_oss"),
)
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def config_of(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(SIZES | {"model_type": model_type} | changes)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_defaults_are_those_of_transformers(model_type: str, saved: bool) -> None:
    theirs = transformers.AutoConfig.for_model(model_type, **SIZES)
    ours = ModelConfig.from_dict(theirs.to_dict() if saved else SIZES | {"model_type": model_type})
    assert ours.mixture is not None
    assert ours.mixture.routing.experts == (
        theirs.num_local_experts if hasattr(theirs, "num_local_experts") else theirs.num_experts
    )
    assert ours.mixture.routing.chosen == theirs.num_experts_per_tok
    mixes = model_type == "phimoe"
    assert ours.mixture.routing.normalized == getattr(theirs, "norm_topk_prob", not mixes)
    assert ours.mixture.routing.jitter == (theirs.router_jitter_noise if mixes else 0)
    assert ours.mixture.width == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    names = ("shared_intermediate_size", "shared_expert_intermediate_size")
    shared = next((getattr(theirs, name) for name in names if hasattr(theirs, name)), 0)
    assert (0 if ours.ffn is None else ours.ffn.width) == shared
    assert ours.attention.kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.attention.scale == getattr(theirs, "attention_multiplier", ours.attention.head_dim**-0.5)
    assert ours.rope.base == theirs.rope_parameters["rope_theta"]
    assert {block.window for block in ours.blocks(AttentionBlock).values()} == {
        getattr(theirs, "sliding_window", None) or 0,
        *([0] if model_type == "gpt_oss" else []),
    }


def test_multipliers_become_scales() -> None:
    """A stream that is divided by the multiplier of what is added to it has the same norms."""
    multipliers = {"embedding_multiplier": 12, "residual_multiplier": 0.25, "logits_scaling": 8}
    config = config_of("granitemoe", **multipliers, rms_norm_eps=1e-6)
    assert config.embedding_scale == 48
    assert config.rms_norm_eps == pytest.approx(16e-6)
    assert config.logit_scale == 0.125


@pytest.mark.parametrize("file", ["modeling_phimoe", "modeling_slimmoe"])
def test_published_names_of_phi_moe(file: str) -> None:
    published = {
        "architectures": ["PhiMoEForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": f"{file}.PhiMoEForCausalLM"},
    }
    assert config_of("phimoe", **published) == config_of("phimoe")


def test_published_fields_of_qwen_moe() -> None:
    published = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_window_layers": 21,
        "moe_intermediate_size": 80,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 192,
        "sliding_window": 32768,
        "use_sliding_window": False,
    }
    config = config_of("qwen2_moe", **published)
    assert check_config(SIZES | {"model_type": "qwen2_moe"} | published) == ()
    assert [block.width for block in config.blocks(FfnBlock).values()] == [192, 192]
    dense = config_of("qwen2_moe", **published, mlp_only_layers=[0])
    assert [block.width for block in dense.blocks(FfnBlock).values()] == [96, 192]
    assert [block.token_gated for block in dense.blocks(FfnBlock).values()] == [False, True]


def test_published_fields_of_gpt_oss() -> None:
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4",
        },
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    }
    config = config_of("gpt_oss", **published)
    assert check_config(SIZES | {"model_type": "gpt_oss"} | published) == ()
    layers = config.blocks(AttentionBlock).values()
    assert [one.window for one in layers] == [128, 0]
    assert all(one.sinks and one.qkv_bias and one.o_bias for one in layers)
    assert (config.rope.kind, config.rope.base, config.rope.truncate) == ("yarn", 150_000, False)
    block = config.mixture
    assert block is not None
    assert block.routing == Routing(32, 4)
    assert block.clip == (7.0, 1.702)
    assert config.stored is not None
    assert expert_specs(config, op_specs(config, "w4a16", 32, True))[0].weight == WeightFormat(8, 32)
    # A file without these fields has the same ones.
    short = config_of("gpt_oss", num_local_experts=32, max_position_embeddings=131_072)
    assert short.rope == config.rope
    assert short.per_layer == config.per_layer


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"swiglu_limit": 0}, CheckpointError, "swiglu_limit"),
        ({"swiglu_alpha": "x"}, CheckpointError, "swiglu_alpha"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "'relu' of a clipped gate"),
        ({"num_experts_per_tok": 129}, CheckpointError, "at most the 128 of num_experts"),
    ],
)
def test_values_that_gpt_oss_cannot_have(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        config_of("gpt_oss", **changes)


def test_rows_of_an_expert() -> None:
    prefix = "model.layers.1.block_sparse_moe"
    assert expert_rows(config_of("mixtral"), 1, 3) == {
        "gate": TensorRows(f"{prefix}.experts.3.w1.weight", 0, 96),
        "up": TensorRows(f"{prefix}.experts.3.w3.weight", 0, 96),
        "down": TensorRows(f"{prefix}.experts.3.w2.weight", 0, 64),
    }
    config = config_of("granitemoe")
    assert expert_rows(config, 1, 3) == {
        "gate": TensorRows(f"{prefix}.input_linear.weight", 576, 672),
        "up": TensorRows(f"{prefix}.input_linear.weight", 672, 768),
        "down": TensorRows(f"{prefix}.output_linear.weight", 192, 256),
    }
    assert expected_tensors(config)[f"{prefix}.output_linear.weight"] == (8, 64, 96)


def test_experts_have_the_format_of_the_other_groups() -> None:
    config = config_of("qwen3_moe", moe_intermediate_size=80)
    specs = op_specs(config, "w4a8", 32, False)
    assert [spec.group for spec in specs] == ["qkv", "o", "qkv", "o", "head"]
    first, second = expert_specs(config, specs)
    assert (first.layer, second.layer) == (0, 1)
    assert first.experts == Routing(128, 8, normalized=False)
    assert first.weight == specs[0].weight
    assert first.then is not None
    assert (first.then.columns, first.then.weight.block) == (80, 16)
    assert first.integer_inputs
    assert first.then.integer_inputs


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "said"),
    [
        ("olmoe", {"mlp_only_layers": [1]}, UnsupportedModelError, "layers without experts"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, CheckpointError, "a list of numbers of layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step"),
        ("mixtral", {"num_experts_per_tok": 9}, CheckpointError, "at most the 8 of num_experts"),
        ("phimoe", {"num_experts_per_tok": 3}, CheckpointError, "sparsemixer"),
        ("olmoe", {"num_local_experts": 10**9}, CheckpointError, "num_local_experts"),
        ("mixtral", {"clip_qkv": 8.0}, UnsupportedModelError, "limit of queries"),
        ("mixtral", {"lm_head_bias": True}, UnsupportedModelError, "bias of the LM head"),
    ],
)
def test_what_no_mixture_can_be_is_refused(
    model_type: str, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        config_of(model_type, **changes)


@pytest.mark.parametrize("model_type", ["mixtral", "granitemoe"])
def test_experts_are_read_one_at_a_time(
    model_type: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(model_type)
    config, source = ModelConfig.from_folder(folder), Checkpoint(folder)
    weights = load_weights(source, config, precision="fp16", float_dtype=np.float32)
    read, sizes = Checkpoint.read, []

    def counted(own: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> Any:
        values = read(own, name, rows)
        sizes.append(values.size)
        return values

    monkeypatch.setattr(Checkpoint, "read", counted)
    members = weights.expert_members(1, ("gate", "up"))
    assert sizes == []
    assert config.mixture is not None
    for index, member in enumerate(members):
        expert, name = divmod(index, 2)
        place = expert_rows(config, 1, expert)["gate" if name == 0 else "up"]
        whole = source.read(place.name).reshape(-1, config.hidden_size)
        np.testing.assert_array_equal(member, whole[place.start : place.stop])
    assert len(members) == 2 * config.mixture.routing.experts
    assert sizes[::2] == [config.mixture.width * config.hidden_size] * len(members)


def test_experts_in_one_tensor_are_those_of_their_own(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published checkpoints of Qwen3.5-MoE have them."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    source, folder = checkpoint("qwen3_5_moe_text"), tmp_path / "stacked"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        prefix = next(name for name in tensors if f"layers.{layer}.mlp.experts.0.down" in name)
        prefix = prefix.partition("0.down")[0]
        for stacked, members in STACKED.items():
            parts = [
                np.concatenate([tensors.pop(f"{prefix}{expert}.{member}.weight") for member in members])
                for expert in range(6)
            ]
            tensors[f"{prefix}{stacked}"] = np.stack(parts)
    save_file(tensors, folder / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    one, other = (load_weights(Checkpoint(own), config) for own in (source, folder))
    assert list(one.linears) == list(other.linears)
    for name, weight in one.linears.items():
        assert np.array_equal(weight.dequantize(), other.linears[name].dequantize()), name
