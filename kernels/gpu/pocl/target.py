"""Sets the processor that PoCL compiles for, when its LLVM is older than the processor.

The PyPI wheel contains PoCL 3.0 with LLVM 14. On an unknown processor ``getHostCPUName`` returns ``generic``,
which LLVM's own compiler refuses: every build fails with "unknown target CPU 'generic'"
(https://github.com/pocl/pocl/issues/1049). PoCL has no option for the name. It keeps a string pointer beside
the target triple in its device structure; if exactly that pair is found, the pointer is redirected to the
newest processor whose features this machine has. So it is on a processor with a matrix unit, which LLVM 14
takes for an older one without.

:data:`TARGET_VARIABLE` selects an older processor the same way, to test or measure the kernels for it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from pathlib import Path
from typing import Final

from heterollm.base import DeviceError

logger = logging.getLogger(__name__)

TARGET_VARIABLE: Final = "HETEROLLM_POCL_TARGET"
"""Environment variable with a name in TARGETS: the processor that PoCL compiles for."""

STRUCTURE_BYTES: Final = 2048
UNKNOWN: Final = re.compile(rb"generic")
ANY_PROCESSOR: Final = re.compile(rb"[a-z0-9][a-z0-9._-]{1,30}")
TRIPLE_PREFIX: Final = b"x86_64-"
AVX2: Final = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512: Final = AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
MATRIX_TARGET: Final = "sapphirerapids"
"""The oldest processor with a matrix unit (AMX)."""

MATRIX: Final = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
NEWER: Final = frozenset(
    {"avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512_bitalg", "avx512_vpopcntdq", "avx512_vbmi2"}
    | {"avx512vbmi", "avx512ifma", "avx_vnni"}
)
TARGETS: Final = (
    (MATRIX_TARGET, AVX512 | NEWER | MATRIX),
    ("cascadelake", AVX512 | {"avx512_vnni"}),
    ("skylake-avx512", AVX512),
    ("haswell", AVX2),
    ("ivybridge", frozenset({"avx", "f16c"})),
    ("nehalem", frozenset({"sse4_2"})),
)

# PoCL keeps the pointer for the life of the process, so the bytes must live as long.
_names: list[ctypes.Array[ctypes.c_char]] = []
# By device: the chosen and the set target when its first runtime was opened.
_settled: dict[int, tuple[str | None, str | None]] = {}


ARCH_PRCTL: Final = 158
REQUEST_PERMISSION: Final = 0x1023
TILE_DATA: Final = 18


@functools.cache
def allow_matrix() -> bool:
    """Ask Linux to let this process use the matrix unit; return whether it may.

    The tiles' 8 KiB are no part of a thread's state until a process asks (arch_prctl, Linux 5.16).
    """
    if not _processor_flags() >= MATRIX:
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


def target_for(flags: frozenset[str]) -> str | None:
    """Return the LLVM name of the newest processor with these ``/proc/cpuinfo`` flags, or None."""
    return next((name for name, needed in TARGETS if needed <= flags), None)


def chosen_target() -> str | None:
    """Return the processor that :data:`TARGET_VARIABLE` names, or None if it is not set.

    Raises:
        DeviceError: The name is not in TARGETS, or this machine lacks features of that processor.
    """
    name = os.environ.get(TARGET_VARIABLE)
    if not name:
        return None
    names = ", ".join(known for known, _ in TARGETS)
    needed = dict(TARGETS).get(name)
    if needed is None:
        raise DeviceError(
            f"{TARGET_VARIABLE} names {name!r}, which is not a known processor.",
            fix=f"Unset it, or name one of {names}.",
        )
    if missing := needed - _processor_flags():
        raise DeviceError(
            f"{TARGET_VARIABLE} names {name}, but this processor lacks {', '.join(sorted(missing))}.",
            fix=f"Unset it, or name another of {names}.",
        )
    return name


def target_for_this_machine() -> str | None:
    """Return the LLVM name of the chosen processor or of one that fits this machine, or None.

    Raises:
        DeviceError: The choice is not possible (:func:`chosen_target`).
    """
    return chosen_target() or target_for(_processor_flags())


def mend_target(device_pointer: int) -> str | None:
    """Set the processor in PoCL's device structure if PoCL does not know all of it, or if one is chosen.

    The first call for a device decides; later calls return its result.

    Args:
        device_pointer: The ``cl_device_id`` of a PoCL 3 CPU device on Linux x86-64.

    Returns:
        The processor's name, or None if nothing was changed.

    Raises:
        DeviceError: The choice is not possible (:func:`chosen_target`), not with this PoCL, or has changed
            since the first call.
    """
    chosen = chosen_target()
    if device_pointer not in _settled:
        _settled[device_pointer] = chosen, _set_target(device_pointer, chosen)
    first, target = _settled[device_pointer]
    if chosen != first:
        raise DeviceError(
            f"{TARGET_VARIABLE} names {chosen or 'nothing'}, but this process compiles OpenCL for "
            f"{target or 'what PoCL detects'}: the device was first opened with {first or 'nothing'}.",
            fix="Start another process for another target.",
        )
    return target


def _set_target(device_pointer: int, chosen: str | None) -> str | None:
    readable = _readable_ranges()
    target = target_for_this_machine()
    known = chosen is None and target != MATRIX_TARGET
    slot = _find_name_slot(device_pointer, readable, UNKNOWN if known else ANY_PROCESSOR)
    if slot is None:
        if chosen:
            raise DeviceError(
                f"{TARGET_VARIABLE} names {chosen}, but this build of PoCL keeps its target elsewhere.",
                fix="Unset it, or use PyPI's PoCL: `pip install pocl-binary-distribution==3.0`.",
            )
        return None
    if target is None:
        return None
    name = ctypes.create_string_buffer(target.encode())
    _names.append(name)
    slot.value = ctypes.addressof(name)
    reason = "asked to" if chosen else "PoCL does not know all of this processor"
    logger.info("%s; compiling its kernels for %s", reason, target)
    return target


def _find_name_slot(
    device_pointer: int, readable: list[tuple[int, int]], name_pattern: re.Pattern[bytes]
) -> ctypes.c_uint64 | None:
    """Find the pointer to a matching name behind the pointer to the target triple."""
    for offset in range(0, STRUCTURE_BYTES, 8):
        here = device_pointer + offset
        if not _is_readable(here, 16, readable):
            return None
        triple = ctypes.c_uint64.from_address(here)
        name = ctypes.c_uint64.from_address(here + 8)
        if _text_at(triple.value, readable).startswith(TRIPLE_PREFIX) and name_pattern.fullmatch(
            _text_at(name.value, readable)
        ):
            return name
    return None


def _text_at(address: int, readable: list[tuple[int, int]], limit: int = 64) -> bytes:
    if not _is_readable(address, limit, readable):
        return b""
    return ctypes.string_at(address, limit).split(b"\0", 1)[0]


def _is_readable(address: int, size: int, readable: list[tuple[int, int]]) -> bool:
    return any(start <= address and address + size <= stop for start, stop in readable)


def _readable_ranges() -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        if mode.startswith("r"):
            start, stop = (int(part, 16) for part in span.split("-"))
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
    return ranges


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
