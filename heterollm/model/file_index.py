"""What is known of a file's content, kept as long as its path and its stamp stay the same."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from heterollm.base import CacheError, atomic_path, cache_root, locked, parse_json

__all__ = ["FileIndex"]

logger = logging.getLogger(__name__)


class FileIndex:
    """A small JSON file of the cache folder: path and stamp to one text.

    The stamp is size, modification time, inode and change time, so that a file counts as another one although
    it has the size and modification time of the one that it replaces. Where the system keeps no inode or
    change time nothing is stored, and the caller reads the file's content each time. The index only saves
    work: an unreadable one counts as empty, and one that cannot be written is logged.
    """

    def __init__(self, name: str) -> None:
        """Use the index ``<cache folder>/<name>.json``."""
        self._path = cache_root() / f"{name}.json"

    def get(self, file: Path) -> str | None:
        """Return what was stored for a file that has not changed since."""
        stamp = _stamp(file)
        entry = self._read().get(str(file.resolve()))
        return entry[1] if stamp is not None and entry is not None and entry[0] == stamp else None

    def put(self, file: Path, text: str) -> None:
        """Store a text for a file as it is now; entries of files that are gone are dropped."""
        stamp = _stamp(file)
        if stamp is None:
            return
        try:
            with locked(self._path):
                entries = {path: entry for path, entry in self._read().items() if _exists(path)}
                entries[str(file.resolve())] = (stamp, text)
                with atomic_path(self._path) as temporary:
                    temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        except CacheError as error:
            logger.warning("%s", error)

    def _read(self) -> dict[str, tuple[str, str]]:
        try:
            content = parse_json(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict):
            return {}
        entries = {}
        for path, entry in content.items():
            match entry:
                case [str(stamp), str(text)]:
                    entries[path] = (stamp, text)
        return entries


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def _stamp(file: Path) -> str | None:
    """Return the state of a file in one line; None where the system cannot tell it from that of another."""
    status = file.stat()
    # The change time cannot be set by programs, but Windows gives the time of creation in its place; some
    # network and memory-card file systems have no inodes.
    if os.name == "nt" or not status.st_ino:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"
