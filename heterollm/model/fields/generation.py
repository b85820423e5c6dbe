"""The fields of ``generation_config.json``."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.table import FieldTable, rows

SOURCE: Final = "transformers, GenerationConfig"
BEAMS: Final = "beam search, which num_beams asks for"
GUESSES: Final = "speculation of transformers, which keeps the answers; here `--speculative`"

GENERATION_FIELDS: Final = FieldTable(
    "generation_config.json",
    (
        *rows(
            "read",
            SOURCE,
            {
                "eos_token_id": "ids that end an answer; before those of config.json",
                "bos_token_id": "ids that begin a text; before those of config.json",
                "pad_token_id": "padding token; before that of config.json",
                "do_sample": "whether to sample; default false, which is greedy",
                "temperature": "default of the server; 1.0 if missing",
                "top_k": "default of the server; 50 if missing, 0 for all",
                "top_p": "default of the server; 1.0 if missing",
                "min_p": "default of the server; none if missing",
                "repetition_penalty": "default of the server; 1.0 if missing",
            },
        ),
        *rows(
            "none",
            SOURCE,
            {
                "max_length": "the caller sets the length",
                "max_new_tokens": "the caller sets the length",
                "max_time": "the caller sets the time",
                "num_return_sequences": "the caller sets the number of answers",
                "renormalize_logits": "sampling normalises after the filters in any case",
                "remove_invalid_values": "logits that are not finite raise an error here",
                "use_cache": "the cache changes the time alone",
                "cache_implementation": "the place of the cache; here `--kv-bits`",
                "cache_config": "the place of the cache; here `--kv-bits`",
                "max_cache_len": "the size of the cache; here `--context`",
                "prefill_chunk_size": "the chunks of a prompt change the time alone",
                "low_memory": "the memory of contrastive search",
                **dict.fromkeys(
                    ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"), BEAMS
                ),
                **dict.fromkeys(
                    (
                        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
                        *("assistant_confidence_threshold", "prompt_lookup_num_tokens"),
                        *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
                        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
                    ),
                    GUESSES,
                ),
                "decoder_start_token_id": "models with an encoder",
                **dict.fromkeys(
                    (
                        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
                        "return_dict_in_generate",
                    ),
                    "the values that transformers returns beside the tokens",
                ),
                **dict.fromkeys(
                    ("compile_config", "disable_compile", "continuous_batching_config"),
                    "how transformers runs",
                ),
                **dict.fromkeys(
                    ("transformers_version", "_from_model_config", "_commit_hash"), "the file's history"
                ),
            },
        ),
        *rows(
            "refused",
            SOURCE,
            {
                "min_length": "answers may end earlier",
                "min_new_tokens": "answers may end earlier",
                "no_repeat_ngram_size": "answers may repeat a sequence of tokens",
                "encoder_no_repeat_ngram_size": "answers may repeat a sequence of the prompt",
            },
            neutral=(0,),
        ),
        *rows(
            "refused",
            SOURCE,
            {
                "num_beams": "answers are sampled or greedy, without beam search",
                "typical_p": "there is no locally typical sampling",
                "guidance_scale": "there is no classifier-free guidance",
                "encoder_repetition_penalty": "there is no penalty of what the prompt lacks",
            },
            neutral=(1,),
        ),
        *rows(
            "refused",
            SOURCE,
            {
                "epsilon_cutoff": "there is no epsilon sampling",
                "eta_cutoff": "there is no eta sampling",
                "penalty_alpha": "there is no contrastive search",
            },
            neutral=(0,),
        ),
        *rows("refused", SOURCE, {"token_healing": "prompts are taken as they are"}, neutral=(False,)),
        *rows(
            "refused",
            SOURCE,
            {
                "stop_strings": "the caller names strings that stop an answer",
                "bad_words_ids": "no tokens are excluded",
                "suppress_tokens": "no tokens are excluded",
                "begin_suppress_tokens": "no tokens are excluded",
                "sequence_bias": "the caller biases tokens",
                "constraints": "answers follow no constraints but a grammar",
                "force_words_ids": "answers follow no constraints but a grammar",
            },
            neutral=([], {}),
        ),
        *rows(
            "refused",
            SOURCE,
            {
                "top_h": "there is no top-h sampling",
                "forced_bos_token_id": "no token is forced",
                "forced_eos_token_id": "no token is forced",
                "exponential_decay_length_penalty": "there is no penalty of the length",
                "watermarking_config": "answers have no watermark",
                "dola_layers": "there is no contrast between layers",
            },
        ),
    ),
)
"""Fields of the defaults of an answer. They are defaults that a caller may replace, so that a refused one
leaves the model usable: a note names it, and answers are made without it."""
