"""The hyperparameters of GGUF files, for each architecture."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.gguf_attention import ATTENTION, ROPE
from heterollm.model.fields.gguf_experts import EXPERTS, LATENT
from heterollm.model.fields.gguf_rows import (
    ARCHITECTURE,
    CENTERED,
    DELTA,
    GEMMA3N,
    GEMMA4,
    GEMMAS,
    GRANITES,
    LATENT_SOURCE,
    LAYERED,
    MODEL,
    NAMES,
    NEMOTRON_H,
    OFF,
    PACKAGE,
    QWEN35,
    SPACES,
    VISION,
    read,
    rows,
)

ACTIVATION: Final = "another activation than the architecture's"

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
    read(".attention.key_length_swa", "width of a head in layers with a window", "models/gemma4.cpp", GEMMA4),
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


OTHER: Final = (
    *rows(
        "none",
        "order of the rows of q and k, which is that of every Llama file",
        "convert.py",
        ".tensor_data_layout",
    ),
    *(
        row
        for neutral, only in (
            (("gelu", "geglu", "gelu_pytorch_tanh", "gelu_new"), GEMMAS | {"gemma", "phi2", "starcoder2"}),
            (("relu2", "relu_sqr"), NEMOTRON_H | {"nemotron", "arcee"}),
            (("silu", "swish", "swiglu"), frozenset[str]()),
        )
        for row in rows("refused", ACTIVATION, NAMES, ".hidden_activation", neutral=neutral, only=only)
    ),
    read(".pooling_type", "pooling of embeddings: 1 mean, 3 last token; a model has none with others"),
    *rows("none", "names of a classifier's outputs", MODEL, ".classifier.*"),
    read(
        ".shortconv.l_cache",
        "tokens that a convolution spans",
        "models/lfm2.cpp",
        frozenset({"lfm2", "lfm2moe"}),
    ),
    *(
        read(f".ssm.{name}", meaning, ARCHITECTURE, DELTA | SPACES)
        for name, meaning in (
            ("conv_kernel", "tokens that the convolution of a delta net or a state space spans"),
            ("group_count", "key heads of a delta net, or groups of heads of a state space"),
            ("state_size", "width of a delta net's key head, or of B and C in a state space"),
            ("time_step_rank", "value heads of a delta net, or heads of a state space"),
            ("inner_size", "values of all heads of a delta net or a state space"),
        )
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
