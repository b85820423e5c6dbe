"""The kernels' sources and their hash, which is part of the key of measurements."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable


def read_sources(files: Sequence[str]) -> str:
    """Return the OpenCL C of the named files, joined in order."""
    folder = resources.files("heterollm.kernels.gpu.opencl")
    return "\n".join(folder.joinpath(name).read_text("utf-8") for name in files)


@functools.cache
def kernel_source_hash() -> str:
    """Return a short hash of all OpenCL C in ``heterollm.kernels.gpu.opencl``, names and contents.

    It is part of the key of tuned parameters and of measured samples.
    """
    return source_hash("heterollm.kernels.gpu.opencl", (".cl", ".h"))


def source_hash(package: str, endings: tuple[str, ...]) -> str:
    """Return a short hash of the files of a package and its folders, names and contents.

    Args:
        package: Dotted name of the package.
        endings: File name endings to include.
    """
    digest = hashlib.sha256()
    for name, entry in _files(resources.files(package)):
        if name.endswith(endings):
            content = entry.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _files(entry, f"{name}/")
        else:
            yield name, entry
