"""Streams an answer: the token loop runs on the engine thread, and the caller's thread receives its steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from heterollm.base import Progress
from heterollm.engine.reading import PromptReading
from heterollm.engine.session import Session
from heterollm.engine.thread import EngineThread
from heterollm.text import GenerationResult, GenerationStep, TokenSequence, drive

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
    marks: tuple[int, ...]
    speculate: bool
    progress: Progress | None


class Stream:
    """An iterator of the steps of one answer; :attr:`result` is the whole answer.

    The engine thread computes the answer whether or not the steps are fetched, and stops after the current
    pass if the stream is closed or dropped.
    """

    def __init__(
        self, thread: EngineThread, sequence: TokenSequence, session: Session, progress: Progress | None
    ) -> None:
        # The call must not hold the stream, or dropping the stream would never end the answer.
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        cancel = threading.Event()
        self._items = items
        self._cancel = cancel
        self._end: GenerationResult | BaseException | None = None

        def read(ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
            reading = PromptReading(len(ids), cancel, progress, session.finish_kernels)
            with contextlib.closing(session.prefill_in_turns(ids, reading)) as turns:
                for _ in turns:
                    return None
            return session.last_logits

        def work() -> None:
            try:
                # The logits of the last token are needed.
                session.keep_common(sequence.prompt_ids[:-1])
                for step in drive(sequence, session, cancel=cancel, read=read):
                    items.put(step)
                assert sequence.result is not None
                items.put(sequence.result)
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
        """Cancel the answer after the current pass."""
        self._cancel.set()

    def __del__(self) -> None:
        self._cancel.set()
