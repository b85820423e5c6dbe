"""A dialogue, and what of it a session's KV cache already holds."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.base import InputError
from heterollm.text.tokenizer import Message, Tokenizer

__all__ = ["Conversation", "common_prefix", "reusable_prefix"]


class Conversation:
    """The messages of a dialogue, rendered with a tokenizer's chat template.

    Args:
        tokenizer: Renders the messages.
        system: Instructions that stand before the first message, if any; kept by :meth:`reset`.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._messages: list[Message] = []
        self.reset()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, oldest first."""
        return tuple(self._messages)

    def add_user(self, text: str) -> None:
        """Append what the user says."""
        self._messages.append({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """Append an answer, whole or cut short."""
        self._messages.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._messages.clear()
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def prompt_ids(self) -> list[int]:
        """Return the ids of the dialogue and of what opens the next answer.

        Raises:
            InputError: The last message is not the user's, or the template refuses the dialogue.
            CheckpointError: The chat template is damaged.
        """
        if not self._messages or self._messages[-1]["role"] != "user":
            raise InputError("There is nothing to answer: the last message is not the user's.")
        return self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading ids two sequences share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def reusable_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many held tokens a prompt can keep.

    A session that holds ``held`` truncates to this length and prefills the rest of the prompt, which is
    never empty, since the logits of its last token are needed.
    """
    return max(0, min(common_prefix(held, prompt), len(prompt) - 1))
