"""The synchronisation strategies that a caller of ``LLM.load`` can choose."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from heterollm.kernels.gpu import SyncChoice

Sync: TypeAlias = Literal["auto", SyncChoice]
"""A strategy in place of the plan's; ``auto`` is the plan's."""

SYNC_OPTIONS: Final[tuple[Sync, ...]] = get_args(Sync)
