"""The SHA-256 of files, which the cache knows while a file stays the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from heterollm.base.errors import HeteroLLMError
from heterollm.base.file_index import FileIndex

PIECE_BYTES: Final = 16 * 1024 * 1024
"""Bytes that are read at once."""


def file_digests(
    paths: Sequence[Path], progress: Callable[[int, int], None] | None = None, *, error: type[HeteroLLMError]
) -> dict[Path, str]:
    """Return the SHA-256 of files, as hexadecimal digits.

    Args:
        paths: The files.
        progress: Called with the bytes read, those of known files among them, and the total.
        error: Raised if a file cannot be read.
    """
    index, new = FileIndex("digests"), {}
    known = index.get_all(paths)
    done_bytes = sum(path.stat().st_size for path in known)
    left = [path for path in paths if path not in known]
    total_bytes = done_bytes + sum(path.stat().st_size for path in left)
    try:
        for path in left:
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while piece := file.read(PIECE_BYTES):
                        digest.update(piece)
                        done_bytes += len(piece)
                        if progress is not None:
                            progress(done_bytes, total_bytes)
            except OSError as cause:
                raise error(f"Cannot read {path}: {cause.strerror}.") from cause
            new[path] = digest.hexdigest()
    finally:
        index.put_all(new)
    return known | new
