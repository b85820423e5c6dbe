"""Reads requests: receives their bodies within bounds of time and memory, and tokenises them on threads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.requests import Request

from heterollm.serve.admission import BusyError
from heterollm.serve.errors import GoneError, RequestError

T = TypeVar("T")

MOST_BODY_BYTES: Final = 8 << 20
MOST_BODIES_BYTES: Final = 64 << 20
"""Bytes of all bodies that have come and were not read yet."""

BODY_S: Final = 30.0
"""Time for a client to send a body."""

SHORT_BYTES: Final = 64 << 10
"""Largest body that others do not hold up: neither their memory nor their tokenising."""

SHORT_READERS: Final = 2
LONG_READERS: Final = 1
STEP_BYTES: Final = 1 << 18


@dataclass(eq=False, slots=True)
class _Body:
    """A body in memory: its bytes so far, and its time limit as long as it comes."""

    timeout: asyncio.Timeout | None
    size: int = 0
    dropped: bool = False


class Bodies:
    """The bodies of requests, within a limit of their memory.

    Beyond it the long body goes that has been coming for longest: a client that stops in the middle loses to
    one that sends its whole body.

    Args:
        most_bytes: The limit; short bodies have their own room.
    """

    def __init__(self, most_bytes: int = MOST_BODIES_BYTES) -> None:
        self._most = most_bytes
        self._held: dict[_Body, None] = {}

    @property
    def size(self) -> int:
        """Bytes of long bodies."""
        return sum(body.size for body in self._held if body.size > SHORT_BYTES)

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Give the body of a request, whose memory counts until the block ends.

        Raises:
            RequestError: It is too large or comes too slowly.
            BusyError: Other bodies take the memory.
        """
        if int(request.headers.get("content-length", "0")) > MOST_BODY_BYTES:
            raise _too_large()
        content = bytearray()
        body = _Body(asyncio.timeout(BODY_S))
        self._held[body] = None
        try:
            assert body.timeout is not None
            try:
                async with body.timeout:
                    async for part in request.stream():
                        content += part
                        self._grow(body, len(content))
            except TimeoutError:
                if body.dropped:
                    raise _no_memory() from None
                raise RequestError(f"The body took more than {BODY_S:.0f} s.", status=408) from None
            body.timeout = None
            yield bytes(content)
        finally:
            self._held.pop(body, None)

    def _grow(self, body: _Body, size: int) -> None:
        if size > MOST_BODY_BYTES:
            raise _too_large()
        body.size = size
        while size > SHORT_BYTES and self.size > self._most:
            coming = (one for one in self._held if one.timeout is not None and one.size > SHORT_BYTES)
            oldest = next(coming)  # this one at least
            if oldest is body:
                raise _no_memory()
            assert oldest.timeout is not None
            oldest.dropped = True
            oldest.timeout.reschedule(asyncio.get_running_loop().time())
            del self._held[oldest]


def _too_large() -> RequestError:
    return RequestError(f"The body exceeds {MOST_BODY_BYTES} bytes.", status=413)


def _no_memory() -> BusyError:
    return BusyError("Other long requests take the memory for bodies.", retry_s=1, code="bodies_full")


class Readers:
    """Threads that decode and tokenise requests beside the engine thread; some of them read only short ones.

    Args:
        queue: Requests that wait for a thread at most.
    """

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._waiting = 0
        self._mean_s = 0.1
        self._short = _Lane(SHORT_READERS)
        self._long = _Lane(LONG_READERS)

    @property
    def waiting(self) -> int:
        """Requests that are read or wait for it."""
        return self._waiting

    async def read(self, request: Request, size: int, call: Callable[[], T]) -> T:
        """Run a call on a thread and return its result.

        Args:
            request: If its client leaves, a call that has not begun never does.
            size: Bytes of its body.
            call: Decodes the body.

        Raises:
            BusyError: Too many wait.
            GoneError: The client has left.
        """
        if self._waiting >= self._queue:
            retry_s = min(60, max(1, math.ceil(self._mean_s * self._waiting)))
            raise BusyError(f"{self._waiting} requests wait to be read, and no more may.", retry_s=retry_s)
        lane = self._short if size <= SHORT_BYTES else self._long
        self._waiting += 1
        reading = asyncio.create_task(lane.run(self._timed, call))
        leaving = asyncio.create_task(left(request))
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise GoneError
            return await reading
        finally:
            self._waiting -= 1
            reading.cancel()
            leaving.cancel()

    def _timed(self, call: Callable[[], T]) -> T:
        begin_s = time.monotonic()
        try:
            return call()
        finally:
            self._mean_s += 0.1 * (time.monotonic() - begin_s - self._mean_s)

    def close(self) -> None:
        """Let the threads end after their calls."""
        self._short.close()
        self._long.close()


class _Lane:
    """Threads, and the queue of calls for them: one that is cancelled leaves it."""

    def __init__(self, threads: int) -> None:
        self._free = asyncio.Semaphore(threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="heterollm-reader")

    async def run(self, timed: Callable[[Callable[[], T]], T], call: Callable[[], T]) -> T:
        await self._free.acquire()
        result = asyncio.get_running_loop().run_in_executor(self._threads, _caught, timed, call)
        # A call that has begun keeps its thread to its end, also without its client.
        result.add_done_callback(lambda _: self._free.release())
        value = await asyncio.shield(result)
        if isinstance(value, _Raised):
            raise value.error
        return value

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


def _caught(timed: Callable[[Callable[[], T]], T], call: Callable[[], T]) -> T | _Raised:
    try:
        return timed(call)
    except Exception as error:  # noqa: BLE001 - raised in the task that waits, if it still does
        return _Raised(error)
    except BaseException as error:  # noqa: BLE001 - a panic in a library: nobody may catch it as one
        return _Raised(RuntimeError(f"{type(error).__name__}: {error}"))


async def left(request: Request) -> None:
    """Return when the client has left, after the body of its request has come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_values(content: bytes, most: int) -> None:
    """Refuse JSON text of very many values before it is decoded, which would keep Python's lock.

    Args:
        content: The text; it need not be JSON.
        most: Values and fields at most, by the commas and brackets outside of strings.

    Raises:
        RequestError: There are more.
    """
    # Without escapes every quote begins or ends a string.
    plain = content.replace(rb"\\", b"__").replace(rb"\"", b"__")
    place = values = 0
    while place >= 0:
        quote = plain.find(b'"', place)
        end = len(plain) if quote < 0 else quote
        for begin in range(place, end, STEP_BYTES):
            until = min(end, begin + STEP_BYTES)
            values += sum(plain.count(sign, begin, until) for sign in (b",", b"[", b"{"))
            if values > most:
                raise RequestError(f"The body has more than {most} values.", code="too_many_values")
        if quote < 0:
            return
        place = plain.find(b'"', quote + 1) + 1 or -1
