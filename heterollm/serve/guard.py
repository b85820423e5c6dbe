"""The check of every request before it is read: its key, its host, and the type of its body."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from heterollm.serve.errors import RequestError, error_answer
from heterollm.serve.options import ServeOptions

__all__ = ["Guard", "is_loopback"]

OPEN_PATHS: Final = ("/", "/health")
"""Paths that need no key: they hold no secret."""


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, which no other reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


class Guard:
    """Refuses requests without the key, and requests that pages of other origins make a browser send.

    A browser sends a page's requests to any address, this machine's included. It asks before it sends JSON
    (CORS); hence bodies must be JSON. A name of another origin that resolves to this machine (DNS rebinding)
    avoids that; hence a server on a loopback address answers to loopback names alone.

    Args:
        app: The application behind.
        options: The options of the server.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else f"Bearer {options.api_key}".encode()
        self._loopback = is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except RequestError as error:
                status, body, _ = error_answer(error)
                headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
                content = msgspec.json.encode(body)
                response = Response(content, status, headers, "application/json")
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        if self._loopback and not is_loopback(name):
            raise RequestError(f"This server does not answer to the name {host!r:.100}.", status=421)
        given = headers.get("authorization", "").encode("latin-1")
        if self._key is not None and path not in OPEN_PATHS and not hmac.compare_digest(given, self._key):
            raise RequestError("The API key is missing or wrong.", status=401, code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise RequestError(f"The content type is {kind!r:.100}, not application/json.", status=415)
