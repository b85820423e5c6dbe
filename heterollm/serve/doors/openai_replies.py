"""Answers to OpenAI's chats and completions, whole and in chunks."""

from __future__ import annotations

import codecs
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from heterollm.serve.answers import Ended, Spent, StepOf
from heterollm.serve.asking import AnswerRequest
from heterollm.serve.errors import FailedRequest, openai_error
from heterollm.serve.replies import Reply
from heterollm.tools import AnswerPart, ToolCall

if TYPE_CHECKING:
    from heterollm.llm import LLM
    from heterollm.text import GenerationStep

LEAST_LOGPROB: Final = -9999.0
"""OpenAI's value for a token that the model excludes."""


@dataclass(slots=True)
class _Place:
    """The end of the tokens of one answer that were reported.

    Args:
        first: Whether no token had text yet.
        offset: Characters that are complete.
    """

    first: bool = True
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def pass_token(self, own: bytes | None) -> None:
        """Go behind a token of these bytes."""
        if own is not None:
            self.first = False
            self.offset += len(self._decoder.decode(own))


class OpenAIReply(Reply):
    """The answer to one request.

    Args:
        llm: The model.
        name: Its name.
        request: The request.
    """

    def __init__(self, llm: LLM, name: str, request: AnswerRequest) -> None:
        super().__init__(llm, name, request)
        self._chat = request.chat
        self._logprobs = request.logprobs
        prefix, kind = ("chatcmpl", "chat.completion") if request.chat else ("cmpl", "text_completion")
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"{llm.plan.level}-{llm.plan.precision}-{llm.device.name}",
        }
        self._usage_of_chunks = {"usage": None} if request.stream and request.include_usage else {}
        self._places: defaultdict[int, _Place] = defaultdict(_Place)

    def whole(self, steps: Sequence[StepOf], ends: Sequence[Ended], spent: Spent) -> dict[str, Any]:
        """Return the body of an answer that is sent at once."""
        choices = []
        for end in sorted(ends, key=lambda one: one.choice):
            own = [one.step for one in steps if one.choice == end.choice]
            said: dict[str, Any] = {"text": end.result.text}
            if self._chat:
                said = {"message": self._message(end, own)}
            choices.append(self._choice(end.choice, said, own, self._reason(end)))
        return {
            **self._head,
            "object": self._kind,
            "service_tier": self._request.tier,
            "choices": choices,
            "usage": self._usage(spent),
            "timings": self._timings(spent),
        }

    def opening(self, choice: int) -> list[dict[str, Any]]:
        """Return the first chunk of an answer, if there is one before its text."""
        return [self._delta(choice, {"role": "assistant", "content": ""}, [], None)] if self._chat else []

    def step(self, event: StepOf) -> list[dict[str, Any]]:
        """Return the chunks of a token; none if it has nothing to say."""
        said = self._deltas(self._part(event))
        if self._logprobs and not said:
            said = [{"content": ""}]
        steps = [event.step]
        chunks = []
        for delta in said:
            chunks.append(self._delta(event.choice, delta, steps, None))
            steps = []
        return chunks

    def end(self, event: Ended) -> list[dict[str, Any]]:
        """Return the last chunks of an answer."""
        said = self._deltas(self._last_part(event))
        chunks = [self._delta(event.choice, delta, [], None) for delta in said]
        last = self._delta(event.choice, {}, [], self._reason(event))
        return [*chunks, last if event.spent is None else {**last, "timings": self._timings(event.spent)}]

    def _delta(
        self, choice: int, delta: Mapping[str, Any], steps: Sequence[GenerationStep], reason: str | None
    ) -> dict[str, Any]:
        said = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return self._chunk(self._choice(choice, said, steps, reason))

    def _message(self, end: Ended, steps: Sequence[GenerationStep]) -> dict[str, Any]:
        whole = self._whole_part(end, steps)
        content = whole.content or (None if whole.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning:
            message |= _reasoning(whole.reasoning)
        if whole.calls:
            message["tool_calls"] = [_call(call) for call in whole.calls]
        return message

    def _deltas(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the deltas of a part: a call has its id and name once, before its arguments."""
        deltas: list[dict[str, Any]] = [_reasoning(part.reasoning)] if part.reasoning else []
        deltas += [{"content": part.content}] if part.content else []
        for piece in part.calls:
            said = _call(piece) if piece.call_id else {"function": {"arguments": piece.arguments}}
            deltas.append({"tool_calls": [{"index": piece.index, **said}]})
        return deltas

    def closing(self, spent: Spent) -> bytes:
        """Return the usage, if the request wants it, and the last line."""
        usage = {**self._chunk(None), "usage": self._usage(spent), "timings": self._timings(spent)}
        return self.encoded([usage] if self._request.include_usage else []) + b"data: [DONE]\n\n"

    def failed(self, failure: FailedRequest) -> dict[str, Any]:
        """Return the chunk of an error in the middle of a stream."""
        return openai_error(failure)[1]

    def _chunk(self, choice: Mapping[str, Any] | None) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        choices = [] if choice is None else [choice]
        return {**self._head, "object": kind, "choices": choices, **self._usage_of_chunks}

    def _choice(
        self, index: int, said: Mapping[str, Any], steps: Sequence[GenerationStep], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs and steps:
            logprobs = (self._of_chat if self._chat else self._of_completion)(self._places[index], steps)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _of_chat(self, place: _Place, steps: Sequence[GenerationStep]) -> dict[str, Any]:
        content = []
        for step in steps:
            token = self._token(place, step.token_id, step.log_probability)
            top = [self._token(place, *one) for one in step.top_log_probabilities or ()]
            content.append({**token, "top_logprobs": top})
            place.pass_token(self._bytes(place, step.token_id))
        return {"content": content, "refusal": None}

    def _of_completion(self, place: _Place, steps: Sequence[GenerationStep]) -> dict[str, Any]:
        tokens, tops, offsets = [], [], []
        for step in steps:
            tokens.append(self._text(place, step.token_id))
            top: dict[str, float] = {}
            for token, value in step.top_log_probabilities or ():
                # Different tokens may have the same text: the likelier one comes first.
                top.setdefault(self._text(place, token), value)
            tops.append(top)
            offsets.append(place.offset)
            place.pass_token(self._bytes(place, step.token_id))
        values = [_logprob(step.log_probability) for step in steps]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _token(self, place: _Place, token: int, value: float | None) -> dict[str, Any]:
        own = self._bytes(place, token)
        known = None if own is None else list(own)
        return {"token": self._text(place, token), "logprob": _logprob(value), "bytes": known}

    def _bytes(self, place: _Place, token: int) -> bytes | None:
        return self._llm.tokenizer.token_bytes.of(token, first=place.first)

    def _text(self, place: _Place, token: int) -> str:
        return self._llm.tokenizer.token_bytes.text(token, first=place.first)

    def _usage(self, spent: Spent) -> dict[str, Any]:
        count = self._reasoning_tokens
        details = {} if count is None else {"completion_tokens_details": {"reasoning_tokens": count}}
        return {
            "prompt_tokens": spent.prompt_tokens,
            "completion_tokens": spent.answer_tokens,
            "total_tokens": spent.prompt_tokens + spent.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": spent.cached_tokens},
            **details,
        }


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under the names of both conventions."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _logprob(value: float | None) -> float:
    assert value is not None  # the request asked for it
    return max(value, LEAST_LOGPROB)
