"""The OpenCL binding, pyopencl, set up as the project needs it.

All OpenCL calls go through this room, which takes the binding from here, so that another
one can serve where pyopencl has no wheel.
"""

from __future__ import annotations

import os
from typing import Any, Final

# pyopencl would keep the code that sets a kernel's arguments in a database of pickles.
os.environ.setdefault("PYOPENCL_NO_CACHE", "1")

import pyopencl as cl
import pyopencl.invoker

__all__ = ["OpenClError", "cl"]

OpenClError: Final = cl.Error
"""What any OpenCL call raises."""


def _remember_invokers() -> None:
    """Make pyopencl generate the code that sets arguments once for each kernel function.

    It does so for each kernel object, of which a pass has hundreds: 0.1 ms each without this.
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
