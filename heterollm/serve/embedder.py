"""Embeddings for requests: one text after the other, between the turns of answers."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from heterollm.base import ContextError, InputError, OptionError, UnsupportedModelError
from heterollm.engine import check_dimensions
from heterollm.serve.about import About
from heterollm.serve.admission import BusyError, stops
from heterollm.serve.answers import Spent
from heterollm.serve.errors import GoneError, RequestError
from heterollm.serve.reading import left

if TYPE_CHECKING:
    from heterollm.llm import LLM


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A checked request.

    Args:
        texts: Tokens of each text.
        dimensions: Leading elements of the embeddings; None for all.
        write: Returns the body of the answer with embeddings and seconds, in the form of the door.
    """

    texts: Sequence[NDArray[np.int32]]
    dimensions: int | None
    write: Callable[[Sequence[NDArray[np.float32]], float], dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


def embedding_texts(
    about: About,
    texts: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None = None,
    cut: bool = False,
    param: str = "input",
) -> list[NDArray[np.int32]]:
    """Return the tokens of texts.

    Args:
        about: Has the model.
        texts: Texts or token ids.
        dimensions: Elements of an embedding; only checked.
        cut: Whether to leave out the ends of texts that are too long.
        param: The door's name of the texts.

    Raises:
        RequestError: The model has no embeddings, or none of these dimensions; or a text has no tokens.
        ContextError: A text is too long.
    """
    try:
        pooling = about.llm.pooling
    except UnsupportedModelError as error:
        raise RequestError(error.message, fix=error.fix, param="model") from error
    if pooling is None:
        raise RequestError(
            f"{about.name!r} has no embeddings: its checkpoint declares no pooling (modules.json).",
            fix="Serve a model made for embeddings, such as Qwen3-Embedding.",
            param="model",
            code="model_has_no_embeddings",
        )
    try:
        check_dimensions(dimensions, about.llm.config.hidden_size)
        return [about.llm.embedding_ids(text, cut=cut) for text in texts]
    except ContextError:
        raise
    except (InputError, OptionError) as error:
        name = "dimensions" if isinstance(error, OptionError) else param
        raise RequestError(error.message, fix=error.fix, param=name) from error


class Embedder:
    """Computes the embeddings of one request after the other.

    Between the chunks of a text the engine runs the turns of answers.

    Args:
        llm: The model.
        queue: Requests that wait at most.
        report: Takes the tokens and times of a request.
    """

    def __init__(self, llm: LLM, queue: int, report: Callable[[Spent], None]) -> None:
        self._llm = llm
        self._queue = queue
        self._report = report
        self._requests = 0
        self._one = anyio.CapacityLimiter(1)
        self._closed = False

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self._requests

    def stop(self) -> None:
        """End all requests at the next chunk."""
        self._closed = True

    async def run(self, request: Request, asked: EmbeddingRequest) -> dict[str, Any]:
        """Return the body of the answer.

        Raises:
            BusyError: Too many wait, or the server stops.
            GoneError: The client has left.
            HeteroLLMError: A processor failed.
        """
        if self._requests > self._queue:
            raise BusyError(f"{self._requests - 1} requests for embeddings wait.", retry_s=1)
        self._requests += 1
        gone, begin_s = threading.Event(), time.monotonic()
        watch = asyncio.create_task(left(request))
        watch.add_done_callback(lambda _: gone.set())
        try:
            call = functools.partial(self._compute, asked, gone, begin_s)
            vectors = await anyio.to_thread.run_sync(call, limiter=self._one)
        finally:
            self._requests -= 1
            watch.cancel()
        return asked.write(vectors, time.monotonic() - begin_s)

    def _compute(
        self, asked: EmbeddingRequest, gone: threading.Event, asked_s: float
    ) -> list[NDArray[np.float32]]:
        def check() -> bool:
            if self._closed:
                raise stops()
            if gone.is_set():
                raise GoneError
            return False

        begin_s, made = time.monotonic(), []
        for ids in asked.texts:
            check()
            made.append(self._llm.embedding(ids, dimensions=asked.dimensions, stopped=check))
        prefill_s = time.monotonic() - begin_s
        self._report(Spent(asked.tokens, queued_s=begin_s - asked_s, prefill_s=prefill_s))
        return made
