"""The endpoints: those of the doors, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from heterollm.base import GIB
from heterollm.engine import return_freed_memory
from heterollm.serve import markdown
from heterollm.serve.about import About
from heterollm.serve.admission import Admission
from heterollm.serve.answers import ServedPrompt
from heterollm.serve.asking import AnswerRequest
from heterollm.serve.channel import LARGE_BATCH, Channel
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors import (
    anthropic,
    llama_cpp,
    ollama,
    ollama_embeddings,
    ollama_models,
    openai_embeddings,
    openai_models,
    responses,
)
from heterollm.serve.doors.openai import chat_request, completion_request
from heterollm.serve.doors.openai_replies import OpenAIReply
from heterollm.serve.doors.responses_reply import ResponseReply
from heterollm.serve.embedder import Embedder, EmbeddingRequest
from heterollm.serve.errors import GoneError, RequestError, error_response, json_response
from heterollm.serve.exchange import Exchange
from heterollm.serve.guard import Guard, owner_of
from heterollm.serve.metrics import Metrics
from heterollm.serve.options import ServeOptions
from heterollm.serve.page import page
from heterollm.serve.prefix_files import PrefixFiles
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

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Read: TypeAlias = Callable[["LLM", RequestDefaults, bytes], AnswerRequest | dict[str, Any]]
"""Reads the body of a request for an answer; returns the response if there is nothing to compute."""

ANSWERS: Final[Mapping[str, tuple[Read, type[Reply]]]] = {
    "/v1/chat/completions": (chat_request, OpenAIReply),
    "/v1/completions": (completion_request, OpenAIReply),
    "/v1/messages": (anthropic.messages_request, anthropic.MessageReply),
    "/api/chat": (ollama.chat_request, ollama.OllamaChatReply),
    "/api/generate": (ollama.generate_request, ollama.OllamaTextReply),
}
"""The paths of answers: the reader of their bodies and the writer of their replies."""

EMBEDDINGS: Final[Mapping[str, Callable[[About, bytes], EmbeddingRequest]]] = {
    "/v1/embeddings": openai_embeddings.embeddings_request,
    "/api/embed": ollama_embeddings.embed_request,
    "/api/embeddings": ollama_embeddings.old_embed_request,
}
"""The paths of embeddings."""

READS: Final[Mapping[str, Callable[[About, bytes], object]]] = {
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/api/show": ollama_models.show,
    "/tokenize": llama_cpp.tokenize,
    "/detokenize": llama_cpp.detokenize,
    "/markdown": markdown.draw,
}
"""The paths of bodies that need no pass of the model."""

FACTS: Final[Mapping[str, Callable[[About, Request], object]]] = {
    "/v1/models": openai_models.models,
    "/v1/models/{name:path}": openai_models.model,
    "/api/tags": ollama_models.tags,
    "/api/ps": ollama_models.processes,
    "/api/version": ollama_models.version,
    "/v1/responses/{id}": responses.kept_response,
    "/props": llama_cpp.props,
    "/slots": llama_cpp.slots,
}
"""The paths that describe the model and the server."""


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
        self._answered = 0
        self._bodies = Bodies()
        self._readers = Readers(options.queue)
        self._status_reader = anyio.CapacityLimiter(1)
        self._prefix_files = PrefixFiles(llm.state_key, int(options.prefixes_gib * GIB))
        self._sessions = SessionCache(
            llm.session,
            most=places,
            chunk=llm.plan.longest_flight,
            failures=lambda: llm.failures,
            files=self._prefix_files,
        )
        self._activity = Activity()
        self._figures = Status(llm, self._activity, live=options.live)
        self._scheduler = llm.scheduler(gaps=options.gaps)
        self._admission = Admission(
            self._scheduler, places=places, queue=options.queue, need=llm.sessions_taken
        )
        self._about = About(llm, self.defaults, int(time.time()), self._admission)
        self._metrics = Metrics(
            lambda: (
                *(*self._counts(), len(self._sessions), len(llm.failures)),
                *(self._scheduler.passes, self._scheduler.rows),
            )
        )
        self._embedder = Embedder(llm, options.queue, self._metrics.spent)
        # Takes a moment for a large vocabulary: not while a request waits.
        _ = llm.tokenizer.bound
        routes: Sequence[tuple[str, str, Endpoint]] = (
            ("/", "GET", self._show_page),
            ("/status", "GET", self._status),
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._show_metrics),
            *((path, "GET", functools.partial(self._tell, call)) for path, call in FACTS.items()),
            ("/v1/responses", "POST", self._respond),
            ("/v1/responses/{id}", "DELETE", functools.partial(self._tell, responses.forget_response)),
            *((path, "POST", functools.partial(self._return, call)) for path, call in READS.items()),
            *((path, "POST", functools.partial(self._answer, *door)) for path, door in ANSWERS.items()),
            *((path, "POST", functools.partial(self._embed, read)) for path, read in EMBEDDINGS.items()),
        )
        self.app = Starlette(
            routes=[
                Route(path, self._endpoint(path, call), methods=[method]) for path, method, call in routes
            ],
            middleware=guards(options),
            exception_handlers={HTTPException: no_such_route},
            lifespan=self._life,
        )

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        resting = asyncio.create_task(self._return_memory())
        yield
        resting.cancel()
        self._readers.close()
        self._embedder.stop()
        await asyncio.to_thread(self._admission.close)
        await asyncio.to_thread(self._prefix_files.close)

    async def _return_memory(self) -> None:
        """Free the memory of ended requests, of which cycles and heaps of threads keep 100 MiB or more."""
        returned = self._answered
        while True:
            await asyncio.sleep(REST_S)
            if returned != self._answered and not self.busy:
                returned = self._answered
                # Errors hold their requests in cycles, of which nothing else may remind Python for long.
                await asyncio.to_thread(gc.collect)
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
        return running + self._embedder.requests, waiting + self._readers.waiting

    def stop(self) -> None:
        """End running and waiting answers with an error."""
        self._admission.stop()
        self._embedder.stop()

    def _endpoint(self, path: str, call: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            response = await answered(call, request)
            self._metrics.answered(path, response.status_code)
            self._answered += request.method == "POST"
            return response

        return endpoint

    # -- answers -------------------------------------------------------------------------------------

    async def _read(self, request: Request, call: Callable[[bytes], T]) -> T:
        """Return the result of a call with the body, on a thread of readers."""
        async with self._bodies.receive(request) as content:
            return await self._readers.read(request, len(content), functools.partial(call, content))

    async def _answer(self, read: Read, reply: type[Reply], request: Request) -> Response:
        asked = await self._read(request, functools.partial(read, self._llm, self.defaults))
        if isinstance(asked, dict):
            return json_response(asked)
        room, need = self._admission.room(asked.tier), max(map(self._llm.sessions_taken, asked.prompts))
        if need > room:
            raise RequestError(
                f"n is {len(asked.prompts[0])}, which takes the memory of {need:.1f} sessions, but there are"
                f" {room} of tier {asked.tier}.",
                fix="Give a smaller n or max_tokens.",
                param="n",
            )
        answer = reply(self._llm, self._options.name, asked)
        channel = Channel(self._scheduler.wake, 1 if asked.stream else LARGE_BATCH)
        tasks = self._start(asked, _owner(request, asked), channel)
        exchange = Exchange(request, channel, len(tasks), functools.partial(self._end, tasks))
        if asked.stream:
            return await exchange.streamed(answer)
        return json_response(await exchange.whole(answer))

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

    async def _embed(self, read: Callable[[About, bytes], EmbeddingRequest], request: Request) -> Response:
        asked = await self._read(request, functools.partial(read, self._about))
        try:
            return json_response(await self._embedder.run(request, asked))
        except GoneError:
            self._metrics.aborted()
            raise

    # -- what the server is --------------------------------------------------------------------------

    async def _respond(self, request: Request) -> Response:
        read = functools.partial(responses.response_request, self._about, owner_of(request.headers))
        return await self._answer(lambda _llm, _defaults, content: read(content), ResponseReply, request)

    async def _tell(self, call: Callable[[About, Request], object], request: Request) -> Response:
        return json_response(call(self._about, request))

    async def _return(self, call: Callable[[About, bytes], object], request: Request) -> Response:
        return json_response(await self._read(request, functools.partial(call, self._about)))

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
    return repr((owner_of(request.headers), *asked.owner))


def guards(options: ServeOptions) -> list[Middleware]:
    """Return what checks a request before it is read."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors),
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", "X-Api-Key", "Anthropic-Version"],
    )
    return [*((cors,) if options.cors else ()), Middleware(Guard, options=options)]


async def answered(call: Endpoint, request: Request) -> Response:
    """Return the answer of an endpoint, or its error in the form of the path's door."""
    try:
        return await call(request)
    except (GoneError, ClientDisconnect):
        return Response(status_code=GONE)
    except Exception as error:  # noqa: BLE001 - the client gets it
        return error_response(request.url.path, error)


async def no_such_route(request: Request, error: Exception) -> Response:
    """Answer a request for a path that there is not."""
    assert isinstance(error, HTTPException)  # it is registered for these
    path = request.url.path
    message = f"{error.detail}: {request.method} {path:.100}."
    return error_response(path, RequestError(message, status=error.status_code, code="no_such_endpoint"))
