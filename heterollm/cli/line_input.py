"""Lines of a person: with editing, completion and a lasting history on a terminal, as they come elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prompt_toolkit.history import History

PROMPT: Final = "> "
OWNER_ONLY: Final = 0o600


def line_reader(commands: Sequence[str], note: Callable[[str], None]) -> Callable[[], str]:
    """Return a function that reads the next line.

    It raises EOFError at the end of the input and KeyboardInterrupt after Ctrl-C.

    Args:
        commands: Words at the beginning of a line that Tab completes.
        note: Shows a remark to the user.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input("")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    try:
        session: PromptSession[str] = PromptSession(
            history=_history(note),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_history_search=True,
        )
    except Exception as error:  # noqa: BLE001 - terminals that the library cannot drive raise errors of many kinds
        note(f"Line editing is off: {error or type(error).__name__}.")
        return lambda: input(PROMPT)
    return lambda: session.prompt(PROMPT)


def history_path() -> Path:
    """Return the file that keeps the lines of earlier dialogues."""
    import platformdirs

    return platformdirs.user_state_path("heterollm", appauthor=False) / "chat_history"


def _history(note: Callable[[str], None]) -> History:
    """Return the lasting history, or one of this dialogue if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))
    except (OSError, RuntimeError) as error:  # the latter without a home folder
        note(f"The history is not kept: {error}.")
        return InMemoryHistory()
    return FileHistory(str(path))
