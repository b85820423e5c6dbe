"""Host, key and content type of a request, by every form that a header may have."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from heterollm.base import OptionError
from heterollm.serve import ServeOptions
from heterollm.serve.guard import Guard, is_loopback

Headers = list[tuple[bytes, bytes]]


async def status(headers: Headers, options: ServeOptions, method: str = "GET") -> int:
    """Return the status of the answer to a request with these headers alone."""

    async def answer(_request: object) -> Response:
        return Response()

    app = Guard(Starlette(routes=[Route("/x", answer, methods=["GET", "POST"])]), options)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": method, "path": "/x", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    found: int = sent[0]["status"]
    return found


def of(headers: Headers, method: str = "GET", **options: object) -> int:
    return asyncio.run(status(headers, ServeOptions(**options), method))  # type: ignore[arg-type]


OWN = (
    "localhost",
    "LocalHost:8080",
    "localhost.",
    "localhost.:8080",
    "127.0.0.1",
    "127.0.0.1:8080",
    "127.255.255.254",
    "[::1]",
    "[::1]:8080",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]:80",
    "localhost:",
)
FOREIGN = (
    "",
    " ",
    "evil.example",
    "localhost.evil.example",
    "evil.localhost.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example@127.0.0.1",
    "user:password@localhost",
    "localhost:80@evil.example",
    "localhost:80:80",
    "localhost:port",
    "localhost:808080",
    "localhost evil.example",
    "localhost,evil.example",
    "localhost/evil",
    "localhost..",
    "[::1]evil.example",
    "[::1].evil.example:80",
    "[::1",
    "::1",
    "[::1%25eth0]",
    "[127.0.0.1]",
    "[localhost]",
    "[evil]",
    "[]",
    "[2001:db8::1]",
    "[::ffff:10.0.0.1]",
    "0.0.0.0",
    "10.0.0.1",
    "2130706433",
    "0x7f.0.0.1",
    "127.1",
    "localhost\u00a0",
    "127.0.0.\u00b2",
    "xn--localhost",
)


@pytest.mark.parametrize("host", OWN)
def test_names_of_this_machine_pass(host: str) -> None:
    assert of([(b"host", host.encode("latin-1"))]) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_all_other_names_do_not(host: str) -> None:
    assert of([(b"host", host.encode("latin-1"))]) == 421
    # A server for a network answers to any of its names.
    assert of([(b"host", host.encode("latin-1"))], host="0.0.0.0") == 200


def test_a_request_names_one_host() -> None:
    own, other = (b"host", b"localhost"), (b"host", b"evil.example")
    assert of([]) == 421
    for several in ([own, other], [other, own], [own, own]):
        assert of(several) == 421


def test_loopback_addresses_of_the_option() -> None:
    assert all(
        map(is_loopback, ("localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"))
    )
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "example.org", "::ffff:10.0.0.1")))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"Bearer second", 200),
        (b"bearer first", 200),
        (b"Bearer  first", 200),
        (b"Bearer third", 401),
        (b"Bearer firs", 401),
        (b"Bearer", 401),
        (b"Basic first", 401),
        (b"first", 401),
        (b"Bearer \xff", 401),
        (None, 401),
    ],
)
def test_one_of_several_keys_is_needed(given: bytes | None, expected: int) -> None:
    headers = [(b"host", b"localhost"), *(() if given is None else ((b"authorization", given),))]
    assert of(headers, api_keys=("first", "second")) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([b"application/json"], 200),
        ([b"Application/JSON; charset=utf-8"], 200),
        ([b"text/plain"], 415),
        ([b"text/plain; application/json"], 415),
        ([b"application/jsonx"], 415),
        ([b"application/json", b"text/plain"], 415),
        ([], 415),
    ],
)
def test_a_body_is_json(kinds: list[bytes], expected: int) -> None:
    assert of([(b"host", b"localhost"), *((b"content-type", kind) for kind in kinds)], "POST") == expected


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "https://A.example", "a.example", "https://u@a", "://x", "https://a b"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(OptionError, match="--cors"):
        ServeOptions(cors=(origin,))


def test_origins_that_browsers_send_are_taken() -> None:
    ServeOptions(
        cors=("*", "https://a.example", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md")
    )


@pytest.mark.parametrize("key", ["", " ", "a\n", "é", " a"])
def test_a_key_that_a_header_cannot_hold_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="API key"):
        ServeOptions(api_keys=("good", key))
