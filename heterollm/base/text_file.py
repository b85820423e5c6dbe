"""Reads files that users and checkpoints name: no device, no pipe that never ends, no more than a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from heterollm.base.errors import InputError
from heterollm.base.units import MIB, format_bytes

LARGEST_TEXT_BYTES: Final = 256 * MIB
LARGEST_RECORDS_BYTES: Final = 256 * MIB
"""Largest file of records; a profile of a whole device takes some megabytes."""


def read_file(path: Path, limit_bytes: int = LARGEST_RECORDS_BYTES, *, pipes: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        limit_bytes: Most bytes that it may have.
        pipes: Whether it may be a pipe, a terminal or another device, which is read up to the limit.

    Raises:
        OSError: It cannot be read, is no plain file, or is too large.
        ValueError: The name is no path.
    """
    # A pipe without a writer would hold a blocking open for ever.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | (0 if pipes else getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        plain = stat.S_ISREG(status.st_mode)
        if not plain and not pipes:
            raise OSError(errno.EINVAL, "it is no plain file")
        if plain and status.st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"it has more than {format_bytes(limit_bytes)}")
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(limit_bytes)}")
    return content


def read_text(path: Path) -> str:
    """Return the text of a file or a pipe, without a byte order mark.

    Raises:
        InputError: The file cannot be read, is too large, or is not UTF-8.
    """
    try:
        content = read_file(path, LARGEST_TEXT_BYTES, pipes=True).decode("utf-8-sig")
    except (OSError, ValueError) as error:  # also names that are no paths
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{str(path)!r:.200} cannot be read: {reason}.", fix="Name a file of UTF-8 text."
        ) from error
    return content.replace("\r\n", "\n").replace("\r", "\n")  # as Python's text files do
