"""An index of texts about files, valid as long as path and stamp of the file stay the same."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from heterollm.base.cache import atomic_path, locked
from heterollm.base.cache_place import own_folder
from heterollm.base.errors import CacheError
from heterollm.base.strict_json import parse_json

logger = logging.getLogger(__name__)


class FileIndex:
    """A JSON file in the cache folder that maps path and stamp of a file to a text.

    The stamp has size, modification time, inode and change time, so that it detects a replacement of equal
    size and modification time. On systems without inode or change time the index stores nothing, and the
    caller reads the file each time. An unreadable index counts as empty; a write error is logged.
    """

    def __init__(self, name: str) -> None:
        """Use the index ``checks/<name>.json`` in the cache folder."""
        self._path = own_folder("checks") / f"{name}.json"

    def get(self, file: Path) -> str | None:
        """Return the text of an unchanged file; None without one."""
        return self.get_all([file]).get(file)

    def get_all(self, files: Iterable[Path]) -> dict[Path, str]:
        """Return the texts of unchanged files."""
        entries, found = self._read(), {}
        for file in files:
            stamp, entry = _stamp(file), entries.get(str(file.resolve()))
            if stamp is not None and entry is not None and entry[0] == stamp:
                found[file] = entry[1]
        return found

    def put(self, file: Path, text: str) -> None:
        """Store the text of a file in its present state, and drop the entries of missing files."""
        self.put_all({file: text})

    def put_all(self, texts: Mapping[Path, str]) -> None:
        """Store the texts of files in their present state, and drop the entries of missing files."""
        stamped = {str(file.resolve()): (_stamp(file), text) for file, text in texts.items()}
        new = {path: (stamp, text) for path, (stamp, text) in stamped.items() if stamp is not None}
        if not new:
            return
        try:
            with locked(self._path):
                entries = {path: entry for path, entry in self._read().items() if _exists(path)} | new
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
    """Return the stamp of a file; None on systems without inode or change time."""
    status = file.stat()
    # Programs cannot set the change time. Windows reports the creation time instead, and some network and
    # memory-card file systems have no inodes.
    if os.name == "nt" or not status.st_ino:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"
