"""The tokenizer of GGUF files: fields that change it, and properties of tokens that files do not store."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_text_rules import RULES
from heterollm.model.stored.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from heterollm.text import Tokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = ["\u2581", "\u2581h", "\u2581hi", "h", "i", "hi", "\n", "a", "b", "ab", "bb"]
MARKS = ["<|user|>", "<|end|>", "<|endoftext|>", "<mark>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, *MARKS]
SPM: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [0.0] * 4,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [3, 3, 3, 4],
}
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
BPE_TOKENS = [*LETTERS, "ab", "12", "123", "<s>", "<e>", "<e2>", "\u0120a"]
BPE: dict[str, Any] = {
    "general.architecture": "qwen2",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": BPE_TOKENS,
    "tokenizer.ggml.token_type": [1] * len(LETTERS) + [1, 1, 1, 3, 3, 3, 1],
    "tokenizer.ggml.merges": ["a b", "1 2", "12 3", "\u0120 a"],
    "tokenizer.ggml.bos_token_id": BPE_TOKENS.index("<s>"),
    "tokenizer.ggml.eos_token_id": BPE_TOKENS.index("<e>"),
}


def read(metadata: dict[str, Any]) -> GgufTokenizer:
    return gguf_tokenizer(Path("a.gguf"), metadata)


def loaded(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    found = read(metadata)
    assert found.tokenizer is not None
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(found.tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(found.config))
    (folder / "config.json").write_text(json.dumps(found.ids))
    return Tokenizer.from_folder(folder)


def pieces(metadata: dict[str, Any], text: str, folder: Path) -> list[str]:
    """The texts of the ids of a text, with the tokens that begin it."""
    return [metadata["tokenizer.ggml.tokens"][index] for index in loaded(metadata, folder).encode(text)]


class Seen(NamedTuple):
    """The pieces of a text in a file without a field, or with another value, and with it.

    Args:
        base: The file.
        value: The value.
        text: A text.
        without: Its pieces without the value.
        found: Its pieces with it.
    """

    base: dict[str, Any]
    value: Any
    text: str
    without: list[str]
    found: list[str]


def less(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name.removeprefix("tokenizer.ggml.") not in names}


TEXT_CASES: dict[str, list[Seen]] = {
    "tokenizer.ggml.tokens": [
        Seen(SPM, [*SPM_TOKENS[:-1], "<seal>"], "<seal>", ["<s>", "\u2581"], ["<s>", "<seal>"]),
    ],
    "tokenizer.ggml.scores": [
        Seen(
            SPM,
            [-1.0 if token == "ab" else 0.0 for token in SPM_TOKENS],
            "abb",
            ["<s>", "\u2581", "ab", "b"],
            ["<s>", "\u2581", "a", "bb"],
        )
    ],
    "tokenizer.ggml.token_type": [
        Seen(SPM, [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) + 4), "<mark>", ["<s>", "<mark>"], ["<s>", "\u2581"]),
        Seen(less(SPM, "token_type"), SPM["tokenizer.ggml.token_type"], "<unk>", ["<s>", "\u2581"], ["<s>", "<unk>"]),
    ],
    "tokenizer.ggml.merges": [Seen(BPE, ["1 2"], "ab", ["ab"], ["a", "b"])],
    "tokenizer.ggml.pre": [
        Seen(BPE, "llama-bpe", "123", ["1", "2", "3"], ["<s>", "123"]),
        Seen(less(BPE, "pre"), "qwen2", "123", ["123"], ["1", "2", "3"]),
        Seen(less(BPE, "pre"), "default", "(ab", ["(", "ab"], ["(", "ab"]),
    ],
    "tokenizer.ggml.model": [Seen({**SPM, "tokenizer.ggml.merges": []}, "gpt2", "hi", ["<s>", "\u2581hi"], [])],
    "tokenizer.ggml.bos_token_id": [
        Seen(SPM, 2, "hi", ["<s>", "\u2581hi"], ["</s>", "\u2581hi"]),
        Seen(
            less({**BPE, "tokenizer.ggml.pre": "tekken"}, "bos_token_id"),
            BPE_TOKENS.index("<s>"),
            "ab",
            ["ab"],
            ["<s>", "ab"],
        ),
    ],
    "tokenizer.ggml.add_bos_token": [
        Seen(SPM, False, "hi", ["<s>", "\u2581hi"], ["\u2581hi"]),
        Seen(BPE, True, "ab", ["ab"], ["<s>", "ab"]),
        Seen({**BPE, "tokenizer.ggml.pre": "tekken"}, False, "ab", ["<s>", "ab"], ["ab"]),
    ],
    "tokenizer.ggml.add_space_prefix": [
        Seen(SPM, False, "hi", ["<s>", "\u2581hi"], ["<s>", "hi"]),
        Seen({**SPM, "general.architecture": "gemma2"}, True, "hi", ["<s>", "hi"], ["<s>", "\u2581hi"]),
    ],
    "tokenizer.ggml.unknown_token_id": [
        Seen(less(SPM, "token_type"), 2, "x", ["<s>", "\u2581", "<0x78>"], ["<s>", "\u2581", "<0x78>"]),
    ],
    "general.name": [
        Seen(
            SPM,
            name,
            "<|user|>\nhi<|end|>\n<|endoftext|>\n",
            ["<s>", "<|user|>", "\u2581", "\n", "hi", "<|end|>", "\u2581", "\n", "<|endoftext|>", "\u2581", "\n"],
            ["<s>", "<|user|>", "\u2581hi", "<|end|>", "<|endoftext|>", "\u2581", "\n"],
        )
        for name in ("Phi-3-mini", "a PHI3 finetune", "Phi 3.5 Mini Instruct")
    ],
}
"""Fields that change the pieces of a text."""
