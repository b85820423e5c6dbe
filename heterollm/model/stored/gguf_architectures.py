"""The architectures of GGUF files, and the models in transformers that they were converted from.

What becomes of each tensor: https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from heterollm.model.stored.gguf_family_fields import (
    Fields,
    cohere2,
    deepseek2,
    delta_net,
    delta_net_moe,
    dots1,
    ernie_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    gemma4_moe,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    granite_moe,
    lfm2,
    lfm2_moe,
    llama4,
    mellum,
    minicpm,
    mistral3,
    nemotron_h,
    nemotron_h_moe,
    no_fields,
    olmo,
    olmo2,
    one_window,
    phimoe,
    plain_rope,
    qwen2_moe,
    qwen3_moe,
    silu,
    stablelm,
)
from heterollm.model.stored.gguf_file import GgufFile, Lists
from heterollm.model.stored.gguf_names import SKIP, Other, space_modules, space_others


class Architecture(NamedTuple):
    """A value of ``general.architecture``.

    Args:
        model_type: That of ``config.json``.
        class_name: The class in transformers.
        layer: Prefix of the names of layers' tensors, before the number.
        grouped: Whether rows of ``attn_qkv`` stand by heads in the checkpoint: those of q, k and v of each.
        permuted: Whether the rows of q and k stand in the order of rotated pairs.
        norm_offset: What the converter added to the weights of norms.
        biases: Fields of ``config.json`` for biases, each with tensors of files that have them.
        modules: Modules of a layer by the file's names, where they differ from Llama's.
        joined: The file's names of tensors that share the rows of a module's weight.
        top: Modules outside of layers, likewise; with ``{}`` for the number of each in a stack.
        experts: Modules of an expert's weights by the stacks that hold them.
        experts_field: Field of ``config.json`` with the number of experts.
        epsilon: Field of ``config.json`` for the number added in norms, and the file's.
        fields: Returns the fields of ``config.json`` that other architectures lack.
        lists: Meaning of heads and widths that are lists.
        others: Other tensors of a layer by the file's names, where they differ from those of all.
        numbers: Names and shapes of tensors of each layer whose numbers the metadata has, by field.
        is_latent: Whether attention is latent.
        heads_in_turns: Whether the value heads of a delta net stand in turns: the first of each key head,
            then the second of each.
    """

    model_type: str
    class_name: str
    layer: str = "model.layers"
    grouped: bool = False
    permuted: bool = False
    norm_offset: float = 0.0
    biases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    modules: Mapping[str, str] = MappingProxyType({})
    joined: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    top: Mapping[str, str] = MappingProxyType({})
    experts: Mapping[str, str] = MappingProxyType({})
    experts_field: str = "num_experts"
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    fields: Callable[[GgufFile, Fields], Fields] = no_fields
    lists: Lists = "alike"
    others: Mapping[str, Other] = MappingProxyType({})
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({})
    is_latent: bool = False
    heads_in_turns: bool = False

    @property
    def has_spaces(self) -> bool:
        """Whether layers may be state spaces."""
        return SKIP in self.others


def key_heads(file: GgufFile, architecture: Architecture) -> int:
    """Return the key heads of layers with attention."""
    return file.count("attention.head_count_kv", "attention.head_count", lists=architecture.lists)


LAYER_NORM: Final = ("layer_norm_eps", "attention.layer_norm_epsilon")
QKV_BIAS: Final = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
ATTENTION_BIAS: Final = ("attention_bias", QKV_BIAS)
BIASES: Final = (ATTENTION_BIAS, ("mlp_bias", ("blk.0.ffn_down.bias",)))
FUSED_NETWORK: Final = {"ffn_up": "mlp.gate_up_proj"}
OUTPUT_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_MODULES: Final = {**OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
NAMED_EXPERTS: Final = {
    f"ffn_{member}_exps": f"mlp.experts.{{}}.{member}_proj" for member in ("gate", "up", "down")
}
NUMBERED_EXPERTS: Final = {
    f"ffn_{member}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
SHARED_EXPERT: Final = {
    f"ffn_{member}_shexp": f"mlp.shared_expert.{member}_proj" for member in ("gate", "up", "down")
}
SHARED_EXPERTS: Final = {own: module.replace("expert", "experts") for own, module in SHARED_EXPERT.items()}
LFM2_NORM: Final = ("norm_eps", "attention.layer_norm_rms_epsilon")
LFM2_MODULES: Final = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
LFM2_TOP: Final = dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
POST_NORM: Final = {"post_attention_norm": "post_attention_layernorm"}
ROUTER: Final = {"ffn_gate_inp": "mlp.gate"}
SPARSE_ROUTER: Final = {"ffn_gate_inp": "block_sparse_moe.gate"}
CHOICE_BIAS: Final = {"exp_probs_b.bias": Other("mlp.gate.e_score_correction_bias")}
XIELU: Final = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
    "xielu.eps": ("mlp.act_fn.eps", ()),
}
LAYER_INPUT_MODULES: Final = {
    **GEMMA_MODULES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
LAYER_INPUT_TABLES: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GEMMA3N: Final = Architecture(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    modules={
        **LAYER_INPUT_MODULES,
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    top={
        **LAYER_INPUT_TABLES,
        "altup_proj": "model.altup_projections.{}",
        "altup_unembd_proj": "model.altup_unembed_projections.{}",
    },
    fields=gemma3n,
    lists="first",
    others={"altup_correct_scale.weight": Other("altup.correct_output_scale")},
)
GEMMA4: Final = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    modules=LAYER_INPUT_MODULES,
    top=LAYER_INPUT_TABLES,
    fields=gemma4,
    lists="first",
)

GRANITE_EXPERTS: Final = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    permuted=True,
    biases=(ATTENTION_BIAS,),
    modules={
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    joined={
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
        "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    },
    experts_field="num_local_experts",
    fields=granite_moe,
)
GRANITE_HYBRID: Final = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    permuted=True,
    biases=(ATTENTION_BIAS,),
    modules={"ffn_down": "shared_mlp.output_linear", **space_modules("mamba")},
    joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
    experts_field="num_local_experts",
    fields=granite_hybrid,
    lists="hybrid",
    others=space_others("mamba"),
)

NEMOTRON_H: Final = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    modules={
        "attn_norm": "norm",
        **{f"attn_{member}": f"mixer.{member}_proj" for member in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        **space_modules("mixer"),
    },
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    epsilon=("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    fields=nemotron_h,
    lists="hybrid",
    others=space_others("mixer"),
    layer="backbone.layers",
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture("llama", "LlamaForCausalLM", permuted=True, biases=BIASES),
        "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, biases=BIASES),
        "apertus": Architecture(
            "apertus",
            "ApertusForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
            fields=plain_rope,
            numbers=XIELU,
        ),
        "arcee": Architecture("arcee", "ArceeForCausalLM", permuted=True, biases=BIASES),
        "mistral3": Architecture("mistral", "MistralForCausalLM", permuted=True, fields=mistral3),
        # q, k and v lie apart, as Llama's.
        "internlm2": Architecture("llama", "LlamaForCausalLM", permuted=True, biases=BIASES),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", biases=(ATTENTION_BIAS,)),
        "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", biases=(ATTENTION_BIAS,)),
        # Names of linears are Llama's there.
        "exaone": Architecture("llama", "LlamaForCausalLM", biases=BIASES),
        "olmo": Architecture(
            "olmo",
            "OlmoForCausalLM",
            permuted=True,
            biases=(ATTENTION_BIAS,),
            epsilon=("rms_norm_eps", LAYER_NORM[1]),
            fields=olmo,
        ),
        "phi2": Architecture(
            "phi",
            "PhiForCausalLM",
            modules={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
            top={"output_norm": "model.final_layernorm"},
            epsilon=LAYER_NORM,
        ),
        "phi3": Architecture(
            "phi3",
            "Phi3ForCausalLM",
            modules={"attn_qkv": "self_attn.qkv_proj", **FUSED_NETWORK},
            fields=one_window,
        ),
        "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0, biases=(ATTENTION_BIAS,)),
        "gemma2": Architecture(
            "gemma2", "Gemma2ForCausalLM", norm_offset=1.0, modules=GEMMA_MODULES, fields=gemma2
        ),
        "gemma3": Architecture(
            "gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0, modules=GEMMA_MODULES, fields=gemma3
        ),
        "gemma3n": GEMMA3N,
        "gemma4": GEMMA4,
        "granite": Architecture(
            "granite", "GraniteForCausalLM", permuted=True, biases=BIASES, fields=granite
        ),
        "granitehybrid": GRANITE_HYBRID,
        "minicpm": Architecture(
            "granite", "GraniteForCausalLM", permuted=True, biases=BIASES, fields=minicpm
        ),
        "stablelm": Architecture(
            "stablelm",
            "StableLmForCausalLM",
            biases=(("use_qkv_bias", QKV_BIAS),),
            epsilon=LAYER_NORM,
            fields=stablelm,
        ),
        "seed_oss": Architecture(
            "seed_oss",
            "SeedOssForCausalLM",
            biases=(*BIASES, ("attention_out_bias", ("blk.0.attn_output.bias",))),
            modules=POST_NORM,
        ),
        "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", biases=(("use_bias", QKV_BIAS),)),
        "chatglm": Architecture("glm", "GlmForCausalLM", biases=(ATTENTION_BIAS,), modules=FUSED_NETWORK),
        "glm4": Architecture(
            "glm4",
            "Glm4ForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={
                **FUSED_NETWORK,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        ),
        # Of files that 1bitLLM published, with SiLU. Microsoft's 2B4T has blocks of a type of its own (I2_S).
        "bitnet": Architecture(
            "bitnet",
            "BitNetForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
            fields=silu,
        ),
        "gptneox": Architecture(
            "gpt_neox",
            "GPTNeoXForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={
                "attn_qkv": "attention.query_key_value",
                "attn_output": "attention.dense",
                "ffn_up": "mlp.dense_h_to_4h",
                "ffn_down": "mlp.dense_4h_to_h",
            },
            top={
                "token_embd": "gpt_neox.embed_in",
                "output_norm": "gpt_neox.final_layer_norm",
                "output": "embed_out",
            },
            layer="gpt_neox.layers",
            grouped=True,
            epsilon=LAYER_NORM,
            fields=gpt_neox,
        ),
        "starcoder2": Architecture(
            "starcoder2",
            "Starcoder2ForCausalLM",
            biases=(("use_bias", QKV_BIAS),),
            modules={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            epsilon=("norm_epsilon", LAYER_NORM[1]),
        ),
        "olmo2": Architecture(
            "olmo2", "Olmo2ForCausalLM", biases=(ATTENTION_BIAS,), modules=OUTPUT_NORMS, fields=olmo2
        ),
        "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", modules=OUTPUT_NORMS, fields=exaone4),
        "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", epsilon=LAYER_NORM, fields=cohere2),
        "hunyuan-dense": Architecture(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
            },
        ),
        "qwen35": Architecture(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            norm_offset=1.0,
            modules=POST_NORM,
            fields=delta_net,
            heads_in_turns=True,
        ),
        "nemotron": Architecture(
            "nemotron",
            "NemotronForCausalLM",
            norm_offset=1.0,
            biases=BIASES,
            epsilon=("norm_eps", LAYER_NORM[1]),
        ),
        "nemotron_h": NEMOTRON_H,
        # Its factors are those of the weights.
        "falcon-h1": Architecture(
            "falcon_h1",
            "FalconH1ForCausalLM",
            modules={
                "ffn_norm": "pre_ff_layernorm",
                **{f"ffn_{member}": f"feed_forward.{member}_proj" for member in ("gate", "up", "down")},
                **space_modules("mamba"),
            },
            top={"output_norm": "model.final_layernorm"},
            fields=falcon_h1,
            # llama.cpp's converter leaves the ending out.
            others={**space_others("mamba"), "ffn_norm": Other("pre_ff_layernorm.weight")},
        ),
        "lfm2": Architecture(
            "lfm2",
            "Lfm2ForCausalLM",
            modules=LFM2_MODULES,
            top=LFM2_TOP,
            epsilon=LFM2_NORM,
            fields=lfm2,
            lists="hybrid",
        ),
    }
)
DELTA_MIXTURE: Final = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    norm_offset=1.0,
    modules={**POST_NORM, **ROUTER, **SHARED_EXPERT},
    experts=NAMED_EXPERTS,
    fields=delta_net_moe,
)
MIXTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture(
            "mixtral",
            "MixtralForCausalLM",
            permuted=True,
            modules=SPARSE_ROUTER,
            experts=NUMBERED_EXPERTS,
            experts_field="num_local_experts",
        ),
        "qwen3moe": Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules=ROUTER,
            experts=NAMED_EXPERTS,
            fields=qwen3_moe,
        ),
        "qwen2moe": Architecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            biases=(("qkv_bias", QKV_BIAS),),
            modules={**ROUTER, **SHARED_EXPERT},
            experts=NAMED_EXPERTS,
            fields=qwen2_moe,
        ),
        "qwen35moe": DELTA_MIXTURE._replace(heads_in_turns=True),
        # Its linears lie apart, as those of Qwen3.5-MoE, which computes the same.
        "qwen3next": DELTA_MIXTURE,
        "lfm2moe": Architecture(
            "lfm2_moe",
            "Lfm2MoeForCausalLM",
            modules={**LFM2_MODULES, "ffn_gate_inp": "feed_forward.gate"},
            top=LFM2_TOP,
            experts={
                own: module.replace("block_sparse_moe", "feed_forward")
                for own, module in NUMBERED_EXPERTS.items()
            },
            epsilon=LFM2_NORM,
            fields=lfm2_moe,
            lists="hybrid",
            others={"exp_probs_b.bias": Other("feed_forward.expert_bias")},
        ),
        "ernie4_5-moe": Architecture(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            biases=(("use_bias", QKV_BIAS),),
            modules={**ROUTER, **SHARED_EXPERTS},
            experts=NAMED_EXPERTS,
            experts_field="moe_num_experts",
            fields=ernie_moe,
            others={"exp_probs_b.bias": Other("mlp.moe_statics.e_score_correction_bias", 0)},
        ),
        "glm4moe": Architecture(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={**POST_NORM, **ROUTER, **SHARED_EXPERTS},
            experts=NAMED_EXPERTS,
            experts_field="n_routed_experts",
            fields=glm4_moe,
            others=CHOICE_BIAS,
        ),
        "deepseek2": Architecture(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            modules={
                **ROUTER,
                **SHARED_EXPERTS,
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
            },
            experts=NAMED_EXPERTS,
            experts_field="n_routed_experts",
            fields=deepseek2,
            others=CHOICE_BIAS,
            is_latent=True,
        ),
        "dots1": Architecture(
            "dots1",
            "Dots1ForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={**ROUTER, **SHARED_EXPERTS},
            experts=NAMED_EXPERTS,
            experts_field="n_routed_experts",
            fields=dots1,
            others=CHOICE_BIAS,
        ),
        "exaone-moe": Architecture(
            "exaone_moe",
            "ExaoneMoeForCausalLM",
            modules={**ROUTER, **SHARED_EXPERTS},
            experts=NAMED_EXPERTS,
            fields=exaone_moe,
            others={"exp_probs_b.bias": Other("mlp.e_score_correction_bias")},
        ),
        "gemma4": GEMMA4._replace(
            modules={
                **GEMMA4.modules,
                "ffn_gate_inp": "router.proj",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            experts={own: module.removeprefix("mlp.") for own, module in NAMED_EXPERTS.items()},
            fields=gemma4_moe,
            others={
                "ffn_gate_inp.scale": Other("router.scale"),
                "ffn_down_exps.scale": Other("router.per_expert_scale"),
            },
        ),
        "llama4": Architecture(
            "llama4_text",
            "Llama4ForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={
                "ffn_gate_inp": "feed_forward.router",
                **{f"ffn_{member}": f"feed_forward.{member}_proj" for member in ("gate", "up", "down")},
                **{own: module.replace("mlp", "feed_forward") for own, module in SHARED_EXPERT.items()},
            },
            experts={own: module.replace("mlp", "feed_forward") for own, module in NAMED_EXPERTS.items()},
            experts_field="num_local_experts",
            fields=llama4,
        ),
        "olmoe": Architecture("olmoe", "OlmoeForCausalLM", modules=ROUTER, experts=NAMED_EXPERTS),
        "mellum": Architecture(
            "mellum", "MellumForCausalLM", modules=ROUTER, experts=NAMED_EXPERTS, fields=mellum
        ),
        "gpt-oss": Architecture(
            "gpt_oss",
            "GptOssForCausalLM",
            biases=(ATTENTION_BIAS,),
            modules={
                "ffn_gate_inp": "mlp.router",
                **POST_NORM,
                # Of all experts together: the stacks of weights are those of `experts`.
                **{own: module.replace("{}.", "") for own, module in NAMED_EXPERTS.items()},
            },
            experts=NAMED_EXPERTS,
            experts_field="num_local_experts",
            fields=gpt_oss,
        ),
        # Routed as the checkpoint's code does, by sparsemixer; llama.cpp has a softmax instead.
        "phimoe": Architecture(
            "phimoe",
            "PhimoeForCausalLM",
            biases=(ATTENTION_BIAS, ("lm_head_bias", ("output.bias",))),
            modules=SPARSE_ROUTER,
            experts=NUMBERED_EXPERTS,
            experts_field="num_local_experts",
            fields=phimoe,
        ),
        "granitemoe": GRANITE_EXPERTS,
        "nemotron_h_moe": NEMOTRON_H._replace(
            modules={
                **NEMOTRON_H.modules,
                "ffn_gate_inp": "mixer.gate",
                **{f"ffn_{one}_shexp": f"mixer.shared_experts.{one}_proj" for one in ("up", "down")},
            },
            experts={f"ffn_{one}_exps": f"mixer.experts.{{}}.{one}_proj" for one in ("up", "down")},
            experts_field="n_routed_experts",
            fields=nemotron_h_moe,
            others={
                **NEMOTRON_H.others,
                "exp_probs_b.bias": Other("mixer.gate.e_score_correction_bias"),
            },
        ),
        "granitehybrid": GRANITE_HYBRID._replace(
            modules={**GRANITE_EXPERTS.modules, **space_modules("mamba")}, joined=GRANITE_EXPERTS.joined
        ),
    }
)
"""The architectures of files with experts."""
