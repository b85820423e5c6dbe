"""Runs a server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from heterollm.base import GIB, OptionError, format_bytes
from heterollm.engine import SHORT_PASS, available_bytes
from heterollm.serve.app import Server
from heterollm.serve.connections import ServerConfig
from heterollm.serve.fleet import Fleet, ListedModel
from heterollm.serve.front import Front
from heterollm.serve.guard import is_loopback
from heterollm.serve.model_process import NoSessionError
from heterollm.serve.options import ServeOptions

if TYPE_CHECKING:
    from heterollm.llm import LLM

MOST_PLACES: Final = SHORT_PASS + 1
"""Sessions at once: those of a decode pass, and one for the tier ``priority``."""
UNKNOWN_BYTES: Final = 4 * GIB
"""Memory for the sessions of several models where the system does not tell how much is available."""
GRACE_S: Final = 15
"""Seconds for running answers after the signal to stop."""
POLL_S: Final = 0.1
SWITCH_S: Final = 0.001
"""Time that a thread may keep Python's lock while others wait, instead of 5 ms at each launch of a kernel."""


class _Uvicorn(uvicorn.Server):
    """A server that returns after a signal, when running answers have ended or after :data:`GRACE_S`.

    A second signal ends them at once.
    """

    def __init__(self, server: Server | Front, note: Callable[[str], None]) -> None:
        super().__init__(
            ServerConfig(server.app, connections=server.connections, timeout_graceful_shutdown=2 * GRACE_S)
        )
        self._server = server
        self._note = note
        self._hurry = threading.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first one stops the server, the second one its answers, too."""
        if self.should_exit and not self._hurry.is_set():
            self._hurry.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, and let the running ones end."""
        if self._server.busy:
            self._note(f"Running answers have {GRACE_S} s to end; Ctrl-C again ends them now.")
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        with contextlib.suppress(TimeoutError):
            # The event is set by a signal's handler, which does not wake the loop.
            async with asyncio.timeout(GRACE_S):
                while not self._hurry.is_set():
                    await asyncio.sleep(POLL_S)
        self._server.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(options: ServeOptions) -> socket.socket:
    """Return the socket of a server, on which clients wait, before a model is loaded for nothing.

    Raises:
        OptionError: The address is in use or not this machine's.
    """
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        if os.name == "posix":  # elsewhere it lets two programs take one port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        raise OptionError(
            f"Cannot listen on {options.host} port {options.port}: {reason}.",
            fix="--port 0 takes any free port." if taken else "Choose another --host or --port.",
        ) from error
    return bound


def serve(
    llm: LLM,
    options: ServeOptions,
    bound: socket.socket,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Serve a model until SIGINT or SIGTERM; running answers then have some seconds to end.

    Args:
        llm: The loaded model.
        options: The options.
        bound: The socket that :func:`listen` returned.
        say: Takes the addresses for the user.
        note: Takes remarks.

    Raises:
        NoSessionError: There is no memory for one session.
    """
    each = llm.session_bytes
    places = session_places(options, each)
    llm.limit_sessions(places + 1)  # the last one computes embeddings
    server = Server(llm, options, places)
    note(
        f"{places} sessions of {format_bytes(each)} at most; {options.queue} requests of each tier may wait."
    )
    if options.exact and not server.shares_exactly:
        note("Answers with a seed or temperature 0 share no passes with this plan; with --no-exact they do.")
    note(str(server.defaults))
    if not llm.tokenizer.has_chat_template:
        note("The model brings no chat template; a plain form is used.")
    _say_addresses(options.name, options, bound, say, note)
    sys.setswitchinterval(SWITCH_S)
    # The objects of the loaded libraries are many, and a collection among them stops every stream.
    gc.collect()
    gc.freeze()
    _Uvicorn(server, note).run(sockets=[bound])


def serve_several(
    models: Sequence[ListedModel],
    options: ServeOptions,
    bound: socket.socket,
    *,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Serve several models, each in a process that starts with its first request, until SIGINT or SIGTERM.

    Args:
        models: The models.
        options: The options of the server that forwards to them.
        bound: The socket that :func:`listen` returned.
        say: Takes the addresses for the user.
        note: Takes remarks.
    """
    idle = f", and unloaded after {options.idle_s / 60:g} idle minutes" if options.idle_s else ""
    note(f"Models, loaded when asked for{idle}: {', '.join(model.name for model in models)}")
    _say_addresses("The server", options, bound, say, note)
    fleet = Fleet(models, idle_s=options.idle_s, sessions_bytes=_allowed_bytes(options, UNKNOWN_BYTES))
    _Uvicorn(Front(fleet, options), note).run(sockets=[bound])


def _say_addresses(
    name: str,
    options: ServeOptions,
    bound: socket.socket,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(
        f"{name} answers OpenAI's clients at {address}/v1, Anthropic's and Ollama's at {address}\n"
        f"Chat in a browser at {address}/ (Ctrl-C ends the server)"
    )
    if not options.api_keys and not is_loopback(options.host):
        note("Everybody who reaches this address can use the model: set --api-key or HETEROLLM_API_KEY.")


def session_places(options: ServeOptions, each_bytes: int) -> int:
    """Return how many sessions a server of one model may have.

    Raises:
        NoSessionError: There is no memory for one.
    """
    allowed = _allowed_bytes(options, each_bytes)
    places = min(MOST_PLACES, allowed // each_bytes)
    if places < 1:
        raise NoSessionError(
            f"One session takes {format_bytes(each_bytes)}, but {format_bytes(allowed)} are for sessions.",
            needed_bytes=each_bytes,
            fix="Use a smaller --context, or a larger --sessions-gib.",
        )
    return places


def _allowed_bytes(options: ServeOptions, unknown_bytes: int) -> int:
    """Return the memory for sessions: that of the options, or a quarter of the available memory."""
    if options.sessions_gib is not None:
        return int(options.sessions_gib * GIB)
    available = available_bytes()
    return unknown_bytes if available is None else available // 4
