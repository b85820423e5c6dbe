"""The OpenCL binding, pyopencl, which only this room uses, so that it can be replaced."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, Final

# pyopencl would keep the code that sets a kernel's arguments in a database of pickles.
os.environ.setdefault("PYOPENCL_NO_CACHE", "1")

import pyopencl
import pyopencl.invoker

cl: Final = pyopencl
"""The binding."""

OpenClError: Final = cl.Error
"""Error of any OpenCL call."""


def build_quietly(program: pyopencl.Program, options: Sequence[str] = ()) -> pyopencl.Program:
    """Build a program; some compilers write to the log on success, and pyopencl would warn about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        # pyopencl's own cache reads pickles; it stays off.
        return program.build(options=list(options), cache_dir=False)


def _remember_invokers() -> None:
    """Make pyopencl generate the code that sets arguments once per kernel function.

    By default it does so for each of the hundreds of kernel objects of a pass, 0.1 ms each.
    """
    generate = pyopencl.invoker.generate_enqueue_and_set_args
    made: dict[tuple[Any, ...], Any] = {}

    def generate_once(*arguments: Any, devs: Any, **options: Any) -> Any:  # noqa: ANN401
        key = (*arguments, *sorted(options.items()))
        if key not in made:
            made[key] = generate(*arguments, devs=devs, **options)
        return made[key]

    pyopencl.invoker.generate_enqueue_and_set_args = generate_once


_remember_invokers()
