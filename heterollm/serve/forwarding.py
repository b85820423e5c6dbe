"""Forwards a request to the process of a model, and its answer to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heterollm.base import EngineError
from heterollm.serve.errors import GoneError
from heterollm.serve.reading import left

READ_BYTES: Final = 1 << 16

OF_CONNECTION: Final = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"host",
        b"keep-alive",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that belong to a connection, not to its request or answer."""


class EndedError(EngineError):
    """The process of a model ended before its answer did."""


class _Exchange:
    """A request to a process on its own connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._state = h11.Connection(h11.CLIENT)

    async def send(self, request: Request, body: bytes, port: int) -> None:
        """Send a request."""
        query = request.url.query
        target = request.url.path + (f"?{query}" if query else "")
        headers = [(name, value) for name, value in request.headers.raw if name not in OF_CONNECTION]
        headers += [(b"host", b"127.0.0.1:%d" % port), (b"connection", b"close")]
        headers += [(b"content-length", b"%d" % len(body))] if body else []
        begin = h11.Request(method=request.method, target=target, headers=headers)
        parts = [self._state.send(begin)]
        parts += [self._state.send(h11.Data(data=body))] if body else []
        self._writer.write(b"".join(part for part in (*parts, self._state.send(h11.EndOfMessage())) if part))
        await self._writer.drain()

    async def event(self) -> object:
        """Return the next part of the answer.

        Raises:
            EndedError: The process ended before its answer did.
        """
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._reader.read(READ_BYTES))
        except (OSError, h11.RemoteProtocolError) as error:
            raise EndedError(
                f"The process of the model ended during an answer: {error}.", fix="Send the request again."
            ) from error
        return event

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the content of the answer."""
        while isinstance(event := await self.event(), h11.Data):
            yield bytes(event.data)


class Forwarded(Response):
    """An answer whose content comes from a process; at its end it closes what it holds."""

    def __init__(
        self, request: Request, begin: h11.Response, exchange: _Exchange, held: AsyncExitStack
    ) -> None:
        super().__init__(status_code=begin.status_code)
        self.raw_headers = [(name, value) for name, value in begin.headers if name not in OF_CONNECTION]
        self._request, self._exchange, self._held = request, exchange, held

    async def discard(self) -> None:
        """Read no more of the answer."""
        await self._held.aclose()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the answer."""
        async with self._held:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            content = asyncio.create_task(self._send_content(send))
            leaving = asyncio.create_task(left(self._request))
            await asyncio.wait((content, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in (content, leaving):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await content

    async def _send_content(self, send: Send) -> None:
        async for part in self._exchange.parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def forward(request: Request, body: bytes, port: int, held: AsyncExitStack) -> Forwarded:
    """Send a request to a process, and return its answer, which closes ``held`` at its end.

    Raises:
        EndedError: The process does not answer.
        GoneError: The client left before the answer began.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        held.callback(writer.close)
        exchange = _Exchange(reader, writer)
        await exchange.send(request, body, port)
    except OSError as error:
        raise EndedError(
            f"The process of the model does not answer: {error}.", fix="Send the request again."
        ) from error
    begin = asyncio.create_task(exchange.event())
    leaving = asyncio.create_task(left(request))
    await asyncio.wait((begin, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not begin.done():
        begin.cancel()
        raise GoneError
    response = begin.result()
    assert isinstance(response, h11.Response)
    return Forwarded(request, response, exchange, held.pop_all())
