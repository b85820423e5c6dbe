"""The endpoints: OpenAI's, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from heterollm.engine import return_freed_memory
from heterollm.serve.admission import Admission
from heterollm.serve.answers import ServedPrompt
from heterollm.serve.bodies import AnswerRequest, chat_request, completion_request
from heterollm.serve.channel import Channel
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.errors import GoneError, RequestError, error_answer
from heterollm.serve.exchange import Exchange, json_response
from heterollm.serve.guard import Guard
from heterollm.serve.metrics import Metrics
from heterollm.serve.options import ServeOptions
from heterollm.serve.page import page
from heterollm.serve.reading import Bodies, Readers
from heterollm.serve.replies import Reply
from heterollm.serve.sessions import SessionCache
from heterollm.serve.status import Activity, Status

if TYPE_CHECKING:
    from heterollm.llm import LLM

GONE: Final = 499
"""Status in the metrics of a request whose client left."""

REST_S: Final = 1.0
"""Time between two looks whether the server has come to rest."""


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
        self.defaults = RequestDefaults.of(llm, options)
        self._started = int(time.time())
        self._answered = 0
        self._bodies = Bodies()
        self._readers = Readers(options.queue)
        self._status_reader = anyio.CapacityLimiter(1)
        self._sessions = SessionCache(
            llm.session,
            most=places,
            chunk=llm.plan.longest_flight,
            failures=lambda: llm.failures,
        )
        self._activity = Activity()
        self._figures = Status(llm, self._activity, live=options.live)
        self._scheduler = llm.scheduler()
        self._admission = Admission(self._scheduler, places=places, queue=options.queue)
        self._metrics = Metrics(
            lambda: (
                *(*self._counts(), len(self._sessions), len(llm.failures)),
                *(self._scheduler.passes, self._scheduler.rows),
            ),
        )
        # Takes a moment for a large vocabulary: not while a request waits.
        _ = llm.tokenizer.bound
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
        resting = asyncio.create_task(self._return_memory())
        yield
        resting.cancel()
        self._readers.close()
        await asyncio.to_thread(self._admission.close)

    async def _return_memory(self) -> None:
        """Return freed memory when requests have ended: the heaps of threads keep 100 MiB or more."""
        returned = self._answered
        while True:
            await asyncio.sleep(REST_S)
            if returned != self._answered and not self.busy:
                returned = self._answered
                await asyncio.to_thread(return_freed_memory)

    @property
    def shares_exactly(self) -> bool:
        """Whether answers that depend on no other request may share passes."""
        return self._scheduler.shares_exactly

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return any(self._counts())

    @property
    def connections(self) -> int:
        """Connections at most."""
        return self._options.connections

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of prompts that run, and that wait or are read."""
        running, waiting = self._admission.counts()
        return running, waiting + self._readers.waiting

    def stop(self) -> None:
        """End running and waiting answers with an error."""
        self._admission.stop()

    def _endpoint(
        self, path: str, call: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                response = await call(request)
            except (GoneError, ClientDisconnect):
                response = Response(status_code=GONE)
            except Exception as error:  # noqa: BLE001 - the client gets it in OpenAI's form
                response = _error_response(error)
            self._metrics.answered(path, response.status_code)
            self._answered += request.method == "POST"
            return response

        return endpoint

    # -- answers -------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat_request)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, completion_request)

    async def _answer(
        self, request: Request, parse: Callable[[LLM, RequestDefaults, bytes], AnswerRequest]
    ) -> Response:
        name = self._options.name
        async with self._bodies.receive(request) as content:
            call = functools.partial(parse, self._llm, self.defaults, content)
            asked = await self._readers.read(request, len(content), call)
        del content, call
        count, room = len(asked.prompts[0]), self._admission.room(asked.tier)
        if count > room:
            raise RequestError(
                f"n is {count}, but there is memory for {room} sessions of tier {asked.tier}.", param="n"
            )
        reply = Reply(self._llm, name, asked)
        channel = Channel(self._scheduler.wake)
        tasks = self._start(asked, _owner(request, asked), channel)
        exchange = Exchange(request, channel, len(tasks), functools.partial(self._end, tasks))
        if asked.stream:
            return await exchange.streamed(reply, include_usage=asked.include_usage)
        return json_response(await exchange.whole(reply))

    def _start(self, asked: AnswerRequest, owner: str, channel: Channel) -> Sequence[ServedPrompt]:
        """Queue the work of a request; raises BusyError if too many wait."""
        tasks, first = [], 0
        for answers in asked.prompts:
            task = ServedPrompt(
                tier=asked.tier,
                answers=answers,
                first=first,
                reproducible=asked.reproducible and self._options.exact,
                owner=owner,
                cache=self._sessions,
                channel=channel,
                activity=self._activity,
                report=self._metrics.spent,
                ended=self._admission.ended,
            )
            tasks.append(task)
            first += len(answers)
        self._admission.submit(tasks)
        return tasks

    def _end(self, tasks: Sequence[ServedPrompt], error: BaseException | None) -> None:
        """End a request: its work, which may have ended, and its error, if one ended it."""
        self._admission.cancel(tasks)
        if isinstance(error, GoneError):
            self._metrics.aborted()

    async def _embeddings(self, _request: Request) -> Response:
        raise RequestError(
            f"{self._options.name!r} has no embeddings: heterollm runs models that write text.",
            fix="Use a model made for embeddings, in another program.",
            param="model",
            code="model_has_no_embeddings",
        )

    # -- what the server is --------------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._options.name:
            raise RequestError(
                f"There is no model {name!r:.100} here.", status=404, param="model", code="model_not_found"
            )
        return json_response(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self._options.name,
            "object": "model",
            "created": self._started,
            "owned_by": "heterollm",
            "context_length": self._llm.context,
            "default_sampling": {**self.defaults.sampling, "max_tokens": self.defaults.max_tokens},
        }

    async def _health(self, _request: Request) -> Response:
        running, waiting = self._counts()
        failure = self._scheduler.failure
        body = {
            "status": "failing" if failure else "ok",
            "running": running,
            "waiting": waiting,
            "error": str(failure) if failure else None,
        }
        return json_response(body, status=503 if failure else 200)

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, _request: Request) -> Response:
        running, waiting = self._counts()
        figures = await anyio.to_thread.run_sync(self._figures.read, limiter=self._status_reader)
        counts = {"running": running, "waiting": waiting, "sessions": len(self._sessions)}
        return json_response({"model": self._options.name, **counts, **figures})

    async def _show_page(self, _request: Request) -> Response:
        return page()


def _owner(request: Request, asked: AnswerRequest) -> str:
    """Return a name of those whose requests may reuse one another's sessions."""
    return repr((request.headers.get("authorization"), *asked.owner))


def _error_response(error: BaseException) -> Response:
    status, body, headers = error_answer(error)
    response = json_response(body, status)
    response.headers.update(headers)
    return response


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for these
    message = f"{error.detail}: {request.method} {request.url.path:.100}."
    return _error_response(RequestError(message, status=error.status_code, code="no_such_endpoint"))
