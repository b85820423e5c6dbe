"""The fields of a tokenizer's files."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.table import FieldTable, rows

BASE: Final = "transformers, PreTrainedTokenizerBase"
FAST: Final = "transformers, PreTrainedTokenizerFast"
OLDER: Final = "older tokenizers of transformers; the library tokenizers ignores it"
HISTORY: Final = "the file's history"

SPECIAL: Final = rows(
    "read",
    BASE,
    {
        "bos_token": "token that begins a text, for the chat template",
        "eos_token": "token that ends an answer, beside the ids of generation_config.json",
        "unk_token": "token of what the vocabulary lacks, for the chat template",
        "sep_token": "special token, for the chat template",
        "pad_token": "special token, for the chat template",
        "cls_token": "special token, for the chat template",
        "mask_token": "special token, for the chat template",
        "additional_special_tokens": "further special tokens",
    },
)

TOKENIZER_CONFIG_FIELDS: Final = FieldTable(
    "tokenizer_config.json",
    (
        *SPECIAL,
        *rows(
            "read",
            BASE,
            {
                "added_tokens_decoder": "added tokens by id",
                "extra_special_tokens": "newer name of additional_special_tokens",
                "model_specific_special_tokens": "further special tokens by name",
                "chat_template": "template of a dialogue; the file chat_template.jinja precedes it",
            },
        ),
        *rows(
            "read",
            FAST,
            {
                "add_prefix_space": "whether a text begins with a space",
                "tokenizer_class": "class of a checkpoint without tokenizer.json; with it the file counts",
            },
        ),
        *rows(
            "none",
            BASE,
            {
                **dict.fromkeys(
                    (
                        *("model_max_length", "max_len", "max_length", "padding_side", "truncation_side"),
                        *("padding", "truncation", "truncation_strategy", "stride", "pad_to_multiple_of"),
                        "pad_token_type_id",
                    ),
                    "prompts are neither cut nor padded",
                ),
                "clean_up_tokenization_spaces": "the text of tokens stays as it is, as in llama.cpp; "
                "transformers leaves that of BPE, too",
                "clean_up_tokenization_spaces_for_bpe*": "the text of tokens stays as it is",
                "spaces_between_special_tokens": "special tokens have no text",
                **dict.fromkeys(
                    ("name_or_path", "tokenizer_file", "special_tokens_map_file", "_commit_hash"), HISTORY
                ),
                **dict.fromkeys(
                    ("processor_class", "model_input_names", "verbose", "backend", "is_local", "from_slow"),
                    "how transformers calls the tokenizer",
                ),
                "auto_map": "code of the checkpoint, which is never run",
                "response_template": "how transformers takes answers apart",
                "response_schema": "how transformers takes answers apart",
                "errors": "text that is not Unicode is refused",
            },
        ),
        *rows(
            "none",
            FAST,
            {
                "add_bos_token": "the post-processor of tokenizer.json counts, as in transformers 5",
                "add_eos_token": "the post-processor of tokenizer.json counts, as in transformers 5",
            },
        ),
        *rows(
            "none",
            OLDER,
            {
                **dict.fromkeys(
                    (
                        *("legacy", "legacy_behaviour", "sp_model_kwargs", "use_default_system_prompt"),
                        *("do_lower_case", "remove_space", "keep_accents", "use_fast", "vocab_file"),
                        "merges_file",
                    ),
                    "tokenizer.json counts",
                )
            },
        ),
        *rows(
            "refused",
            BASE,
            {"split_special_tokens": "special tokens in a text that are taken for plain text"},
            neutral=(False,),
        ),
    ),
)

SPECIAL_TOKENS_FIELDS: Final = FieldTable("special_tokens_map.json", SPECIAL)

ADDED_TOKENS_FIELDS: Final = FieldTable(
    "added_tokens.json",
    rows("read", BASE, {"*": "id of an added token; with tokenizer.json the ids of that file count"}),
)

TOKENIZER_FIELDS: Final = FieldTable(
    "tokenizer.json",
    (
        *rows(
            "read",
            "tokenizers, Tokenizer",
            {
                "model": "vocabulary and merges",
                "added_tokens": "tokens that are found before the text is divided",
                "normalizer": "changes of the text",
                "pre_tokenizer": "rule that divides the text",
                "post_processor": "tokens that begin a text",
                "decoder": "text of tokens",
            },
        ),
        *rows(
            "none",
            "tokenizers, Tokenizer",
            {
                "version": "version of the format; the library refuses others",
                "truncation": "prompts are not cut",
                "padding": "prompts are not padded",
            },
        ),
    ),
)
"""Sections of the file; the library tokenizers reads all of each and refuses kinds that it does not know."""
