"""Deletes damaged compiled programs from PoCL's cache, which would kill the process with SIGBUS or SIGABRT.

A list holds the checksums of all programs at the last successful run; a program that differs is deleted
before PoCL starts. Each process that loads programs has a marker file. A marker of a dead process means that
some program may have killed it, so all programs are deleted and compiled again.
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from heterollm.base import (
    CACHE_VARIABLE,
    DeviceError,
    atomic_path,
    delete_quietly,
    format_bytes,
    is_trusted,
    parse_json,
    see,
)

logger = logging.getLogger(__name__)

ROOM_BYTES: Final = 32 << 20
"""Free space that compiling needs; a whole profile of a machine leaves 2 MB of programs."""

LIST: Final = ".checksums.json"
MARKER: Final = ".loading-"

# The folder in use and the lock on this process's marker, until the programs are known to be sound.
_guarded: Path | None = None
_marker: FileLock | None = None


def guard_programs(folder: Path) -> None:
    """Check PoCL's cache folder before PoCL opens it, and create this process's marker, once.

    Raises:
        DeviceError: The disk has too little room to compile; PoCL would abort the process.
        OSError: The folder cannot be written.
    """
    global _guarded, _marker
    if _marker is not None and folder == _guarded:  # PoCL was not found, and is looked for again
        return
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < ROOM_BYTES:
        raise DeviceError(
            f"Only {format_bytes(free_bytes)} are free in {folder}, too little to compile OpenCL programs.",
            fix=f"Free {format_bytes(ROOM_BYTES)}, or point {CACHE_VARIABLE} at another folder. "
            + see("the-cache-cannot-be-written"),
        )
    if _someone_died(folder):
        logger.warning(
            "Compiling OpenCL programs again: a process ended while it loaded them from %s.", folder
        )
        for program in _programs(folder):
            delete_quietly(program)
    known = _known(folder)
    damaged = {
        file
        for file, checksum in known.items()
        if _checksum(folder / file) not in (checksum, None) or not is_trusted(folder / file)
    }
    if damaged:
        logger.warning(
            "%d compiled OpenCL programs in %s are damaged; compiling again.", len(damaged), folder
        )
        for file in damaged:
            delete_quietly(folder.joinpath(*Path(file).parts[:2]))
    marker = FileLock(folder / f"{MARKER}{secrets.token_hex(8)}")
    marker.acquire()
    _guarded, _marker = folder, marker
    atexit.register(programs_are_sound)


def programs_are_sound() -> None:
    """Write the checksums of all programs and delete this process's marker.

    Called after a model has run, and at a normal exit.
    """
    global _marker
    if _marker is None or _guarded is None:
        return
    found = {
        file.relative_to(_guarded).as_posix(): checksum
        for program in _programs(_guarded)
        for file in program.rglob("*")
        if file.name != "last_accessed" and (checksum := _checksum(file)) is not None
    }
    try:
        with atomic_path(_guarded / LIST) as temporary:
            temporary.write_text(json.dumps(found, indent=0), encoding="utf-8")
        delete_quietly(Path(_marker.lock_file))
        _marker.release()
    except Exception as error:  # noqa: BLE001 - this may run while the interpreter ends
        logger.info("Checksums of OpenCL programs are not kept: %s", error)
    _marker = None


def _someone_died(folder: Path) -> bool:
    """Return whether a process died while its marker existed."""
    died = False
    for path in folder.glob(f"{MARKER}*"):
        lock = FileLock(path, timeout=0)
        try:
            with lock:
                died = True
                delete_quietly(path)
        except Timeout:  # it is alive
            continue
    return died


def _programs(folder: Path) -> Iterator[Path]:
    """Yield PoCL's program folders, two levels below."""
    return (path for path in folder.glob("??/*") if path.is_dir())


def _known(folder: Path) -> dict[str, int]:
    try:
        content = parse_json((folder / LIST).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {
        file: value for file, value in content.items() if type(value) is int and ".." not in Path(file).parts
    }


def _checksum(file: Path) -> int | None:
    """Return the CRC-32 of a file, or None if it cannot be read."""
    try:
        return zlib.crc32(file.read_bytes())
    except OSError:
        return None
