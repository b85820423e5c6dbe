"""The fields of ``config.json``, by model type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from heterollm.model.fields.generation import GENERATION_FIELDS
from heterollm.model.fields.table import Field, FieldTable, rows

PRETRAINED: Final = "transformers, PreTrainedConfig"
CLASS: Final = "transformers, configuration class of the model type"
OLDER: Final = "older PreTrainedConfig; transformers 5 ignores it"
PUBLISHED: Final = "published checkpoints; transformers ignores it"

GEMMA: Final = frozenset({"gemma2", "gemma3_text"})
GRANITE: Final = frozenset({"granitemoe", "granitemoeshared"})
MIXTURES: Final = GRANITE | {"mixtral", "qwen3_moe", "olmoe", "phimoe"}
DECODER_TYPES: Final = GEMMA | MIXTURES | {"llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"}
"""Model types whose fields are listed."""

BIASED: Final = GEMMA | GRANITE | {"llama", "qwen3", "smollm3", "qwen3_moe", "olmoe", "phimoe"}
WINDOWED: Final = DECODER_TYPES - GRANITE - {"llama", "olmoe"}
ALL_OR_NONE: Final = frozenset({"mistral", "phi3", "mixtral", "qwen3_moe", "phimoe"})
LAYERED: Final = GEMMA | {"qwen2", "qwen3", "smollm3"}


def _optional(name: str, meaning: str, source: str, readers: Iterable[str], neutral: object) -> list[Field]:
    """Return the rows of a field that some model types read, and that is refused in all others."""
    own = frozenset(readers)
    read = [Field(name, "read", meaning, source, only=own)] if own else []
    why = f"{meaning}; transformers ignores it in this model type"
    return [*read, Field(name, "refused", why, PUBLISHED, (neutral, False), DECODER_TYPES - own)]


CONFIG_FIELDS: Final = FieldTable(
    "config.json",
    (
        *rows(
            "read",
            PRETRAINED,
            {
                "model_type": "the family; others are refused",
                "architectures": "the class, which must be the causal language model of the model type",
                "auto_map": "code of the checkpoint; refused unless it became transformers' own",
                "quantization_config": "formats of stored integers; has a table for each method",
            },
        ),
        *rows(
            "read",
            CLASS,
            {
                "vocab_size": "rows of embedding and head",
                "hidden_size": "width of the stream",
                "num_hidden_layers": "number of layers",
                "num_attention_heads": "query heads",
                "num_key_value_heads": "key and value heads; by default as many, or the model type's number",
                "head_dim": "width of a head; by default hidden_size / num_attention_heads, or its own",
                "max_position_embeddings": "longest context; also part of some RoPE scalings",
                "rms_norm_eps": "added to the mean square in norms; by default the model type's",
                "tie_word_embeddings": "whether the head is the embedding; by default the model type's",
                "bos_token_id": "ids that begin a text, after generation_config.json",
                "eos_token_id": "ids that end an answer, after generation_config.json",
                "pad_token_id": "padding token, after generation_config.json",
                "rope_parameters": "rotary embedding; has a table of its own",
                "rope_scaling": "older name of rope_parameters, which it precedes",
                "rope_theta": "base of rotary embedding, where the section has none; by default "
                "10,000 or the model type's",
            },
        ),
        *rows(
            "read",
            CLASS,
            {"original_max_position_embeddings": "context before the extension; precedes the section's"},
            only=DECODER_TYPES - {"phimoe", "gemma3_text"},
        ),
        *rows(
            "none",
            CLASS,
            {"original_max_position_embeddings": "that of the section counts, else max_position_embeddings"},
            only=frozenset({"phimoe", "gemma3_text"}),
        ),
        *rows("read", CLASS, {"intermediate_size": "width of the network, or of an expert"}),
        *rows(
            "read",
            CLASS,
            {"hidden_act": "activation: silu or gelu_pytorch_tanh; case counts, as in transformers' ACT2FN"},
            only=DECODER_TYPES - GEMMA,
        ),
        *rows("read", CLASS, {"hidden_activation": "activation, as hidden_act"}, only=GEMMA),
        *rows("none", PUBLISHED, {"hidden_act": "hidden_activation counts"}, only=GEMMA),
        *rows("read", CLASS, {"attention_bias": "biases of attention's linears"}, only=BIASED),
        *rows(
            "none",
            PUBLISHED,
            {"attention_bias": "transformers ignores it here; biases without a place are refused"},
            only=DECODER_TYPES - BIASED,
        ),
        *_optional("mlp_bias", "biases of the feed-forward network", CLASS, {"llama", "smollm3"}, False),
        *rows("read", CLASS, {"sliding_window": "positions that a token attends to"}, only=WINDOWED),
        *rows(
            "none",
            PUBLISHED,
            {"sliding_window": "transformers has no window in this model type"},
            only=DECODER_TYPES - WINDOWED,
        ),
        *rows(
            "read",
            CLASS,
            {"use_sliding_window": "whether sliding_window counts; by default not"},
            only=frozenset({"qwen2", "qwen3", "smollm3", "qwen3_moe"}),
        ),
        *rows(
            "read",
            CLASS,
            {"max_window_layers": "first layer with a window, where layer_types is missing"},
            only=frozenset({"qwen2", "qwen3"}),
        ),
        *rows(
            "none",
            PUBLISHED,
            {"max_window_layers": "transformers ignores it in this model type"},
            only=frozenset({"qwen3_moe", "smollm3"}),
        ),
        *rows("read", CLASS, {"layer_types": "full_attention or sliding_attention, by layer"}, only=LAYERED),
        *rows(
            "read",
            PUBLISHED,
            {"layer_types": "must agree with sliding_window; transformers ignores it in this model type"},
            only=ALL_OR_NONE,
        ),
        *rows(
            "refused",
            PUBLISHED,
            {"layer_types": "layers of different kinds; transformers ignores it in this model type"},
            neutral=("full_attention", "attention"),
            only=DECODER_TYPES - LAYERED - ALL_OR_NONE,
        ),
        *rows(
            "read",
            CLASS,
            {
                "sliding_window_pattern": "one of so many layers has full attention; layer_types precedes it",
                "rope_local_base_freq": "base of rotary embedding in layers with a window",
            },
            only=frozenset({"gemma3_text"}),
        ),
        *rows(
            "refused",
            PUBLISHED,
            {"sliding_window_pattern": "every second layer has full attention, whatever the field says"},
            neutral=(2,),
            only=frozenset({"gemma2"}),
        ),
        *rows(
            "none",
            PUBLISHED,
            {
                "_sliding_window_pattern": "a copy that transformers writes; layer_types counts",
                "sliding_window_size": "older name that transformers ignores",
            },
            only=GEMMA,
        ),
        *rows(
            "read",
            CLASS,
            {"no_rope_layer_interval": "every so many layers one has no RoPE; no_rope_layers precedes it"},
            only=frozenset({"smollm3"}),
        ),
        *_optional("no_rope_layers", "layers without positions", CLASS, {"smollm3"}, 1),
        *rows(
            "read",
            CLASS,
            {"partial_rotary_factor": "part of a head that rotates"},
            only=frozenset({"phi3"}),
        ),
        *rows(
            "refused",
            PUBLISHED,
            {"partial_rotary_factor": "rotary embedding of part of a head"},
            neutral=(1,),
            only=DECODER_TYPES - {"phi3"},
        ),
        *_optional("query_pre_attn_scalar", "a scale of attention scores", CLASS, GEMMA, False),
        *_optional("attn_logit_softcapping", "a soft cap on attention scores", CLASS, {"gemma2"}, 0),
        *_optional("final_logit_softcapping", "a soft cap on logits", CLASS, GEMMA, 0),
        *rows(
            "refused",
            CLASS,
            {
                "use_bidirectional_attention": "attention in both directions",
                "is_encoder_decoder": "models with an encoder",
                "per_layer_config": "layers that differ in other fields",
            },
            neutral=(False, {}, []),
        ),
        *_optional("num_local_experts", "a mixture of experts", CLASS, MIXTURES, 0),
        *_optional("num_experts", "a mixture of experts", CLASS, {"mixtral", "qwen3_moe", "olmoe"}, 0),
        *_optional("num_experts_per_tok", "experts that compute a token", CLASS, MIXTURES, 0),
        *_optional("moe_intermediate_size", "width of an expert", CLASS, {"qwen3_moe"}, 0),
        *_optional("shared_intermediate_size", "experts of every token", CLASS, {"granitemoeshared"}, 0),
        *_optional("norm_topk_prob", "whether chosen weights sum to 1", CLASS, {"qwen3_moe", "olmoe"}, False),
        *_optional("clip_qkv", "a limit of queries, keys and values", CLASS, {"olmoe"}, False),
        *_optional("lm_head_bias", "a bias of the LM head", CLASS, {"phimoe"}, False),
        *_optional("embedding_multiplier", "a factor on the embedding", CLASS, GRANITE, 1),
        *_optional("attention_multiplier", "a factor on attention scores", CLASS, GRANITE, 1),
        *_optional("residual_multiplier", "a factor on what layers add", CLASS, GRANITE, 1),
        *_optional("logits_scaling", "a divisor of the logits", CLASS, GRANITE, 1),
        *_optional("mlp_only_layers", "layers without experts", CLASS, {"qwen3_moe"}, False),
        *_optional("decoder_sparse_step", "every how many layers one has experts", CLASS, {"qwen3_moe"}, 1),
        *rows(
            "read",
            CLASS,
            {"router_jitter_noise": "range of the router's second choice (sparsemixer)"},
            only=frozenset({"phimoe"}),
        ),
        *rows(
            "none",
            CLASS,
            {
                "router_jitter_noise": "training",
                "input_jitter_noise": "training",
                "output_router_logits": "the values that transformers returns beside the logits",
                "router_aux_loss_coef": "training",
            },
            only=MIXTURES,
        ),
        *rows(
            "none",
            CLASS,
            {
                "initializer_range": "training",
                "attention_dropout": "training",
                "resid_pdrop": "training",
                "embd_pdrop": "training",
                "hidden_dropout": "training",
                "use_cache": "the cache changes the time alone",
                "pretraining_tp": "products in parts; transformers 5 ignores it",
            },
        ),
        *rows(
            "none",
            PRETRAINED,
            {
                "transformers_version": "the file's history",
                "dtype": "type of the stored weights; the files state it",
                "torch_dtype": "older name of dtype",
                "output_hidden_states": "the values that transformers returns beside the logits",
                "output_attentions": "the values that transformers returns beside the logits",
                "tie_last_hidden_states": "the values that transformers returns beside the logits",
                "return_dict": "the values that transformers returns beside the logits",
                "chunk_size_feed_forward": "the chunks change the time alone",
                **dict.fromkeys(
                    ("id2label", "label2id", "num_labels", "problem_type"),
                    "classification, whose architectures are refused",
                ),
                "name_or_path": "the file's history",
                "_name_or_path": "the file's history",
                "_commit_hash": "the file's history",
                **dict.fromkeys(
                    (
                        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
                        *("experts_implementation", "_experts_implementation"),
                        *("_experts_implementation_internal", "_attn_implementation_autoset"),
                    ),
                    "how transformers computes",
                ),
            },
        ),
        *rows(
            "none",
            OLDER,
            {
                **dict.fromkeys(
                    (
                        *("torchscript", "use_bfloat16", "tf_legacy_loss", "is_decoder", "use_return_dict"),
                        *("tie_encoder_decoder", "cross_attention_hidden_size"),
                    ),
                    "how transformers computes",
                ),
                **dict.fromkeys(
                    ("tokenizer_class", "prefix", "finetuning_task", "task_specific_params"),
                    "the tokenizer's files and the caller decide",
                ),
                "sep_token_id": "no token of a decoder",
                "custom_pipelines": "code of the checkpoint for other tasks, which is never run",
            },
        ),
        *rows(
            "none",
            PUBLISHED,
            {
                "transformers.js_config": "settings of transformers.js",
                "is_llama_config": "history of the first SmolLM checkpoints",
                "unsloth_*": "the file's history",
                "max_sequence_length": "older name that transformers ignores; max_position_embeddings counts",
            },
        ),
        *rows(
            "refused",
            OLDER,
            {"add_cross_attention": "models with an encoder", "pruned_heads": "heads that are cut out"},
            neutral=(False, {}),
        ),
        *rows(
            "refused",
            PUBLISHED,
            {
                "rope_interleaved": "rotary embedding of neighbouring elements",
                "use_mrope": "rotary embedding of several axes",
                "dual_chunk_attention_config": "attention in two kinds of chunks",
                "attention_sink": "scores of attention that belong to no token",
                "attention_sinks": "scores of attention that belong to no token",
                "alibi": "biases of attention by distance",
                "use_alibi": "biases of attention by distance",
                "qk_norm": "norms of queries and keys that the model type does not have",
                "use_qk_norm": "norms of queries and keys that the model type does not have",
                "num_nextn_predict_layers": "layers that predict further tokens",
            },
            neutral=(False, 0, {}),
        ),
        *rows(
            "refused",
            PUBLISHED,
            {
                "interpolate_factor": "positions that are scaled",
                "full_attn_mod": "layers of different kinds",
            },
            neutral=(1,),
        ),
        *rows(
            "refused",
            PUBLISHED,
            {"position_embedding_type": "positions other than rotary embedding"},
            neutral=("rope",),
        ),
        *rows(
            "refused",
            "mlx-lm, save_config",
            {"quantization": "integers of MLX; take the model that they were made from"},
        ),
        *rows(
            "refused",
            "compressed-tensors before 0.6",
            {"compression_config": "an older name of quantization_config; rename it"},
        ),
        *(
            Field(
                one.name,
                "read" if one.effect == "read" else "none",
                "as in generation_config.json, where that file is missing",
                "transformers, GenerationConfig.from_model_config",
            )
            for one in GENERATION_FIELDS.fields
        ),
    ),
)
"""Fields by model type. A field that the model type's class does not know, and that changes the results
elsewhere, is refused all the same: such a file was written for another reader."""
