"""A dialogue, and its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.base import InputError
from heterollm.text.tokenizer import Message, Tokenizer


class Conversation:
    """The messages of a dialogue, rendered with a tokenizer's chat template.

    Args:
        tokenizer: Renders the messages.
        system: Instructions before the first message, if any; :meth:`reset` keeps them.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = []
        self.system = system

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, oldest first."""
        system = () if self.system is None else ({"role": "system", "content": self.system},)
        return (*system, *self._messages)

    def add_user(self, text: str) -> None:
        """Append a message of the user."""
        self._messages.append({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """Append an answer, whole or cut short."""
        self._messages.append({"role": "assistant", "content": text})

    def drop_answer(self) -> bool:
        """Forget the last answer; return whether a message of the user is last now."""
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        return bool(self._messages) and self._messages[-1]["role"] == "user"

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._messages.clear()

    def restore(self, messages: Sequence[Message]) -> None:
        """Replace all messages; the first may be the system's."""
        first = messages[:1]
        system = first[0]["content"] if first and first[0]["role"] == "system" else None
        self.system, self._messages = system, list(messages[0 if system is None else 1 :])

    def prompt_ids(self) -> list[int]:
        """Return the ids of the dialogue and of the opening of the next answer.

        Raises:
            InputError: The last message is not the user's, or the template refuses the dialogue.
            CheckpointError: The chat template is damaged.
        """
        if not self._messages or self._messages[-1]["role"] != "user":
            raise InputError("There is nothing to answer: the last message is not the user's.")
        return self._tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)

    def fit(self, limit: int, target: int) -> int:
        """Forget the oldest turns of a dialogue that is too long, and return their number.

        A turn is a message of the user with its answers. The instructions and the last turn stay.

        Args:
            limit: Most tokens of the dialogue.
            target: Tokens to leave at most once a turn has to go. The session prefills the rest again, so a
                target well below the limit makes that rare.

        Raises:
            InputError, CheckpointError: As for :meth:`prompt_ids`.
        """
        dropped = 0
        while len(self.prompt_ids()) > (target if dropped else limit):
            starts = [place for place, message in enumerate(self._messages) if message["role"] == "user"]
            if len(starts) < 2:
                break
            del self._messages[: starts[1]]
            dropped += 1
        return dropped
