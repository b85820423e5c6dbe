"""The bytes of single tokens: a part of a character has bytes, but no text."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from heterollm.text.stream_decoder import LIBRARY

if TYPE_CHECKING:
    import tokenizers

KEPT: Final = 1 << 16
"""Tokens whose bytes stay in memory."""


class TokenBytes:
    """The bytes that each token adds to a text; those of an answer, joined, are its text in UTF-8.

    Args:
        backend: The tokenizer.
        special_ids: Ids without text.
        byte_ids: Ids of single bytes, if the decoder falls back to bytes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        kinds = _kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else set()
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else {}
        with LIBRARY:
            self._before = backend.encode("a", add_special_tokens=False).ids
            self._offset = len(backend.decode(self._before))
        self._kept = lru_cache(KEPT)(self._of)

    def of(self, token_id: int, *, first: bool = False) -> bytes | None:
        """Return a token's bytes; None if it has no text.

        Args:
            token_id: The token.
            first: Whether it begins a text, where some decoders drop a space.
        """
        own = self._kept(token_id)
        if not first or own is None or not own.startswith(b" "):
            return own
        with LIBRARY:
            whole = own.decode(errors="replace") == self._backend.decode([token_id])
        return own if whole else own[1:]

    def text(self, token_id: int, *, first: bool = False) -> str:
        r"""Return a token for people: its text or else its name, with parts of characters as ``\xf0``."""
        own = self.of(token_id, first=first)
        return (self.name(token_id) or "") if own is None else own.decode(errors="backslashreplace")

    def name(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for an id without a token."""
        return self._backend.id_to_token(token_id)

    def _of(self, token_id: int) -> bytes | None:
        name = self.name(token_id)
        if name is None or token_id in self._special_ids:
            return None
        if token_id in self._byte_ids:
            return bytes([int(name[3:5], 16)])
        if self._byte_of:
            values = [self._byte_of.get(character) for character in name]
            # The decoder takes a token with other characters, an added one, as text.
            return name.encode() if None in values else bytes(value for value in values if value is not None)
        with LIBRARY:
            return self._backend.decode([*self._before, token_id])[self._offset :].encode()


def _kinds(decoder: Any) -> set[str]:  # noqa: ANN401 - JSON
    """Return the types of a decoder and of those that it consists of."""
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in the vocabulary of a byte-level tokenizer (GPT-2's alphabet)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(shown)]
    return {chr(value): value for value in shown} | {chr(256 + i): value for i, value in enumerate(hidden)}
