"""Decodes token ids that arrive one at a time, and converts failures of the tokenizers library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from heterollm.base import CheckpointError

if TYPE_CHECKING:
    import tokenizers

FIX: Final = "Download the checkpoint again, with all of its tokenizer files."
MOST_HELD: Final = 16
"""Longest run of unreadable tokens that is held back: every further token decodes the whole run again."""
CHARACTER_BYTES: Final = 4
"""Longest character in UTF-8."""


class _LibraryGuard:
    """Converts failures of the tokenizers library: bare exceptions, and panics that are no ``Exception``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if type(error) is Exception or type(error).__module__ == "pyo3_runtime":
            raise CheckpointError(f"The checkpoint's tokenizer fails: {error}.", fix=FIX) from error


LIBRARY = _LibraryGuard()


class StreamDecoder:
    """Decodes ids that arrive one at a time, without splitting a character.

    The results of :meth:`push` and :meth:`finish`, joined, equal ``Tokenizer.decode`` of all ids. A character
    of several tokens waits for its last byte. With byte fallback a run of byte tokens waits for the next
    token, because one wrong byte makes the whole run unreadable.

    Args:
        backend: The tokenizer.
        special_ids: Ids without text.
        byte_ids: Ids of single bytes, if the decoder falls back to bytes.
    """

    __slots__ = (
        "_backend",
        "_byte_ids",
        "_given",
        "_held",
        "_settled",
        "_skipped",
        "_special_ids",
        "_stream",
    )

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        # Tokens of the last piece, tokens after it, and the number of those that the stream has.
        self._settled: list[int] = []
        self._held: list[int] = []
        self._given = 0
        # Characters of the next piece that were returned before the restart.
        self._skipped = 0
        self._restart()

    def push(self, token_id: int) -> str:
        """Take one id and return the text that is complete with it, which may be empty."""
        if token_id in self._special_ids or self._backend.id_to_token(token_id) is None:
            return ""
        self._held.append(token_id)
        if token_id in self._byte_ids:
            return ""
        with LIBRARY:
            piece: str | None = self._stream.step(self._backend, self._held[self._given :])
        self._given = len(self._held)
        if piece is None:
            return self._unreadable() if len(self._held) > MOST_HELD and not self._byte_ids else ""
        piece = piece[self._skipped :]
        self._settled, self._held, self._given, self._skipped = self._held, [], 0, 0
        return piece

    def flush(self) -> str:
        """Return the text that is held back, if it consists of whole characters."""
        piece = self._text() if self._held else ""
        if "\ufffd" in piece:
            return ""
        self._skipped += len(piece)
        return piece

    def finish(self) -> str:
        """Return the text that was held back, with incomplete characters as U+FFFD, and restart."""
        piece = self._text()
        self._restart()
        return piece

    def _unreadable(self) -> str:
        """Return all text that is held back except its last character, which further bytes may change."""
        piece = self._text()[:-1]
        # Every token has at least one byte, and UTF-8 resynchronises within one character: the last tokens
        # alone decode to the same last character.
        held = self._held[-CHARACTER_BYTES:]
        self._restart()
        self._held = held
        self._skipped = len(self._text()) - 1
        return piece

    def _text(self) -> str:
        with LIBRARY:
            settled: str = self._backend.decode(self._settled, skip_special_tokens=True)
            text: str = self._backend.decode(self._settled + self._held, skip_special_tokens=True)
        return text[len(settled) + self._skipped :]

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._settled, self._held, self._given, self._skipped = [], [], 0, 0


class NoText:
    """A decoder whose text is empty."""

    def push(self, _token_id: int) -> str:
        """Return no text."""
        return ""

    def flush(self) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""
