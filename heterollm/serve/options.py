"""The options of a server."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from heterollm.base import OptionError
from heterollm.engine import USUAL_GAPS
from heterollm.text import GenerationOptions, SamplingOptions

MOST_CHOICES: Final = 16
"""Answers that one request may ask for."""

ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
"""An origin as browsers send it: in small letters, without a path."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of a server.

    Args:
        host: Address to listen on.
        port: Its port; 0 for any free one.
        name: The model's name in requests and answers.
        api_keys: Keys of which requests must have one; empty for none. Different keys share no sessions.
        cors: Origins of pages that browsers let use the server.
        sessions_gib: Memory of all sessions; None for a quarter of the available memory.
        prefixes_gib: Disk for the beginnings of prompts that several requests share; 0 for none.
        idle_s: Time without a request after which a server of several models unloads one; 0 for never.
        gaps: Usual times between two of its tokens for which prompts may keep an answer waiting.
        queue: Requests that wait at most, of each service tier.
        connections: Connections at most; beyond them the one goes that has waited longest for a request.
        sampling: Sampling parameters of requests that do not have them, by name.
        max_tokens: Tokens of an answer at most where a request does not say; None for the context.
        exact: Whether answers with a seed, or with temperature 0, depend on no other request.
        live: Whether the model records a trace, so that the page shows how busy both processors are.

    Raises:
        OptionError: A value is illegal.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    name: str = "model"
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    sessions_gib: float | None = None
    prefixes_gib: float = 0.0
    idle_s: float = 0.0
    gaps: float = USUAL_GAPS
    queue: int = 64
    connections: int = 512
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    exact: bool = True
    live: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port is {self.port}, but must be 0 to 65535.")
        GenerationOptions(sampling=SamplingOptions(**self.sampling), max_new_tokens=self.max_tokens)
        if self.queue < 1:
            raise OptionError(f"--queue is {self.queue}, but must be at least 1.")
        if self.sessions_gib is not None and not self.sessions_gib > 0:
            raise OptionError(f"--sessions-gib is {self.sessions_gib}, but must be above 0.")
        if not 0 <= self.prefixes_gib < math.inf:
            raise OptionError(f"--prefixes-gib is {self.prefixes_gib}, but must be at least 0.")
        if not 0 <= self.idle_s < math.inf:
            raise OptionError(f"--idle-minutes is {self.idle_s / 60:g}, but must be at least 0.")
        if not 1 <= self.gaps < math.inf:
            raise OptionError(f"--gaps is {self.gaps:g}, but must be at least 1.")
        if self.connections < 1:
            raise OptionError(f"--connections is {self.connections}, but must be at least 1.")
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
                raise OptionError(
                    "An API key is empty or has characters that a header cannot hold.",
                    fix="Give ASCII characters without space at the ends, or leave the key out.",
                )
        for origin in self.cors:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise OptionError(
                    f"--cors is {origin!r:.80}, which is no origin.",
                    fix="Give one such as https://example.org.",
                )
