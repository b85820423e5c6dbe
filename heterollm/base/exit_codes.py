"""The exit codes of the command, for the program, its help and the docs."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
PARTLY: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""As shells report SIGINT and SIGPIPE: 128 plus the signal's number."""

EXIT_CODES: Final = {
    DONE: "it worked",
    FAILED: "an error; stderr says what failed and what to do",
    USAGE: "wrong usage: no such command, option or value",
    PARTLY: "some configurations of a bench failed; the others have rows",
    INTERRUPTED: "Ctrl-C; 143 where the system ended it",
    BROKEN_PIPE: "nobody read the output to its end",
}
"""Meaning of every exit code."""
