"""Lists and clears the subfolders of the cache folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heterollm.base.cache import cache_root
from heterollm.base.errors import CacheError, OptionError
from heterollm.base.output_file import LABEL

__all__ = ["CLEARED", "KINDS", "CacheKind", "clear_cache", "delete_path", "list_cache"]

KINDS: Final = {
    "weights": "quantised weights",
    "gguf": "tokenizers and settings of GGUF files",
    "graphs": "compiled NPU graphs",
    "opencl": "compiled OpenCL programs",
    "profiles": "profiles of devices",
    "predictors": "predictors fitted to profiles",
    "plans": "solved plans",
    "tuning": "tuned kernel parameters",
}
"""Subfolders of the cache folder and their content."""

CLEARED: Final = tuple(kind for kind in KINDS if kind != "profiles")
"""Subfolders that are cleared by default: profiles take minutes of measuring."""

OWN_NAME: Final = re.compile(
    r"\.?[0-9a-f]{32}([0-9a-f]{32})?(?![0-9a-f]).*|pocl-[\w.-]+|\.?([a-z0-9][\w-]*-)?([0-9a-f]{16}){1,2}\.json.*"
)
"""File names that heterollm gives: ``$HETEROLLM_CACHE`` may name a folder that holds other files."""


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


def delete_path(path: Path) -> None:
    """Delete a file, a link, or a folder with its content; nothing happens if there is none.

    Raises:
        OSError: It cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_cache(kinds: Sequence[str] = ()) -> list[CacheKind]:
    """Delete heterollm's files in some subfolders, or in all but profiles, and return their old sizes.

    Files outside the known subfolders, files with other names and the targets of symbolic links stay.

    Raises:
        OptionError: There is no such kind.
        CacheError: A file cannot be deleted.
    """
    before = list_cache(kinds or CLEARED)
    for kind in before:
        for entry in _own_entries(kind.path):
            try:
                delete_path(entry)
            except OSError as error:
                raise CacheError(
                    f"Cannot delete {entry}: {error.strerror or error}.",
                    fix="Close other programs that use heterollm, or check who owns the folder.",
                ) from error
    return before


def _measured(name: str) -> CacheKind:
    path = cache_root() / name
    sizes = [size for entry in _own_entries(path) for size in _sizes(entry)]
    return CacheKind(name, KINDS[name], path, len(sizes), sum(sizes))


def _own_entries(folder: Path) -> list[Path]:
    """Return heterollm's files and folders in a subfolder; simulated profiles lie one folder deeper."""
    folders = [path for path in (folder, folder / LABEL) if path.is_dir() and not path.is_symlink()]
    if folder not in folders:
        return []
    return sorted(entry for path in folders for entry in path.iterdir() if OWN_NAME.fullmatch(entry.name))


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
