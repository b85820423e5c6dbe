"""What the declarations make of published and of sparse configurations, against transformers'."""

from typing import Any

import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import Member
from heterollm.model import ModelConfig, op_specs
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.blocks import ShortConvBlock
from heterollm.model.families import FAMILIES
from heterollm.model.layout import expected_tensors, layer_norms, linear_rows
from heterollm.model.missing import MISSING
from heterollm.model.tensor_rows import TensorRows
from heterollm.model.wrappers import WRAPPERS

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# As their makers publish them, and as sparse as transformers takes them.
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral 0.1": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 32},
    "mistral 0.3": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
    "mistral": {"model_type": "mistral", "num_attention_heads": 8},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 32},
    "qwen2 with window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 32,
        "max_window_layers": 5,
    },
    "qwen2 unused window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "attention_bias": True},
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": 64, "sliding_window": 32},
    "phi3 128k": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        "rope_theta": 5000.0,
    },
    "gemma2": {"model_type": "gemma2"},
    "gemma2 with layers": {
        "model_type": "gemma2",
        "layer_types": ["full_attention"] * 7 + ["sliding_attention"],
        "sliding_window": 32,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": 144,
        "head_dim": 128,
    },
    "gemma3": {"model_type": "gemma3_text", "num_key_value_heads": 1},
    "gemma3 scaled": {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "sliding_window_pattern": 3,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "smollm3": {"model_type": "smollm3"},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "hidden_act": "gelu", "head_dim": 16},
    "granite": {"model_type": "granite", "attention_multiplier": 0.25},
    "stablelm": {"model_type": "stablelm", "num_key_value_heads": 2, "use_qkv_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", "num_key_value_heads": 2, "use_bias": True},
    "glm4": {"model_type": "glm4", "num_key_value_heads": 2},
    "seed_oss": {"model_type": "seed_oss", "num_key_value_heads": 2},
    "ministral": {"model_type": "ministral", "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 32},
    "cwm": {"model_type": "cwm", "num_key_value_heads": 2, "sliding_window": 32},
    "phi": {
        "model_type": "phi",
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-4,
    },
    "pythia": {
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-4,
        "rotary_emb_base": 5000,
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
    },
    "apertus": {"model_type": "apertus", "num_key_value_heads": 2},
    "internlm3": {
        "model_type": "internlm3",
        "head_dim": 16,
        "num_key_value_heads": 2,
        "qkv_bias": True,
        "bias": True,
        "rope_theta": 50_000_000,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "opt": {"model_type": "opt", "ffn_dim": 96},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 32, "norm_epsilon": 1e-4},
    "nemotron": {"model_type": "nemotron", "num_key_value_heads": 2, "norm_eps": 1e-4},
    "arcee": {"model_type": "arcee", "num_key_value_heads": 2, "mlp_bias": True},
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "attention_bias": True, "rope_theta": 5e5},
    "olmo3": {
        "model_type": "olmo3",
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "rope_theta": 500_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "exaone4": {
        "model_type": "exaone4",
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "sliding_window_pattern": "LLLG",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "rope_theta": 1_000_000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "exaone4 without window": {
        "model_type": "exaone4",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 8,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_key_value_heads": 2,
        "layer_norm_eps": 1e-4,
        "logit_scale": 0.25,
        "position_embedding_type": "rope_gptj",
        "rope_theta": 50_000,
        "sliding_window": 32,
        "sliding_window_pattern": 4,
        "use_qk_norm": False,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "num_key_value_heads": 2,
        "use_qk_norm": True,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "granite with windows": {
        "model_type": "granite_swa",
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "attention_multiplier": 0.0625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "rope_theta": 50_000.0,
    },
    "exaone 3.5": {
        "model_type": "exaone",
        "activation_function": "silu",
        "head_dim": 16,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "num_layers": 8,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4": {
        "model_type": "llama4_text",
        "attention_chunk_size": 32,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 64,
        "head_dim": 16,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 160,
        "moe_layers": [1, 3],
        "no_rope_layers": [],
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "use_qk_norm": True,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.5,
            "original_max_position_embeddings": 64,
        },
    },
    "smollm3 with layers": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 1],
        "use_sliding_window": True,
        "sliding_window": 32,
        "mlp_bias": True,
    },
}


KINDS = ["linear_attention", "full_attention"]
NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16}


@pytest.fixture(params=CONFIGS)
def published(request: pytest.FixtureRequest) -> dict[str, Any]:
    return COMMON | CONFIGS[request.param]


RENAMED = {"gpt_neox": ("lm_head", "embed_out")}


def theirs_of(fields: dict[str, Any]) -> Any:
    copied = {name: dict(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return transformers.AutoConfig.for_model(copied.pop("model_type"), **copied)


@pytest.mark.parametrize("saved", [False, True])
def test_features_are_those_of_transformers(published: dict[str, Any], saved: bool) -> None:
    """As published, and as transformers writes the same configuration."""
    theirs = theirs_of(published)
    ours = ModelConfig.from_dict(theirs.to_dict() if saved else published)
    own = ours.attention
    assert own.kv_heads == getattr(theirs, "num_key_value_heads", own.heads)
    assert own.head_dim == (getattr(theirs, "head_dim", None) or 64 // own.heads)
    family = FAMILIES[theirs.model_type]
    assert ours.rms_norm_eps == getattr(theirs, family.renamed.get("rms_norm_eps", "rms_norm_eps"), 1e-5)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    scale = getattr(theirs, "query_pre_attn_scalar", own.head_dim) ** -0.5
    scale = getattr(theirs, "attention_multiplier", scale)
    assert own.scale == pytest.approx(scale, rel=1e-12)
    assert own.soft_cap == (getattr(theirs, "attn_logit_softcapping", None) or 0)
    assert ours.logit_soft_cap == (getattr(theirs, "final_logit_softcapping", None) or 0)
    slides = theirs.model_type in ("mistral", "phi3", "starcoder2", "ministral3")
    everywhere = theirs.sliding_window if slides else 0
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 8
    own_window = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    windows = [getattr(theirs, own_window[kind]) if kind in own_window else everywhere or 0 for kind in kinds]
    assert [block.window for block in ours.blocks(AttentionBlock).values()] == windows
    turning = getattr(theirs, "no_rope_layers", [not family.tensors.positions] * 8)
    if theirs.model_type in ("exaone4", "cohere2") and theirs.sliding_window is not None:
        turning = [kind == "sliding_attention" for kind in kinds]
    assert [block.rope is not None for block in ours.blocks(AttentionBlock).values()] == [
        bool(one) for one in turning
    ]
    nested = theirs.model_type in ("gemma3_text", "olmo3")
    for layer, kind in zip(ours.blocks(AttentionBlock).values(), kinds, strict=True):
        if layer.rope is not None:
            parameters = theirs.rope_parameters[kind] if nested else theirs.rope_parameters
            kind, base = parameters["rope_type"], parameters["rope_theta"]
            if "alpha" in parameters:
                kind, base = "default", base * parameters["alpha"] ** (own.head_dim / (own.head_dim - 2))
            assert layer.rope.kind == kind
            assert layer.rope.base == base
            assert layer.rope.factor == parameters.get("factor")
            assert own.rotary_dim == own.head_dim * parameters.get("partial_rotary_factor", 1)


def test_tensors_are_those_of_transformers(published: dict[str, Any]) -> None:
    ours = ModelConfig.from_dict(published)
    fields = {**published, "num_layers" if "num_layers" in published else "num_hidden_layers": 1}
    fields |= {name: fields[name][:1] for name in ("layer_types", "no_rope_layers") if name in fields}
    model = transformers.AutoModelForCausalLM.from_config(theirs_of(fields))
    stored = model.state_dict()
    buffers = (pair for pair in model.named_buffers() if pair[0] in stored)
    shapes = {name: tuple(one.shape) for name, one in (*model.named_parameters(), *buffers)}
    # Names are those of files, some of which transformers renames.
    shapes = {name.replace(*RENAMED.get(ours.model_type, ("", ""))): one for name, one in shapes.items()}
    prefix = ".h." if ours.model_type == "exaone" else ".layers."
    expected = expected_tensors(ours).items()
    first = {name: shape for name, shape in expected if prefix not in name or f"{prefix}0." in name}
    if ours.model_type == "exaone":
        assert sorted(first.values()) == sorted(shapes.values())
    else:
        assert first == shapes


def test_members_of_a_fused_tensor_are_its_rows() -> None:
    config = ModelConfig.from_dict(COMMON | CONFIGS["phi3"] | {"num_key_value_heads": 2})
    groups = linear_rows(config, 3)
    name = "model.layers.3.self_attn.qkv_proj.weight"
    assert groups["qkv"] == {
        "q": TensorRows(name, 0, 64),
        "k": TensorRows(name, 64, 96),
        "v": TensorRows(name, 96, 128),
    }
    name = "model.layers.3.mlp.gate_up_proj.weight"
    assert groups["gate_up"] == {"gate": TensorRows(name, 0, 96), "up": TensorRows(name, 96, 192)}
    assert groups["o"] == {"o": TensorRows("model.layers.3.self_attn.o_proj.weight", 0, 64)}
    qkv = next(spec for spec in op_specs(config, "w4a16", 32, True) if spec.group == "qkv")
    assert qkv.members == (Member("q", 64), Member("k", 32), Member("v", 32))


@pytest.mark.parametrize("alias", ["su", "yarn"])
def test_the_first_checkpoints_of_phi3_name_longrope_otherwise(alias: str) -> None:
    fields = COMMON | CONFIGS["phi3 128k"]
    renamed = fields | {"rope_scaling": fields["rope_scaling"] | {"type": alias}}
    assert ModelConfig.from_dict(renamed) == ModelConfig.from_dict(fields)


def test_code_that_transformers_has_too_may_come_along() -> None:
    fields = COMMON | CONFIGS["phi3"]
    published = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    assert ModelConfig.from_dict(fields | {"auto_map": published}) == ModelConfig.from_dict(fields)
    for other in ({"AutoModelForCausalLM": "modeling_mine.Phi3ForCausalLM"}, {"AutoConfig": "x.Y"}, "code"):
        with pytest.raises(UnsupportedModelError, match="auto_map"):
            ModelConfig.from_dict(fields | {"auto_map": other})


def test_norms_of_a_layer() -> None:
    def norms(name: str) -> set[str]:
        return set(layer_norms(ModelConfig.from_dict(COMMON | CONFIGS[name]), 0))

    plain, heads = {"attention", "feed_forward"}, {"query_head", "key_head"}
    assert norms("olmo2") == norms("exaone4") == {"attention_output", "feed_forward_output"} | heads
    assert norms("mistral") == norms("smollm3") == norms("phi3") == plain
    assert norms("qwen3") == plain | heads
    assert norms("gemma2") == plain | {"attention_output", "feed_forward_output"}
    assert norms("gemma3") == norms("gemma2") | heads


def test_scale_of_the_embedding_is_a_float32() -> None:
    config = ModelConfig.from_dict(COMMON | CONFIGS["gemma2"] | {"hidden_size": 160})
    assert config.embedding_scale == pytest.approx(160**0.5, rel=1e-7)
    assert config.embedding_scale != 160**0.5
    assert ModelConfig.from_dict(COMMON | CONFIGS["mistral"]).embedding_scale == 1


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma3", {"model_type": "gemma3"}, "without text_config"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "soft cap on attention scores"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma2", {"hidden_activation": "mish"}, "'mish'"),
        ("mistral", {"final_logit_softcapping": 30.0}, "soft cap on logits"),
        ("mistral 0.1", {"layer_types": ["full_attention", "sliding_attention"] * 4}, "different kinds"),
        ("mistral 0.1", {"layer_types": ["full_attention"] * 8}, "different kinds"),
        ("mistral", {"num_local_experts": 8}, "mixture of experts"),
        ("mistral", {"query_pre_attn_scalar": 64}, "scale of attention scores"),
        ("qwen3", {"num_experts": 128}, "mixture of experts"),
        ("qwen3", {"no_rope_layers": [1] * 7 + [0]}, "without positions"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "part of a head"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
        ("phi3", {"model_type": "phi3small"}, "phi3small"),
        ("phi3", {"model_type": "cohere"}, "'cohere' (norms of heads that subtract the mean)"),
        ("phi3", {"model_type": "bamba"}, "'bamba' (layers of Mamba-2)"),
        ("smollm3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
        ("hunyuan", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scales heads (yarn) before"),
        ("mistral", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, "alpha"),
        ("mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "grow with the position"),
    ],
)
def test_what_a_family_does_not_follow_is_refused_by_name(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="Supported model types: llama") as caught:
        ModelConfig.from_dict(COMMON | CONFIGS[name] | changes)
    assert named in caught.value.message
    assert caught.value.fix is not None
    assert all(f" {known}" in caught.value.fix for known in FAMILIES)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is ['full_attention']"),
        ("gemma2", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2 with window", {"max_window_layers": -1}, "max_window_layers is -1"),
        (
            "qwen2 unused window",
            {"layer_types": ["sliding_attention"] * 8},
            "sliding_window is 32; expected a whole number, in use",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list of 8 times 0 or 1"),
        ("granite with windows", {"layer_rope_theta": [0.5] * 8}, "for each layer 0 or a number above 1"),
        ("granite with windows", {"layer_rope_theta": [50_000.0]}, "for each layer 0 or a number above 1"),
        ("internlm3", {"bias": False}, "qkv_bias is True; expected False, as bias"),
        ("llama4", {"no_rope_layers": [1]}, "a list of 8 times 0 or 1"),
        ("llama4", {"moe_layers": "all"}, "a list of numbers of layers"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ("llama4", {"num_experts_per_tok": 2}, "1, since its weight multiplies the input"),
        ("smollm3", {"no_rope_layers": [2] * 8}, "no_rope_layers"),
        ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1"),
        ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ("phi3 128k", {"partial_rotary_factor": 0.5}, "short_factor"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings",
        ),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": -1.0, "factor": 1.0}}, "alpha is -1.0"),
        ("cohere2", {"sliding_window": None}, "sliding_window is missing"),
        ("exaone4", {"layer_types": None}, "sliding_window_pattern is 'LLLG'"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 1, "sliding_attention": {}}},
            "full_attention is 1",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(COMMON | CONFIGS[name] | changes)
    assert named in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"full_attn_idxs": [2, 5], "num_key_value_heads": 2},
        # As the first checkpoints are.
        {"full_attn_idxs": [0, 7], "block_ff_dim": 200, "tie_embedding": False, "norm_eps": 1e-3},
        {"layer_types": ["conv", "full_attention"] * 4, "block_auto_adjust_ff_dim": False},
        {"block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3, "conv_L_cache": 5, "rope_theta": 1e4},
        {},
    ],
)
def test_layers_and_widths_of_lfm2_are_those_of_transformers(changes: dict[str, Any]) -> None:
    fields = COMMON | {"model_type": "lfm2", "num_attention_heads": 8} | changes
    theirs = theirs_of(fields)
    for given in (fields, theirs.to_dict()):
        ours = ModelConfig.from_dict(given)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert expected_tensors(ours) == shapes
        kinds = ["conv" if layer.find(ShortConvBlock) else "full_attention" for layer in ours.per_layer]
        assert kinds == theirs.layer_types
        assert ours.rms_norm_eps == theirs.norm_eps
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.rope.base == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "changes", [{}, {"full_attention_interval": 2, "attention_bias": True}, {"layer_types": KINDS * 4}]
)
def test_layers_of_qwen3_5_are_those_of_transformers(changes: dict[str, Any]) -> None:
    fields = COMMON | {"model_type": "qwen3_5_text", "num_attention_heads": 8, **NET} | changes
    theirs = theirs_of(fields)
    for given in (fields, theirs.to_dict()):
        ours = ModelConfig.from_dict(given)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert expected_tensors(ours) == shapes
        assert [KINDS[bool(layer.find(AttentionBlock))] for layer in ours.per_layer] == theirs.layer_types
        assert ours.attention.rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"linear_key_head_dim": 320}, UnsupportedModelError, "linear_key_head_dim 320, above 256"),
        ({"linear_num_value_heads": 3}, CheckpointError, "a multiple of the 2 of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim is 1"),
        ({"full_attention_interval": 0}, CheckpointError, "full_attention_interval is 0"),
        ({"full_attention_interval": 9}, UnsupportedModelError, "A model without attention"),
        ({"layer_types": ["conv"] * 8}, UnsupportedModelError, "'conv'"),
        ({"attn_output_gate": False}, UnsupportedModelError, "without an output gate"),
        ({"mamba_ssm_dtype": "float16"}, UnsupportedModelError, "recurrent state in another type"),
    ],
)
def test_other_delta_nets_are_refused(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ModelConfig.from_dict(COMMON | {"model_type": "qwen3_5_text", **NET} | changes)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"full_attn_idxs": []}, UnsupportedModelError, "without attention"),
        ({"conv_bias": True}, UnsupportedModelError, "biases of convolutions"),
        ({"layer_types": ["conv", "linear_attention"] * 4}, UnsupportedModelError, "linear_attention"),
        ({"layer_types": ["conv", "sliding_attention"] * 4}, CheckpointError, "sliding_window"),
        ({"conv_L_cache": 1, "full_attn_idxs": [0]}, CheckpointError, "conv_L_cache is 1"),
    ],
)
def test_other_convolutions_are_refused(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ModelConfig.from_dict(COMMON | {"model_type": "lfm2", "num_attention_heads": 8} | changes)


def test_a_type_with_a_missing_feature_is_not_supported() -> None:
    assert not {*MISSING} & {*FAMILIES, *WRAPPERS}
    assert all(
        kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        for kind in {*MISSING} - {"kimi_linear", "minicpm3", "bailing_moe"}
    )
