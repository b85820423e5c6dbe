"""The cache of sessions: requests reuse the beginnings that their prompts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.engine import Session
from heterollm.serve.prefix_files import PrefixFiles

LEAST_LOSS: Final = 32
"""Tokens that a session may lose before it is copied instead, if there is room."""


@dataclass(slots=True)
class CachedSession:
    """A session, in use or kept.

    Args:
        session: The session.
        owner: Whose prompt it holds: no other's request may use it.
        used: Number of the last use; the smallest is evicted first.
        exact: Leading tokens that whole chunks of prompts have computed.
        begin: Tokens that it held when a request took it.
        busy: Whether a request uses it.
        shared: Tokens that a second request had in common with it.
    """

    session: Session
    owner: str = ""
    used: int = 0
    exact: int = 0
    begin: int = 0
    busy: bool = True
    shared: int = 0


class SessionCache:
    """Sessions of requests; only the engine thread may call it.

    A reproducible answer must not depend on the sessions that happen to be kept. Tokens of an answer and of a
    prompt, and chunks of different lengths, run on different kernels and graphs, which round differently. So
    such a request reuses whole chunks that a prompt has computed at the same place, and no other tokens.

    Args:
        new_session: Returns a new session.
        most: Sessions at most; more only while requests use them all, and share their memory.
        chunk: Tokens of the chunks that run at once.
        failures: Returns the failures of the NPU so far. After one, other processors compute the same tokens.
        files: Keeps beginnings that several requests share; None for none.
    """

    def __init__(
        self,
        new_session: Callable[[], Session],
        *,
        most: int,
        chunk: int,
        failures: Callable[[], Sequence[str]],
        files: PrefixFiles | None = None,
    ) -> None:
        self._new_session = new_session
        self._failures = failures
        self._files = PrefixFiles("", 0) if files is None else files
        self._known_failures = len(failures())
        self._most = most
        self._chunk = chunk
        self._uses = 0
        self._held: list[CachedSession] = []

    def __len__(self) -> int:
        """Return the number of sessions in memory."""
        return len(self._held)

    def take(self, prompt: NDArray[np.int32], *, reproducible: bool, owner: str = "") -> CachedSession:
        """Return a session for a prompt that holds a beginning of it, and nothing else.

        Args:
            prompt: Token ids, at least one; the last one is never reused, since its logits are needed.
            owner: Whose sessions may be reused: number and time of reused tokens tell how far a prompt agrees
                with an earlier one.
            reproducible: Whether to reuse only chunks that the prompt itself would compute in the same way.
        """
        if len(self._failures()) != self._known_failures:
            self._known_failures = len(self._failures())
            for held in self._held:
                held.exact, held.begin = 0, -1
        ids = prompt[:-1]
        best, reused = None, 0
        for held in self._held:
            if held.owner != owner:
                continue
            length = self._usable(held, ids, reproducible=reproducible)
            if length > reused:
                best, reused = held, length
        if (kept := self._from_file(ids, owner, reused)) is not None:
            return kept
        if best is None:
            return self._empty(owner)
        lost = best.session.position - reused
        if best.busy or (lost >= LEAST_LOSS and len(self._held) < self._most):
            best = self.copy(best)
        best.session.truncate(reused)
        best.busy, best.begin, best.shared = True, reused, reused
        best.exact = min(best.exact, reused // self._chunk * self._chunk)
        return self._touched(best)

    def copy(self, held: CachedSession) -> CachedSession:
        """Return a copy of a session, in use."""
        self._keep(self._most - 1)
        other = CachedSession(held.session.fork(), held.owner, exact=held.exact, begin=held.begin)
        self._held.append(other)
        return self._touched(other)

    def prefilled(self, held: CachedSession) -> None:
        """Note that a session holds the whole prompt."""
        # Behind an uneven place the chunks differ from those of the prompt alone.
        if held.exact == held.begin:
            held.exact = held.session.position // self._chunk * self._chunk

    def give_back(self, held: CachedSession) -> None:
        """Keep a session for later requests."""
        held.busy = False
        self._touched(held)
        if whole := min(held.shared, held.exact) // self._chunk * self._chunk:
            self._files.offer(held.session, whole, held.owner)
        self._keep(self._most)

    def _from_file(self, ids: NDArray[np.int32], owner: str, reused: int) -> CachedSession | None:
        """Return a session with a longer beginning of a prompt than those in memory, if one is kept."""
        if not self._known_failures and self._files.longest(ids, owner) > reused:
            held = self._empty(owner)
            if length := self._files.fill(held.session, ids, owner):
                held.begin = held.exact = length
                return held
            held.busy = False
        return None

    def _usable(self, held: CachedSession, ids: NDArray[np.int32], *, reproducible: bool) -> int:
        own = held.session.ids[: len(ids)]
        different = np.flatnonzero(own != ids[: len(own)])
        length = int(different[0]) if len(different) else len(own)
        if reproducible:
            length = min(length, held.exact) // self._chunk * self._chunk
        return held.session.reusable(length)

    def _empty(self, owner: str) -> CachedSession:
        self._keep(self._most - 1)
        held = CachedSession(self._new_session(), owner)
        self._held.append(held)
        return self._touched(held)

    def _keep(self, most: int) -> None:
        """Drop sessions beyond a number: those that no request uses, the least recently used one first."""
        idle = sorted((held for held in self._held if not held.busy), key=lambda held: held.used)
        for held in idle[: max(0, len(self._held) - most)]:
            self._held.remove(held)
            held.session.reset()  # its request may still hold it

    def _touched(self, held: CachedSession) -> CachedSession:
        self._uses += 1
        held.used = self._uses
        return held
