"""The file to which a running bench appends each row as soon as it is whole."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from heterollm.base import CacheError
from heterollm.benchmarks.formats import to_jsonl
from heterollm.benchmarks.rows import BenchRow

logger = logging.getLogger(__name__)


class RowFile:
    """Appends rows to a file of JSON lines; a failed write leaves no part of a row.

    Args:
        path: The file; created if missing.

    Attributes:
        error: Why some rows are not in the file; None if all are.

    Raises:
        CacheError: The file cannot be written; raised before a measurement.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.error: CacheError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise _error(path, error) from error

    def add(self, row: BenchRow) -> None:
        """Append a row; log the first failure and continue without the file."""
        try:
            self._append(to_jsonl([row]).encode("utf-8"))
        except OSError as error:
            if self.error is None:
                self.error = _error(self._path, error)
                logger.warning("%s The rows are in the report alone.", self.error.message)

    def _append(self, line: bytes) -> None:
        with self._path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(-1, os.SEEK_END)
                # The last line of an edited file may lack a line end.
                line = line if file.read(1) == b"\n" else b"\n" + line
            try:
                if file.write(line) != len(line):
                    raise OSError("the disk is full")
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise


def _error(path: Path, error: OSError) -> CacheError:
    return CacheError(f"Cannot write {path}: {error.strerror or error}.", fix="Name another file.")
