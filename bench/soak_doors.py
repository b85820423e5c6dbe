"""The doors of a server beside OpenAI's completions: the same dialogue has the same greedy answer at each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

TOKENS: Final = 16
BUSY: Final = (503, 529)

Body = Callable[[str, bool], dict[str, Any]]


def _options(stream: bool, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - of a body
    return {"model": "soak", "stream": stream, "temperature": 0, **fields}


def _said(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _ollama(stream: bool, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - of a body
    return {
        "model": "soak",
        "stream": stream,
        "options": {"temperature": 0, "num_predict": TOKENS},
        **fields,
    }


DOORS: Final[dict[str, Body]] = {
    "/v1/chat/completions": lambda text, stream: _options(stream, messages=_said(text), max_tokens=TOKENS),
    "/v1/responses": lambda text, stream: _options(stream, input=text, max_output_tokens=TOKENS),
    "/v1/messages": lambda text, stream: _options(stream, messages=_said(text), max_tokens=TOKENS),
    "/api/chat": lambda text, stream: _ollama(stream, messages=_said(text)),
    "/api/generate": lambda text, stream: _ollama(stream, prompt=text),
}
"""The body of a prompt's request at each door."""


def _text(event: dict[str, Any]) -> str:
    """Return the text of a whole answer or of an event of a stream, in the form of any door."""
    if choices := event.get("choices"):
        said = choices[0].get("message") or choices[0]["delta"]
        return str(said.get("content") or "")
    if event.get("object") == "response":
        return "".join(part["text"] for item in event["output"] for part in item["content"])
    if event.get("type") == "message":
        return "".join(block["text"] for block in event["content"])
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    if "done" in event:
        return str(event["response"] if "response" in event else event["message"]["content"])
    return ""


def text_of(content: str, stream: bool) -> str:
    """Return the text of an answer of any door."""
    if not stream:
        return _text(json.loads(content))
    lines = (line.removeprefix("data: ") for line in content.splitlines())
    return "".join(_text(json.loads(line)) for line in lines if line.startswith("{"))


class Doors:
    """Asks at doors for dialogues whose answers it knows.

    Args:
        post: Sends a body to a path, and returns status and content of the answer.
        prompts: The prompts.
    """

    def __init__(self, post: Callable[[str, bytes], tuple[int, str]], prompts: Sequence[str]) -> None:
        self._post = post
        self._prompts = prompts
        self.learn()

    def learn(self) -> None:
        """Ask for every prompt at the first door, one after the other."""
        found = [self._ask(next(iter(DOORS)), prompt, stream=False) for prompt in self._prompts]
        assert all(status == 200 for status, _ in found), found
        self._texts = [text for _, text in found]

    def check(self, case: int, stream: bool, moment: float) -> tuple[bool, str]:
        """Ask at a door, which ``moment`` in [0, 1) chooses; return whether the answer is right, and it."""
        path = tuple(DOORS)[int(moment * len(DOORS))]
        status, text = self._ask(path, self._prompts[case], stream=stream)
        right = status in BUSY or (status == 200 and text == self._texts[case])
        return right, f"{path} {status} {text!r} {self._texts[case]!r}"

    def _ask(self, path: str, prompt: str, *, stream: bool) -> tuple[int, str]:
        status, content = self._post(path, json.dumps(DOORS[path](prompt, stream)).encode())
        return status, text_of(content, stream) if status == 200 else content
