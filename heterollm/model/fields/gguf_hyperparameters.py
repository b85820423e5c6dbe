"""The hyperparameters of GGUF files, for each architecture."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.gguf_experts import EXPERTS, LATENT
from heterollm.model.fields.gguf_rows import (
    ARCHITECTURE,
    CONTEXT,
    MODEL,
    NAMES,
    OFF,
    ONE,
    PACKAGE,
    read,
    rows,
)

GEMMA4: Final = frozenset({"gemma4"})
GEMMA3N: Final = frozenset({"gemma3n"})
LAYERED: Final = GEMMA4 | GEMMA3N
GEMMAS: Final = LAYERED | {"gemma2", "gemma3"}
PATTERNED: Final = GEMMAS | {"gpt-oss", "mellum", "cohere2", "olmo2", "exaone4", "exaone-moe"}
WINDOWED: Final = PATTERNED | {"phi3", "phimoe"}
CENTERED: Final = frozenset({"gptneox", "phi2", "stablelm", "starcoder2", "nemotron", "cohere2"})
GRANITES: Final = frozenset({"granite", "granitemoe"})
GRANITE_HYBRID: Final = frozenset({"granitehybrid"})
SCALED: Final = GRANITES | GRANITE_HYBRID | {"minicpm"}
QWEN35: Final = frozenset({"qwen35", "qwen35moe"})
DELTA: Final = QWEN35 | {"qwen3next"}
NEMOTRON_H: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
SPACES: Final = GRANITE_HYBRID | NEMOTRON_H | {"falcon-h1"}
VISION: Final = QWEN35 | {"qwen3vl"}
LATENT_SOURCE: Final = "models/deepseek2.cpp"
MISTRAL3: Final = frozenset({"mistral3"})

SIZES: Final = (
    read(".context_length", "longest context"),
    read(".embedding_length", "width of the residual stream"),
    read(".block_count", "layers"),
    read(
        ".feed_forward_length",
        "width of the feed-forward network; a list must repeat one number, or in Gemma 4 its double; "
        "in Gemma 3n it may have any",
    ),
    read(".attention.head_count", "query heads; a list must repeat one number"),
    read(
        ".attention.head_count_kv",
        "key heads, the query heads if absent; a list must repeat one number, in Gemma 4 for each kind",
    ),
    read(".attention.key_length", "width of a head, embedding_length / head_count if absent"),
    read(".attention.value_length", "width of a value, which must be key_length"),
    read(".attention.layer_norm_epsilon", "number added in norms; required", ARCHITECTURE, CENTERED),
    *rows(
        "none",
        "number added in norms, which is 1e-05 in any case",
        "conversion/olmo.py",
        ".attention.layer_norm_epsilon",
        only=frozenset({"olmo"}),
    ),
    *rows(
        "none",
        "number added in norms of another kind than the architecture's",
        NAMES,
        ".attention.layer_norm_rms_epsilon",
        only=CENTERED | {"olmo"},
    ),
    read(".attention.layer_norm_rms_epsilon", "number added in norms; required", ARCHITECTURE),
    read(".attention.q_lora_rank", "elements of vectors of queries; absent: none", LATENT_SOURCE, LATENT),
    read(".attention.kv_lora_rank", "elements of latent vectors", LATENT_SOURCE, LATENT),
    read(".attention.key_length_mla", "width of a head; key_length if absent", LATENT_SOURCE, LATENT),
    read(".attention.value_length_mla", "width of a value; value_length if absent", LATENT_SOURCE, LATENT),
    *rows("none", "rows of the token embedding, whose shape states it", MODEL, ".vocab_size"),
    read(
        ".attention.key_length_swa",
        "width of a head in layers with a window",
        "models/gemma4.cpp",
        GEMMA4,
    ),
    read(
        ".attention.shared_kv_layers",
        "last layers, which read the keys of others; absent: none, in Gemma 3n all but 20",
        "models/gemma4.cpp, gemma3n.cpp",
        LAYERED,
    ),
    read(
        ".embedding_length_per_layer_input",
        "width of a token's embedding for each layer; absent or 0: none, in Gemma 3n 256",
        "models/gemma4.cpp, gemma3n.cpp",
        LAYERED,
    ),
    read(".altup.num_inputs", "residual streams, 4 if absent", "models/gemma3n.cpp", GEMMA3N),
    *rows(
        "refused",
        "another stream than the first, which layers compute",
        "models/gemma3n.cpp",
        ".altup.active_idx",
        neutral=(0,),
        only=GEMMA3N,
    ),
    read(
        ".activation_sparsity_scale",
        "deviations above the mean of a cutoff of gates, by layer; absent: 5 % of the gates of 10 layers",
        "conversion/gemma.py",
        GEMMA3N,
    ),
    *rows(
        "refused",
        "heads of another width in layers with a window; key_length passes",
        MODEL,
        ".attention.key_length_swa",
        ".attention.value_length_swa",
    ),
    *rows(
        "refused", "an output of another width than the stream", MODEL, ".embedding_length_out", neutral=OFF
    ),
)

ATTENTION: Final = (
    read(
        ".attention.sliding_window",
        "window; 0 for none. llama.cpp ignores Phi-3's, whose older files have "
        "wrong numbers; absent: none, 4096 in Gemma 2 and the largest EXAONE 4",
        ARCHITECTURE,
        WINDOWED,
    ),
    read(
        ".attention.sliding_window_pattern",
        "every n-th layer sees all positions, or a flag for each layer; "
        "2 in Gemma 2 and gpt-oss, 6 in Gemma 3, 5 in Gemma 3n, 4 in others if absent",
        ARCHITECTURE,
        PATTERNED,
    ),
    *rows(
        "refused",
        "chunks of another length than 8192; with 0 llama.cpp has none",
        "models/llama4.cpp",
        ".attention.sliding_window",
        neutral=(8192,),
        only=frozenset({"llama4"}),
    ),
    *rows(
        "refused",
        "a window that llama.cpp ignores in this architecture; one of context_length passes",
        ARCHITECTURE,
        ".attention.sliding_window",
        neutral=OFF,
    ),
    *rows(
        "refused",
        "windows in some layers, which llama.cpp ignores in this architecture",
        ARCHITECTURE,
        ".attention.sliding_window_pattern",
    ),
    read(
        ".attn_logit_softcapping",
        "soft cap of attention scores, 50 if absent",
        "models/gemma2.cpp",
        frozenset({"gemma2"}),
    ),
    read(
        ".final_logit_softcapping",
        "soft cap of the logits; absent: 30 in Gemma 2 and 3n, none in Gemma 3 and 4",
        "models/gemma2.cpp, gemma3.cpp, gemma3n.cpp, gemma4.cpp",
        GEMMAS,
    ),
    *rows(
        "refused",
        "soft caps that llama.cpp ignores in this architecture",
        NAMES,
        ".attn_logit_softcapping",
        ".final_logit_softcapping",
        ".router_logit_softcapping",
        neutral=OFF,
    ),
    *rows("refused", "attention in both directions", MODEL, ".attention.causal", neutral=(True,)),
    read(
        ".attention.scale",
        "factor of scores; absent or 0: by the width of a head",
        "granite.cpp",
        GRANITES | GRANITE_HYBRID,
    ),
    read(
        ".embedding_scale",
        "factor of the embedding; absent: 1, and 12 in MiniCPM",
        "granite.cpp, minicpm.cpp",
        SCALED,
    ),
    read(
        ".residual_scale",
        "factor of what layers add; absent: 1, and 1.4 by the root of the number of layers in MiniCPM",
        "granite.cpp, minicpm.cpp",
        SCALED,
    ),
    read(
        ".logit_scale",
        "divisor of the logits, and their factor in Cohere 2; required, but in MiniCPM, where "
        "embedding_length / 256 stands for it",
        "granite.cpp, minicpm.cpp, cohere2.cpp",
        SCALED | {"cohere2"},
    ),
    read(
        ".attention.temperature_scale",
        "growth of queries with the position; absent or 0: none",
        "models/mistral3.cpp",
        MISTRAL3,
    ),
    read(
        ".attention.clamp_kqv",
        "limit of queries, keys and values; absent or 0: none",
        "models/olmo.cpp",
        frozenset({"olmo"}),
    ),
    read(
        ".full_attention_interval",
        "every n-th layer has attention and no delta net, 4 if absent",
        ARCHITECTURE,
        DELTA,
    ),
    read(
        ".attention.recurrent_layers",
        "which layers have a delta net, before full_attention_interval",
        ARCHITECTURE,
        DELTA,
    ),
    *rows(
        "refused",
        "a scale of attention scores; each architecture has its own, Gemma's by the count of layers",
        NAMES,
        ".attention.scale",
        neutral=OFF,
    ),
    *rows(
        "refused",
        "a scale that no supported architecture has",
        NAMES,
        ".attention.output_scale",
        ".attention.value_scale",
        ".embedding_scale",
        ".residual_scale",
        ".logit_scale",
        neutral=ONE,
    ),
    *rows(
        "refused",
        "a change of attention that no supported architecture has",
        NAMES,
        ".attention.clamp_kqv",
        ".attention.max_alibi_bias",
        ".attention.temperature_length",
        ".attention.temperature_scale",
        ".attention.shared_kv_layers",
        ".attention.relative_buckets_count",
        ".attention.q_lora_rank",
        ".attention.kv_lora_rank",
        ".attention.decay_lora_rank",
        ".attention.iclr_lora_rank",
        ".attention.value_residual_mix_lora_rank",
        ".attention.gate_lora_rank",
        ".attention.output_lora_rank",
        ".attention.output_group_count",
        ".attention.key_length_mla",
        ".attention.value_length_mla",
        ".attention.indexer.*",
        ".attention.compress_rope_freq_base",
        ".attention.compress_ratios",
        ".attention.recurrent_layers",
        ".full_attention_interval",
        neutral=OFF,
    ),
    *rows(
        "none",
        "number added in norms of another kind than the architecture's",
        NAMES,
        ".attention.layer_norm_epsilon",
        ".attention.group_norm_epsilon",
        ".attention.group_norm_groups",
    ),
)

ROPE: Final = (
    read(".rope.dimension_count", "elements of a head that RoPE rotates, key_length if absent"),
    read(".rope.freq_base", "base of the frequencies, 10000 if absent"),
    read(
        ".rope.freq_base_swa",
        "base in layers with a window; absent: 10000 in Gemma 3, 3n and 4, that of all layers in others",
        "models/gemma3.cpp, gemma3n.cpp, gemma4.cpp, mellum.cpp, olmo2.cpp",
        LAYERED | {"gemma3", "mellum", "olmo2"},
    ),
    read(".rope.scaling.type", "none, linear, yarn or longrope; linear if absent"),
    read(".rope.scaling.factor", "factor of linear and yarn; absent or 0: 1"),
    read(".rope.scale_linear", "older name of rope.scaling.factor, which comes first"),
    read(".rope.scaling.original_context_length", "context before the extension, context_length if absent"),
    read(".rope.scaling.attn_factor", "factor of cosine and sine, beside YaRN's own; 1 if absent", CONTEXT),
    read(
        ".rope.scaling.yarn_beta_fast",
        "beta_fast of the checkpoint, 32 if absent; llama.cpp ignores it in "
        "these architectures, whose converter writes it",
        "conversion/base.py",
    ),
    read(
        ".rope.scaling.yarn_beta_slow",
        "beta_slow of the checkpoint, 1 if absent; as yarn_beta_fast",
        "conversion/base.py",
    ),
    read(
        ".rope.scaling.yarn_attn_factor",
        "attention_factor of the checkpoint, in place of YaRN's own; as yarn_beta_fast",
        "conversion/base.py",
    ),
    *rows(
        "refused",
        "an extrapolation by a part, of which transformers and llama.cpp know none here",
        CONTEXT,
        ".rope.scaling.yarn_ext_factor",
        neutral=(1, 1.0, -1, -1.0),
    ),
    read(
        ".rope.scaling.yarn_log_multiplier",
        "mscale_all_dim of the checkpoint, beside an mscale of 1; absent or 0: neither. "
        "In deepseek2 a tenth of it, and mscale is as large",
        CONTEXT,
        MISTRAL3 | LATENT,
    ),
    *rows(
        "refused",
        "an attention factor of DeepSeek's form",
        CONTEXT,
        ".rope.scaling.yarn_log_multiplier",
        neutral=OFF,
    ),
    *rows(
        "refused",
        "layers without positions",
        "granite.cpp",
        ".rope.scaling.finetuned",
        neutral=(True,),
        only=GRANITES,
    ),
    read(
        ".rope.scaling.finetuned",
        "whether attention has positions; absent: yes",
        "granite.cpp",
        GRANITE_HYBRID,
    ),
    *rows("none", "whether the model was trained with the scaling", MODEL, ".rope.scaling.finetuned"),
    *rows("refused", "NTK scaling of Hunyuan", MODEL, ".rope.scaling.alpha", neutral=OFF),
    *rows(
        "none",
        "positions of text are the same on all axes",
        NAMES,
        ".rope.dimension_sections",
        only=VISION,
    ),
    *rows(
        "refused",
        "RoPE over several axes",
        NAMES,
        ".rope.dimension_sections",
        neutral=([], [0, 0, 0], [0, 0, 0, 0]),
    ),
    *rows(
        "refused",
        "RoPE that differs between layers; the value of all layers passes",
        MODEL,
        ".rope.dimension_count_swa",
        ".rope.freq_base_swa",
    ),
)

OTHER: Final = (
    *rows(
        "none",
        "order of the rows of q and k, which is that of every Llama file",
        "convert.py",
        ".tensor_data_layout",
    ),
    *rows(
        "refused",
        "another activation than the architecture's",
        NAMES,
        ".hidden_activation",
        neutral=("gelu", "geglu", "gelu_pytorch_tanh", "gelu_new"),
        only=GEMMAS | {"gemma", "phi2", "starcoder2"},
    ),
    *rows(
        "refused",
        "another activation than the architecture's",
        NAMES,
        ".hidden_activation",
        neutral=("relu2", "relu_sqr"),
        only=NEMOTRON_H | {"nemotron", "arcee"},
    ),
    *rows(
        "refused",
        "another activation than the architecture's",
        NAMES,
        ".hidden_activation",
        neutral=("silu", "swish", "swiglu"),
    ),
    read(".pooling_type", "pooling of embeddings: 1 mean, 3 last token; a model has none with others"),
    *rows("none", "names of a classifier's outputs", MODEL, ".classifier.*"),
    read(
        ".shortconv.l_cache",
        "tokens that a convolution spans",
        "models/lfm2.cpp",
        frozenset({"lfm2", "lfm2moe"}),
    ),
    read(
        ".ssm.conv_kernel",
        "tokens that the convolution of a delta net or a state space spans",
        *(ARCHITECTURE, DELTA | SPACES),
    ),
    read(
        ".ssm.group_count",
        "key heads of a delta net, or groups of heads of a state space",
        *(ARCHITECTURE, DELTA | SPACES),
    ),
    read(
        ".ssm.state_size",
        "width of a delta net's key head, or of B and C in a state space",
        *(ARCHITECTURE, DELTA | SPACES),
    ),
    read(
        ".ssm.time_step_rank",
        "value heads of a delta net, or heads of a state space",
        *(ARCHITECTURE, DELTA | SPACES),
    ),
    read(
        ".ssm.inner_size",
        "values of all heads of a delta net or a state space",
        *(ARCHITECTURE, DELTA | SPACES),
    ),
    read(
        ".nextn_predict_layers",
        "last layers, which predict further tokens and are not read",
        ARCHITECTURE,
        QWEN35 | {"exaone4", "exaone-moe", "glm4moe", "nemotron_h_moe"},
    ),
    *(
        read(
            f"xielu.{name}", f"{meaning} of xIELU in each layer", "models/apertus.cpp", frozenset({"apertus"})
        )
        for name, meaning in (
            ("alpha_p", "factor of the square, before a softplus,"),
            ("alpha_n", "factor of the exponential less beta, before a softplus,"),
            ("beta", "factor of the input"),
            ("eps", "upper bound of the exponent"),
        )
    ),
    read(
        ".use_parallel_residual",
        "whether attention and network stand side by side",
        "models/gptneox.cpp",
        frozenset({"gptneox"}),
    ),
    *rows(
        "none",
        "the norm before the network says it",
        "models/stablelm.cpp",
        ".use_parallel_residual",
        only=frozenset({"stablelm"}),
    ),
    *rows(
        "none",
        "Granite 4's sizes of recurrent layers, of which these architectures have none",
        "conversion/granite.py",
        ".ssm.*",
        only=GRANITES,
    ),
    *rows("none", "a part of vision", NAMES, ".n_deepstack_layers", only=VISION),
    *rows(
        "refused",
        "a part of models that no supported architecture has",
        NAMES,
        ".use_parallel_residual",
        ".nextn_predict_layers",
        ".n_deepstack_layers",
        ".deepstack_mapping",
        ".features_length",
        ".embedding_length_per_layer_input",
        ".decoder_block_count",
        ".decoder_start_token_id",
        ".swin_norm",
        ".rescale_every_n_layers",
        ".time_mix_extra_dim",
        ".time_decay_extra_dim",
        ".token_shift_count",
        ".activation_sparsity_scale",
        ".altup.*",
        ".swiglu_clamp_exp",
        ".swiglu_clamp_shexp",
        ".dense_*_feat_in",
        ".dense_*_feat_out",
        ".hyper_connection.*",
        ".hash_layer_count",
        ".ssm.*",
        ".kda.*",
        ".wkv.*",
        ".posnet.*",
        ".convnext.*",
        ".shortconv.*",
        ".target_layers",
        ".target_hidden_size",
        ".norm_before_residual",
        "xielu.*",
        "diffusion.*",
        neutral=OFF,
    ),
    *rows(
        "refused", "a part of a file that is no language model", PACKAGE, "adapter.*", "clip.*", "imatrix.*"
    ),
)

HYPERPARAMETERS: Final = (*SIZES, *ATTENTION, *ROPE, *EXPERTS, *OTHER)
