"""How the processors may be asked to wait for each other when a model is loaded."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from heterollm.kernels.gpu import SyncChoice

__all__ = ["SYNC_OPTIONS", "Sync"]

Sync: TypeAlias = Literal["auto", SyncChoice]
"""A way of waiting, in place of the plan's; ``auto`` leaves it to the plan."""

SYNC_OPTIONS: Final[tuple[Sync, ...]] = get_args(Sync)
