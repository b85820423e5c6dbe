"""The architectures of GGUF files, and the models in transformers that they were converted from.

What becomes of each tensor: https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.model.stored.gguf_architecture import (
    ATTENTION_BIAS,
    BIASES,
    CHOICE_BIAS,
    LAYER_NORM,
    NAMED_EXPERTS,
    NUMBERED_EXPERTS,
    OUTPUT_NORMS,
    QKV_BIAS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    Architecture,
)
from heterollm.model.stored.gguf_family_fields import (
    cohere2,
    deepseek2,
    delta_net,
    delta_net_moe,
    dots1,
    ernie_moe,
    exaone4,
    exaone_moe,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    granite_moe,
    llama4,
    mellum,
    minicpm,
    mistral3,
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
from heterollm.model.stored.gguf_gemma import GEMMA3N, GEMMA4, GEMMA4_MOE, GEMMA_MODULES, gemma2, gemma3
from heterollm.model.stored.gguf_hybrids import (
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
)
from heterollm.model.stored.gguf_names import Other, space_modules

FUSED_NETWORK: Final = {"ffn_up": "mlp.gate_up_proj"}
POST_NORM: Final = {"post_attention_norm": "post_attention_layernorm"}
ROUTER: Final = {"ffn_gate_inp": "mlp.gate"}
SPARSE_ROUTER: Final = {"ffn_gate_inp": "block_sparse_moe.gate"}
XIELU: Final = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
    "xielu.eps": ("mlp.act_fn.eps", ()),
}

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
            modules={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
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
        "falcon-h1": FALCON_H1,
        "lfm2": LFM2,
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
        "lfm2moe": LFM2_MOE,
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
        "gemma4": GEMMA4_MOE,
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
        "nemotron_h_moe": NEMOTRON_H_MOE,
        "granitehybrid": GRANITE_HYBRID._replace(
            modules={**GRANITE_EXPERTS.modules, **space_modules("mamba")}, joined=GRANITE_EXPERTS.joined
        ),
    }
)
"""The architectures of files with experts."""
