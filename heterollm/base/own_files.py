"""Decides which files heterollm made, and deletes no others: every deletion in the package happens here.

A file is heterollm's if this process made it as a scratch file, or if all of these hold: it lies in a known
subfolder that heterollm made, of the cache or of an exported model that this process writes; its name is one
that heterollm gives; no folder between is a link; and it belongs to this user. Links are deleted themselves,
never followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from heterollm.base.cache_place import CACHE_VARIABLE, cache_root, is_trusted, own_folder
from heterollm.base.errors import CacheError
from heterollm.base.text_file import read_file

KINDS: Final = {
    "weights": "quantised weights",
    "gguf": "tokenizers and settings of GGUF files",
    "graphs": "compiled NPU graphs",
    "opencl": "compiled OpenCL programs",
    "profiles": "profiles of devices",
    "predictors": "predictors fitted to profiles",
    "plans": "solved plans",
    "tuning": "tuned kernel parameters",
    "prefixes": "states behind the beginnings of prompts",
    "checks": "hashes of checkpoints and verdicts on their files",
    "races": "measured choices between a GPU and the CPU's cores",
}
"""Subfolders of the cache folder and their content."""

LIST: Final = ".heterollm"
"""The file in the cache folder that names the subfolders which heterollm made, one a line."""

EXPORTED: Final = "heterollm.json"
"""The manifest in the folder of an exported model."""

LONGEST_LIST: Final = 4096

LABEL: Final = "simulated"
"""Part of the name of every file that holds simulated times, and the folder of such profiles in the cache."""

HEX: Final = r"(?:[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{16})"
OWN_NAME: Final = re.compile(
    # A key, perhaps after words, and an ending; locks, and files that a killed process left behind.
    rf"(?:[a-z0-9][\w-]*-)?{HEX}(?:_qnn\.bin|(?:\.[\w-]+)*\.(?:safetensors|onnx|json|bin|weights|loading)|)"
    r"(?:\.lock|\.damaged-\d+)?"
    rf"|\.{HEX}\.(?:building|temporary)(?:\.lock)?"
    rf"|\.[\w.-]*{HEX}[\w.-]*\.partial"
    r"|pocl-[\w.-]+|(?:digests|tokenizers)\.json(?:\.lock)?"
)
"""Names that heterollm gives to the files and folders in a subfolder of its cache."""

HUB_NAME: Final = re.compile(
    r"refs/[\w.-]+|trees/[0-9a-f]{40}\.json|(?:snapshots|\.no_exist)/[0-9a-f]{40}|blobs/[0-9a-f]{16,64}(?:-\d+)?(?:\.[\w.-]+)?"
    r"|CACHEDIR\.TAG|\.gitignore"
)
"""Names that the hub's client gives below the folder of a model."""

RESERVED: Final = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)
"""Names of Windows' devices."""

LONGEST_NAME: Final = 255
LONGEST_PREFIX: Final = 100
"""Characters of a file's name that the name of its temporary file repeats."""

_scratch: set[Path] = set()
"""Files and folders that this process made and will delete."""

_trees: set[Path] = set()
"""Folders with subfolders like the cache's: exported models that this process writes."""


def is_exported(model: str | Path) -> bool:
    """Return whether a text or path names the folder of an exported model; the text may be any."""
    return os.path.isfile(os.path.join(model, EXPORTED))  # noqa: PTH113, PTH118 - pathlib raises for some texts


def is_plain_name(name: str) -> bool:
    """Return whether a text from elsewhere names one file in a folder, on every system, and nothing else."""
    return (
        0 < len(name) <= LONGEST_NAME
        and name not in {".", ".."}
        and name.isprintable()
        and not set(name) & set('/\\:*?"<>|')
        and name == name.strip().rstrip(".")
        and RESERVED.fullmatch(name) is None
    )


def is_own_file(path: Path) -> bool:
    """Return whether heterollm made a file, a folder or a link, which may thus be deleted."""
    if any(place in _scratch for place in (path, *path.parents)):
        return True
    root = next((tree for tree in _trees if path.is_relative_to(tree)), None)
    try:
        root = root or cache_root()
        parts = path.relative_to(root).parts
    except (ValueError, CacheError):
        return False
    if len(parts) < 2 or parts[0] not in KINDS or ".." in parts or parts[0] not in _listed(root):
        return False
    named = parts[2:3] if parts[:2] == ("profiles", LABEL) else parts[1:2]
    folders = [root.joinpath(*parts[:count]) for count in range(1, len(parts))]
    return (
        bool(named)
        and OWN_NAME.fullmatch(named[0]) is not None
        and not any(folder.is_symlink() for folder in folders)
        and (os.name == "nt" or not os.path.lexists(path) or path.lstat().st_uid in {os.geteuid(), 0})
    )


def own_entries(kind: str) -> list[Path]:
    """Return heterollm's files and folders in a subfolder of the cache, those of simulations among them.

    Raises:
        CacheError: The cache folder cannot be used.
    """
    folder = cache_root() / kind
    folders = [path for path in (folder, folder / LABEL) if path.is_dir() and not path.is_symlink()]
    return sorted(
        entry for path in folders for entry in path.iterdir() if entry.name != LABEL and is_own_file(entry)
    )


def delete(path: Path) -> None:
    """Delete one of heterollm's files, links, or folders with all content; nothing happens if there is none.

    Raises:
        CacheError: heterollm did not make it.
        OSError: It cannot be deleted.
    """
    if not is_own_file(path):
        raise CacheError(f"{path} is not deleted: heterollm did not make it.")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_fetched(folder: Path) -> None:
    """Check, before the hub's client deletes a model from the hub's cache, that all files are the client's.

    Args:
        folder: The model's folder.

    Raises:
        CacheError: It is a link, another user can write it, or it holds other files.
    """
    problem = None
    if folder.is_symlink() or not is_trusted(folder):
        problem = "it is a link, or another user can write it"
    else:
        names = (path.relative_to(folder).as_posix() for path in folder.glob("*/*"))
        beside = (entry.name for entry in folder.iterdir() if entry.is_symlink() or not entry.is_dir())
        foreign = next((name for name in (*beside, *names) if HUB_NAME.fullmatch(name) is None), None)
        problem = foreign and f"it holds {foreign!r:.80}, which is not the hub's"
    if problem is not None:
        raise CacheError(
            f"{folder} is not deleted: {problem}.", fix="Move your files, or delete it yourself."
        )


def delete_quietly(path: Path) -> None:
    """Delete one of heterollm's files or folders as far as the system allows: Windows keeps mapped files."""
    with contextlib.suppress(OSError, CacheError):
        if path.is_dir() and not path.is_symlink() and is_own_file(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            delete(path)


def make_own_folder(kind: str) -> Path:
    """Make a subfolder of the cache, for this user alone, and note that heterollm made it.

    Raises:
        CacheError: Another user can write it, or it is there with files that heterollm did not make.
        OSError: It cannot be made.
    """
    return _make_listed(own_folder(kind), 0o700)


def _make_listed(folder: Path, mode: int) -> Path:
    """Make a subfolder of the cache or of an exported model, and note that heterollm made it."""
    kind = folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=mode, exist_ok=True)
    if kind in _listed(folder.parent):
        return folder
    names = {entry.name for entry in folder.iterdir()} - {LABEL}
    foreign = next((name for name in sorted(names) if OWN_NAME.fullmatch(name) is None), None)
    if foreign is not None:
        raise CacheError(
            f"{folder} holds {foreign!r:.80}, which heterollm did not make.",
            fix=f"Point {CACHE_VARIABLE} at a folder without other files of such a name.",
        )
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    # Nobody else may write the list; others may copy an exported model.
    with os.fdopen(os.open(folder.parent / LIST, flags, mode & 0o644), "ab") as file:
        file.write(f"{kind}\n".encode())
    return folder


def make_parent(target: Path) -> None:
    """Make the folder of a file to write; a subfolder of the cache as in :func:`make_own_folder`.

    Raises:
        CacheError: Another user can write the cache, or the folder holds files that heterollm did not make.
        OSError: It cannot be made.
    """
    for tree in _trees:
        if target.is_relative_to(tree) and (parts := target.relative_to(tree).parts)[0] in KINDS:
            _make_listed(tree / parts[0], 0o777)
            return
    with contextlib.suppress(ValueError):
        parts = target.relative_to(cache_root()).parts if OWN_NAME.fullmatch(target.name) else ()
        if parts and parts[0] in KINDS:
            make_own_folder(parts[0])
    target.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def own_tree(folder: Path) -> Iterator[None]:
    """Treat a folder like the cache folder while this process writes an exported model into it."""
    _trees.add(folder)
    try:
        yield
    finally:
        _trees.discard(folder)


def delete_left(folder: Path) -> None:
    """Delete locks, and files that a killed process left half written, in a folder of :func:`own_tree`."""
    for kind in _listed(folder) & KINDS.keys():
        for path in (folder / kind).iterdir():
            if path.name.endswith((".lock", ".partial", ".building")):
                delete_quietly(path)


@contextlib.contextmanager
def scratch_file(target: Path) -> Iterator[Path]:
    """Yield a new empty file beside a future one, and delete it at the end unless it was renamed.

    Raises:
        OSError: It cannot be made.
    """
    # With the user's default permissions: other users read pages and plans too.
    path = target.with_name(f".{target.name[:LONGEST_PREFIX]}.{secrets.token_hex(8)}.partial")
    _write_new(path)
    _scratch.add(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        _scratch.discard(path)


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for this user alone, and delete it at the end, as far as the system allows.

    Args:
        prefix: Beginning of its name.
        parent: The folder to make it in; by default that of temporary files.

    Raises:
        OSError: It cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    _scratch.add(folder)
    try:
        yield folder
    finally:
        delete_quietly(folder)
        _scratch.discard(folder)


def _listed(root: Path) -> set[str]:
    """Return the subfolders that heterollm made; none if another user can write their list."""
    listed = root / LIST
    try:
        if not stat.S_ISREG(listed.lstat().st_mode) or not is_trusted(listed):
            return set()
        return set(read_file(listed, LONGEST_LIST).decode().split())
    except (OSError, ValueError):
        return set()


def _write_new(path: Path, content: bytes = b"") -> None:
    """Write a file that is not there yet; a link in its place is an error."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
        file.write(content)
