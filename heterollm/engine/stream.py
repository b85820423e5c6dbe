"""Streams an answer: the token loop runs on the engine thread, and the caller's thread receives its steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from heterollm.base import Progress
from heterollm.engine.reading import PromptReading
from heterollm.engine.session import Session
from heterollm.engine.thread import EngineThread
from heterollm.text import GenerationResult, GenerationStep, Tokenizer, TokenSequence, drive
from heterollm.tools import AnswerPart, ReplyForm, joined, reader_of

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


class DividedAnswer:
    """Divides an answer to a dialogue: reasoning stands apart from the text.

    Args:
        form: The form of its parts.
        tokenizer: Spells its tokens.
        sequence: The answer.
    """

    def __init__(self, form: ReplyForm, tokenizer: Tokenizer, sequence: TokenSequence) -> None:
        self._reader, self._tokenizer, self._sequence = reader_of(form), tokenizer, sequence
        self._parts: list[AnswerPart] = []
        self._ended = False

    def step(self, step: GenerationStep) -> GenerationStep:
        """Return the next step; the last one has all that was held back."""
        part, result = self._reader.push(step.text, step.token_id), self._sequence.result
        self._parts.append(part)
        # The sequence has its result before the last step comes.
        if result is not None and result.generated_tokens == len(self._parts):
            part = self._parts[-1] = joined((part, self._reader.finish()))
            self._ended = True
        return replace(step, text=part.content, reasoning=part.reasoning)

    def result(self, result: GenerationResult) -> GenerationResult:
        """Return the whole answer."""
        rest = () if self._ended else (self._reader.finish(),)
        whole = joined((*self._parts, *rest))
        raw_text = self._tokenizer.decode(result.token_ids, controls=True)
        return replace(result, text=whole.content, reasoning=whole.reasoning, raw_text=raw_text)


class Stream:
    """An iterator of the steps of one answer; :attr:`result` is the whole answer.

    The engine thread computes the answer whether or not the steps are fetched, and stops after the current
    pass if the stream is closed or dropped.

    Args:
        thread: The engine thread.
        sequence: The answer.
        session: Computes it.
        progress: Takes the progress of the prompt.
        divided: Divides the answer; None for one that is text alone.
    """

    def __init__(
        self,
        thread: EngineThread,
        sequence: TokenSequence,
        session: Session,
        progress: Progress | None,
        divided: DividedAnswer | None = None,
    ) -> None:
        # The call must not hold the stream, or dropping the stream would never end the answer.
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        cancel = threading.Event()
        self._items = items
        self._cancel = cancel
        self._divided = divided
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
            divided = self._divided
            if isinstance(item, GenerationStep):
                return item if divided is None else divided.step(item)
            if divided is not None and isinstance(item, GenerationResult):
                item = divided.result(item)
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
