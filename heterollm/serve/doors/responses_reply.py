"""Answers of OpenAI's Responses API: items of reasoning, text and calls, whole and in events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from heterollm.serve.answers import Ended, Spent
from heterollm.serve.asking import AnswerRequest
from heterollm.serve.errors import FailedRequest
from heterollm.serve.replies import SingleReply, named_events
from heterollm.tools import AnswerPart

if TYPE_CHECKING:
    from heterollm.llm import LLM

PREFIX: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
DELTA: Final = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
"""The events of the text of each type of item."""


class ResponseReply(SingleReply):
    """A response; its stream opens and ends one item after the other, each with its number."""

    def __init__(self, llm: LLM, name: str, request: AnswerRequest) -> None:
        super().__init__(llm, name, request)
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            **request.echo["fields"],
        }
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        """The item that the stream is in, without its text."""
        self._text = ""

    def _body(self, part: AnswerPart, end: Ended, spent: Spent) -> dict[str, Any]:
        self._chunks(part)
        self._leave(self._status(end))
        return self._ended(end, spent)

    def opening(self, choice: int) -> list[dict[str, Any]]:  # noqa: ARG002 - the only one
        """Return the events before the first item."""
        response = self._response("in_progress", None, None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, text in (("reasoning", part.reasoning), ("message", part.content)):
            if text:
                if self._item is None or self._item["type"] != kind:
                    events += self._enter({"type": kind, **_own(kind)})
                events.append(self._delta(text))
        for call in part.calls:
            if call.call_id:
                own = {"call_id": call.call_id, "name": call.name, "arguments": ""}
                events += self._enter({"type": "function_call", **own})
            if call.arguments:
                events.append(self._delta(call.arguments))
        return events

    def _ending(self, end: Ended, spent: Spent) -> list[dict[str, Any]]:
        status = self._status(end)
        return [*self._leave(status), self._event(f"response.{status}", response=self._ended(end, spent))]

    # -- items ---------------------------------------------------------------------------------------

    def _enter(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of an item's beginning, and of the end of the one before."""
        events = self._leave("completed")
        identity = f"{PREFIX[item['type']]}_{secrets.token_hex(16)}"
        self._item, self._text = {"id": identity, **item, "status": "in_progress"}, ""
        added = {"output_index": len(self._output), "item": dict(self._item)}
        events.append(self._event("response.output_item.added", **added))
        if "content" in item:
            events.append(self._event("response.content_part.added", **self._at(), part=self._part_of("")))
        return events

    def _delta(self, text: str) -> dict[str, Any]:
        assert self._item is not None  # it began
        self._text += text
        return self._event(f"{DELTA[self._item['type']]}.delta", **self._at(), **self._extra(), delta=text)

    def _leave(self, status: str) -> list[dict[str, Any]]:
        """Return the events of the end of the item that the stream is in, if it is in one."""
        if self._item is None:
            return []
        item, text, place = self._item, self._text, self._at()
        kind = item["type"]
        if kind == "function_call":
            item = {**item, "arguments": text, "status": status}
            own = {"arguments": text, "name": item["name"]}
            events = [self._event(f"{DELTA[kind]}.done", **place, **own)]
        else:
            part = self._part_of(text)
            item = {**item, "content": [part], "status": status}
            events = [
                self._event(f"{DELTA[kind]}.done", **place, **self._extra(), text=text),
                self._event("response.content_part.done", **place, part=part),
            ]
        done = {"output_index": len(self._output), "item": item}
        self._output.append(item)
        self._item = None
        return [*events, self._event("response.output_item.done", **done)]

    def _at(self) -> dict[str, Any]:
        """Return the place of the item that the stream is in."""
        assert self._item is not None  # it began
        place = {"item_id": self._item["id"], "output_index": len(self._output)}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _extra(self) -> dict[str, Any]:
        assert self._item is not None  # it began
        return {"logprobs": []} if self._item["type"] == "message" else {}

    def _part_of(self, text: str) -> dict[str, Any]:
        assert self._item is not None  # it began
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    # -- the response --------------------------------------------------------------------------------

    @staticmethod
    def _status(end: Ended) -> str:
        return "incomplete" if end.result.stop_reason in ("length", "context") else "completed"

    def _ended(self, end: Ended, spent: Spent) -> dict[str, Any]:
        """Return the whole response, and keep it if the request allows that."""
        response = self._response(self._status(end), self._usage(spent), None)
        response["timings"] = self._timings(spent)
        keep = self._request.echo["keep"]
        if keep is not None:
            keep(response)
        return response

    def _response(
        self, status: str, usage: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        own = {"status": status, "error": error, "incomplete_details": details}
        return {**self._head, **own, "output": list(self._output), "usage": usage}

    def _usage(self, spent: Spent) -> dict[str, Any]:
        return {
            "input_tokens": spent.prompt_tokens,
            "input_tokens_details": {"cached_tokens": spent.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": spent.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens or 0},
            "total_tokens": spent.prompt_tokens + spent.answer_tokens,
        }

    def failed(self, failure: FailedRequest) -> dict[str, Any]:
        """Return the event of an error in the middle of a stream."""
        error = {"code": "server_error", "message": failure.message}
        return self._event("response.failed", response=self._response("failed", None, error))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def encoded(self, chunks: Sequence[dict[str, Any]]) -> bytes:
        """Return events with their types."""
        return named_events(chunks)


def _own(kind: str) -> dict[str, Any]:
    return {"summary": [], "content": []} if kind == "reasoning" else {"role": "assistant", "content": []}
