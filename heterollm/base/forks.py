"""Refuses work in a child that was forked after its parent had opened a device."""

from __future__ import annotations

import os

from heterollm.base.errors import EngineError

_opened = _lost = False


def mark_device_opened() -> None:
    """Note that this process has device threads, which a forked child will lack."""
    global _opened
    _opened = True


def check_process() -> None:
    """Refuse a process that would wait for its parent's device threads for ever.

    Raises:
        EngineError: The process was forked after its parent had opened a device.
    """
    if _lost:
        raise EngineError(
            "This process was forked from one that had opened a device, whose threads it lacks.",
            fix='Start it by `multiprocessing.get_context("spawn")`, or fork before anything is loaded.',
        )


def _after_fork() -> None:
    global _lost
    _lost = _opened


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
