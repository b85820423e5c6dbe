"""The check of every request before it is read: its key, its host, and the type of its body."""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from heterollm.serve.errors import RequestError, error_response
from heterollm.serve.options import ServeOptions

OPEN_PATHS: Final = ("/", "/health")
"""Paths that need no key: they hold no secret."""

HOST: Final = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+?)\.?)(?::[0-9]{0,5})?", re.ASCII
)
"""A Host header: an IPv6 address in brackets, or a name or IPv4 address; then perhaps a port."""


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, which no other reaches."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # another name
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_loopback_header(host: str) -> bool:
    """Whether a Host header names this machine, by all of its text."""
    found = HOST.fullmatch(host)
    if found is None:
        return False
    address = found["address"]
    return is_loopback(found["name"]) if address is None else ":" in address and is_loopback(address)


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
        self._keys = [key.encode() for key in options.api_keys]
        self._loopback = is_loopback(options.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except RequestError as error:
                await error_response(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if self._loopback and not (len(hosts) == 1 and _is_loopback_header(hosts[0])):
            raise RequestError(
                f"This server does not answer to the name {', '.join(hosts)!r:.100}.", status=421
            )
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers):
            raise RequestError("The API key is missing or wrong.", status=401, code="invalid_api_key")
        kinds = headers.getlist("content-type")
        kind = kinds[0].partition(";")[0].strip().lower() if len(kinds) == 1 else ""
        if method == "POST" and kind != "application/json":
            raise RequestError(
                f"The content type is {', '.join(kinds)!r:.100}, not application/json.", status=415
            )

    def _has_key(self, headers: Headers) -> bool:
        # All keys are compared, so that the time tells nothing of them.
        given = [key.encode("latin-1") for key in given_keys(headers)]
        right = [hmac.compare_digest(key, own) for key in given for own in self._keys]
        return any(right)


def given_keys(headers: Headers) -> tuple[str, ...]:
    """Return the keys of a request: most clients send a bearer token, Anthropic's X-Api-Key, too."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return tuple(filter(None, (bearer, headers.get("x-api-key", "").strip())))


def owner_of(headers: Headers) -> str:
    """Return a name of those who share a key, or the header of a proxy that knows them."""
    return repr(given_keys(headers) or headers.get("authorization"))
