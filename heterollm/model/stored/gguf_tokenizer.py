"""The tokenizer in a GGUF file's metadata, as ``tokenizer.json`` and ``tokenizer_config.json``.

transformers converts such metadata too, but splits text by a rule of the architecture where it does not know
the file's own rule, and its function is private.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_text_rules import DEFAULT_RULE, RULES, Rule
from heterollm.model.stored.gguf_tokens import (
    NORMAL,
    SPECIAL,
    USER_DEFINED,
    end_texts,
    stripping,
    token_kinds,
)

if TYPE_CHECKING:
    import tokenizers

SPACE: Final = "\u2581"
ENDS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Metadata with the ids of tokens that end an answer."""
SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids that llama.cpp takes where a file of kind ``llama`` states none."""


class GgufTokenizer(NamedTuple):
    """The tokenizer of a file.

    Args:
        tokenizer: Content of ``tokenizer.json``; None without tokens.
        config: Content of ``tokenizer_config.json``.
        ids: Fields of ``config.json`` and ``generation_config.json``.
        notes: Assumptions, for the user.
    """

    tokenizer: str | None
    config: dict[str, Any]
    ids: dict[str, Any]
    notes: tuple[str, ...] = ()


class Vocabulary(NamedTuple):
    """The parts of the metadata that a tokenizer needs."""

    path: Path
    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    merges: Sequence[str] | None


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Return the tokenizer in a file's metadata.

    Raises:
        CheckpointError: The metadata contradicts itself.
        UnsupportedModelError: The tokenizer's kind, or its rule to divide texts, is unknown.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        stated = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", *ENDS)}
        return GgufTokenizer(None, {}, _ids(stated, []))
    vocabulary = _vocabulary(path, metadata)
    names = ("bos", "unknown", "padding", *ENDS)
    ids = {name: _id(vocabulary, metadata, name, model) for name in names}
    notes: tuple[str, ...] = ()
    if model == "gpt2":
        rule, notes = _rule(path, metadata.get("tokenizer.ggml.pre"))
        tokenizer, begins = _byte_level(vocabulary, rule), rule.begins
    elif model == "llama":
        gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
        tokenizer, begins = _sentencepiece(vocabulary, ids["unknown"], prefix, gemma), True
    elif model == "gemma4":
        tokenizer, begins = _by_lines(vocabulary, ids["unknown"]), True
    else:
        raise UnsupportedModelError(f"{path}: a tokenizer of kind {model!r:.40} is not supported.")
    _add_special_tokens(tokenizer, vocabulary, metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, own in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = ids[own]
        if index is not None:
            config[f"{name}_token"] = vocabulary.tokens[index]
    begins = metadata.get("tokenizer.ggml.add_bos_token", begins)
    if begins and ids["bos"] is None and "tokenizer.ggml.add_bos_token" in metadata:
        raise CheckpointError(f"{path} has tokenizer.ggml.add_bos_token, but no tokenizer.ggml.bos_token_id.")
    around = {"bos": bool(begins), "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False))}
    if around["eos"] and pooling_mode(metadata) is None:
        raise UnsupportedModelError(
            f"{path} has tokenizer.ggml.add_eos_token: its texts end in a token after which a model has "
            "nothing to say, and it pools no embeddings."
        )
    _put_around(tokenizer, vocabulary, {name: ids[name] for name, wanted in around.items() if wanted})
    template = _chat_template(metadata)
    if template is not None:
        config["chat_template"] = template
    texts = end_texts(vocabulary.tokens)
    ends = [index for index, text in enumerate(vocabulary.tokens) if text in texts]
    return GgufTokenizer(tokenizer.to_str(), config, _ids(ids, ends), notes)


def _ids(stated: Mapping[str, int | None], ends: Sequence[int]) -> dict[str, Any]:
    """Return the token ids of ``config.json``."""
    found = [stated[name] for name in ENDS if stated[name] is not None]
    return {
        "bos_token_id": stated["bos"],
        "pad_token_id": stated["padding"],
        "eos_token_id": list(dict.fromkeys([*found, *ends])),
    }


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them by name, as in ``tokenizer_config.json``."""
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")
    }
    template = metadata.get(key)
    if not named:
        return template if isinstance(template, str) and template else None
    templates = {**({"default": template} if template else {}), **named}
    return [{"name": name, "template": str(text)} for name, text in templates.items()]


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    def listed(name: str, kind: type | UnionType, default: list[Any] | None) -> list[Any]:
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name} is not a list of {kind}.")
        return value

    # llama.cpp gives empty texts this one, too.
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(listed("tokens", str, None))]
    scores = listed("scores", float | int, [0.0] * len(tokens))
    kinds = listed("token_type", int, [NORMAL] * len(tokens))
    if not tokens or {len(scores), len(kinds)} != {len(tokens)}:
        raise CheckpointError(f"{path}: {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types.")
    if len(set(tokens)) != len(tokens):
        twice = next(text for text, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens has {twice!r:.40} twice.")
    merges = listed("merges", str, None) if "tokenizer.ggml.merges" in metadata else None
    return Vocabulary(path, tokens, scores, kinds, merges)


def _id(vocabulary: Vocabulary, metadata: Mapping[str, Any], name: str, model: object) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        default = SENTENCEPIECE_IDS.get(name) if model == "llama" else None
        return default if default is not None and default < len(vocabulary.tokens) else None
    if type(index) is not int or not 0 <= index < len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.path}: {name}_token_id {index!r:.40} is none of {len(vocabulary.tokens)} tokens."
        )
    return index


def _rule(path: Path, name: object) -> tuple[Rule, tuple[str, ...]]:
    """Return a rule, and a note about one that the file does not state."""
    if name in (None, "", "default"):
        return DEFAULT_RULE, (
            f"{path.name} does not say how its tokenizer divides texts (tokenizer.ggml.pre): llama.cpp's "
            "default rule is used, and answers may be worse.",
        )
    rule = RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise UnsupportedModelError(
            f"{path}: its tokenizer divides texts by the rule {name!r:.40}, which heterollm does not know.",
            fix=f"Known are {', '.join(RULES)}. Take another file, or the Hugging Face checkpoint.",
        )
    return rule, ()


def _byte_level(vocabulary: Vocabulary, rule: Rule) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.merges is None and any(
        kind == NORMAL and len(text) > 1
        for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ):
        raise CheckpointError(f"{vocabulary.path} has no tokenizer.ggml.merges.", fix="Download it again.")
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges or ()]
    tokenizer = Tokenizer(_bpe(models, vocabulary, pairs, ignore_merges=rule.whole))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    vocabulary: Vocabulary, unknown: int | None, prefix: bool, gemma: bool
) -> tokenizers.Tokenizer:
    from tokenizers import decoders, normalizers

    tokenizer = _spaced(vocabulary, unknown, list(_implied_merges(vocabulary, gemma)))
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), tokenizer.normalizer])
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _by_lines(vocabulary: Vocabulary, unknown: int | None) -> tokenizers.Tokenizer:
    """Return the tokenizer of Gemma 4, which merges by a list, and no line with its end."""
    from tokenizers import Regex, pre_tokenizers

    if vocabulary.merges is None:
        raise CheckpointError(f"{vocabulary.path} has no tokenizer.ggml.merges.", fix="Download it again.")
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    tokenizer = _spaced(vocabulary, unknown, pairs)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return tokenizer


def _spaced(
    vocabulary: Vocabulary, unknown: int | None, pairs: list[tuple[str, ...]]
) -> tokenizers.Tokenizer:
    """Return a tokenizer of characters, with a sign for spaces, and bytes of unknown ones."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        options["unk_token"] = vocabulary.tokens[unknown]
    tokenizer = Tokenizer(_bpe(models, vocabulary, pairs, **options))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
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


def _add_special_tokens(
    tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, metadata: Mapping[str, Any]
) -> None:
    from tokenizers import AddedToken

    kinds = tuple(token_kinds(vocabulary.tokens, vocabulary.kinds))
    for of_kind, special in ((SPECIAL, True), ((USER_DEFINED,), False)):
        texts = (text for text, kind in zip(vocabulary.tokens, kinds, strict=True) if kind in of_kind)
        added = [
            AddedToken(text, normalized=False, special=special, **stripping(metadata, text)) for text in texts
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _put_around(
    tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, stated: Mapping[str, int | None]
) -> None:
    """Let texts begin with the token ``bos`` and end with ``eos``, as far as these are stated."""
    from tokenizers import processors

    around = {name: (vocabulary.tokens[index], index) for name, index in stated.items() if index is not None}
    if not around:
        return
    begin, end = ([f"{around[name][0]}:0"] if name in around else [] for name in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A:0", *end],
        pair=[*begin, "$A:0", "$B:1", *end],
        special_tokens=list(around.values()),
    )


def pooling_mode(metadata: Mapping[str, Any]) -> str | None:
    """Return the pooling of embeddings by its name in sentence-transformers; None if there is none."""
    stated = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return {1: "mean", 3: "lasttoken"}.get(stated) if isinstance(stated, int) else None
