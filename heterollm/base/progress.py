"""The callback by which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the total number of steps."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Report nothing."""
