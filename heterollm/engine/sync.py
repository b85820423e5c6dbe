"""How the processors may be asked to wait for each other."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from heterollm.base import OptionError
from heterollm.kernels.gpu import STRATEGIES, Strategy

__all__ = ["SYNC_OPTIONS", "Sync", "check_sync"]

Sync: TypeAlias = Literal["auto", "operator"] | Strategy
"""How the parts wait for each other: by a strategy of :mod:`heterollm.kernels.sync.handover`, by ``auto``,
which chooses one (:mod:`heterollm.engine.waits`), or by ``operator``: ``clFinish`` after every operator, the
baseline that fast synchronisation is compared with."""

SYNC_OPTIONS: Final[tuple[Sync, ...]] = ("auto", "operator", *STRATEGIES)


def check_sync(sync: object) -> None:
    """Refuse what is no way for the parts to wait for each other.

    Raises:
        OptionError: It is none.
    """
    if sync not in SYNC_OPTIONS:
        raise OptionError(f"There is no sync {sync!r:.80}.", fix=f"Choose among {', '.join(SYNC_OPTIONS)}.")
