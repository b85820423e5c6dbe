"""The cache of compiled NPU graphs: keys of context binaries, and checks before use.

A binary has three files: ``<name>.onnx`` (the wrapper that ONNX Runtime opens), ``<name>_qnn.bin`` (the
context binary, which it maps) and ``<name>.json`` (compiler versions and checksums), written last. Each
further graph of the binary has a wrapper ``<name>.1.onnx``, ``<name>.2.onnx`` and so on. Graphs that need no
compiler, those of ``host``, have their weights, ``<name>.weights``, in place of the binary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from heterollm.base import (
    GraphError,
    atomic_path,
    cache_error,
    delete,
    delete_quietly,
    is_trusted,
    make_parent,
    own_folder,
    parse_json,
)

GRAPHS_FOLDER = "graphs"
"""Subfolder of the cache for compiled graphs."""

TEMPORARY_SUFFIX = ".temporary"


@dataclass(frozen=True, slots=True)
class ContextBinary:
    """One compiled graph in the cache, or several that share a context.

    Args:
        identity: Graphs and target; its hash names the files.
        made_by: Versions of the compiler; files of other versions are stale and are replaced.
        folder: Folder of the files; by default the graphs' folder of the cache.
        graphs: Number of graphs.
        ending: Ending of the name of the binary.
    """

    identity: Mapping[str, Any]
    made_by: Mapping[str, Any]
    folder: Path | None = None
    graphs: int = 1
    ending: str = "_qnn.bin"

    @property
    def model(self) -> Path:
        """The wrapper of the first graph."""
        text = json.dumps(dict(self.identity), sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return (self.folder or own_folder(GRAPHS_FOLDER)) / f"{name}.onnx"

    @property
    def models(self) -> tuple[Path, ...]:
        """The wrappers of all graphs, in the order in which to open them."""
        first = self.model
        more = (first.with_name(f"{first.stem}.{number}.onnx") for number in range(1, self.graphs))
        return (first, *more)

    @property
    def binary(self) -> Path:
        """The context binary, under the name that ONNX Runtime gives it."""
        return self.model.with_name(f"{self.model.stem}{self.ending}")

    @property
    def manifest(self) -> Path:
        """The description and the checksums."""
        return self.model.with_suffix(".json")

    @property
    def size_bytes(self) -> int:
        """Size of the existing files."""
        return sum(path.stat().st_size for path in self._files if path.exists())

    def problem(self, *, contents: bool = True) -> str | None:
        """Return the fault of the files, "missing" if there are none, or None if they are sound.

        Args:
            contents: Whether to read all files; those of an exported model were compared with its manifest.
        """
        try:
            stored = parse_json(self.manifest.read_bytes())
        except FileNotFoundError:
            return "incomplete" if self.binary.exists() else "missing"
        except (OSError, ValueError):
            return "damaged (its description cannot be read)"
        if not isinstance(stored, dict) or stored.get("identity") != self._plain(self.identity):
            return "damaged (its description is of another graph)"
        if stored.get("made_by") != self._plain(self.made_by):
            return f"stale (made by {stored.get('made_by')})"
        if not all(map(is_trusted, self._files)):
            return "not safe (another user can write it)"
        if not contents:
            return None if all(path.is_file() for path in self._files) else "incomplete"
        try:
            sums = self._checksums()
        except OSError:
            return "damaged (a file cannot be read)"
        return None if stored.get("sha256") == sums else "damaged (a checksum differs)"

    def build(self, compile_into: Callable[[Path, tuple[Path, ...]], object]) -> None:
        """Replace the files with newly compiled ones; the caller holds the lock of :attr:`model`.

        Args:
            compile_into: Compiler; takes an empty folder for sources and the paths of the wrappers to write.

        Raises:
            GraphError: The compiler failed or wrote nothing.
            CacheError: The folder cannot be written or the disk is full.
        """
        building = self.model.with_name(f".{self.model.stem}.building")
        try:
            make_parent(building)
            delete_quietly(building)  # left by a process that was killed
            building.mkdir()
            models = tuple([building / model.name for model in self.models])
            compile_into(building, models)
            delete(self.manifest)
            for name in (self.binary.name, *(model.name for model in models)):
                (building / name).replace(self.model.with_name(name))
            description = {
                "identity": self._plain(self.identity),
                "made_by": self._plain(self.made_by),
                "sha256": self._checksums(),
            }
            with atomic_path(self.manifest) as path:
                path.write_text(json.dumps(description))
        except FileNotFoundError as error:
            raise GraphError(f"QNN compiled a graph but wrote no {Path(error.filename).name}.") from error
        except OSError as error:
            raise cache_error(self.model, error) from error
        finally:
            delete_quietly(building)

    def remove(self) -> None:
        """Delete the files as far as the system allows; no other process may use them."""
        for path in (*self._files, self.model.with_name(f"{self.model.name}.lock")):
            delete_quietly(path)  # Windows keeps files that are mapped

    @property
    def _files(self) -> tuple[Path, ...]:
        return (self.manifest, *self.models, self.binary)

    def _checksums(self) -> dict[str, str]:
        sums = {}
        for path in (*self.models, self.binary):
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return sums

    @staticmethod
    def _plain(mapping: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
        """Return a mapping after a round trip through JSON."""
        return json.loads(json.dumps(dict(mapping)))


@contextlib.contextmanager
def temporary_graphs() -> Iterator[Path]:
    """Yield a new folder in the cache for temporary graphs, and delete it at the end.

    Folders of killed processes are deleted too: a live process holds the lock of its folder.

    Raises:
        CacheError: The cache folder cannot be written.
    """
    parent = own_folder(GRAPHS_FOLDER)
    folder = parent / f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    lock = FileLock(_lock_path(folder))
    try:
        make_parent(folder)
        for left in parent.glob(f".*{TEMPORARY_SUFFIX}"):
            _delete_if_left(left)
        lock.acquire()
        folder.mkdir()
    except OSError as error:
        raise cache_error(folder, error) from error
    try:
        yield folder
    finally:
        lock.release()
        _delete_if_left(folder)


def _delete_if_left(folder: Path) -> None:
    """Delete a folder unless a process holds its lock."""
    lock_path = _lock_path(folder)
    with contextlib.suppress(Timeout, OSError), FileLock(lock_path, timeout=0):
        delete_quietly(folder)
    if not folder.exists():
        delete_quietly(lock_path)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
