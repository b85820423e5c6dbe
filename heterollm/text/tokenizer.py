"""The tokenizer of a checkpoint: ids of texts and of dialogues, and the text of ids."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from heterollm.base import CheckpointError, ContextError, InputError
from heterollm.text.chat_template import ChatTemplate
from heterollm.text.prompt_bound import PromptBound, prompt_bound
from heterollm.text.rendering import SPLIT, ControlTokens
from heterollm.text.stream_decoder import LIBRARY, NoText, StreamDecoder
from heterollm.text.token_bytes import TokenBytes
from heterollm.text.tokenizer_files import TokenizerParts, read_tokenizer, tokenizer_file

Message = Mapping[str, str]
"""One chat message: ``{"role": "user", "content": "…"}``."""

_FIX_MISSING = (
    "Put the checkpoint's tokenizer files into the folder, or give token ids: only text needs them."
)
LONG_TEXT = 1 << 16
"""Characters from which a text may be refused before it is tokenised; a shorter one takes milliseconds."""


class Tokenizer:
    """A checkpoint's tokenizer; made by :meth:`from_folder`.

    Args:
        parts: The tokenizer, its special tokens and the chat template.
        folder: The checkpoint, for messages.
        eos_ids: Ids that end an answer, from the model's configuration; the tokenizer's own is added.
    """

    def __init__(self, parts: TokenizerParts, folder: Path, eos_ids: Collection[int] = ()) -> None:
        self._template = ChatTemplate(parts.chat_template, parts.special, folder)
        self._backend = parts.backend
        # The file may enable both; silently truncating a prompt would give a wrong answer.
        self._backend.no_truncation()
        self._backend.no_padding()
        own = self._backend.token_to_id(parts.special.get("eos_token", ""))
        self._eos_ids = frozenset(eos_ids if own is None else {*eos_ids, own})
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = {token.content: index for index, token in added.items()}
        # Other added tokens are words or spaces.
        self._controls = ControlTokens(
            name
            for name, index in self._added.items()
            if len(name) > 1 and (index in self._special_ids or (name[0], name[-1]) == ("<", ">"))
        )
        base: int = self._backend.get_vocab_size(False)
        self._vocab_size = max(base, max(added, default=-1) + 1)
        self._prefix, self._suffix = self._added_around()
        self._byte_ids = self._byte_fallback_ids()

    @classmethod
    def from_folder(cls, path: str | Path, eos_ids: Collection[int] = ()) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder, without downloads and without remote code.

        Args:
            path: Folder with `tokenizer.json` (or `tokenizer.model`, or `vocab.json` and `merges.txt`).
            eos_ids: Ids that end an answer, from the model's configuration; the tokenizer's own is added.

        Raises:
            CheckpointError: A file is missing or damaged; the message has its name.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"There is no checkpoint folder {folder}.", fix="Check the path.")
        check_tokenizer(folder)
        parts = read_tokenizer(folder, str(tokenizer_file(folder)))
        with LIBRARY:
            return cls(parts, folder, eos_ids)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end an answer, from the model's configuration and the tokenizer."""
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that :meth:`encode` returns; a model may have more rows."""
        return self._vocab_size

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The id of each token, special ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The spelling of each id without text."""
        return {index: self._backend.id_to_token(index) or "" for index in self._special_ids}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        return TokenBytes(self._backend, self._special_ids, self._byte_ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template; without one the dialogue has a plain form."""
        return self._template.exists

    @property
    def chat_stop_strings(self) -> tuple[str, ...]:
        """Further stop strings of a chat: in the plain form, the opening of the next message."""
        return () if self.has_chat_template else ("\n\nUser:", "\n\nSystem:")

    def to_json(self) -> str:
        """Return the tokenizer in the form of `tokenizer.json`, added tokens included."""
        return self._backend.to_str()

    @functools.cached_property
    def bound(self) -> PromptBound | None:
        """The longest text that one token may stand for; None if there is no limit."""
        with LIBRARY:
            return prompt_bound(self._backend)

    def encode(
        self, text: str, add_bos: bool = True, *, controls: bool = True, most_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text. Other threads of Python run meanwhile.

        Args:
            text: Any text.
            controls: Whether spelled-out special tokens become their ids; else they are text.
            add_bos: Prepend the tokens that begin a text of this checkpoint (often one BOS, sometimes
                none), unless the text has them already.
            most_tokens: Refuse a text that must have more, by its bytes, before it is tokenised. The ids may
                still be more.

        Raises:
            InputError: The text is not valid Unicode.
            ContextError: The text has more than ``most_tokens``.
        """
        parts = [text] if controls else self._controls.divide(text).split(SPLIT)
        return self._encode(parts, add_bos, most_tokens)

    def encode_whole(self, text: str, *, most_tokens: int, cut: bool = False) -> list[int]:
        """Return the ids of a text with all that the tokenizer puts around it, as models of embeddings do.

        Args:
            text: Any text.
            most_tokens: Tokens at most.
            cut: Whether to leave out the end of a longer text.

        Raises:
            InputError: The text is not valid Unicode.
            ContextError: The text has more than ``most_tokens``.
        """
        ids = self.encode(text, add_bos=False, most_tokens=None if cut else most_tokens)
        room = most_tokens - len(self._prefix) - len(self._suffix)
        if len(ids) > room and not cut:
            raise ContextError(
                f"The text has {most_tokens - room + len(ids)} tokens, but the model takes {most_tokens}.",
                fix="Shorten the text.",
            )
        return [*self._prefix, *ids[: max(room, 0)], *self._suffix]

    def _encode(self, parts: list[str], add_bos: bool, most_tokens: int | None) -> list[int]:
        """Return the ids of parts of a text, between which no token lies."""
        try:
            if most_tokens is not None:
                self._check_length("".join(parts), most_tokens)
            with LIBRARY:
                # `encode` would keep Python's lock.
                encoded = self._backend.encode_batch_fast(parts, add_special_tokens=False)
            ids: list[int] = [index for part in encoded for index in part.ids]
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(
                f"The text is not valid Unicode text: {error}.", fix="Remove lone surrogates."
            ) from error
        prefix = self._prefix
        return prefix + ids if add_bos and ids[: len(prefix)] != prefix else ids

    def _check_length(self, text: str, most_tokens: int) -> None:
        if len(text) >= LONG_TEXT and self.bound is not None:
            least = self.bound.least_tokens(text)
            if least > most_tokens:
                raise ContextError(
                    f"The prompt has at least {least} tokens, but the context holds {most_tokens}.",
                    fix="Shorten the prompt or load the model with a larger context.",
                )

    def decode(self, ids: Sequence[int], *, controls: bool = False) -> str:
        """Return the text of ids; ids past the vocabulary are empty text.

        Args:
            ids: Token ids.
            controls: Whether special tokens have their spelling, instead of no text.

        Raises:
            InputError: An id is negative or not a whole number below 2³².
        """
        try:
            with LIBRARY:
                text: str = self._backend.decode(ids, skip_special_tokens=not controls)
        except (OverflowError, TypeError) as error:
            raise InputError(f"The token ids cannot be decoded: {error}.") from error
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of a dialogue, ready for prefill.

        Without a template the dialogue is ``User: …``, blank line, ``Assistant: …``, blank line, and so on,
        with the prefix of :meth:`encode`.

        Args:
            messages: Role and content of each message, oldest first.
            add_generation_prompt: End with the opening of the assistant's answer.
            most_tokens: As for :meth:`encode`.

        Raises:
            InputError: There is no message, or the template refuses or ignores one.
            ContextError: The dialogue has more than ``most_tokens``.
            CheckpointError: The template is damaged.
        """
        text = self.render_chat(messages, add_generation_prompt)
        return self.encode_chat(text, most_tokens=most_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a dialogue for :meth:`encode_chat`; errors as for :meth:`apply_chat_template`.

        Args:
            messages: Role and content of each message, and further fields that the template reads.
            add_generation_prompt: End with the opening of the assistant's answer.
            tools: Declarations of tools, if the template takes them.
            variables: Further variables of the template.
        """
        if not messages:
            raise InputError("A chat prompt needs at least one message.")
        messages = self._controls.guard(messages)
        if self.has_chat_template:
            given = {**(variables or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
            return self._template.render(messages, given)
        turns = [f"{message['role'].capitalize()}: {message['content'].strip()}\n\n" for message in messages]
        # No space after the colon: most vocabularies join it with the next word.
        return "".join(turns) + ("Assistant:" if add_generation_prompt else "")

    def encode_chat(self, text: str, *, most_tokens: int | None = None) -> list[int]:
        """Return the ids of a rendered dialogue; no content of users and tools makes control tokens."""
        return self._encode(text.split(SPLIT), not self.has_chat_template, most_tokens)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The id of each token that no merge makes, by its spelling; special ones are among them."""
        return self._added

    def chat_template(self, *, tools: bool = False) -> str:
        """Return the chat template, of dialogues with tools if there is another; empty if there is none."""
        return self._template.text([{}] if tools else None)

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder for ids that arrive one at a time."""
        return StreamDecoder(self._backend, self._special_ids, self._byte_ids)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and behind a text."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        ids, special = encoding.ids, encoding.special_tokens_mask
        begin = special.index(0) if 0 in special else len(ids)
        end = len(ids) - special[::-1].index(0) if 0 in special else len(ids)
        return ids[:begin], ids[end:]

    def _byte_fallback_ids(self) -> frozenset[int]:
        """Return the ids of single bytes that the decoder combines to characters (sentencepiece)."""
        names = {value: f"<0x{value:02X}>" for value in range(256)}
        ids = {name: self._backend.token_to_id(name) for name in names.values()}
        return frozenset(
            index
            for name, index in ids.items()
            if index is not None and self._backend.decode([index]) != name
        )


class NoTokenizer:
    """The tokenizer of a checkpoint folder without tokenizer files: the text of every token is empty."""

    def __init__(self, folder: Path, eos_ids: frozenset[int]) -> None:
        self.folder = folder
        self.eos_ids = eos_ids
        self.special_tokens: Mapping[int, str] = {}

    def stream_decoder(self) -> NoText:
        """Return a decoder whose text is empty."""
        return NoText()


def load_tokenizer(folder: Path, eos_ids: Sequence[int]) -> Tokenizer | NoTokenizer:
    """Return the tokenizer of a checkpoint folder, or :class:`NoTokenizer` if its files are missing.

    Args:
        folder: Folder of the checkpoint.
        eos_ids: Ids that end an answer, from the model's configuration.

    Raises:
        CheckpointError: A file is damaged; the message has its name.
    """
    if tokenizer_file(folder) is None:
        return NoTokenizer(folder, frozenset(eos_ids))
    return Tokenizer.from_folder(folder, eos_ids)


def check_tokenizer(folder: Path) -> None:
    """Check that a checkpoint folder has tokenizer files, without reading them.

    Raises:
        CheckpointError: They are missing; the message has the name of one.
    """
    if tokenizer_file(folder) is None:
        raise CheckpointError(f"{folder / 'tokenizer.json'} is missing.", fix=_FIX_MISSING)
