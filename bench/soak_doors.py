"""Requests at every door of a server, and their answers in one form, whole or streamed."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

TEXT: Final = "def scale(values, factor):\n    return [value * factor for value in values]\n\n"
LENGTHS: Final = (4, 16, 48)
LONG: Final = 400
"""Tokens of an answer whose client leaves."""

SHAPE: Final = {
    "type": "object",
    "properties": {"kind": {"enum": ["round", "square"]}, "sides": {"type": "integer", "maximum": 99}},
    "required": ["kind", "sides"],
    "additionalProperties": False,
}
TURN: Final = {
    "type": "object",
    "properties": {"way": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2, 3]}},
    "required": ["way", "steps"],
    "additionalProperties": False,
}
GRAMMAR: Final = 'start: /[a-z]{3,12}/ (", " /[0-9]{1,4}/){0,6}'
EMBEDDINGS: Final = ("/v1/embeddings", "/api/embed")
GREEDY: Final = {"temperature": 0}
"""Sampling at a door without seeds."""

TIERED: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Doors whose requests name a service tier."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose answer is the same at each time.

    Args:
        path: The door.
        body: What it gets.
    """

    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        """Whether the door streams answers."""
        return self.path not in EMBEDDINGS

    def whole(self, tier: str | None = None, *, stream: bool = False) -> bytes:
        """Return the content of the request."""
        body = dict(self.body)
        if self.streams:
            body["stream"] = stream
        if tier is not None and self.path in TIERED:
            body["service_tier"] = tier
        return json.dumps(body).encode()

    def long(self) -> bytes:
        """Return the content of a request whose answer takes long, as a stream if the door has them."""
        if not self.streams:
            return self.whole()
        body = {**self.body, "stream": True}
        if "options" in body:
            body["options"] = {**body["options"], "num_predict": LONG}
        else:
            body["max_output_tokens" if self.path == "/v1/responses" else "max_tokens"] = LONG
        return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class _Draw:
    """The choices of one request."""

    prompts: tuple[str, ...]
    tokens: int
    sampling: dict[str, Any]

    @property
    def said(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompts[0]}]

    def ollama(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of a body
        return {"model": "soak", "options": {**self.sampling, "num_predict": self.tokens}, **more}

    def openai(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of a body
        return {"model": "soak", "max_tokens": self.tokens, **self.sampling, **more}


def _function(**more: Any) -> dict[str, Any]:  # noqa: ANN401 - of a tool
    return {"name": "turn", "description": "Turns", "parameters": TURN, **more}


TOOLS: Final = [{"type": "function", "function": _function()}]
FORM: Final = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}
CLAUDE_TOOLS: Final = [{"name": "turn", "description": "Turns", "input_schema": TURN}]
COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

VARIANTS: Final[tuple[tuple[str, Callable[[_Draw], dict[str, Any]]], ...]] = (
    (COMPLETIONS, lambda one: one.openai(prompt=one.prompts[0])),
    (COMPLETIONS, lambda one: one.openai(prompt=one.prompts[0], n=3)),
    (COMPLETIONS, lambda one: one.openai(prompt=list(one.prompts))),
    (COMPLETIONS, lambda one: one.openai(prompt=list(one.prompts), n=2, logprobs=2)),
    (COMPLETIONS, lambda one: one.openai(prompt=one.prompts[0], logprobs=5)),
    (COMPLETIONS, lambda one: one.openai(prompt=one.prompts[0], stop=["\n", ":"])),
    (COMPLETIONS, lambda one: one.openai(prompt=one.prompts[0], grammar=GRAMMAR)),
    (
        COMPLETIONS,
        lambda one: one.openai(
            prompt=one.prompts[0], presence_penalty=0.5, frequency_penalty=0.3, logit_bias={"5": 2.0}
        ),
    ),
    (CHATS, lambda one: one.openai(messages=one.said)),
    (CHATS, lambda one: one.openai(messages=one.said, n=2, logprobs=True, top_logprobs=3)),
    (CHATS, lambda one: one.openai(messages=one.said, response_format=FORM)),
    (CHATS, lambda one: one.openai(messages=one.said, response_format={"type": "json_object"})),
    (CHATS, lambda one: one.openai(messages=one.said, tools=TOOLS, tool_choice="required", n=2)),
    (CHATS, lambda one: one.openai(messages=one.said, tools=TOOLS)),
    (
        RESPONSES,
        lambda one: {
            "model": "soak",
            "input": one.prompts[0],
            "max_output_tokens": one.tokens,
            **one.sampling,
        },
    ),
    (
        RESPONSES,
        lambda one: {
            "model": "soak",
            "input": one.prompts[0],
            "max_output_tokens": 120,
            **one.sampling,
            "tools": [{"type": "function", **_function()}],
            "tool_choice": "required",
            "store": False,
        },
    ),
    (
        RESPONSES,
        lambda one: {
            "model": "soak",
            "input": one.prompts[0],
            "max_output_tokens": one.tokens,
            **one.sampling,
            "text": {"format": {"type": "json_schema", "name": "shape", "schema": SHAPE}},
        },
    ),
    (
        MESSAGES,
        lambda one: {"model": "soak", "messages": one.said, "max_tokens": one.tokens, **GREEDY},
    ),
    (
        MESSAGES,
        lambda one: {
            "model": "soak",
            "messages": one.said,
            "max_tokens": 120,
            **GREEDY,
            "tools": CLAUDE_TOOLS,
            "tool_choice": {"type": "any"},
        },
    ),
    (
        MESSAGES,
        lambda one: {
            "model": "soak",
            "messages": one.said,
            "max_tokens": one.tokens,
            **GREEDY,
            "output_config": {"format": {"type": "json_schema", "schema": SHAPE}},
        },
    ),
    ("/api/chat", lambda one: one.ollama(messages=one.said)),
    ("/api/chat", lambda one: one.ollama(messages=one.said, tools=TOOLS)),
    ("/api/chat", lambda one: one.ollama(messages=one.said, format=SHAPE)),
    ("/api/generate", lambda one: one.ollama(prompt=one.prompts[0])),
    ("/api/generate", lambda one: one.ollama(prompt=one.prompts[0], raw=True)),
    ("/api/generate", lambda one: one.ollama(prompt=one.prompts[0], format="json")),
    ("/v1/embeddings", lambda one: {"model": "soak", "input": list(one.prompts), "dimensions": 64}),
    ("/v1/embeddings", lambda one: {"model": "soak", "input": one.prompts[0], "encoding_format": "base64"}),
    ("/api/embed", lambda one: {"model": "soak", "input": list(one.prompts)}),
)
"""Doors, and the bodies of their requests."""


def requests(count: int) -> list[Asked]:
    """Return requests of all variants, with prompts of a few tokens up to several chunks."""
    chosen = random.Random(3)  # noqa: S311 - no secrets
    made = []
    for number in range(count):
        path, body = VARIANTS[number % len(VARIANTS)]
        prompts = tuple(
            TEXT * chosen.choice((0, 0, 1, 2, 8, 20)) + f"def name_{number}_{place}(" for place in range(3)
        )
        sampling = chosen.choice((GREEDY, {"seed": number, "temperature": 0.8, "top_p": 0.9}))
        made.append(Asked(path, body(_Draw(prompts, chosen.choice(LENGTHS), sampling))))
    return made


@dataclass(slots=True)
class _Choice:
    """One answer of a request."""

    texts: defaultdict[str, str] = field(default_factory=lambda: defaultdict(str))
    calls: list[list[Any]] = field(default_factory=list)
    lists: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def call(self, name: str, arguments: Any = "") -> None:  # noqa: ANN401 - text or an object
        self.calls.append([name, arguments])

    def plain(self) -> list[Any]:
        """Return the answer; arguments of calls as objects, none where they were cut."""
        calls = []
        for name, arguments in self.calls:
            try:
                calls.append([name, json.loads(arguments) if isinstance(arguments, str) else arguments])
            except ValueError:
                calls.append([name, {}])
        return [{name: text for name, text in self.texts.items() if text}, calls, dict(self.lists)]


def answer_of(content: str, *, stream: bool) -> list[Any]:
    """Return the answer in the content of a response of any door, in the same form whole and streamed.

    Raises:
        ValueError: The answer has an error.
    """
    choices: defaultdict[int, _Choice] = defaultdict(_Choice)
    for event in _events(content) if stream else [json.loads(content)]:
        if event.get("error"):
            raise ValueError(f"{event:.300}")
        _take(choices, event)
    return [choices[index].plain() for index in sorted(choices)]


def _events(content: str) -> Iterator[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in content.splitlines())
    return (json.loads(line) for line in lines if line.startswith("{"))


def _take(choices: defaultdict[int, _Choice], event: dict[str, Any]) -> None:
    """Take a whole answer, or an event of a stream."""
    kind = event.get("type", "")
    if "choices" in event:
        for choice in event["choices"]:
            _take_openai(choices[choice["index"]], choice)
    elif "data" in event or "embeddings" in event:
        own = event.get("embeddings") or [one["embedding"] for one in event["data"]]
        choices[0].lists["embeddings"] = own
    elif "done" in event:
        _take_ollama(choices[0], event)
    elif event.get("object") == "response":
        for item in event["output"]:
            _take_item(choices[0], item)
        choices[0].texts["end"] = event["status"]
    elif kind.startswith("response."):
        _take_response_event(choices[0], kind, event)
    elif kind:
        _take_message(choices[0], kind, event)


def _take_openai(own: _Choice, choice: dict[str, Any]) -> None:
    said = choice.get("message") or choice.get("delta") or choice
    for name in ("text", "content", "reasoning_content"):
        own.texts[name] += said.get(name) or ""
    for call in said.get("tool_calls") or ():
        function = call["function"]
        if function.get("name"):
            own.call(function["name"])
        own.calls[-1][1] += function.get("arguments") or ""
    for name, values in (choice.get("logprobs") or {}).items():
        own.lists[name] += values or []
    own.texts["end"] += choice["finish_reason"] or ""


def _take_ollama(own: _Choice, event: dict[str, Any]) -> None:
    said = event.get("message") or event
    for name in ("content", "response", "thinking"):
        own.texts[name] += said.get(name) or ""
    for call in said.get("tool_calls") or ():
        own.call(call["function"]["name"], call["function"]["arguments"])
    own.texts["end"] += event.get("done_reason") or ""


def _take_item(own: _Choice, item: dict[str, Any]) -> None:
    if item["type"] == "function_call":
        own.call(item["name"], item["arguments"])
    own.texts[item["type"]] += "".join(part["text"] for part in item.get("content", ()))


def _take_response_event(own: _Choice, kind: str, event: dict[str, Any]) -> None:
    if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
        own.call(event["item"]["name"])
    elif kind == "response.function_call_arguments.delta":
        own.calls[-1][1] += event["delta"]
    elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
        own.texts["message" if "output" in kind else "reasoning"] += event["delta"]
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        own.texts["end"] = event["response"]["status"]


def _take_message(own: _Choice, kind: str, event: dict[str, Any]) -> None:
    """Take a message of Anthropic's, or an event of its stream."""
    if kind == "message":
        for block in event["content"]:
            _take_block(own, block)
        own.texts["end"] = event["stop_reason"]
    elif kind == "content_block_start":
        _take_block(own, {**event["content_block"], "input": ""})
    elif kind == "content_block_delta":
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            own.calls[-1][1] += delta["partial_json"]
        else:
            own.texts[delta["type"].removesuffix("_delta")] += delta.get("text") or delta.get("thinking", "")
    elif kind == "message_delta":
        own.texts["end"] = event["delta"]["stop_reason"]


def _take_block(own: _Choice, block: dict[str, Any]) -> None:
    if block["type"] == "tool_use":
        own.call(block["name"], block["input"])
    else:
        own.texts[block["type"]] += block[block["type"]]
