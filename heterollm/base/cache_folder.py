"""Lists and clears the subfolders of the cache folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heterollm.base.cache_place import cache_root
from heterollm.base.errors import CacheError, OptionError
from heterollm.base.own_files import KINDS, delete, own_entries

CLEARED: Final = tuple(kind for kind in KINDS if kind != "profiles")
"""Subfolders that are cleared by default: profiles take minutes of measuring."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A subfolder of the cache, with the number and size of heterollm's files in it."""

    name: str
    content: str
    path: Path
    files: int
    size_bytes: int


def list_cache(kinds: Sequence[str] = ()) -> list[CacheKind]:
    """Return some subfolders, or all, with their size; only files that heterollm made count.

    Raises:
        OptionError: There is no such kind.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise OptionError(f"The cache has no kind {kind!r}.", fix=f"Choose {', '.join(KINDS)}.")
    return [_measured(kind) for kind in dict.fromkeys(kinds or KINDS)]


def clear_cache(kinds: Sequence[str] = ()) -> list[CacheKind]:
    """Delete heterollm's files in some subfolders, or in all but profiles, and return their old sizes.

    Files outside the known subfolders, files with other names and the targets of symbolic links stay.

    Raises:
        OptionError: There is no such kind.
        CacheError: A file cannot be deleted.
    """
    before = list_cache(kinds or CLEARED)
    for kind in before:
        for entry in own_entries(kind.name):
            try:
                delete(entry)
            except OSError as error:
                raise CacheError(
                    f"Cannot delete {entry}: {error.strerror or error}.",
                    fix="Close other programs that use heterollm, or check who owns the folder.",
                ) from error
    return before


def _measured(name: str) -> CacheKind:
    path = cache_root() / name
    sizes = [size for entry in own_entries(name) for size in _sizes(entry)]
    return CacheKind(name, KINDS[name], path, len(sizes), sum(sizes))


def _sizes(entry: Path) -> Iterator[int]:
    """Yield the size of every file under an entry; another process may remove files meanwhile."""
    paths = entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else [entry]
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if not path.is_dir():
            yield status.st_size
