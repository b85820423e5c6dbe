"""Requests that are made to hurt a server, and sockets that never make one."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
REFUSALS: Final = (400, 408, 413, 503)
MOST_SOCKETS: Final = 200
"""Sockets of one run that say nothing, or little."""

HEAD: Final = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

BROKEN: Final = (
    b"",
    b"{",
    b"[]",
    b"\xff",
    b'{"model": "other", "prompt": "x"}',
    b'{"model": "soak"}',
    b'{"model": "soak", "prompt": 3}',
    b'{"model": "soak", "prompt": "x", "n": 1e9}',
    b'{"model": "soak", "prompt": "x", "tools": [{}]}',
    b'{"model": "soak", "prompt": ' + b"[" * 5000,
)
"""Bodies of completions that are none."""

Request = tuple[str, bytes]


def _completion(**fields: Any) -> Request:  # noqa: ANN401 - of a body
    return COMPLETIONS, json.dumps({"model": "soak", "prompt": "x", "max_tokens": 2, **fields}).encode()


def _chat(messages: list[dict[str, str]], **fields: Any) -> Request:  # noqa: ANN401 - of a body
    return CHATS, json.dumps({"model": "soak", "messages": messages, "max_tokens": 2, **fields}).encode()


def _schema(schema: dict[str, Any]) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat([{"role": "user", "content": "x"}], response_format=form)


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _wide(width: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{n}": {"enum": [n, str(n)]} for n in range(width)}}


def _rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(count)) + f'\nr{count}: "x"\n'


LONG: Final = "def scale(values, factor):\n    return values\n"
SCHEMAS: Final[tuple[Callable[[], Request], ...]] = (
    lambda: _schema(_chain(3000)),
    lambda: _schema(_deep(400)),
    lambda: _schema(_wide(20_000)),
    lambda: _schema({"type": "string", "pattern": "(a|a?){500}" * 50}),
    lambda: _schema({"type": "string", "maxLength": 10**9, "minLength": 10**8}),
    lambda: _completion(grammar=_rules(5000)),
    lambda: _completion(grammar="start: " + "(" * 5000 + '"x"' + ")" * 5000),
)
PROMPTS: Final[tuple[Callable[[], Request], ...]] = (
    lambda: _completion(prompt="a" * 2_000_000),
    lambda: _completion(prompt=LONG * (7_000_000 // len(LONG))),
    lambda: _completion(prompt="日本語" * 400_000),
    lambda: _completion(prompt=[1] * 2_000_000),
    lambda: _completion(prompt=[[1]] * 500_000),
    lambda: _completion(prompt=["a"] * 1_000_000),
    lambda: (COMPLETIONS, b'{"model": "soak", "prompt": ' + b"[" * 8_000_000),
    lambda: (COMPLETIONS, b'{"model": "soak", "prompt": "' + rb"\"" * 3_000_000),
    lambda: (COMPLETIONS, b" " * 9_000_000),
    lambda: _chat([{"role": "user", "content": "x"}] * 150_000),
    lambda: (CHATS, b'{"model": "soak", "messages": [' + b"{}," * 1_000_000 + b"{}]}"),
    lambda: _chat([{"role": "user", "content": LONG * 40_000}]),
)
OPTIONS: Final[tuple[Callable[[], Request], ...]] = tuple(
    # Defaults bind the value of each round.
    lambda name=name, value=value: (  # type: ignore[misc]
        COMPLETIONS,
        f'{{"model": "soak", "prompt": "x", "max_tokens": 2, "{name}": {value}}}'.encode(),
    )
    for name, value in (
        ("repetition_penalty", "1e-300"),
        ("repetition_penalty", "1e300"),
        ("repetition_penalty", "5e-324"),
        ("temperature", "NaN"),
        ("temperature", "1e999"),
        ("temperature", "-1"),
        ("top_p", "0"),
        ("top_p", "-Infinity"),
        ("min_p", "2"),
        ("n", "1000000000"),
        ("n", "1e9"),
        ("max_tokens", "1" + "0" * 400),
        ("max_tokens", "-1"),
        ("top_k", "1e400"),
        ("seed", "1" + "0" * 100),
        ("logprobs", "100000"),
        ("stop", json.dumps(["x" * 1000] * 1000)),
    )
)
ATTACKS: Final = {"schema": SCHEMAS, "long prompt": PROMPTS, "bad option": OPTIONS}
"""Kinds of requests. A server may refuse each, or answer it."""


class Sockets:
    """Connections that stay silent, or stop in the middle of a head or of a body; the oldest end.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: deque[socket.socket] = deque()

    def add(self, chosen: random.Random) -> None:
        """Open one more."""
        body = b'{"model": "soak", "prompt": "' + b"a" * chosen.choice((10, 100_000, 1_000_000))
        said = chosen.choice(
            (
                b"",
                b"POST /v1/comp",
                HEAD.encode(),
                f"{HEAD}Content-Length: 8000000\r\n\r\n".encode() + body,
                f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\na\r\n" * 2000,
            )
        )
        made = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        self._open.append(made)
        with contextlib.suppress(OSError):  # the server may end it, or read no more of it
            made.sendall(said)
        while len(self._open) > MOST_SOCKETS:
            self._open.popleft().close()

    def close(self) -> None:
        """End all."""
        while self._open:
            self._open.popleft().close()
