"""Text of token ids that arrive one at a time, and failures of the tokenizers library as errors of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from heterollm.base import CheckpointError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["FIX", "LIBRARY", "NoText", "StreamDecoder"]

FIX: Final = "Download the checkpoint again, with all of its tokenizer files."
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4


class _LibraryGuard:
    """Turns failures of the tokenizers library into errors of ours.

    It raises bare exceptions for damaged files, and its panics are no ``Exception`` at all.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if type(error) is Exception or type(error).__module__ == "pyo3_runtime":
            raise CheckpointError(f"The checkpoint's tokenizer fails: {error}.", fix=FIX) from error


LIBRARY = _LibraryGuard()


class StreamDecoder:
    """Turns ids that arrive one at a time into text, never splitting a character.

    The pieces that :meth:`push` and :meth:`finish` return, joined, equal ``Tokenizer.decode`` of all ids.
    Only the tokens since the last settled text, and the ones just before them, are decoded each time, so
    that a leading space is kept and the cost per token does not grow.

    Text waits for its last bytes when a character is spread over tokens. With byte fallback a whole run
    of byte tokens waits for the token after it, since one wrong byte makes all of the run unreadable.

    Args:
        backend: The tokenizer.
        special_ids: Ids without text.
        byte_ids: Ids of single bytes, if the decoder falls back to bytes.
    """

    __slots__ = ("_backend", "_byte_ids", "_ids", "_settled", "_special_ids", "_start")

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._byte_ids = byte_ids
        # The tokens of the last settled text, then from `_start` on those whose text is not settled.
        self._ids: list[int] = []
        self._start = 0
        # Characters of the text of `_ids` that were handed out.
        self._settled = 0

    def push(self, token_id: int) -> str:
        """Take one id and return the text that it settles, often all of its own, sometimes none."""
        if token_id in self._special_ids or self._backend.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._text()
        if text.endswith(_REPLACEMENT) and not self._byte_ids:
            return self._hold(text)
        piece = text[self._settled :]
        del self._ids[: self._start]
        self._start = len(self._ids)
        self._settled = len(self._text())
        return piece

    def finish(self) -> str:
        """Return the text that is still held, with unfinished characters as U+FFFD, and start anew."""
        text = self._text()
        piece = text[self._settled :]
        self._ids.clear()
        self._start = self._settled = 0
        return piece

    def _hold(self, text: str) -> str:
        """Hand out all but the last character, which further bytes may still change."""
        piece = text[self._settled : -1]
        self._settled = len(text) - 1
        if len(self._ids) > 4 * _CHARACTER_BYTES:
            # Unreadable bytes only. UTF-8 finds its step again within one character, and a token has at
            # least one byte, so as many tokens as a character has bytes decode to the same ending.
            self._ids = self._ids[-_CHARACTER_BYTES:]
            self._start = 0
            self._settled = len(self._text()) - 1
        return piece

    def _text(self) -> str:
        with LIBRARY:
            text: str = self._backend.decode(self._ids, skip_special_tokens=True)
        return text


class NoText:
    """A decoder that knows no text."""

    def push(self, _token_id: int) -> str:
        """Take one id and return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""
