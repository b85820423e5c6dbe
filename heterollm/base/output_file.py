"""Output files that the user names: checked before the work begins, and replaced atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from heterollm.base.cache import atomic_path
from heterollm.base.errors import CacheError, OptionError
from heterollm.base.own_files import LABEL


def labelled(path: Path, *, simulated: bool = True) -> Path:
    """Return the path of an output file; with simulated times ``game.json`` becomes ``game.simulated.json``.

    Args:
        path: The path that the user named.
        simulated: Whether the file holds simulated times.
    """
    if not simulated or LABEL in path.name.lower() or not path.name or os.path.isdir(path):  # noqa: PTH112 - no error
        return path  # an error about a folder has the folder's own name
    return path.with_name(f"{path.stem}.{LABEL}{path.suffix}")


def check_folder(path: Path, what: str) -> None:
    """Check, before the work begins, that a file can be written into an existing folder.

    Args:
        path: The file.
        what: Its content for errors, such as ``page``.

    Raises:
        OptionError: The path is a folder, or its folder does not exist.
    """
    if os.path.isdir(path) or not os.path.isdir(path.parent):  # noqa: PTH112 - these raise nothing
        raise OptionError(
            f"The {what} cannot be written to {str(path)!r:.200}.",
            fix="Name a file in a folder that is there.",
        )
    check_target(path, what)


def check_target(path: Path, what: str = "trace") -> None:
    """Check, before the work begins, that a file can be written, and create its folder.

    Args:
        path: The file.
        what: Its content for errors, such as ``trace``.

    Raises:
        OptionError: The file cannot be written; the message has the reason.
    """
    try:
        if path.is_dir():
            raise OptionError(f"{path} is a folder.", fix=f"Name a file for the {what}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        with contextlib.suppress(FileNotFoundError):
            path.lstat()  # raises where the name is too long
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no plain file.", fix=f"Name a file for the {what}.")
    except (OSError, ValueError) as error:  # such as names that are no paths
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"The {what} cannot be written to {str(path)!r:.200}: {reason}.", fix="Name another place."
        ) from error


def save_file(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        OptionError: The file cannot be written.
    """
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except CacheError as error:
        raise OptionError(error.message, fix="Name another place.") from error
