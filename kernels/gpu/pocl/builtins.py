"""Declarations of the built-in functions that the kernels call, in place of PoCL's header of all functions.

PoCL 3 parses a megabyte of declarations for each program: 77 of the 91 ms that building a small one takes,
and 13 of 20 ms where the cache has it. The option :data:`WITHOUT_HEADER` leaves that header out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

WITHOUT_HEADER: Final = "-D_OPENCL_H_"

WIDTHS: Final = ("", "2", "3", "4", "8", "16")
INTEGERS: Final = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
SCALARS: Final = (*INTEGERS, "float")
SPACES: Final = ("__global", "__local", "__private")
CONVERSIONS: Final = ("float", "float4", "float8", "float16", "int8", "int8_rte", "uchar8", "ushort8")


@functools.cache
def builtin_declarations() -> str:
    """Return the declarations, each function with all types that it has without extensions."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for name in ("get_global_id", "get_global_size", "get_group_id", "get_local_id", "get_num_groups"):
        yield _declaration("size_t", name, "uint", "const")
    yield _declaration("void", "barrier", "cl_mem_fence_flags", "convergent")
    yield _declaration("void", "mem_fence", "cl_mem_fence_flags")
    for space in SPACES[:2]:
        for kind in ("int", "uint"):
            pointer = f"volatile {space} {kind} *"
            yield _declaration(kind, "atomic_inc", pointer)
            yield _declaration(kind, "atomic_add", f"{pointer}, {kind}")
            yield _declaration(kind, "atomic_or", f"{pointer}, {kind}")
            yield _declaration(kind, "atomic_cmpxchg", f"{pointer}, {kind}, {kind}")
    for width in WIDTHS:
        kind = f"float{width}"
        for name in ("ceil", "exp", "exp2", "fabs", "log1p", "sqrt", "tanh"):
            yield _declaration(kind, name, kind, "const")
        for other in dict.fromkeys((kind, "float")):
            yield _declaration(kind, "fmax", f"{kind}, {other}", "const")
            yield _declaration(kind, "fmin", f"{kind}, {other}", "const")
    for scalar in SCALARS:
        for width in WIDTHS:
            kind = f"{scalar}{width}"
            if scalar != "float":
                yield _declaration(kind, "clz", kind, "const")
            for other in dict.fromkeys((kind, scalar)):
                yield _declaration(kind, "min", f"{kind}, {other}", "const")
                yield _declaration(kind, "max", f"{kind}, {other}", "const")
                yield _declaration(kind, "clamp", f"{kind}, {other}, {other}", "const")
        for target in CONVERSIONS:
            result = target.removesuffix("_rte")
            width = result.lstrip("abcdefghijklmnopqrstuvwxyz")
            yield _declaration(result, f"convert_{target}", f"{scalar}{width}", "const")
        for space in (*SPACES, "__constant"):
            yield _declaration(f"{scalar}8", "vload8", f"size_t, const {space} {scalar} *", "pure")
        for space in SPACES:
            yield _declaration("void", "vstore8", f"{scalar}8, size_t, {space} {scalar} *")
    for space in (*SPACES, "__constant"):
        for width in ("", "4", "8"):
            yield _declaration(f"float{width}", f"vload_half{width}", f"size_t, const {space} half *", "pure")
    for space in SPACES:
        for width in ("", "8"):
            yield _declaration("void", f"vstore_half{width}_rte", f"float{width}, size_t, {space} half *")


def _declaration(result: str, name: str, arguments: str, *attributes: str) -> str:
    return f"{result} __attribute__(({', '.join(('overloadable', *attributes))})) {name}({arguments});"
