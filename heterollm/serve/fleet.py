"""Models of a server, loaded when a request asks for them and unloaded when they rest or memory is short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from heterollm.engine import available_bytes
from heterollm.serve.admission import BusyError
from heterollm.serve.errors import RequestError
from heterollm.serve.model_process import ModelProcess, NoSessionError, Run

logger = logging.getLogger(__name__)

MARGIN: Final = 1.25
"""Memory of a loaded model over the bytes of its files: caches, programs, and the process itself."""

CHECK_S: Final = 1.0
AGAIN_S: Final = 5
"""Seconds after which a model may be in use no more."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that the server can load.

    Args:
        name: Its name in requests.
        size_bytes: Bytes of its weights' files; 0 if unknown.
        run: Serves it in a process.
    """

    name: str
    size_bytes: int
    run: Run


@dataclass(eq=False, slots=True)
class _Entry:
    """A model, and its process if it is loaded.

    Args:
        model: The model.
        process: The process.
        sessions_bytes: Bytes that its sessions may take.
        refused: Has the bytes of one session, if there was no memory for it.
        users: Requests that use it.
        used_s: Time of the last one's end.
        lock: Held while it is loaded or unloaded.
    """

    model: ListedModel
    process: ModelProcess | None = None
    sessions_bytes: int = 0
    refused: NoSessionError | None = None
    users: int = 0
    used_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """Processes that serve a model each; for one event loop.

    Args:
        models: The models, with different names.
        idle_s: Time without a request after which a model is unloaded; 0 for never.
        sessions_bytes: Bytes that the sessions of all models may take together.
        start: Starts the process of a model.
        available: Returns the bytes of memory that are available; None if unknown.
    """

    def __init__(
        self,
        models: Sequence[ListedModel],
        *,
        idle_s: float,
        sessions_bytes: int,
        start: Callable[[str, Run, int], ModelProcess] = ModelProcess,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._entries = {model.name: _Entry(model) for model in models}
        self._idle_s = idle_s
        self._sessions_bytes = sessions_bytes
        self._start = start
        self._available = available

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(self._entries)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return tuple(name for name, entry in self._entries.items() if entry.process is not None)

    @property
    def requests(self) -> int:
        """Requests that use a model or wait for one."""
        return sum(entry.users for entry in self._entries.values())

    def find(self, name: str | None) -> str:
        """Return the model that a request names; without a name the one that was used last, or the first.

        Raises:
            RequestError: There is no such model.
        """
        if name is None:
            return max(self._entries.values(), key=lambda entry: entry.used_s).model.name
        for own in (name, name.removesuffix(":latest")):
            if own in self._entries:
                return own
        raise RequestError(
            f"There is no model {name!r:.100} here.",
            fix=f"Name one of {', '.join(self._entries):.500}.",
            status=404,
            param="model",
            code="model_not_found",
        )

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[int]:
        """Give the port of a model, which is loaded first if it is not, and stays until the block ends.

        Raises:
            HeteroLLMError: It cannot be loaded.
        """
        entry = self._entries[name]
        entry.users += 1
        entry.used_s = time.monotonic()
        try:
            # Whoever asks first loads it, also for the others; a client that leaves stops no load.
            yield await asyncio.shield(self._port(entry))
        finally:
            entry.users -= 1
            entry.used_s = time.monotonic()

    def port(self, name: str) -> int | None:
        """Return the port of a model if it is loaded: a look at it, which is no use."""
        process = self._entries[name].process
        return process.port if process is not None and process.is_alive else None

    async def watch(self) -> None:
        """Unload models that rest, and forget processes that ended, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for entry in self._entries.values():
                rests = self._idle_s and not entry.users and now_s - entry.used_s > self._idle_s
                ended = entry.process is not None and not entry.process.is_alive
                if entry.process is not None and (rests or ended) and not entry.lock.locked():
                    async with entry.lock:
                        await self._unload(entry)

    def stop(self) -> None:
        """End all answers with an error."""
        for entry in self._entries.values():
            if entry.process is not None:
                entry.process.kill()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*map(self._unload, self._entries.values()))

    async def _port(self, entry: _Entry) -> int:
        async with entry.lock:
            if entry.process is not None and not entry.process.is_alive:
                logger.warning("The process of %s ended; it is loaded again.", entry.model.name)
                await self._unload(entry)
            if entry.process is None:
                await self._make_room(entry)
                entry.process = await self._started(entry)
            return entry.process.port

    async def _started(self, entry: _Entry) -> ModelProcess:
        """Start the process of a model.

        Its sessions get half of the memory that is left, those of the last model all. If that is too little
        for one session, models that nobody uses give way.

        Raises:
            NoSessionError: All of the memory is too little for one.
            BusyError: Models in use have it.
        """
        while True:
            least = 0 if entry.refused is None else entry.refused.needed_bytes
            while self._left_bytes < least:
                if not await self._unload_oldest():
                    raise BusyError("Other models have the memory for sessions.", retry_s=AGAIN_S)
            waiting = sum(not other.sessions_bytes for other in self._entries.values())
            entry.sessions_bytes = given = max(least, self._left_bytes // min(2, waiting))
            try:
                process = await asyncio.to_thread(self._start, entry.model.name, entry.model.run, given)
                await asyncio.to_thread(process.wait)
            except BaseException as error:
                entry.sessions_bytes = 0
                if not isinstance(error, NoSessionError) or error.needed_bytes > self._sessions_bytes:
                    raise
                entry.refused = error
            else:
                entry.sessions_bytes = process.sessions_bytes
                return process

    @property
    def _left_bytes(self) -> int:
        """Bytes for sessions that no model has."""
        return self._sessions_bytes - sum(entry.sessions_bytes for entry in self._entries.values())

    async def _make_room(self, entry: _Entry) -> None:
        """Unload models until one more fits; if it never does, its own check of memory says what it lacks."""
        needed = int(MARGIN * entry.model.size_bytes)
        while (available := self._available()) is not None and available < needed:
            if not await self._unload_oldest():
                return

    async def _unload_oldest(self) -> bool:
        """Unload the model that nobody uses and that rests for longest; return whether there was one."""
        others = [
            other
            for other in self._entries.values()
            if other.process is not None and not other.users and not other.lock.locked()
        ]
        if not others:
            return False
        oldest = min(others, key=lambda other: other.used_s)
        async with oldest.lock:
            if not oldest.users:
                await self._unload(oldest)
        return True

    @staticmethod
    async def _unload(entry: _Entry) -> None:
        process, entry.process = entry.process, None
        if process is not None:
            await asyncio.to_thread(process.close)
            entry.sessions_bytes = 0
