"""What the command ends with, once for the program, its help and the docs."""

from __future__ import annotations

from typing import Final

__all__ = ["BROKEN_PIPE", "DONE", "EXIT_CODES", "FAILED", "INTERRUPTED", "USAGE"]

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The last two as shells report a process that a signal ended: 128 and its number."""

EXIT_CODES: Final = {
    DONE: "it worked",
    FAILED: "an error; stderr says what failed and what to do",
    USAGE: "wrong usage: no such command, option or value",
    INTERRUPTED: "Ctrl-C; 143 where the system ended it",
    BROKEN_PIPE: "nobody read the output to its end",
}
"""Every exit code of the command, and what it means."""
