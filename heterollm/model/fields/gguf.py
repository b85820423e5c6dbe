"""The metadata of GGUF files that llama.cpp's loader and the ``gguf`` package know, for each architecture."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.gguf_hyperparameters import HYPERPARAMETERS
from heterollm.model.fields.gguf_rows import NAMES, PACKAGE, VOCABULARY, read, rows
from heterollm.model.fields.table import FieldTable

LOADER: Final = "llama-model-loader.cpp"

GENERAL: Final = (
    read("general.architecture", "architecture, which selects the rows of this table"),
    read("general.alignment", "alignment of the tensors in bytes, 32 if absent", "gguf.cpp: gguf_init"),
    read("general.name", "Phi-3 in it: marks strip the white space behind them", VOCABULARY),
    read(
        "general.sampling.temp",
        "temperature; with any of these fields, llama.cpp's 0.8 if absent",
        "common.cpp",
    ),
    read("general.sampling.top_k", "top_k; as temp, 40", "common.cpp"),
    read("general.sampling.top_p", "top_p; as temp, 0.95", "common.cpp"),
    read("general.sampling.min_p", "min_p; as temp, 0.05", "common.cpp"),
    read("general.sampling.penalty_repeat", "repetition penalty; as temp, 1", "common.cpp"),
    *rows(
        "none",
        "recommended sampler that heterollm lacks; a note names it",
        "common.cpp",
        "general.sampling.*",
    ),
    *rows(
        "refused",
        "only files with a whole model are read, no adapters, projectors or statistics",
        NAMES,
        "general.type",
        neutral=("model",),
    ),
    *rows(
        "refused",
        "blocks of versions other than 2 have another layout",
        NAMES,
        "general.quantization_version",
        neutral=(2,),
    ),
    *rows(
        "none", "most frequent type of the tensors, each of which states its own", NAMES, "general.file_type"
    ),
    *rows(
        "none",
        "description of the file",
        NAMES,
        "general.author",
        "general.version",
        "general.organization",
        "general.finetune",
        "general.basename",
        "general.description",
        "general.quantized_by",
        "general.size_label",
        "general.license",
        "general.license.*",
        "general.url",
        "general.doi",
        "general.uuid",
        "general.repo_url",
        "general.source.*",
        "general.base_model.*",
        "general.dataset.*",
        "general.datasets",
        "general.tags",
        "general.languages",
    ),
    *rows("none", "record of the quantisation", "quantize.cpp", "quantize.imatrix.*"),
    read("split.count", "parts of a split file, which is opened by the first", LOADER),
    read("split.no", "number of the part, which its name must state", LOADER),
    read("split.tensors.count", "tensors of all parts", LOADER),
)

TOKENIZER: Final = (
    read("tokenizer.ggml.model", "llama, gpt2, gemma4, or none; other kinds are refused", VOCABULARY),
    read(
        "tokenizer.ggml.pre",
        "rule that divides texts, of gpt2 alone; absent or default: llama.cpp's rule for these, and a note",
        VOCABULARY,
    ),
    read(
        "tokenizer.ggml.tokens", "texts of the tokens, all different; an empty one is [EMPTY_n]", VOCABULARY
    ),
    read("tokenizer.ggml.scores", "order of merges of llama; 0 if absent", VOCABULARY),
    read(
        "tokenizer.ggml.token_type",
        "unknown (2) and control (3) tokens are special, user-defined ones (4) stay "
        "whole; tokens that llama.cpp knows by their text are special too",
        VOCABULARY,
    ),
    read(
        "tokenizer.ggml.merges",
        "merges of gpt2 and gemma4, required with tokens of several characters; llama merges by scores",
        VOCABULARY,
    ),
    read("tokenizer.ggml.bos_token_id", "token that begins a text; 1 in llama if absent", VOCABULARY),
    read("tokenizer.ggml.eos_token_id", "token that ends an answer; 2 in llama if absent", VOCABULARY),
    read(
        "tokenizer.ggml.eot_token_id",
        "further token that ends an answer, as those that llama.cpp knows by their text",
        VOCABULARY,
    ),
    read("tokenizer.ggml.eom_token_id", "as eot_token_id", VOCABULARY),
    read("tokenizer.ggml.fim_pad_token_id", "as eot_token_id", VOCABULARY),
    read("tokenizer.ggml.fim_rep_token_id", "as eot_token_id", VOCABULARY),
    read("tokenizer.ggml.fim_sep_token_id", "as eot_token_id", VOCABULARY),
    read("tokenizer.ggml.unknown_token_id", "token of unknown characters; 0 in llama if absent", VOCABULARY),
    read("tokenizer.ggml.padding_token_id", "padding token", VOCABULARY),
    read(
        "tokenizer.ggml.add_bos_token",
        "whether bos begins a text; absent: true in llama and for the rules of Llama 3 and Tekken",
        VOCABULARY,
    ),
    read(
        "tokenizer.ggml.add_space_prefix",
        "whether a text of llama begins with a space; absent: true, except in "
        "Gemma, whose tokenizer adds none",
        VOCABULARY,
    ),
    read("tokenizer.chat_template", "chat template", VOCABULARY),
    read("tokenizer.chat_template.*", "further chat templates by name", PACKAGE),
    *rows("none", "names of the further chat templates", PACKAGE, "tokenizer.chat_templates"),
    read(
        "tokenizer.ggml.add_eos_token",
        "whether eos ends a text; refused if true without a pooling: a model has nothing to say after it",
        VOCABULARY,
    ),
    *rows(
        "refused",
        "texts that end in a further token, after which a model has nothing to say",
        VOCABULARY,
        "tokenizer.ggml.add_sep_token",
        neutral=(False,),
    ),
    *rows(
        "refused",
        "a normalizer that only the kinds t5 and bert have",
        VOCABULARY,
        "tokenizer.ggml.precompiled_charsmap",
        "tokenizer.ggml.normalizer.*",
        neutral=(False,),
    ),
    *rows(
        "refused",
        "tokens that an answer may not hold",
        VOCABULARY,
        "tokenizer.ggml.suppress_tokens",
        neutral=([],),
    ),
    *rows("refused", "the vocabulary of RWKV", NAMES, "tokenizer.rwkv.*"),
    *rows(
        "none",
        "white space that only the kind t5 removes",
        VOCABULARY,
        "tokenizer.ggml.remove_extra_whitespaces",
    ),
    *rows("none", "kinds of segments, of encoders", VOCABULARY, "tokenizer.ggml.token_type_count"),
    *rows(
        "none",
        "token of encoders",
        VOCABULARY,
        "tokenizer.ggml.seperator_token_id",
        "tokenizer.ggml.cls_token_id",
        "tokenizer.ggml.mask_token_id",
    ),
    *rows(
        "none",
        "token of prompts with a gap, which heterollm does not write",
        VOCABULARY,
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.fim_suf_token_id",
        "tokenizer.ggml.fim_mid_token_id",
        "tokenizer.ggml.prefix_token_id",
        "tokenizer.ggml.suffix_token_id",
        "tokenizer.ggml.middle_token_id",
    ),
    *rows("none", "copy of tokenizer.json, which llama.cpp ignores too", NAMES, "tokenizer.huggingface.json"),
)

GGUF_FIELDS: Final = FieldTable("GGUF metadata", (*GENERAL, *HYPERPARAMETERS, *TOKENIZER))
"""The fields of GGUF files; the kind of a file is its ``general.architecture``."""
