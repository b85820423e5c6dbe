"""The rules by which ``tokenizer.ggml.pre`` divides a text before byte-pair encoding.

Names, and what follows from them, are those of ``llm_tokenizer_bpe`` and ``llama_vocab::impl::load`` in
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp; patterns are those of the published
``tokenizer.json`` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3: Final = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{SIGNS}|{ENDING}"
QWEN2: Final = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{SIGNS}|{ENDING}"
QWEN35: Final = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{ENDING}"
)
SEED: Final = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{ENDING}"
BAILING: Final = rf"'(?i:[sdmt]|ll|ve|re)|{LETTERS}|\p{{N}}|{SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS: Final = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN: Final = rf"{WORDS[0]}|{WORDS[1]}|\p{{N}}|{SYMBOLS}|{ENDING}"
GPT4O: Final = rf"{WORDS[0]}{CONTRACTIONS}?|{WORDS[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{SYMBOLS}|{ENDING}"
ASCII_SIGNS: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    rf"{ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDING}",
)
DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
PUNCTUATION: Final = r"[\p{P}\$\+<=>\^~\|]+"


class Rule(NamedTuple):
    """The division of a text.

    Args:
        patterns: Pieces to find, each in the pieces of those before it.
        whole: Whether pieces of the vocabulary stay whole, whatever the merges.
        begins: Whether a text begins with BOS if the metadata does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


DEFAULT_RULE: Final = Rule((PUNCTUATION, GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
"""The rule for files that state none, or ``default``."""


def _named(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **_named(
            Rule((GPT2,)), "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"
        ),
        **_named(
            Rule((GPT2,)), "a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion"
        ),
        **_named(Rule((GPT2,)), "granite-docling"),
        **_named(Rule((r"\p{N}", GPT2)), "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
        **_named(Rule((r"\p{N}", GPT2)), "minerva-7b", "mellum2"),
        **_named(Rule((LLAMA3,), True, True), "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"),
        **_named(Rule((LLAMA3,), True, True), "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        **_named(Rule((LLAMA3,)), "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"),
        **_named(Rule((QWEN2,)), "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"),
        **_named(Rule((QWEN2,)), "hunyuan", "solar-open", "grok-2"),
        **_named(Rule((QWEN35,)), "qwen35"),
        **_named(Rule((TEKKEN,), True, True), "tekken"),
        **_named(Rule((GPT4O,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
        **_named(Rule((SEED,)), "seed-coder"),
        **_named(Rule((BAILING,)), "bailingmoe", "bailingmoe2", "llada-moe"),
        **_named(Rule(DEEPSEEK3), "deepseek-v3", "hunyuan-dense", "joyai-llm"),
        **_named(Rule(DEEPSEEK_CODER), "deepseek-coder"),
        **_named(Rule((rf"{PUNCTUATION[:-2]}`]+", GPT2, r"[0-9][0-9][0-9]")), "falcon"),
        "default": DEFAULT_RULE,
    }
)
"""Values of ``tokenizer.ggml.pre``, compared letter by letter."""
