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

__all__ = ["CACHE_VARIABLE", "atomic_path", "cache_name", "cache_root", "load_or_make", "locked"]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "HETEROLLM_CACHE"
"""Environment variable that moves the cache folder."""

LOCK_TIMEOUT_S = 1800.0
"""Longest wait for another process that builds the same file: a large model's graphs take minutes."""

LONGEST_WORDS: Final = 60
"""Longest readable part of a file name; Windows allows 260 characters for a whole path by default."""

LONGEST_PREFIX: Final = 100
"""Characters of a file's name that the name of its temporary file repeats."""


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


def cache_root() -> Path:
    """Return the cache folder, ``$HETEROLLM_CACHE`` or the platform's user cache, without creating it.

    Raises:
        CacheError: The folder lies in a home folder that does not exist, or below a file.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        text = named or platformdirs.user_cache_dir("heterollm", False)
    except RuntimeError as error:  # of newer platformdirs
        raise _unusable("of this user", "there is no home folder ~") from error
    # Without an error: an unknown home folder remains `~` or `~name`, as in older platformdirs.
    root = Path(os.path.expanduser(text))  # noqa: PTH111
    first = Path(text).parts[0]
    home = Path(os.path.expanduser(first if first[0] == "~" else "~"))  # noqa: PTH111
    if (first[0] == "~" or not named) and root.is_relative_to(home) and not os.path.isdir(home):  # noqa: PTH112
        raise _unusable(root, f"there is no home folder {home}")
    if not os.path.isdir(root):  # noqa: PTH112 - raises nothing
        file = next((path for path in (root, *root.parents) if os.path.isfile(path)), None)  # noqa: PTH113
        if file is not None:
            raise _unusable(root, f"{file} is a file")
    return root


def _unusable(folder: Path | str, reason: str) -> CacheError:
    return CacheError(
        f"The cache folder {folder} cannot be used: {reason}.",
        fix=f"Point {CACHE_VARIABLE} at a folder. " + see("the-cache-cannot-be-written"),
    )


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it when the block ends without an error.

    Raises:
        CacheError: The folder cannot be written, the disk is full, or ``target`` is a folder or a device;
            ``target`` keeps its old content.
    """
    temporary: Path | None = None
    try:
        if target.exists() and not target.is_file():  # root could replace /dev/null
            raise OSError(errno.EINVAL, "it is no plain file")
        target.parent.mkdir(parents=True, exist_ok=True)
        name = f".{target.name[:LONGEST_PREFIX]}.{secrets.token_hex(8)}.partial"
        # With the user's default permissions: other users read pages and plans too.
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
    """Hold the lock file ``<target>.lock``, so that a second process waits and then reuses the file.

    Raises:
        CacheError: The lock cannot be created, or its holder did not release it within half an hour.
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
        return read(path.read_bytes())
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
