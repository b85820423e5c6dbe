"""The hyperparameters of GGUF files with experts, for each architecture."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.gguf_rows import ARCHITECTURE, MODEL, NAMES, OFF, ONE, read, rows

DELTA: Final = frozenset({"qwen35moe", "qwen3next"})
SHARED: Final = DELTA | {"qwen2moe"}
ERNIE: Final = frozenset({"ernie4_5-moe"})
LLAMA4: Final = frozenset({"llama4"})
LATENT: Final = frozenset({"deepseek2"})
LEADING_SIGMOID: Final = frozenset({"glm4moe", "dots1", "exaone-moe"}) | LATENT
SIGMOID: Final = LEADING_SIGMOID | {"nemotron_h_moe"}
LEADING: Final = LEADING_SIGMOID | ERNIE | {"lfm2moe"}
SIZED: Final = SHARED | SIGMOID | LEADING | LLAMA4 | {"qwen3moe", "mellum", "gemma4"}
NORMALIZED: Final = SIZED - SIGMOID - LLAMA4 - {"qwen2moe"} | {
    *("llama", "phimoe", "granitemoe", "granitehybrid")
}

EXPERTS: Final = (
    read(".expert_count", "experts; 0 for none"),
    read(".expert_used_count", "experts that compute a token"),
    read(
        ".expert_feed_forward_length",
        "width of an expert, feed_forward_length / expert_used_count if absent",
        "models/qwen3moe.cpp, mellum.cpp",
        SIZED,
    ),
    read(
        ".expert_shared_feed_forward_length",
        "width of the experts that compute every token; absent or 0: none, and feed_forward_length in Qwen's",
        "granite.cpp, qwen2moe.cpp",
        SHARED | {"granitemoe", "granitehybrid", "nemotron_h_moe"},
    ),
    read(".leading_dense_block_count", "first layers without experts; absent: none", ARCHITECTURE, LEADING),
    read(
        ".interleave_moe_layer_step",
        "every n-th layer has experts",
        "models/ernie4-5-moe.cpp, llama4.cpp",
        ERNIE | LLAMA4,
    ),
    read(".expert_shared_count", "experts that compute every token", ARCHITECTURE, LEADING_SIGMOID | ERNIE),
    read(
        ".expert_weights_norm",
        "whether weights of experts are divided by their sum; absent: no",
        ARCHITECTURE,
        SIGMOID,
    ),
    read(".expert_weights_scale", "factor of the experts' weights; absent or 0: 1", ARCHITECTURE, SIGMOID),
    *rows(
        "none",
        "width of the experts that compute every token, which their number states",
        "conversion/ernie.py",
        ".expert_shared_feed_forward_length",
        only=LEADING_SIGMOID | ERNIE,
    ),
    *rows(
        "none",
        "experts that compute every token, whose common width the file states",
        "conversion/nemotron.py",
        ".expert_shared_count",
        only=frozenset({"nemotron_h_moe"}),
    ),
    *rows(
        "none",
        "width of an expert, which the shapes of its tensors state",
        NAMES,
        ".expert_feed_forward_length",
    ),
    *rows(
        "none",
        "the network's width, which feed_forward_length states, too",
        "conversion/granite.py",
        ".expert_shared_feed_forward_length",
        only=frozenset({"granite"}),
    ),
    *rows(
        "refused",
        "weights of experts that are not divided by their sum",
        "models: build_moe_ffn",
        ".expert_weights_norm",
        neutral=(True,),
        only=NORMALIZED,
    ),
    *rows(
        "refused",
        "weights of experts that are divided by their sum",
        "models: build_moe_ffn",
        ".expert_weights_norm",
        neutral=(False,),
    ),
    read(
        ".expert_gating_func",
        "function of the scores of experts: softmax (1, or absent), else a sigmoid (2)",
        "models/deepseek2.cpp",
        LATENT,
    ),
    read(".expert_group_count", "groups of experts; absent: 1", MODEL, LATENT),
    read(".expert_group_used_count", "groups from which a token chooses; absent: 1", MODEL, LATENT),
    *rows(
        "refused",
        "scores of experts by another function than a sigmoid",
        "models: build_moe_ffn",
        ".expert_gating_func",
        neutral=(2,),
        only=SIGMOID | {"lfm2moe"},
    ),
    *rows(
        "refused",
        "scores of experts by another function than softmax",
        "models: build_moe_ffn",
        ".expert_gating_func",
        neutral=(0, 1),
    ),
    *rows(
        "refused",
        "a scale of the experts' weights",
        "models: build_moe_ffn",
        ".expert_weights_scale",
        neutral=ONE,
    ),
    *rows("refused", "groups of experts", MODEL, ".expert_group_count", neutral=(0, 1)),
    *rows(
        "none", "groups that are used, where expert_group_count states any", MODEL, ".expert_group_used_count"
    ),
    *rows(
        "refused",
        "layers or experts of further kinds",
        NAMES,
        ".expert_shared_count",
        ".expert_shared_feed_forward_length",
        ".expert_chunk_feed_forward_length",
        ".expert_group_scale",
        ".experts_per_group",
        ".leading_dense_block_count",
        ".moe_latent_size",
        neutral=OFF,
    ),
    *rows(
        "refused",
        "experts in some layers alone",
        NAMES,
        ".moe_every_n_layers",
        ".interleave_moe_layer_step",
        neutral=ONE,
    ),
)
