"""Rows of the table of ``config.json``: fields of all model types, and the meaning of those of some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.model.fields.generation import GENERATION_FIELDS
from heterollm.model.fields.table import Field, rows

PRETRAINED: Final = "transformers, PreTrainedConfig"
CLASS: Final = "transformers, configuration class of the model type"
OLDER: Final = "older PreTrainedConfig; transformers 5 ignores it"
PUBLISHED: Final = "published checkpoints; transformers ignores it"

ALWAYS: Final = (
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
        {
            "intermediate_size": "width of the network, or of an expert",
            "original_max_position_embeddings": "context before the extension; precedes the section's",
            "hidden_act": "activation: silu, relu, relu2, or GELU by tanh or erf; case counts, as in ACT2FN",
        },
    ),
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
    *rows(
        "none",
        CLASS,
        {
            **dict.fromkeys(
                (
                    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop"),
                    *("hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"),
                    *("classifier_dropout", "layerdrop", "expert_dropout", "init_std"),
                ),
                "training",
            ),
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
            "qk_layernorm": "norms of queries and keys that the model type does not have",
            "num_nextn_predict_layers": "layers that predict further tokens",
        },
        neutral=(False, 0, {}),
    ),
    *rows(
        "refused",
        PUBLISHED,
        {"interpolate_factor": "positions that are scaled", "full_attn_mod": "layers of different kinds"},
        neutral=(1,),
    ),
    *rows(
        "refused",
        CLASS,
        {
            "do_layer_norm_before": "norms behind blocks",
            "layer_norm_elementwise_affine": "norms without weights",
        },
        neutral=(True,),
    ),
    *rows("refused", CLASS, {"_remove_final_layer_norm": "no norm before the head"}, neutral=(False,)),
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
)
"""Fields of all model types, unless a row of a type precedes."""

UNBOUNDED: Final = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Forms of a range without bounds, as JSON has no infinity."""

OPTIONAL: Final[Mapping[str, tuple[str, tuple[object, ...]]]] = MappingProxyType(
    {
        "mlp_bias": ("biases of the feed-forward network", (False,)),
        "no_rope_layers": ("layers without positions", (1, False)),
        "partial_rotary_factor": ("part of a head that rotates", (1, False)),
        "query_pre_attn_scalar": ("a scale of attention scores", (False,)),
        "attn_logit_softcapping": ("a soft cap on attention scores", (0, False)),
        "final_logit_softcapping": ("a soft cap on logits", (0, False)),
        "num_local_experts": ("a mixture of experts", (0, False)),
        "num_experts": ("a mixture of experts", (0, False)),
        "num_experts_per_tok": ("experts that compute a token", (0, False)),
        "moe_intermediate_size": ("width of an expert", (0, False)),
        "shared_intermediate_size": ("experts of every token", (0, False)),
        "shared_expert_intermediate_size": ("experts of every token", (0, False)),
        "use_parallel_residual": ("attention and network side by side", (False,)),
        "moe_num_experts": ("a mixture of experts", (0, False)),
        "moe_num_shared_experts": ("experts of every token", (0, False)),
        "n_routed_experts": ("a mixture of experts", (0, False)),
        "n_shared_experts": ("experts of every token", (0, False)),
        "num_shared_experts": ("experts of every token", (0, False)),
        "first_k_dense_replace": ("first layers without experts", (0, False)),
        "use_expert_bias": ("a bias of the choice of experts", (False,)),
        "routed_scaling_factor": ("a factor on the experts", (1, False)),
        "num_dense_layers": ("first layers without experts", (0, False)),
        "norm_topk_prob": ("whether chosen weights sum to 1", (False,)),
        "mlp_only_layers": ("layers without experts", (False,)),
        "decoder_sparse_step": ("every how many layers one has experts", (1, False)),
        "clip_qkv": ("a limit of queries, keys and values", (False,)),
        "lm_head_bias": ("a bias of the LM head", (False,)),
        "position_embedding_type": ("positions other than rotary embedding", ("rope",)),
        "embedding_multiplier": ("a factor on the embedding", (1, False)),
        "attention_multiplier": ("a factor on attention scores", (1, False)),
        "residual_multiplier": ("a factor on what layers add", (1, False)),
        "logits_scaling": ("a divisor of the logits", (1, False)),
    }
)
"""Fields that some model types read, and that others refuse unless they have one of the values behind."""

IGNORED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "attention_bias": (
            "biases of attention's linears",
            "transformers ignores it here; biases without a place are refused",
        ),
        "sliding_window": (
            "positions that a token attends to",
            "transformers has no window in this model type",
        ),
        "max_window_layers": (
            "first layer with a window, where layer_types is missing",
            "transformers ignores it in this model type",
        ),
    }
)
"""Fields that some model types read and others ignore, with their meaning and the reason."""

OWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_qk_norm": "norms of heads of queries and keys",
        "attention_chunk_size": "positions of a chunk, of which a token sees those before it",
        "attn_temperature_tuning": "whether queries grow with the position in layers without RoPE",
        "attn_scale": "their growth for each e-fold of floor_scale",
        "floor_scale": "positions whose queries keep their size",
        "moe_layers": "layers with experts",
        "interleave_moe_layer_step": "every how many layers one has experts; moe_layers precedes it",
        "intermediate_size_mlp": "width of the network in layers without experts",
        "layer_rope_theta": "base of rotary embedding by layer, 0 for none; by default that of all",
        "num_layers": "own name of num_hidden_layers, which it precedes",
        "layer_norm_epsilon": "own name of rms_norm_eps, which it precedes",
        "activation_function": "own name of hidden_act, which it precedes",
        "use_qkv_bias": "biases of q, k and v",
        "qkv_bias": "biases of q, k and v",
        "bias": "biases of attention's linears; in InternLM3 of those of the network, as mlp_bias",
        "scale_depth": "factor of what layers add, by the root of their number",
        "dim_model_base": "width that logits are scaled to",
        "use_bias": "biases of all linears of layers",
        "enable_bias": "biases of all linears of layers",
        "word_embed_proj_dim": "width of the embedding, which must be hidden_size",
        "attention_out_bias": "a bias of attention's output",
        "mlp_layer_types": "dense or sparse, by layer",
        "use_sliding_window": "whether sliding_window counts; by default not",
        "sliding_window_pattern": "one of so many layers has full attention; layer_types precedes it",
        "rope_local_base_freq": "base of rotary embedding in layers with a window",
        "no_rope_layer_interval": "every so many layers one has no RoPE; no_rope_layers precedes it",
        "router_jitter_noise": "range of the router's second choice (sparsemixer)",
        "hidden_activation": "activation, as hidden_act",
        "swiglu_limit": "upper bound of an expert's gate, and magnitude that bounds up",
        "swiglu_alpha": "factor of the gate in the sigmoid of that network",
        "logit_scale": "a factor on the logits",
        "n_group": "equal groups of experts",
        "topk_group": "groups from which a token chooses experts",
        "topk_method": "greedy, or group_limited_greedy with those groups",
        "moe_k": "experts that compute a token",
        "moe_layer_start_index": "first layer with experts",
        "moe_layer_end_index": "last layer with experts; -1 for that of the model",
        "moe_layer_interval": "every how many layers one has experts",
        "conv_L_cache": "tokens that a convolution spans",
        "full_attn_idxs": "layers with attention, where layer_types is missing",
        "block_ff_dim": "older name of intermediate_size, which it precedes",
        "block_auto_adjust_ff_dim": "whether the network is narrower than intermediate_size",
        "block_ffn_dim_multiplier": "factor of that width",
        "block_multiple_of": "the width is rounded up to a multiple of it",
        "global_head_dim": "width of heads in layers with full attention",
        "num_global_key_value_heads": "their key heads, if attention_k_eq_v",
        "attention_k_eq_v": "whether layers with full attention have one linear for keys and values",
        "num_kv_shared_layers": "last layers that read the keys and values of layers before",
        "use_double_wide_mlp": "whether their networks are twice as wide",
        "hidden_size_per_layer_input": "elements of a token's embedding for each layer; 0 for none",
        "vocab_size_per_layer_input": "tokens that have one",
        "altup_num_inputs": "residual streams (AltUp), of which layers compute the first",
        "altup_correct_scale": "whether what meets the layer's embedding has factors",
        "laurel_rank": "width between the linears of a branch beside attention (Laurel)",
        "activation_sparsity_pattern": "share of gates that are zero, by layer; 0 for none",
        "qk_scale_factor": "a factor on queries behind their norms",
        "post_norm_eps": "number added in norms of outputs",
        "output_multiplier": "a factor on the logits, before their soft cap",
        "enable_moe_block": "whether experts stand beside the network of each layer",
        "top_k_experts": "experts that compute a token",
        "per_layer_config": "head_dim and num_key_value_heads of layers that differ",
        "tie_embedding": "older name of tie_word_embeddings, which it precedes",
        "full_attention_interval": "every so many layers one has attention; layer_types precedes it",
        "linear_conv_kernel_dim": "tokens that the convolution of a delta net spans",
        "linear_num_key_heads": "heads of queries and keys in a delta net",
        "linear_num_value_heads": "heads of values in a delta net; neighbours share a key head",
        "linear_key_head_dim": "width of a head of queries or keys in a delta net",
        "linear_value_head_dim": "width of a head of values in a delta net",
        "mamba_n_heads": "heads of a state space",
        "mamba_n_groups": "groups of heads that share B and C in a state space",
        "mamba_d_state": "width of B and C in a state space",
        "mamba_d_head": "width of a head of a state space",
        "mamba_d_conv": "tokens that the convolution of a state space spans",
        "mamba_expand": "heads of all state spaces by hidden_size, where mamba_d_head is missing",
        "mamba_d_ssm": "width of all heads of a state space; null for mamba_expand times hidden_size",
        "mamba_rms_norm": "whether the output of a state space has a norm",
        "mamba_norm_before_gate": "whether it comes before the gate",
        "key_multiplier": "a factor on keys",
        "attention_in_multiplier": "a factor on the inputs of attention",
        "attention_out_multiplier": "a factor on the output of attention",
        "ssm_in_multiplier": "a factor on the inputs of a state space",
        "ssm_out_multiplier": "a factor on the output of a state space",
        "ssm_multipliers": "factors on its gate, x, B, C and dt",
        "mlp_multipliers": "factors on the gate and on the output of the network",
        "lm_head_multiplier": "a factor on the logits",
        "q_lora_rank": "elements of a vector from which queries are made; null for none",
        "kv_lora_rank": "elements of the latent vector from which keys and values are made",
        "qk_nope_head_dim": "elements of a query or key that do not rotate",
        "qk_rope_head_dim": "elements of a query, and of the key of all heads, that rotate",
        "v_head_dim": "width of a head of values",
        "rope_interleave": "whether neighbouring elements rotate",
        "layers_block_type": "kind of each layer",
        "hybrid_override_pattern": "older form of layers_block_type, a letter for each layer",
        "moe_shared_expert_intermediate_size": "experts of every token",
        "mamba_conv_bias": "whether the convolution of a state space has biases",
    }
)
"""Fields that no other model type knows."""
