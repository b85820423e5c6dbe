"""The OpenCL binding, which only this room uses: pyopencl, or this project's own where it has no wheel."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from heterollm.base import DeviceError, OptionError
from heterollm.kernels.gpu.opencl_library import LIBRARY_VARIABLE

if TYPE_CHECKING:
    # mypy holds the room to the names that both bindings have.
    from heterollm.kernels.gpu import ctypes_binding

    cl = ctypes_binding
logger = logging.getLogger(__name__)

BINDING_VARIABLE: Final = "HETEROLLM_OPENCL_BINDING"
"""Environment variable with the binding: a name in BINDINGS."""

BINDINGS: Final = ("pyopencl", "ctypes")


def _choose() -> ModuleType:
    """Return the binding that the environment asks for, else pyopencl if it can be imported.

    Raises:
        OptionError: There is no such binding, or pyopencl is to load a library by its path.
        DeviceError: pyopencl is asked for, and cannot be imported.
    """
    asked, by_path = os.environ.get(BINDING_VARIABLE, ""), bool(os.environ.get(LIBRARY_VARIABLE))
    if asked not in ("", *BINDINGS):
        raise OptionError(
            f"{BINDING_VARIABLE} names {asked!r:.80}, which is no OpenCL binding.",
            fix=f"Name one of {', '.join(BINDINGS)}, or unset it.",
        )
    if asked == "pyopencl" and by_path:
        raise OptionError(
            f"{LIBRARY_VARIABLE} names a library, which pyopencl cannot load by its path.",
            fix=f"Unset it, or {BINDING_VARIABLE}.",
        )
    if asked != "ctypes" and not by_path:
        try:
            return _pyopencl()
        except ImportError as error:
            if asked:
                raise DeviceError(
                    f"pyopencl cannot be imported: {error}.",
                    fix=f"Run `pip install --force-reinstall pyopencl`, or unset {BINDING_VARIABLE}.",
                ) from error
            missing = isinstance(error, ModuleNotFoundError) and error.name == "pyopencl"
            level = logging.INFO if missing else logging.WARNING
            logger.log(level, "pyopencl cannot be imported, so that ctypes calls OpenCL: %s", error)
    import heterollm.kernels.gpu.ctypes_binding as own

    return own


def _pyopencl() -> ModuleType:
    """Return pyopencl, changed to generate the code that sets arguments once per kernel function.

    By default it does so for each of the hundreds of kernel objects of a pass, 0.1 ms each.
    """
    # pyopencl would keep that code in a database of pickles.
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
    import pyopencl
    import pyopencl.invoker

    generate = pyopencl.invoker.generate_enqueue_and_set_args
    made: dict[tuple[Any, ...], Any] = {}

    def generate_once(*arguments: Any, devs: Any, **options: Any) -> Any:  # noqa: ANN401
        key = (*arguments, *sorted(options.items()))
        if key not in made:
            made[key] = generate(*arguments, devs=devs, **options)
        return made[key]

    pyopencl.invoker.generate_enqueue_and_set_args = generate_once
    found: ModuleType = pyopencl
    return found


if not TYPE_CHECKING:
    cl = _choose()

OpenClError: Final = cl.Error
"""Error of any OpenCL call."""


def build_quietly(program: cl.Program, options: Sequence[str] = ()) -> cl.Program:
    """Build a program; some compilers write to the log on success, and pyopencl would warn about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        # pyopencl's own cache reads pickles; it stays off.
        return program.build(options=list(options), cache_dir=False)


def binding_name() -> str:
    """Return the binding in use: ``pyopencl``, or ``ctypes`` and its library."""
    return f"ctypes, {cl.functions.path}" if hasattr(cl, "functions") else "pyopencl"


def opencl_library() -> Any:  # noqa: ANN401 - an object with the functions of OpenCL
    """Return the OpenCL library in use."""
    if hasattr(cl, "functions"):
        return cl.functions
    if sys.platform == "win32":
        return ctypes.WinDLL("OpenCL")
    # The binding's own library finds the loader's functions.
    return ctypes.CDLL(sys.modules["pyopencl._cl"].__file__)
