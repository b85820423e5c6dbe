"""The tokenizer in a GGUF file's metadata, as ``tokenizer.json`` and ``tokenizer_config.json``.

transformers converts such metadata too, but splits text by a rule of the architecture where it does not know
the file's own rule, and its function is private.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["gguf_tokenizer"]

CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3: Final = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{SIGNS}|{ENDING}"
QWEN2: Final = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{SIGNS}|{ENDING}"
UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS: Final = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
SYMBOLS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN: Final = rf"{WORDS[0]}|{WORDS[1]}|\p{{N}}|{SYMBOLS}|{ENDING}"
GPT4O: Final = rf"{WORDS[0]}{CONTRACTIONS}?|{WORDS[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{SYMBOLS}|{ENDING}"


class Rule(NamedTuple):
    """The division of a text before byte-pair encoding.

    Args:
        pattern: Pieces that it finds.
        digits: Whether digits are separated first.
        whole: Whether pieces of the vocabulary stay whole, whatever the merges.
        begins: Whether a text begins with BOS if the metadata does not say.
    """

    pattern: str
    digits: bool = False
    whole: bool = False
    begins: bool = False


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "olmo"), Rule(GPT2)),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Rule(GPT2, digits=True)),
        **dict.fromkeys(
            ("llama3", "llama-v3", "llama-bpe", "falcon3"), Rule(LLAMA3, whole=True, begins=True)
        ),
        **dict.fromkeys(("smaug-bpe", "dbrx"), Rule(LLAMA3)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Rule(QWEN2)),
        "tekken": Rule(TEKKEN, whole=True, begins=True),
        **dict.fromkeys(("gpt-4o", "llama4"), Rule(GPT4O)),
    }
)
"""Values of ``tokenizer.ggml.pre``, as in llama.cpp's ``llama-vocab.cpp``."""

CONTROL: Final = 3
USER_DEFINED: Final = 4
SPACE: Final = "\u2581"
END_TEXTS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an answer, whatever the metadata says, as in llama.cpp."""


class Vocabulary(NamedTuple):
    """The parts of the metadata that a tokenizer needs."""

    path: Path
    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    merges: Sequence[str] | None


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[int]] | None:
    """Return ``tokenizer.json``, ``tokenizer_config.json`` and the ids of END_TEXTS; None without tokens.

    Raises:
        CheckpointError: The metadata contradicts itself.
        UnsupportedModelError: The tokenizer's kind, or its rule to divide texts, is unknown.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    vocabulary = _vocabulary(path, metadata)
    if model == "gpt2":
        rule = _rule(path, metadata.get("tokenizer.ggml.pre"))
        tokenizer, begins = _byte_level(vocabulary, rule), rule.begins
    elif model == "llama":
        gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
        tokenizer, begins = (
            _sentencepiece(vocabulary, _id(vocabulary, metadata, "unknown"), prefix, gemma),
            True,
        )
    else:
        raise UnsupportedModelError(f"{path}: a tokenizer of kind {model!r:.40} is not supported.")
    _add_special_tokens(tokenizer, vocabulary)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, own in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = _id(vocabulary, metadata, own)
        if index is not None:
            config[f"{name}_token"] = vocabulary.tokens[index]
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in config:
        _begin_with(tokenizer, config["bos_token"], int(metadata["tokenizer.ggml.bos_token_id"]))
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
    ends = [index for index, text in enumerate(vocabulary.tokens) if text in END_TEXTS]
    return tokenizer.to_str(), config, ends


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    def listed(name: str, kind: type, default: list[Any] | None) -> list[Any]:
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name} is not a list of {kind.__name__}.")
        return value

    tokens = listed("tokens", str, None)
    scores, kinds = listed("scores", float, [0.0] * len(tokens)), listed("token_type", int, [1] * len(tokens))
    if not tokens or {len(scores), len(kinds)} != {len(tokens)}:
        raise CheckpointError(f"{path}: {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types.")
    merges = listed("merges", str, None) if "tokenizer.ggml.merges" in metadata else None
    return Vocabulary(path, tokens, scores, kinds, merges)


def _id(vocabulary: Vocabulary, metadata: Mapping[str, Any], name: str) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.path}: {name}_token_id {index!r:.40} is none of {len(vocabulary.tokens)} tokens."
        )
    return index


def _rule(path: Path, name: object) -> Rule:
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise UnsupportedModelError(
            f"{path}: its tokenizer divides texts by the rule {name!r:.40}, which heterollm does not know.",
            fix=f"Known are {', '.join(RULES)}. Take another file, or the Hugging Face checkpoint.",
        )
    return rule


def _byte_level(vocabulary: Vocabulary, rule: Rule) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges or ()]
    tokenizer = Tokenizer(_bpe(models, vocabulary, pairs, ignore_merges=rule.whole))
    split = pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if rule.digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    vocabulary: Vocabulary, unknown: int | None, prefix: bool, gemma: bool
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = vocabulary.merges
    pairs = (
        list(_implied_merges(vocabulary, gemma))
        if merges is None
        else [tuple(one.split(" ")) for one in merges]
    )
    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        options["unk_token"] = vocabulary.tokens[unknown]
    tokenizer = Tokenizer(_bpe(models, vocabulary, pairs, **options))
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _bpe(models: Any, vocabulary: Vocabulary, pairs: list[tuple[str, ...]], **options: Any) -> Any:  # noqa: ANN401
    identifiers = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(identifiers, pairs, **options)
    except Exception as error:  # the library raises bare exceptions
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{vocabulary.path}: its merges do not fit its tokens: {reason:.120}."
        ) from error


def _implied_merges(vocabulary: Vocabulary, gemma: bool) -> Iterator[tuple[str, ...]]:
    """Yield every pair of tokens that make a token, those of the best token first.

    The score of a token ranks it; Gemma's tokens stand in the order of their merges.
    """
    places = {token: index for index, token in enumerate(vocabulary.tokens)}
    ranked = sorted(places.items(), key=lambda item: item[1] if gemma else -vocabulary.scores[item[1]])
    for token, _ in ranked:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found = [pair for pair in cuts if pair[0] in places and pair[1] in places]
        yield from sorted(found, key=lambda pair: (places[pair[0]], places[pair[1]]))


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = (text for text, own in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if own == kind)
        added = [AddedToken(text, normalized=False, special=special) for text in texts if text]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _begin_with(tokenizer: tokenizers.Tokenizer, token: str, index: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=[(token, index)]
    )
