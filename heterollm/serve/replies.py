"""Answers in the form of a door, whole and in chunks; the parts that all doors share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import msgspec

from heterollm.serve.answers import Ended, Spent, StepOf
from heterollm.serve.asking import AnswerRequest
from heterollm.serve.errors import FailedRequest
from heterollm.text import decode_rate, prefill_rate
from heterollm.tools import AnswerPart, AnswerReader, ReplyForm, joined, reader_of

if TYPE_CHECKING:
    from heterollm.llm import LLM
    from heterollm.text import GenerationStep

REASONS: Final = {"eos": "stop", "complete": "stop", "stop": "stop", "length": "length", "context": "length"}
"""Reasons for the end of an answer, as OpenAI and Ollama name them."""


class Reply(ABC):
    """The answer to one request.

    Args:
        llm: The model.
        name: Its name.
        request: The request.
    """

    media_type = "text/event-stream"

    def __init__(self, llm: LLM, name: str, request: AnswerRequest) -> None:
        self._llm = llm
        self._name = name
        self._request = request
        self._form = request.form
        form = request.form or ReplyForm()
        self._readers: defaultdict[int, AnswerReader] = defaultdict(lambda: reader_of(form))

    # -- the door's form -----------------------------------------------------------------------------

    @abstractmethod
    def whole(self, steps: Sequence[StepOf], ends: Sequence[Ended], spent: Spent) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""

    @abstractmethod
    def opening(self, choice: int) -> list[dict[str, Any]]:
        """Return the chunks of an answer before its text."""

    @abstractmethod
    def step(self, event: StepOf) -> list[dict[str, Any]]:
        """Return the chunks of a token; none if it has nothing to say."""

    @abstractmethod
    def end(self, event: Ended) -> list[dict[str, Any]]:
        """Return the last chunks of an answer."""

    def closing(self, spent: Spent) -> bytes:  # noqa: ARG002 - for doors with a last line
        """Return the end of a stream, behind all answers."""
        return b""

    @abstractmethod
    def failed(self, failure: FailedRequest) -> dict[str, Any]:
        """Return the chunk of an error in the middle of a stream."""

    def encoded(self, chunks: Sequence[dict[str, Any]]) -> bytes:
        """Return chunks as they are sent: server-sent events."""
        return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)

    # -- parts of answers ----------------------------------------------------------------------------

    def _part(self, event: StepOf) -> AnswerPart:
        """Return the parts that a token completes."""
        if self._form is None:
            return AnswerPart(content=event.step.text)
        return self._readers[event.choice].push(event.step.text, event.step.token_id)

    def _last_part(self, event: Ended) -> AnswerPart:
        """Return the parts that an answer's end completes."""
        return AnswerPart() if self._form is None else self._readers[event.choice].finish()

    def _whole_part(self, end: Ended, steps: Sequence[GenerationStep]) -> AnswerPart:
        """Return all parts of an answer."""
        if self._form is None:
            return AnswerPart(content=end.result.text)
        parts = [self._part(StepOf(end.choice, step)) for step in steps]
        return joined((*parts, self._last_part(end)))

    def _reason(self, end: Ended) -> str:
        """Return OpenAI's reason for the end of an answer."""
        reason = REASONS[end.result.stop_reason]
        called = self._form is not None and self._readers[end.choice].calls
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def _reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None if the model has none."""
        if self._form is None or self._form.reasoning is None:
            return None
        return sum(reader.reasoning_tokens for reader in self._readers.values())

    def _timings(self, spent: Spent) -> dict[str, Any]:
        prefilled = spent.prompt_tokens - spent.cached_tokens
        return {
            "queued_ms": round(1e3 * spent.queued_s, 3),
            "cached_tokens": spent.cached_tokens,
            "prefill_tokens": prefilled,
            "prefill_ms": round(1e3 * spent.prefill_s, 3),
            "prefill_tokens_per_s": prefill_rate(prefilled, spent.prefill_s),
            "decode_tokens": spent.decoded,
            "decode_ms": round(1e3 * spent.decode_s, 3),
            "decode_tokens_per_s": decode_rate(spent.decoded, spent.decode_s),
            "speculation": None
            if spent.speculation is None
            else {**asdict(spent.speculation), "tokens_per_pass": spent.speculation.tokens_per_pass},
            "plan": self._llm.plan.level,
            "precision": self._llm.plan.precision,
            "device": self._llm.device.name,
            "time_kind": self._llm.device.time_kind,
        }


def named_events(chunks: Sequence[dict[str, Any]]) -> bytes:
    """Return server-sent events, each with its type in a line of its own."""
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (chunk["type"].encode(), msgspec.json.encode(chunk)) for chunk in chunks
    )


class SingleReply(Reply):
    """The answer of a door whose requests have one answer each."""

    def whole(self, steps: Sequence[StepOf], ends: Sequence[Ended], spent: Spent) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""
        (end,) = ends
        return self._body(self._whole_part(end, [event.step for event in steps]), end, spent)

    @abstractmethod
    def _body(self, part: AnswerPart, end: Ended, spent: Spent) -> dict[str, Any]:
        """Return the body of a whole answer."""

    def opening(self, choice: int) -> list[dict[str, Any]]:  # noqa: ARG002 - the only one
        """Return the chunks before the text; none unless the door has some."""
        return []

    def step(self, event: StepOf) -> list[dict[str, Any]]:
        """Return the chunks of a token."""
        return self._chunks(self._part(event))

    def end(self, event: Ended) -> list[dict[str, Any]]:
        """Return the last chunks of the answer."""
        assert event.spent is not None  # the only one is the last one
        return [*self._chunks(self._last_part(event)), *self._ending(event, event.spent)]

    @abstractmethod
    def _chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the chunks of new parts."""

    @abstractmethod
    def _ending(self, end: Ended, spent: Spent) -> list[dict[str, Any]]:
        """Return the chunks behind all parts."""
