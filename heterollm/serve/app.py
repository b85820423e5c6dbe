"""The endpoints: OpenAI's, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from heterollm.base import HeteroLLMError, InputError, OptionError
from heterollm.serve.answers import Ended, PromptWork, Spent, StepOf
from heterollm.serve.bodies import AnswerRequest, chat_request, completion_request
from heterollm.serve.channel import Channel
from heterollm.serve.errors import RequestError, error_answer
from heterollm.serve.guard import Guard
from heterollm.serve.metrics import Metrics
from heterollm.serve.options import ServeOptions
from heterollm.serve.page import page
from heterollm.serve.replies import Reply
from heterollm.serve.sessions import SessionCache
from heterollm.serve.status import Activity, Status
from heterollm.serve.turns import BusyError, PromptJob, Turns

if TYPE_CHECKING:
    from heterollm.llm import LLM

__all__ = ["Server"]

MOST_BODY_BYTES: Final = 8 << 20
BODY_S: Final = 30.0
"""Time for a client to send a body."""

STALL_S: Final = 60.0
"""Time for a client to read one write, before the server gives up."""

GONE: Final = 499
"""Status in the metrics of a request whose client left."""


class _GoneError(Exception):
    """The client has left."""


class Server:
    """A loaded model behind HTTP; :attr:`app` is the ASGI application.

    Args:
        llm: The model.
        options: The options.
        places: Sessions at most.
    """

    def __init__(self, llm: LLM, options: ServeOptions, places: int) -> None:
        self._llm = llm
        self._options = options
        self._started = int(time.time())
        self._failure = ""
        # A few requests at once are read beside the engine thread.
        self._readers = anyio.CapacityLimiter(2)
        self._sessions = SessionCache(
            llm.session,
            most=places,
            chunk=llm.plan.chunk_length * llm.plan.lanes,
            failures=lambda: llm.failures,
        )
        self._activity = Activity()
        self._figures = Status(llm, self._activity, live=options.live)
        self._turns = Turns(llm.on_engine_thread, places=places, queue=options.queue)
        self._metrics = Metrics(
            lambda: (*self._turns.counts(), len(self._sessions), len(llm.failures)),
        )
        routes = (
            ("/", "GET", self._show_page),
            ("/status", "GET", self._status),
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._show_metrics),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/completions", "POST", self._completion),
            ("/v1/embeddings", "POST", self._embeddings),
        )
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        self.app = Starlette(
            routes=[
                Route(path, self._endpoint(path, call), methods=[method]) for path, method, call in routes
            ],
            middleware=[*((cors,) if options.cors else ()), Middleware(Guard, options=options)],
            exception_handlers={HTTPException: _no_such_route},
            lifespan=self._life,
        )

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._turns.close)

    def _endpoint(
        self, path: str, call: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                response = await call(request)
            except (_GoneError, ClientDisconnect):
                response = Response(status_code=GONE)
            except Exception as error:  # noqa: BLE001 - the client gets it in OpenAI's form
                response = _error_response(error)
            self._metrics.answered(path, response.status_code)
            return response

        return endpoint

    # -- answers -------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat_request)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, completion_request)

    async def _answer(self, request: Request, parse: Callable[[LLM, str, bytes], AnswerRequest]) -> Response:
        content = await _body(request)
        name = self._options.name
        asked = await anyio.to_thread.run_sync(parse, self._llm, name, content, limiter=self._readers)
        count, room = len(asked.prompts[0]), self._turns.room(asked.tier)
        if count > room:
            raise RequestError(
                f"n is {count}, but there is memory for {room} sessions of tier {asked.tier}.", param="n"
            )
        answer = _Answer(self, request, asked)
        reply = Reply(self._llm, name, asked)
        return await (answer.streamed(reply) if asked.stream else answer.whole(reply))

    def start(self, asked: AnswerRequest, channel: Channel) -> Sequence[PromptJob]:
        """Queue the work of a request.

        Raises:
            BusyError: Too many wait.
        """
        jobs, first = [], 0
        for answers in asked.prompts:
            work = PromptWork(
                answers=answers,
                first=first,
                reproducible=asked.reproducible,
                cache=self._sessions,
                sink=channel,
                wanted=self._turns.wanted,
                clock=self._llm.device.now_s,
                activity=self._activity,
            )
            jobs.append(work.job(asked.tier))
            first += len(answers)
        self._turns.submit(jobs)
        return jobs

    def wake(self) -> None:
        """Look again for requests that can go on."""
        self._turns.wake()

    def end(self, jobs: Sequence[PromptJob], spent: Spent | None, error: BaseException | None) -> None:
        """End a request.

        Args:
            jobs: Its work, which may have ended.
            spent: Its tokens and times, if all its answers ended.
            error: The error that ended it, if one did.
        """
        self._turns.cancel(jobs)
        if isinstance(error, _GoneError):
            self._metrics.aborted()
        if spent is not None:
            self._metrics.spent(spent)
            self._failure = ""
        elif isinstance(error, HeteroLLMError) and not isinstance(
            error, InputError | OptionError | BusyError
        ):
            self._failure = str(error)

    async def _embeddings(self, _request: Request) -> Response:
        raise RequestError(
            f"{self._options.name!r} has no embeddings: heterollm runs models that write text.",
            fix="Use a model made for embeddings, in another program.",
            param="model",
            code="model_has_no_embeddings",
        )

    # -- what the server is --------------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._options.name:
            raise RequestError(
                f"There is no model {name!r:.100} here.", status=404, param="model", code="model_not_found"
            )
        return _json(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._started,
            "owned_by": "heterollm",
            "context_length": self._llm.context,
        }

    async def _health(self, _request: Request) -> Response:
        running, waiting = self._turns.counts()
        state = "failing" if self._failure else "ok"
        body = {"status": state, "running": running, "waiting": waiting, "error": self._failure or None}
        return _json(body, status=503 if self._failure else 200)

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, _request: Request) -> Response:
        running, waiting = self._turns.counts()
        figures = await anyio.to_thread.run_sync(self._figures.read, limiter=self._readers)
        counts = {"running": running, "waiting": waiting, "sessions": len(self._sessions)}
        return _json({"model": self._options.name, **counts, **figures})

    async def _show_page(self, _request: Request) -> Response:
        return page()


class _Answer:
    """The reader of one request's answers, which cancels their work when its client leaves."""

    def __init__(self, server: Server, request: Request, asked: AnswerRequest) -> None:
        self._server = server
        self._asked = asked
        self._channel = Channel(server.wake)
        self._jobs = server.start(asked, self._channel)
        self._watch = asyncio.create_task(_close_when_gone(request, self._channel))
        self._spent: Spent | None = None
        self._ended = False

    async def whole(self, reply: Reply) -> Response:
        """Return the response after all tokens."""
        steps, ends = [], []
        async with self._guarded():
            async for events in self._batches():
                steps += [event for event in events if isinstance(event, StepOf)]
                ends += [event for event in events if isinstance(event, Ended)]
        assert self._spent is not None  # all answers ended
        return _json(reply.whole(steps, ends, self._spent))

    async def streamed(self, reply: Reply) -> Response:
        """Return a response that sends tokens as they come; its status knows how the first ones came."""
        batches = self._batches()
        try:
            first = await anext(batches)
        except BaseException as error:
            self._end(error)
            raise
        return _EventStream(self._chunks(reply, first, batches), self._end)

    async def _chunks(
        self, reply: Reply, first: Sequence[Any], batches: AsyncIterator[Sequence[Any]]
    ) -> AsyncGenerator[bytes, None]:
        opened: set[int] = set()
        try:
            async with self._guarded():
                yield _sse(_opened(reply, first, opened))
                async for events in batches:
                    yield _sse(_opened(reply, events, opened))
            if self._asked.include_usage and self._spent is not None:
                yield _sse([reply.usage(self._spent)])
            yield b"data: [DONE]\n\n"
        except _GoneError:
            pass
        except Exception as error:  # noqa: BLE001 - the client gets it in OpenAI's form
            yield _sse([error_answer(error)[1]])

    async def _batches(self) -> AsyncIterator[Sequence[Any]]:
        """Yield events as they come, until all answers have ended."""
        spent, left = Spent(), len(self._jobs)
        while left:
            events = await self._channel.read()
            if events is None:
                raise _GoneError
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
            self._server.end(self._jobs, self._spent, error)


class _EventStream(Response):
    """Sends events; gives up on a client that does not read.

    Args:
        chunks: The events.
        end: Ends the request, also one of which nothing could be sent.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
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
    chunks = []
    for event in events:
        if event.choice not in opened:
            opened.add(event.choice)
            chunks.append(reply.opening(event.choice))
        chunks.append(reply.step(event) if isinstance(event, StepOf) else reply.end(event))
    return [chunk for chunk in chunks if chunk is not None]


def _sse(chunks: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


async def _close_when_gone(request: Request, channel: Channel) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    channel.close()


async def _body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: It is too large or comes too slowly.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BODY_BYTES:
                    raise RequestError(f"The body exceeds {MOST_BODY_BYTES} bytes.", status=413)
    except TimeoutError:
        raise RequestError(f"The body took more than {BODY_S:.0f} s.", status=408) from None
    return bytes(content)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _error_response(error: BaseException) -> Response:
    status, body, headers = error_answer(error)
    response = _json(body, status)
    response.headers.update(headers)
    return response


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for these
    message = f"{error.detail}: {request.method} {request.url.path:.100}."
    return _error_response(RequestError(message, status=error.status_code, code="no_such_endpoint"))
