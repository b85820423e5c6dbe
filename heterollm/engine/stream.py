"""Streams an answer: the token loop runs on the engine thread, and the caller's thread receives its steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from heterollm.base import Progress
from heterollm.engine.reading import PromptReading
from heterollm.engine.session import Session, check_ids
from heterollm.engine.thread import EngineThread
from heterollm.text import Generation, GenerationResult, GenerationStep, TokenSource

Item: TypeAlias = GenerationStep | GenerationResult | BaseException


class AnswerKeywords(TypedDict, total=False):
    """The options of an answer as keywords; :meth:`heterollm.LLM.stream` describes them."""

    session: Session | None
    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    log_probabilities: bool
    top_log_probabilities: int
    json_schema: str | Mapping[str, Any] | None
    json_object: bool
    grammar: str | None
    speculate: bool
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """A checked prompt with the options of one answer; made by :meth:`heterollm.LLM.prepare`.

    Args:
        prompt_ids: The prompt.
        start: Returns the answer, once, given a source, the number of the prompt's tokens that it holds,
            and the event that cancels the answer.
    """

    prompt_ids: Sequence[int]
    start: Callable[[TokenSource, int, threading.Event], Generation]


class SessionSource:
    """The token source of a session, for use on the engine thread only.

    Args:
        session: The session.
        cancel: Stops a prefill between layers or chunks when it is set; the session gets none of its tokens.
        progress: Called with a stage's name, tokens read and tokens in all while a long prompt is read.
    """

    __slots__ = ("_cancel", "_progress", "_session")

    def __init__(
        self, session: Session, cancel: threading.Event | None = None, progress: Progress | None = None
    ) -> None:
        self._session = session
        self._cancel = cancel or threading.Event()
        self._progress = progress

    @property
    def session(self) -> Session:
        """The session."""
        return self._session

    @property
    def position(self) -> int:
        """Number of tokens in the session."""
        return self._session.position

    @property
    def context(self) -> int:
        """Capacity of the session in tokens."""
        return self._session.context

    def prefill(self, ids: Sequence[int], /) -> NDArray[np.float32]:
        """Append tokens and return the logits after the last one, which mean nothing if it was cancelled."""
        session = self._session
        checked = check_ids(ids, session.vocab_size)
        reading = PromptReading(len(checked), self._cancel, self._progress, session.finish_kernels)
        with contextlib.closing(session.prefill_in_turns(checked, reading)) as turns:
            next(turns, None)
        return session.last_logits

    def decode(self, token_id: int, /) -> NDArray[np.float32]:
        """Append one token and return the logits after it."""
        return self._session.decode_in_place(token_id)

    def decode_several(self, token_ids: NDArray[np.int64], /) -> NDArray[np.float32]:
        """Append tokens in one pass and return the logits after each."""
        return self._session.decode_several_in_place(token_ids.astype(np.int32))

    def truncate(self, position: int, /) -> None:
        """Forget the tokens from a position on."""
        self._session.truncate(position)


class Stream:
    """An iterator of the steps of one answer; :attr:`result` is the whole answer.

    The engine thread computes the answer whether or not the steps are fetched, and stops after the current
    token if the stream is closed or dropped.
    """

    def __init__(self, thread: EngineThread, start: Callable[[threading.Event], Generation]) -> None:
        # The call must not hold the stream, or dropping the stream would never end the answer.
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        cancel = threading.Event()
        self._items = items
        self._cancel = cancel
        self._end: GenerationResult | BaseException | None = None

        def work() -> None:
            try:
                generation = start(cancel)
                for step in generation:
                    items.put(step)
                items.put(generation.result)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                items.put(error)

        thread.submit(work)

    def __iter__(self) -> Iterator[GenerationStep]:
        return self

    def __next__(self) -> GenerationStep:
        if self._end is None:
            item = self._items.get()
            if isinstance(item, GenerationStep):
                return item
            self._end = item
            if isinstance(item, BaseException):
                raise item
        raise StopIteration

    @property
    def result(self) -> GenerationResult:
        """The whole answer; fetches the remaining steps.

        Raises:
            HeteroLLMError: The error that ended the answer early.
        """
        for _ in self:
            pass
        if isinstance(self._end, GenerationResult):
            return self._end
        assert self._end is not None
        raise self._end

    def close(self) -> None:
        """Cancel the answer after the current token."""
        self._cancel.set()

    def __del__(self) -> None:
        self._cancel.set()
