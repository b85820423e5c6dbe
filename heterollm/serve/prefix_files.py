"""Beginnings of prompts that several requests share, kept on disk for the next start of the server."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import HeteroLLMError, delete_quietly, own_entries, own_folder
from heterollm.engine import Prefix, Session, open_prefix

logger = logging.getLogger(__name__)

FOLDER: Final = "prefixes"


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A file: its path, tokens and owner."""

    path: Path
    ids: NDArray[np.int32]
    owner: str


class PrefixFiles:
    """The files of a folder of the cache; those of other models count towards the bound, and are not read.

    The engine thread calls the methods, and a thread of this object writes.

    Args:
        key: Identity of all that determines the states: model, precision, plan, device and program.
        most_bytes: Bytes of all files at most; 0 keeps none.
    """

    def __init__(self, key: str, most_bytes: int) -> None:
        self._key = key
        self._most_bytes = most_bytes
        self._writer = ThreadPoolExecutor(1, "heterollm-prefixes")
        self._writing: Future[None] | None = None
        self._kept: list[_Kept] = list(self._found()) if most_bytes else []

    def __len__(self) -> int:
        """Return the number of files of this model."""
        return len(self._kept)

    def longest(self, ids: NDArray[np.int32], owner: str) -> int:
        """Return the length of the longest beginning of tokens that is kept; 0 for none."""
        kept = self._longest(ids, owner)
        return 0 if kept is None else len(kept.ids)

    def fill(self, session: Session, ids: NDArray[np.int32], owner: str) -> int:
        """Put that beginning into an empty session; return its length, or 0 if its file is of no use."""
        kept = self._longest(ids, owner)
        if kept is None:
            return 0
        try:
            session.load_prefix(open_prefix(kept.path))
            os.utime(kept.path)  # the last one used is the last one deleted
        except (HeteroLLMError, OSError) as error:
            logger.warning("The kept beginning of a prompt is read again: %s", error)
            self._forget(kept)
            return 0
        return len(kept.ids)

    def offer(self, session: Session, length: int, owner: str) -> None:
        """Keep the first tokens of a session, unless they are kept, or another file is being written."""
        ids = session.ids[:length]
        size_bytes = session.memory_bytes * length // session.context
        busy = self._writing is not None and not self._writing.done()
        known = any(kept.owner == _hashed(owner) and _begins(ids, kept.ids) for kept in self._kept)
        if busy or known or size_bytes > self._most_bytes or session.reusable(length) != length:
            return
        prefix, name = session.copy_prefix(length), hashlib.sha256(ids.tobytes())
        name.update(f"{self._key} {owner}".encode())
        kept = _Kept(own_folder(FOLDER) / f"{name.hexdigest()[:32]}.safetensors", ids, _hashed(owner))
        self._writing = self._writer.submit(self._write, prefix, kept)

    def close(self) -> None:
        """Wait for the file that is being written."""
        self._writer.shutdown()

    def _longest(self, ids: NDArray[np.int32], owner: str) -> _Kept | None:
        name = _hashed(owner) if self._kept else ""
        fitting = [kept for kept in self._kept if kept.owner == name and _begins(kept.ids, ids)]
        return max(fitting, key=lambda one: len(one.ids), default=None)

    def _write(self, prefix: Prefix, kept: _Kept) -> None:
        try:
            prefix.write(kept.path, {"key": self._key, "owner": kept.owner})
        except HeteroLLMError as error:
            logger.warning("The beginning of a prompt is not kept: %s", error)
            return
        self._kept = [*self._kept, kept]
        self._make_room()

    def _make_room(self) -> None:
        """Delete the files that were not used for longest, until the others are within the bound."""
        found = []
        for path in own_entries(FOLDER):
            with contextlib.suppress(OSError):  # another process has deleted it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        size_bytes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if size_bytes <= self._most_bytes:
                break
            delete_quietly(path)
            size_bytes -= size
            self._kept = [kept for kept in self._kept if kept.path != path]

    def _found(self) -> Iterator[_Kept]:
        for path in own_entries(FOLDER):
            if path.suffix != ".safetensors":
                continue
            try:
                file = open_prefix(path)
            except HeteroLLMError as error:
                logger.warning("A kept beginning of a prompt is deleted: %s", error)
                delete_quietly(path)
                continue
            if file.metadata.get("key") == self._key:
                yield _Kept(path, np.array(file.bits("ids")), file.metadata.get("owner", ""))

    def _forget(self, kept: _Kept) -> None:
        self._kept = [one for one in self._kept if one is not kept]
        delete_quietly(kept.path)


def _begins(ids: NDArray[np.int32], others: NDArray[np.int32]) -> bool:
    return len(ids) <= len(others) and np.array_equal(ids, others[: len(ids)])


def _hashed(owner: str) -> str:
    """Return a name of an owner that does not tell its key."""
    return hashlib.sha256(owner.encode()).hexdigest()
