"""The exchange of one request: events of the engine thread in, a response out, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from heterollm.serve.answers import Ended, Spent, StepOf
from heterollm.serve.channel import Channel
from heterollm.serve.errors import GoneError, failure_of
from heterollm.serve.reading import left
from heterollm.serve.replies import Reply

STALL_S: Final = 60.0
"""Time for a client to read one write, before the server gives up."""


class Exchange:
    """Reads the answers to one request, and ends their work when its client leaves.

    Args:
        request: The request.
        channel: Has the events of all prompts.
        prompts: Number of prompts.
        end: Called once at the end, with the error that ended it, if one did.
    """

    def __init__(
        self, request: Request, channel: Channel, prompts: int, end: Callable[[BaseException | None], None]
    ) -> None:
        self._channel = channel
        self._prompts = prompts
        self._end_request = end
        self._watch = asyncio.create_task(left(request))
        self._watch.add_done_callback(lambda _: channel.close())
        self._spent: Spent | None = None
        self._ended = False

    async def whole(self, reply: Reply) -> dict[str, Any]:
        """Return the body of the response, after all tokens."""
        steps, ends = [], []
        async with self._guarded():
            async for events in self._batches():
                steps += [event for event in events if isinstance(event, StepOf)]
                ends += [event for event in events if isinstance(event, Ended)]
        assert self._spent is not None  # all answers ended
        return reply.whole(steps, ends, self._spent)

    async def streamed(self, reply: Reply) -> Response:
        """Return a response that sends tokens as they come; its status knows how the first ones came."""
        batches = self._batches()
        try:
            first = await anext(batches)
        except BaseException as error:
            self._end(error)
            raise
        return _EventStream(self._chunks(reply, first, batches), reply.media_type, self._end)

    async def _chunks(
        self, reply: Reply, first: Sequence[Any], batches: AsyncIterator[Sequence[Any]]
    ) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        try:
            async with self._guarded():
                yield reply.encoded(_opened(reply, first, opened))
                async for events in batches:
                    yield reply.encoded(_opened(reply, events, opened))
            assert self._spent is not None  # all answers ended
            yield reply.closing(self._spent)
        except GoneError:
            pass
        except Exception as error:  # noqa: BLE001 - the client gets it in the form of its door
            yield reply.encoded([reply.failed(failure_of(error))])

    async def _batches(self) -> AsyncIterator[Sequence[Any]]:
        """Yield events as they come, until all answers have ended."""
        spent, left = Spent(), self._prompts
        while left:
            events = await self._channel.read()
            if events is None:
                raise GoneError
            for event in events:
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, Ended) and event.spent is not None:
                    spent += event.spent
                    left -= 1
            if not left:
                self._spent = spent
            yield events

    @asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def _end(self, error: BaseException | None = None) -> None:
        """End the request, once."""
        if not self._ended:
            self._ended = True
            self._watch.cancel()
            self._end_request(error)


class _EventStream(Response):
    """Sends events; gives up on a client that does not read.

    Args:
        chunks: The events.
        media_type: Their form.
        end: Ends the request, also one of which nothing could be sent.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._chunks = chunks
        self._end = end

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            pass  # the client does not read, or has gone
        finally:
            await self._chunks.aclose()
            self._end()


def _opened(reply: Reply, events: Sequence[Any], opened: set[int]) -> list[dict[str, Any]]:
    """Return the chunks of events, with an opening before the first of each answer."""
    chunks: list[dict[str, Any]] = []
    for event in events:
        if event.choice not in opened:
            opened.add(event.choice)
            chunks += reply.opening(event.choice)
        chunks += reply.step(event) if isinstance(event, StepOf) else reply.end(event)
    return chunks
