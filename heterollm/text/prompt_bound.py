"""Bounds the tokens of a text from below by its bytes, without tokenising it.

The bound is sound or missing. A part of a tokenizer that may drop text, or may put a text of any length into
one token, leaves none: unknown words of WordPiece, patterns that delete, white space that is split off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import tokenizers

Part: TypeAlias = Mapping[str, Any]
"""A part of `tokenizer.json`."""

MOST_CHARACTER_BYTES: Final = 4
"""Longest character in UTF-8."""

UNICODE_SHRINKS: Final = 4
"""Most bytes of a text for each byte of its normal form: a bold mathematical y has 4 bytes, "y" 1."""

NORMAL_FORMS: Final = ("NFC", "NFD", "NFKC", "NFKD")
GROWS: Final = ("Prepend", "ByteLevel")
"""Normalizers that drop nothing. All others, such as ``Strip`` and patterns, leave no bound."""

KEEPS: Final = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
KEEPS_UNLESS_REMOVED: Final = ("Split", "Punctuation")
"""Pre-tokenizers that drop nothing, the second ones unless their behaviour is ``Removed``."""

SWALLOWED: Final = b" \t\n\v\f\r" + bytes(range(128, 256))
"""Bytes that white space may have; it shares those above 127 with other characters."""


@dataclass(frozen=True, slots=True)
class PromptBound:
    """The longest text that one token may stand for.

    Args:
        token_bytes: Its bytes.
        counts_whitespace: Whether they include white space. A mark that swallows the white space beside it
            stands for any amount.
    """

    token_bytes: int
    counts_whitespace: bool

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least.

        Raises:
            UnicodeEncodeError: The text holds half of a surrogate pair.
        """
        content = text.encode()
        if not self.counts_whitespace:
            content = content.translate(None, SWALLOWED)
        return -(-len(content) // self.token_bytes)


def prompt_bound(backend: tokenizers.Tokenizer) -> PromptBound | None:
    """Return the bound of a tokenizer; None if a text of any length may have few tokens."""
    data = json.loads(backend.to_str())
    normalizers = list(_parts(data["normalizer"], "normalizers"))
    pre_tokenizers = list(_parts(data["pre_tokenizer"], "pretokenizers"))
    factor = 1
    for part in normalizers:
        shrinks = _shrinks(part)
        if shrinks is None:
            return None
        factor *= shrinks
    if not all(map(_keeps_text, pre_tokenizers)):
        return None
    # There each character of a token stands for a byte of the text.
    by_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    longest = _longest_token(data["model"], by_bytes=by_bytes)
    if longest is None:
        return None
    added = data["added_tokens"]
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)
    # A replacement may make white space of text, which a mark then swallows.
    if swallows and any(part["type"] == "Replace" and _has_space(part["content"]) for part in normalizers):
        return None
    for token in added:
        texts = [token["content"]]
        if token["normalized"] and backend.normalizer is not None:
            texts.append(backend.normalizer.normalize_str(token["content"]))
        longest = max(longest, *(len(text.encode()) for text in texts))
    return PromptBound(longest * factor, counts_whitespace=not swallows)


def _parts(part: Part | None, members: str) -> Iterator[Part]:
    """Yield the parts of a sequence, or the part itself."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for member in part[members]:
        yield from _parts(member, members)


def _shrinks(part: Part) -> int | None:
    """Return the most bytes of a text for each byte that a normalizer makes of it; None for no limit."""
    kind = part["type"]
    if kind in GROWS:
        return 1
    if kind in NORMAL_FORMS:
        return UNICODE_SHRINKS
    if kind == "Replace" and part["content"] and (pattern := part["pattern"].get("String")):
        return max(1, -(-len(pattern.encode()) // len(part["content"].encode())))
    return None


def _has_space(text: str) -> bool:
    return any(map(str.isspace, text))


def _keeps_text(part: Part) -> bool:
    kind = part["type"]
    return kind in KEEPS or (kind in KEEPS_UNLESS_REMOVED and part["behavior"] != "Removed")


def _longest_token(model: Part, *, by_bytes: bool) -> int | None:
    """Return the bytes of the longest token of a vocabulary; None if it drops or joins unknown text."""
    kind = model["type"]
    if kind == "BPE":
        vocabulary = model["vocab"]
        joins = model["fuse_unk"] or model["unk_token"] is None
        if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
            return None
    elif kind == "Unigram":
        vocabulary, joins = dict(model["vocab"]), True
    else:
        return None
    bytes_known = model["byte_fallback"] and all(f"<0x{value:02X}>" in vocabulary for value in range(256))
    if joins and not bytes_known and not (by_bytes and _byte_alphabet() <= vocabulary.keys()):
        return None
    longest: int = max((len(token if by_bytes else token.encode()) for token in vocabulary), default=0)
    return max(longest, MOST_CHARACTER_BYTES)


def _byte_alphabet() -> set[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())
