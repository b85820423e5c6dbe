"""The cache folder: where it is, and whether another user of the machine could have changed it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import platformdirs

from heterollm.base.errors import CacheError, see

CACHE_VARIABLE: Final = "HETEROLLM_CACHE"
"""Environment variable that moves the cache folder."""

SYSTEM_USERS: Final = range(1, 1001)
"""Numbers of users that are no people; Android's system, which owns the folders of all programs, is 1000."""

NOBODY: Final = 65534
"""Number that a container shows for owners from outside of it."""


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


def own_folder(kind: str) -> Path:
    """Return a subfolder of the cache, without creating it; nobody else can change its files.

    The cache folder itself may be a link, its subfolders may not: a user's link could lead anywhere.

    Raises:
        CacheError: It is a link, or another user of this machine can write it or the folders above it.
    """
    root = cache_root()
    folder = root / kind
    try:
        if folder.is_symlink():
            raise CacheError(
                f"{folder} is a link; heterollm follows none inside its cache.",
                fix=f"Delete the link, and point {CACHE_VARIABLE} at a folder on the other disk.",
            )
        # A folder that is not there yet is made with rights for its user alone.
        problem = _foreign_writer(folder, strict=True) or _foreign_writer(root)
        resolved = root.resolve()
        problem = problem or next(filter(None, map(_ancestor_writer, resolved.parents)), None)
    except (OSError, ValueError) as error:
        raise _unusable(root, getattr(error, "strerror", None) or str(error)) from error
    if problem is not None:
        raise CacheError(
            f"The cache folder {root} is not safe: {problem}.",
            fix=f"Take that right away (`chmod go-w`), or point {CACHE_VARIABLE} at a folder of your own. "
            + see("the-cache-cannot-be-written"),
        )
    return folder


def is_trusted(path: Path) -> bool:
    """Return whether nobody but this user and root can write a file; on Windows, always."""
    return _foreign_writer(path, strict=True) is None


def _foreign_writer(path: Path, *, strict: bool = False) -> str | None:
    """Return who else can write a file or folder; None for nobody, or if there is no such file.

    Args:
        path: The file.
        strict: Whether a sticky folder, in which each user has files of their own, counts as open to others.
    """
    status = _status(path)
    if status is None or os.name == "nt":
        return None
    if status.st_uid not in {os.geteuid(), 0}:
        return f"{path} belongs to another user (number {status.st_uid})"
    return None if not strict and status.st_mode & stat.S_ISVTX else _open_to_others(path, status)


def _ancestor_writer(path: Path) -> str | None:
    """Return who could put another folder in the place of one below; None for nobody."""
    status = _status(path)
    if status is None or os.name == "nt":
        return None
    if status.st_uid not in {os.geteuid(), 0, NOBODY} and status.st_uid not in SYSTEM_USERS:
        return f"{path} belongs to another user (number {status.st_uid})"
    return None if status.st_mode & stat.S_ISVTX else _open_to_others(path, status)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _open_to_others(path: Path, status: os.stat_result) -> str | None:
    if status.st_mode & stat.S_IWOTH:
        return f"every user of this machine can write {path}"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        return f"other users, of group {status.st_gid}, can write {path}"
    return None


def _is_private(group: int) -> bool:
    """Return whether a group is one that its user's account has for itself, as with a umask of 002."""
    import grp
    import pwd

    if group == 0:
        return True  # root can write everything
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _unusable(folder: Path | str, reason: str) -> CacheError:
    return CacheError(
        f"The cache folder {folder} cannot be used: {reason}.",
        fix=f"Point {CACHE_VARIABLE} at a folder. " + see("the-cache-cannot-be-written"),
    )
