"""The cache folder: where it is, and how files in it are written so that a crash never damages one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import platformdirs
from filelock import FileLock, Timeout

from heterollm.base.errors import CacheError, HeteroLLMError, see

__all__ = ["CACHE_VARIABLE", "atomic_path", "cache_name", "cache_root", "kept", "locked"]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "HETEROLLM_CACHE"
"""Environment variable that moves the cache folder."""

LOCK_TIMEOUT_S = 1800.0
"""How long to wait for another process that builds the same file: a large model's graphs take minutes."""


LONGEST_WORDS: Final = 60
"""Characters of a file's name that people read; Windows gives whole paths 260 by default."""

LONGEST_PREFIX: Final = 100
"""Characters of a file's name that are in the name of the one beside it that becomes it."""


def cache_name(words: str, key: str) -> str:
    """Return the name of a cache file without its ending, legal and distinct on every system.

    Windows allows neither ``:`` nor most other punctuation, no dot or blank at the end, no ``con``, ``nul``
    or ``com1``, and does not tell capitals from small letters. So the words keep their letters and digits of
    ASCII, small, and the key, which tells files apart, ends the name.

    Args:
        words: What people recognise the file by, such as the name of a device; may be anything.
        key: A hash in small hexadecimal digits.

    Raises:
        ValueError: The key is none.
    """
    if not re.fullmatch(r"[0-9a-f]{8,64}", key):
        raise ValueError(f"{key!r:.80} is no key of a file name")
    plain = re.sub(r"[^a-z0-9_]+", "-", words.lower())[:LONGEST_WORDS].strip("-_")
    return f"{plain}-{key}" if plain else key


def cache_root() -> Path:
    """Return the cache folder (not created): ``$HETEROLLM_CACHE`` or the platform's user cache."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("heterollm", False))


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it when the block ends without an error.

    Raises:
        CacheError: The folder cannot be written, the disk is full, or ``target`` is a folder or a device;
            it keeps its old content.
    """
    temporary: Path | None = None
    try:
        if target.exists() and not target.is_file():  # whoever may replace /dev/null must not do so
            raise OSError(errno.EINVAL, "it is no plain file")
        target.parent.mkdir(parents=True, exist_ok=True)
        name = f".{target.name[:LONGEST_PREFIX]}.{secrets.token_hex(8)}.partial"
        # With the rights that the user's files have: pages and plans are for others to read, too.
        os.close(os.open(target.with_name(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        temporary = target.with_name(name)
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise cache_error(target, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the per-file lock ``<target>.lock``, so that a second process waits and then reuses the file.

    Raises:
        CacheError: The lock cannot be made, or its holder did not let go within half an hour.
    """
    lock_path = target.with_name(target.name + ".lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path, timeout=LOCK_TIMEOUT_S)
        lock.acquire()
    except Timeout as error:
        raise CacheError(
            f"{lock_path} has been held by another process for {LOCK_TIMEOUT_S:.0f} s.",
            fix="Stop that process, or delete the lock file if it is gone. "
            + see("the-cache-cannot-be-written"),
        ) from error
    except OSError as error:
        raise cache_error(target, error) from error
    try:
        yield
    finally:
        lock.release()


T = TypeVar("T")


def kept(
    path: Path, again: str, *, read: Callable[[bytes], T], make: Callable[[], T], text: Callable[[T], str]
) -> T:
    """Return what a file keeps; what is missing or damaged is made anew, and then kept.

    A cache that cannot be read or written costs time and is no error.

    Args:
        path: The file.
        again: What making it anew is, for the log, such as ``solving again``.
        read: Returns it from the file's content, or raises an error of this package.
        make: Returns a new one.
        text: Returns the content of its file.
    """
    try:
        return read(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, HeteroLLMError) as error:
        logger.warning("The kept file %s is not used (%s); %s", path, error, again)
    made = make()
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text(made), "utf-8")
    except CacheError as error:
        logger.warning("What was made is not kept: %s", error)
    return made


def cache_error(target: Path, error: OSError) -> CacheError:
    """Return the error to raise when a file of the cache cannot be written or read."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return CacheError(
        f"Cannot write {target}: {reason}.",
        fix=f"Free some space (`heterollm cache clear`), or point {CACHE_VARIABLE} at another folder.",
    )
