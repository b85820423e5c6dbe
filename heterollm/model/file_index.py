"""What is known of a file's content, kept until its path, size or modification time changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from heterollm.base import CacheError, atomic_path, cache_root, locked, parse_json

__all__ = ["FileIndex"]

logger = logging.getLogger(__name__)


class FileIndex:
    """A small JSON file of the cache folder: path, size and modification time to one text.

    It only ever saves work: an unreadable one counts as empty, and one that cannot be written is said.
    """

    def __init__(self, name: str) -> None:
        """Use the index ``<cache folder>/<name>.json``."""
        self._path = cache_root() / f"{name}.json"

    def get(self, file: Path) -> str | None:
        """Return what was stored for a file that has not changed since."""
        entry = self._read().get(str(file.resolve()))
        return entry[1] if entry is not None and entry[0] == _stamp(file) else None

    def put(self, file: Path, text: str) -> None:
        """Store a text for a file as it is now; entries of files that are gone are dropped."""
        try:
            with locked(self._path):
                entries = {path: entry for path, entry in self._read().items() if _exists(path)}
                entries[str(file.resolve())] = (_stamp(file), text)
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


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
