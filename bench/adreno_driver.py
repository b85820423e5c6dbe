"""Builds OpenCL programs through the ICD loader and prints each compiler's dump between marks.

Runs under qemu with Debian's arm64 Python, which has no packages, so it needs ctypes alone. It reads a list
of programs, ``{"name", "kernel", "source", "options", "modules"}``; ``modules`` are SPIR-V in base64, tried
in order in place of the source. Nothing is enqueued.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

ALL_DEVICES = 0xFFFFFFFF
BUILD_LOG = 0x1183
WAVE_LANES, LOCAL_BYTES = 0x11B3, 0x11B2


def function(name: str, result: Any, count: int) -> Any:  # noqa: ANN401 - ctypes'
    """Return an OpenCL function whose arguments are all pointers or as wide as one."""
    found = getattr(ctypes.CDLL("libOpenCL.so.1"), name)
    found.restype, found.argtypes = result, [ctypes.c_void_p] * count
    return found


def mark(*words: object) -> None:
    """Write a line between what the driver writes itself."""
    sys.stdout.flush()
    os.write(2, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    """Build every program of the list."""
    address, status = ctypes.byref, ctypes.c_int32()
    platform, device = ctypes.c_void_p(), ctypes.c_void_p()
    function("clGetPlatformIDs", ctypes.c_int32, 3)(1, address(platform), None)
    function("clGetDeviceIDs", ctypes.c_int32, 5)(platform, ALL_DEVICES, 1, address(device), None)
    context = function("clCreateContext", ctypes.c_void_p, 6)(None, 1, address(device), None, None, None)
    from_source = function("clCreateProgramWithSource", ctypes.c_void_p, 5)
    from_module = function("clCreateProgramWithIL", ctypes.c_void_p, 4)
    build = function("clBuildProgram", ctypes.c_int32, 6)
    log = function("clGetProgramBuildInfo", ctypes.c_int32, 6)
    make = function("clCreateKernel", ctypes.c_void_p, 3)
    ask = function("clGetKernelWorkGroupInfo", ctypes.c_int32, 6)
    for program in json.loads(Path(sys.argv[1]).read_text()):
        mark("@@PROGRAM", program["name"])
        source = ctypes.c_char_p(program["source"].encode())
        failed = -1
        for module in map(base64.b64decode, program["modules"] or [""]):
            if module:
                built = from_module(context, module, len(module), None)
            else:
                built = from_source(context, 1, address(source), None, None)
            options = b"" if module else program["options"].encode()
            failed = build(built, 1, address(device), options, None, None)
            if not failed:
                break
        if failed:
            text = ctypes.create_string_buffer(2000)
            log(built, device, BUILD_LOG, 2000, text, None)
            mark("@@FAILED", failed, text.value.decode(errors="replace").replace("\n", " "))
            continue
        kernel, answers = make(built, program["kernel"].encode(), address(status)), {}
        for name, number in (("wave", WAVE_LANES), ("local_bytes", LOCAL_BYTES)):
            value = ctypes.c_uint64()
            ask(kernel, device, number, 8, address(value), None)
            answers[name] = value.value
        mark("@@BUILT", json.dumps(answers))


if __name__ == "__main__":
    main()
