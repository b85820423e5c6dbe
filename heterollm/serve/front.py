"""A server of several models: lists them, and forwards a request to the process of its model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from heterollm.serve.app import Endpoint, answered, guards, no_such_route
from heterollm.serve.doors import ollama_models
from heterollm.serve.errors import RequestError, json_response
from heterollm.serve.fleet import Fleet
from heterollm.serve.forwarding import EndedError, forward
from heterollm.serve.options import ServeOptions
from heterollm.serve.page import page
from heterollm.serve.reading import Bodies

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
"""Time until a process whose connection closed is known to have ended."""


class _Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None


class Front:
    """Several models behind HTTP; :attr:`app` is the ASGI application.

    Args:
        fleet: The models.
        options: The options; the models' processes have their own.
    """

    def __init__(self, fleet: Fleet, options: ServeOptions) -> None:
        self._fleet, self._options = fleet, options
        self._started_s = int(time.time())
        self._bodies = Bodies()
        own: Sequence[tuple[str, str, Endpoint]] = (
            ("/", "GET", self._show_page),
            ("/health", "GET", self._health),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._model),
            ("/api/tags", "GET", functools.partial(self._tags, lambda: fleet.names)),
            ("/api/ps", "GET", functools.partial(self._tags, lambda: fleet.loaded)),
            ("/api/version", "GET", self._version),
            ("/status", "GET", self._status),
            ("/{path:path}", "GET", self._look),
            ("/{path:path}", "POST", self._forward),
            ("/{path:path}", "DELETE", self._look),
        )
        self.app = Starlette(
            routes=[
                Route(path, functools.partial(answered, call), methods=[method]) for path, method, call in own
            ],
            middleware=guards(options),
            exception_handlers={HTTPException: no_such_route},
            lifespan=self._life,
        )

    @property
    def connections(self) -> int:
        """Connections at most."""
        return self._options.connections

    def stop(self) -> None:
        """End running and waiting answers with an error."""
        self._fleet.stop()

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        return bool(self._fleet.requests)

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._fleet.watch())
        yield
        watching.cancel()
        await self._fleet.close()

    async def _forward(self, request: Request) -> Response:
        """Forward a request to the model that its body names, which is loaded for it.

        If its process ends before the answer begins, it is loaded again, once.
        """
        async with self._bodies.receive(request) as body:
            name = self._fleet.find(_model_of(body))
            try:
                return await self._sent(request, body, name)
            except EndedError as error:
                logger.warning("%s: %s", name, error)
                await asyncio.sleep(AGAIN_S)
                return await self._sent(request, body, name)

    async def _sent(self, request: Request, body: bytes, name: str) -> Response:
        async with AsyncExitStack() as held:
            port = await held.enter_async_context(self._fleet.use(name))
            return await forward(request, body, port, held)

    async def _look(self, request: Request) -> Response:
        """Return what a loaded model says: that of the query, or else the first that knows the path."""
        given = request.query_params.get("model")
        names = self._fleet.loaded if given is None else (self._fleet.find(given),)
        for port in filter(None, map(self._fleet.port, names)):
            async with AsyncExitStack() as held:
                response = await forward(request, await request.body(), port, held)
            if response.status_code != 404:
                return response
            await response.discard()
        raise RequestError(
            f"No loaded model has {request.url.path!r:.100}.",
            fix="Ask a model for an answer first: that loads it.",
            status=404,
            code="model_not_loaded",
        )

    async def _status(self, request: Request) -> Response:
        """Return the figures of a model for the page; of one that is not loaded its name."""
        name = self._fleet.find(request.query_params.get("model"))
        if self._fleet.port(name) is not None:
            return await self._look(request)
        return json_response({"model": name, "loaded": False})

    async def _show_page(self, _request: Request) -> Response:
        return page()

    async def _health(self, _request: Request) -> Response:
        counts = {"running": self._fleet.requests, "waiting": 0, "error": None}
        return json_response({"status": "ok", **counts, "loaded": self._fleet.loaded})

    async def _models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": list(map(self._description, self._fleet.names))})

    async def _model(self, request: Request) -> Response:
        return json_response(self._description(self._fleet.find(request.path_params["name"])))

    def _description(self, name: str) -> dict[str, Any]:
        loaded = name in self._fleet.loaded
        own = {"id": name, "object": "model", "type": "model", "display_name": name}
        return {**own, "created": self._started_s, "owned_by": "heterollm", "loaded": loaded}

    @staticmethod
    async def _tags(names: Callable[[], Sequence[str]], _request: Request) -> Response:
        """Return models in Ollama's form."""
        return json_response({"models": [{"name": name, "model": name} for name in names()]})

    async def _version(self, _request: Request) -> Response:
        return json_response({"version": ollama_models.API_VERSION})


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; the model's process says what else is wrong with it."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        found = msgspec.json.decode(body, type=_Named)
        return found.model or found.name
    return None
