"""Connections within bounds: their number, their rests, and the time that their bytes take to parse.

uvicorn bounds none of these: at its limit of connections it refuses requests, though idle sockets hold the
places; its keep-alive time restarts with every byte; a body of one-byte chunks keeps the loop for a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S: Final = 15.0
"""Time of a connection without the whole head of a request."""

STALL_S: Final = 60.0
"""Time of a connection whose client reads nothing of an answer."""

CHECK_S: Final = 1.0
READ_BYTES: Final = 4096
BODY_READ_BYTES: Final = 1 << 16
"""Bytes of a connection that are parsed at once, and of a body of known length, which is quick to parse.
Without a limit asyncio reads 256 KiB."""

PARSE_S: Final = 0.005
"""Time for parsing in one round of the loop, after which answers of others are sent."""

MOST_PARSE_S: Final = 1.0
"""Time to parse one request; 8 MiB in ordinary pieces take a tenth."""

BACKLOG: Final = 128
"""Connections that one round of the loop accepts."""


class ServerConfig(uvicorn.Config):
    """The configuration of uvicorn for a server of one model.

    Args:
        app: The application.
        connections: Connections at most.
        options: Further options of uvicorn.
    """

    def __init__(self, app: ASGIApp, *, connections: int, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(
            app,
            http=Connection,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(IDLE_S),
            **options,
        )
        self.most_connections = connections
        self.parsing = _Parsing()


class Connection(H11Protocol):
    """A connection that makes room for newer ones.

    Beyond the limit the connection goes that has waited longest for a request or for its body: clients that
    connect and say nothing, or little, lose their places to those that send a request.
    """

    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; end the connection that has waited longest if there are too many."""
        super().connection_made(transport)
        self._read_at_once(READ_BYTES)
        self.parse_s = 0.0
        self._unsent = 0
        self.rests_since_s = time.monotonic()
        self._check_timer = self.loop.call_later(CHECK_S, self._check)
        if len(self.connections) > self.config.most_connections:
            waits = [one for one in self.connections if isinstance(one, Connection) and not one.is_busy]
            oldest = min(waits, key=lambda one: one.rests_since_s)  # itself at least
            oldest.transport.abort()
            self.connections.discard(oldest)

    @property
    def is_busy(self) -> bool:
        """Whether a whole request has come, and its answer has not been written."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """Parse bytes, or wait for a turn to do so."""
        self.config.parsing.take(self, data)

    def parse(self, data: bytes) -> None:
        """Parse bytes and start the requests that are complete with them."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        has_length = self.headers and all(name != b"transfer-encoding" for name, _ in self.headers)
        in_body = has_length and self.cycle is not None and self.cycle.more_body
        self._read_at_once(BODY_READ_BYTES if in_body else READ_BYTES)

    def _read_at_once(self, size: int) -> None:
        if hasattr(self.transport, "max_size"):
            self.transport.max_size = size

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.parse_s = 0.0
        self.rests_since_s = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._check_timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Close a connection that rests, and drop one whose bytes nobody reads."""
        now_s, unsent = time.monotonic(), self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self.rests_since_s = unsent, now_s
        closing = self.transport.is_closing()
        answered = self.cycle is None or self.cycle.response_complete
        if unsent and now_s - self.rests_since_s > STALL_S:
            self.transport.abort()
        elif not unsent and answered and not closing and now_s - self.rests_since_s > IDLE_S:
            self.transport.close()
        self._check_timer = self.loop.call_later(CHECK_S, self._check)


class _Parsing:
    """Shares the time for parsing among connections, a piece each in turns."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Connection, bytes]] = deque()
        self._left_s = PARSE_S
        self._is_scheduled = False

    def take(self, connection: Connection, data: bytes) -> None:
        """Parse bytes now, or in a later round if this one has no time left."""
        if self._waiting or self._left_s <= 0:
            connection.transport.pause_reading()
            self._waiting.append((connection, data))
        else:
            self._parse(connection, data)
        self._schedule(connection.loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._begin_round, loop)

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled, self._left_s = False, PARSE_S
        while self._waiting and self._left_s > 0:
            connection, data = self._waiting.popleft()
            self._parse(connection, data)
            if not connection.flow.read_paused and not connection.transport.is_closing():
                connection.transport.resume_reading()
        if self._waiting:
            self._schedule(loop)

    def _parse(self, connection: Connection, data: bytes) -> None:
        begin_s = time.thread_time()
        connection.parse(data)
        took_s = time.thread_time() - begin_s
        self._left_s -= took_s
        connection.parse_s += took_s
        if connection.parse_s > MOST_PARSE_S:
            connection.transport.abort()
