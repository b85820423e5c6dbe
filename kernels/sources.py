"""Which kernel sources these are: what was measured or tuned with others says nothing about them."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

__all__ = ["kernel_source_hash"]


@functools.cache
def kernel_source_hash() -> str:
    """Return a short hash of all OpenCL C in ``heterollm.kernels.opencl``, names and contents.

    It is part of the key of whatever depends on the kernels: tuned parameters and measured samples.
    """
    digest = hashlib.sha256()
    folder = resources.files("heterollm.kernels.opencl")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith((".cl", ".h")):
            content = entry.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{entry.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
