"""Keeps the command line's streams clean: results on stdout, everything else on stderr, closed ones named."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from heterollm.base.errors import HeteroLLMError, InputError

STDOUT: Final = 1
STDERR: Final = 2

CONTROLS: Final = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}
"""Control characters, and those that turn the direction of text, with the pictures that stand for them."""


def visible(text: str) -> str:
    """Return a text whose control characters a terminal shows instead of obeying; lines and tabs stay."""
    return text.translate(CONTROLS)


def hold_descriptors() -> None:
    """Lead a closed stdin, stdout or stderr to the null device, so that no other file takes its descriptor.

    Python leaves ``sys.stdin`` and ``sys.stdout`` None then; ``sys.stderr`` is replaced.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process


def check_stdin() -> None:
    """Check that stdin can be read.

    Raises:
        InputError: It is closed.
    """
    if sys.stdin is None:
        raise InputError("stdin is closed.", fix="Redirect it from a file or a pipe.")


def check_stdout() -> None:
    """Check that the result has a place.

    Raises:
        HeteroLLMError: stdout is closed.
    """
    if sys.stdout is None:
        raise HeteroLLMError("stdout is closed.", fix="Redirect it to a file; /dev/null discards the result.")


def write(text: str, *, styled: bool = False) -> None:
    """Write a piece of the result now.

    Args:
        text: The text; a terminal gets its control characters as pictures, a file or a pipe as they are.
        styled: Whether the text has colours that a terminal obeys.

    Raises:
        HeteroLLMError: It cannot be written, for example to a full disk.
        BrokenPipeError: The reader has closed the pipe.
    """
    if not styled and sys.stdout.isatty():
        text = visible(text)
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # a terminal that cannot show everything
            encoding = sys.stdout.encoding
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise HeteroLLMError(
            f"The result cannot be written to stdout: {error.strerror or error}.",
            fix="Free some space, or write it somewhere else.",
        ) from error


def write_json(value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write one JSON value, in which dataclasses and paths may occur, as the whole result."""
    write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_json_value) + "\n")


def _json_value(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    return str(value) if isinstance(value, Path) else asdict(value)


@contextlib.contextmanager
def private_stdout() -> Iterator[None]:
    """Discard the output of native libraries while the result goes into a file or a pipe.

    Native code writes to file descriptor 1. In this block the descriptor leads to the null device, and
    ``sys.stdout`` writes to a copy of the old one. A terminal stays as it is, since line editing needs it.
    """
    stream = sys.stdout
    try:
        ours = stream.fileno() == STDOUT and not stream.isatty()
    except (AttributeError, OSError, ValueError):
        ours = False  # stdout is missing, or an object without a file
    if not ours:
        yield
        return
    stream.flush()
    kept = os.dup(STDOUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)
    file = open(kept, "wb", closefd=False)  # noqa: SIM115 - a descriptor, closed below
    encoding = getattr(stream, "encoding", None) or "utf-8"
    sys.stdout = io.TextIOWrapper(file, encoding=encoding, errors="replace")
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream
        os.dup2(kept, STDOUT)
        os.close(kept)


def discard_output(*, messages: bool = False) -> None:
    """Discard all further output, since the reader has closed the pipe.

    Args:
        messages: Whether stderr goes as well.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    if messages:
        os.dup2(nowhere, STDERR)
    os.close(nowhere)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - lives as long as the process


class _Notes(logging.Handler):
    """Passes each distinct warning of heterollm to a function once."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._shown:
            self._shown.add(text)
            self._show(text)


@contextlib.contextmanager
def quiet_libraries(show: Callable[[str], None], *, debug: bool) -> Iterator[None]:
    """Show heterollm's warnings as notes, and warnings of other libraries only for debugging."""
    logger = logging.getLogger("heterollm")
    handler = _Notes(show)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
                os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            yield
    finally:
        logger.removeHandler(handler)
