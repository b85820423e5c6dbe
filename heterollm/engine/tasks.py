"""Tasks of a scheduler: prompts and their answers, and their urgency."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from heterollm.engine.session import Session
from heterollm.text import GenerationStep, TokenSequence

ServiceTier: TypeAlias = Literal["priority", "default", "flex"]
TIERS: Final[tuple[ServiceTier, ...]] = get_args(ServiceTier)
"""From the most to the least urgent, named as OpenAI's service tiers."""


@dataclass(eq=False)
class PromptTask(ABC):
    """A prompt and its answers; the engine thread calls the methods.

    Args:
        tier: Its urgency.
        answers: The answers, all to the same prompt.
        reproducible: Whether they must not depend on other tasks.
        cancelled: Set by any thread to end the task at its next turn.
        sessions: Those of the answers, of the first one alone until the prompt is read.
        prompt: The work on the prompt, until it is read.
        read_fraction: Part of it whose kernels are enqueued.
        running: Numbers of the answers behind the prompt that have not ended.
    """

    tier: ServiceTier
    answers: Sequence[TokenSequence]
    reproducible: bool
    cancelled: bool = field(default=False, init=False)
    sessions: list[Session] = field(default_factory=list, init=False)
    prompt: Iterator[None] | None = field(default=None, init=False)
    read_fraction: float = field(default=0.0, init=False)
    running: list[int] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def is_slow(self) -> bool:
        """Whether the reader is so slow that the task has to wait."""

    @abstractmethod
    def take_session(self) -> Session:
        """Return a session that holds a beginning of the prompt, and nothing else."""

    @abstractmethod
    def copy_session(self) -> Session:
        """Return a copy of it, which holds the whole prompt now."""

    @abstractmethod
    def read(self, seconds: float, /) -> None:
        """Count the time of a turn of the prompt, which may have ended."""

    @abstractmethod
    def put(self, number: int, steps: Sequence[GenerationStep], seconds: float, /) -> None:
        """Take new tokens of an answer, which may have ended, and the time of their pass."""

    @abstractmethod
    def fail(self, error: Exception, /) -> None:
        """Take the error that ends the task; any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Give the sessions back: the task has ended, its answers too."""

    def end_answers(self) -> None:
        """End the answers that still run, and the work on the prompt."""
        self.prompt = None
        for row in [Row(self, number) for number in self.running]:
            if row.answer.result is None:
                row.answer.end("cancelled")
            row.forget_guesses()
        self.running = []


class Row(NamedTuple):
    """An answer whose next token a pass computes, as its number in a task."""

    task: PromptTask
    number: int

    @property
    def answer(self) -> TokenSequence:
        """The answer."""
        return self.task.answers[self.number]

    @property
    def session(self) -> Session:
        """Its session."""
        return self.task.sessions[self.number]

    @property
    def runs(self) -> bool:
        """Whether neither the answer nor its task has ended."""
        return self.number in self.task.running

    def forget_guesses(self) -> None:
        """Forget the tokens that a pass has guessed, and the answer has not taken."""
        if self.session.position > self.answer.held:
            self.session.truncate(self.answer.held)


def is_ready(task: PromptTask) -> bool:
    """Return whether a task has something to do: its reader keeps up, or it is to end."""
    return task.cancelled or not task.is_slow


def divided(rows: Sequence[Row], most: int) -> Iterator[Sequence[Row]]:
    """Yield the rows of passes that are alike long, and have at most so many rows."""
    passes = -(-len(rows) // most)
    for number in range(passes):
        yield rows[len(rows) * number // passes : len(rows) * (number + 1) // passes]
