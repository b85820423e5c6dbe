"""Unit conversions; names of quantities end in ``_us``, ``_bytes``, ``_gbps`` or ``_fraction``."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3
PAGE_BYTES = 4096
"""Alignment of memory that both processors address."""


def bandwidth_gbps(size_bytes: float, time_us: float) -> float:
    """Return the bandwidth in 10⁹ bytes a second from bytes and microseconds."""
    return size_bytes / (time_us * 1e3)


def format_bytes(size_bytes: float) -> str:
    """Return a readable size, such as ``7.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
