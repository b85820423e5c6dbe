"""Writes files of the cache so that a crash never damages one."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from filelock import FileLock, Timeout

from heterollm.base.cache_place import CACHE_VARIABLE
from heterollm.base.errors import CacheError, HeteroLLMError, see
from heterollm.base.own_files import make_parent, scratch_file
from heterollm.base.text_file import read_file

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 1800.0
"""Longest wait for another process that builds the same file: a large model's graphs take minutes."""

LONGEST_WORDS: Final = 60
"""Longest readable part of a file name; Windows allows 260 characters for a whole path by default."""


def cache_name(words: str, key: str) -> str:
    """Return the name of a cache file without its ending, legal and distinct on every system.

    Windows forbids most punctuation, a dot or blank at the end, and names such as ``con``, ``nul`` or
    ``com1``, and ignores case. So the words are reduced to lower-case ASCII letters and digits, and the key,
    which distinguishes files, ends the name.

    Args:
        words: Any text that people recognise the file by, such as the name of a device.
        key: A hash in lower-case hexadecimal digits.

    Raises:
        ValueError: The key is not such a hash.
    """
    if not re.fullmatch(r"[0-9a-f]{8,64}", key):
        raise ValueError(f"{key!r:.80} is no key of a file name")
    plain = re.sub(r"[^a-z0-9_]+", "-", words.lower())[:LONGEST_WORDS].strip("-_")
    return f"{plain}-{key}" if plain else key


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it when the block ends without an error.

    Raises:
        CacheError: The folder cannot be written, the disk is full, or ``target`` is a folder or a device;
            ``target`` keeps its old content.
    """
    try:
        if target.exists() and not target.is_file():  # root could replace /dev/null
            raise OSError(errno.EINVAL, "it is no plain file")
        make_parent(target)
        with scratch_file(target) as temporary:
            yield temporary
            temporary.replace(target)
    except OSError as error:
        raise cache_error(target, error) from error


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock file ``<target>.lock``, so that a second process waits and then reuses the file.

    Raises:
        CacheError: The lock cannot be created, or its holder did not release it within half an hour.
    """
    lock_path = target.with_name(target.name + ".lock")
    try:
        make_parent(target)
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


def load_or_make(
    path: Path, again: str, *, read: Callable[[bytes], T], make: Callable[[], T], text: Callable[[T], str]
) -> T:
    """Return the value of a cache file; if the file is missing or damaged, make the value and store it.

    A cache that cannot be read or written costs time and is no error.

    Args:
        path: The file.
        again: Name of the repeated work for the log, such as ``solving again``.
        read: Returns the value from the file's content, or raises an error of this package.
        make: Returns a new value.
        text: Returns the file's content from a value.
    """
    try:
        return read(read_file(path))
    except FileNotFoundError:
        pass
    except (OSError, HeteroLLMError) as error:
        logger.warning("The kept file %s is not used (%s); %s", path, error, again)
    value = make()
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(text(value), "utf-8")
    except CacheError as error:
        logger.warning("The new value is not kept: %s", error)
    return value


def cache_error(target: Path, error: OSError) -> CacheError:
    """Return the error for a cache file that cannot be read or written."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return CacheError(
        f"Cannot write {target}: {reason}.",
        fix=f"Free some space (`heterollm cache clear`), or point {CACHE_VARIABLE} at another folder.",
    )
