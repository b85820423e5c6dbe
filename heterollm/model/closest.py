"""Approximates a model of an unsupported family by a Llama of the same sizes, for uses in which shapes count.

Only decoders whose layers are full or sliding attention and one feed-forward network have such a Llama. The
table lists the fields by which other layers show, so that no simulation leaves a layer out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from heterollm.model.config import ModelConfig
from heterollm.model.families import unsupported
from heterollm.model.fields import Field, FieldTable

SOURCE: Final = "configuration_*.py in transformers/models; the published code of the model type"

KEPT: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "sliding_window",
)
"""Fields that the closest Llama takes from a configuration of another family."""

READ: Final = (
    *KEPT,
    *("architectures", "layer_types", "model_type"),
    *("sliding_window_pattern", "use_sliding_window"),
)

REFUSED: Final[Mapping[str, str]] = {
    "a mixture of experts": "*num_*experts n_*experts moe_* n_experts* num_moe_* mlp_layer_types ffn_config",
    "attention with compressed keys": "*lora_rank qk_*_head_dim v_head_dim",
    "layers of linear attention": "linear_* full_attention_interval full_attn_* attn_type_list kda_* gdn_* "
    "lightning_* lin_*",
    "layers of convolution": "conv_* short_conv* *_conv_states canon*",
    "layers with a recurrent state": "mamba* *_mamba_* ssm* state_* time_step_* time_mix_* rwkv* "
    "rescale_every lru_width recurrent_* attention_hidden_size *lstm* expand d_state d_conv dt_rank "
    "retention* hgrn* ttt_*",
    "layers of several kinds": "hybrid_* *block_type* block_configs layers_block_type attn_layer_* "
    "full_attn_idxs num_mem_blocks per_layer_config global_attn_* local_attention attention_layers "
    "attention_types *_heads_per_layer num_query_heads global_head_dim num_global_* swa_* attention_k_eq_v "
    "layer_kinds",
    "layers that share keys and values": "num_kv_shared_layers cross_layer_* kv_sharing* cla_*",
    "attention other than full and sliding": "attention_chunk_size attention_type index_* indexer_* "
    "keep_window_size lambda_std_dev relative_attention rel_extent d_rel sparse_attention* nsa_* moba_* "
    "num_random_blocks",
    "a gate of the attention": "use_attention_gate attn_output_gate attention_gate gating gated_norm_rank",
    "layers that run more than once": "*_loops n_recurrent_* *_cycles num_layers_per_stack n_input_layers "
    "total_ut_steps num_hidden_groups recursion_* hc_mult",
    "an embedding of every layer": "hidden_size_per_layer_input altup_* laurel_*",
    "embeddings of another width": "input_embedding_size output_embedding_size word_embed_proj_dim",
    "adapters in the layers": "adapter_*",
    "an encoder": "is_encoder_decoder encoder_layers encoder_attention_heads encoder_ffn_dim encoder_config "
    "decoder_layers decoder_config type_vocab_size pooler_* *cross_attention* use_bidirectional_attention "
    "classifier_pooling num_encoder_layers num_decoder_layers",
    "more than text": "text_config llm_config language_config thinker_config talker_config vision* *audio* "
    "*_config",
}
"""Names of fields, with ``*`` for any characters, by what they show that no Llama approximates."""

HARMLESS: Final[Mapping[str, str]] = {
    "settings of the mixture, which has its own field": "num_experts_per_tok norm_topk_prob n_group topk_* "
    "router_* routed_scaling_factor decoder_sparse_step expert_layer_* expert_selection_fn",
    "quantised weights, which a simulation takes as floats": "quantization_config compression_config",
    "guesses of further tokens, which no answer needs": "num_nextn_predict_layers mtp_*",
    "positions, for which time is the same": "rope_* rotary_* partial_rotary_factor no_rope_* "
    "max_window_layers _sliding_window_pattern original_max_position_embeddings position_embedding_type "
    "use_rope alibi layer_rope_theta seq_length",
    "norms, biases, activations and factors, which take little time beside the linear layers": "*norm* *_eps "
    "*bias *_act hidden_activation activation_function *scal* *multiplier* *softcapping scale_* "
    "query_pre_attn_scalar use_parallel_residual parallel_* clip_qkv qkv_* dim_model_base logits_* "
    "no_bias attn_temperature_tuning",
    "training": "*dropout* *dropout initializer_* embedding_initializer_range *aux_loss* *_loss_* "
    "pretraining_tp",
    "the answer's tokens and forms": "*token_id* *_id task_specific_params use_cache output_* return_dict* "
    "id2label label2id problem_type summary_* classifier_* num_labels num_logits_to_keep prefix torchscript "
    "finetuning_task tokenizer_class bad_words_ids begin_suppress_tokens suppress_tokens do_sample "
    "early_stopping diversity_penalty length_penalty *length num_beam* num_return_sequences "
    "remove_invalid_values repetition_penalty temperature top_k top_p typical_p *ngram_size "
    "forced_* exponential_decay* sep_token_id",
    "the file itself": "_name_or_path auto_map dtype torch_dtype transformers_version is_decoder "
    "chunk_size_feed_forward pruned_heads tf_legacy_loss use_bfloat16 *_implementation name "
    "transformers.js_config",
}

NEUTRAL: Final[tuple[object, ...]] = (False, 0, 0.0, "", [], {})
"""Values with which a field says that the model has no such layers."""

LAYER_FIELDS: Final = FieldTable(
    "config.json of a model that a simulation approximates",
    tuple(
        sorted(
            (
                *(Field(name, "read", "size or kind of the layers", SOURCE) for name in READ),
                *(
                    Field(name, "refused", reason, SOURCE, NEUTRAL)
                    for reason, names in REFUSED.items()
                    for name in names.split()
                ),
                *(
                    Field(name, "none", reason, SOURCE)
                    for reason, names in HARMLESS.items()
                    for name in names.split()
                ),
            ),
            key=lambda field: "*" in field.name,  # a whole name decides before a pattern
        )
    ),
)
"""The fields of configurations of other families: sizes that are kept, fields without effect on the time, and
fields of layers that are not modelled."""

DECODERS: Final = ("ForCausalLM", "LMHeadModel")
"""Ends of the architectures of decoders."""

UNGATED: Final = frozenset(
    {
        *("apertus", "apertus1p5_text", "bert-generation", "biogpt", "gpt_neox", "jais2", "nanochat"),
        "persimmon",
    }
)
"""Model types whose feed-forward network has two linear layers."""

WIDTH_STEP: Final = 128
KINDS: Final = ("full_attention", "sliding_attention")


def closest_config(values: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """Return the Llama that is closest to a model of another family, and a note on the approximation.

    Args:
        values: Content of its ``config.json``.

    Raises:
        CheckpointError: A size is missing or illegal.
        UnsupportedModelError: No Llama approximates the model.
    """
    kind = values.get("model_type")
    if (field := next(_unlike(values), None)) is not None:
        raise unsupported(f"{field} in model type {kind!r:.80}")
    unknown = [name for name, value in values.items() if _counts(value) and LAYER_FIELDS.find(name) is None]
    kept = {name: values[name] for name in KEPT if values.get(name) is not None}
    note = f"Model type {kind!r:.80} is taken for a Llama of the same sizes; all else of it is left out."
    if unknown:
        note += f" Nobody has checked the effect of {', '.join(sorted(unknown)):.200}."
    width = kept.get("intermediate_size")
    if kind in UNGATED and type(width) is int:
        # A gated network of two thirds of the width has as many weights.
        kept["intermediate_size"] = max(WIDTH_STEP, width * 2 // 3 // WIDTH_STEP * WIDTH_STEP)
        note += f" Its network has no gate: a gated one, {kept['intermediate_size']} wide, stands for it."
    return ModelConfig.from_dict({**_family(values, kept), **kept}), note


def _unlike(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields, with their values, that show layers which no Llama has."""
    for name in values.get("architectures") or ():
        if not str(name).endswith(DECODERS):
            yield f"An architecture that is no decoder of text (architectures {name!r:.60})"
    kinds = values.get("layer_types")
    for one in kinds if isinstance(kinds, list) else ():
        if one not in KINDS:
            yield f"A layer of another kind than full and sliding attention (layer_types {one!r:.60})"
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and kinds is None:
        yield f"A pattern of layers (sliding_window_pattern {pattern!r:.60})"
    for name, value in values.items():
        row = LAYER_FIELDS.find(name)
        if row is not None and row.effect == "refused" and _counts(value):
            yield f"{row.meaning[0].upper()}{row.meaning[1:]} ({name} {value!r:.60})"


def _counts(value: object) -> bool:
    """Return whether a field's value states something."""
    return value is not None and value not in NEUTRAL


def _family(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family of the closest Llama: one whose layers slide as the model's do."""
    if "sliding_window" not in kept or values.get("use_sliding_window") is False:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    layers, pattern, kinds = kept.get("num_hidden_layers"), values.get("sliding_window_pattern"), None
    if isinstance(values.get("layer_types"), list):
        kinds = values["layer_types"]
    elif type(layers) is int and type(pattern) is int and pattern > 1:
        kinds = [KINDS[(at + 1) % pattern != 0] for at in range(layers)]
    if kinds is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    own = {"use_sliding_window": KINDS[1] in kinds, "layer_types": kinds}
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **own}
