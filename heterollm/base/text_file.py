"""Text files that users name."""

from __future__ import annotations

from pathlib import Path

from heterollm.base.errors import InputError

__all__ = ["read_text"]


def read_text(path: Path) -> str:
    """Return the text of a file, without a byte order mark.

    Raises:
        InputError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:  # also names that are no paths
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{str(path)!r:.200} cannot be read: {reason}.", fix="Name a file of UTF-8 text."
        ) from error
