"""Requests: what a plan was asked to be, part of the plan itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias, get_args

from msgspec import Struct

from heterollm.base import Amount, OptionError, Positive
from heterollm.solver.placements import PLACEMENT_KINDS

__all__ = ["FORBIDDEN", "SOLVED_LEVELS", "PlanRequest", "RequestedLevel", "SolvedLevel", "check_forbidden"]

SolvedLevel: TypeAlias = Literal["tensor", "block"]
"""Levels of the solver: ``tensor`` cuts every group of linears on its own, ``block`` may also place a layer's
feed-forward network as a whole."""

SOLVED_LEVELS: Final[tuple[SolvedLevel, ...]] = get_args(SolvedLevel)

RequestedLevel: TypeAlias = Literal["auto"] | SolvedLevel
"""A level of the solver, or ``auto``: ``block`` where the profile has blocks and the solver takes one at any
length, else ``tensor``."""

FORBIDDEN: Final = ("gpu", "npu", *PLACEMENT_KINDS[2:])
"""What a plan may do without: a processor that computes no linear layer, or a kind of split."""


def check_forbidden(names: Iterable[str]) -> None:
    """Refuse what cannot be forbidden.

    Raises:
        OptionError: A name is not in :data:`FORBIDDEN`.
    """
    for name in names:
        if name not in FORBIDDEN:
            raise OptionError(
                f"There is no {name!r:.40} to forbid.", fix=f"Choose among {', '.join(FORBIDDEN)}."
            )


class PlanRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan is asked to be.

    Args:
        context: Positions of a session.
        gpu_share: Largest part of an operator's time that the GPU may compute.
        energy_weight: 0 counts time alone, 1 energy alone.
        forbidden: Processors and kinds of splits that the plan must do without; see :data:`FORBIDDEN`.
        npu_gib: Memory that the NPU's slices may take together; None is no limit.
        histogram: How often prompts of each length come, and decode under length 1; None counts all alike.
        build_budget_s: Time that building the NPU's graphs may take: the standard lengths are then chosen for
            the histogram. None uses all that the device offers.
        level: What the solver may place as one.

    Raises:
        OptionError: A field is not legal.
    """

    context: Positive = 4096
    gpu_share: Amount = 1.0
    energy_weight: Amount = 0.0
    forbidden: tuple[str, ...] = ()
    npu_gib: Amount | None = None
    histogram: Mapping[int, Amount] | None = None
    build_budget_s: Amount | None = None
    level: RequestedLevel = "auto"

    def __post_init__(self) -> None:
        if self.level not in ("auto", *SOLVED_LEVELS):
            raise OptionError(
                f"The solver has no level {self.level!r:.40}.",
                fix=f"Choose auto, {' or '.join(SOLVED_LEVELS)}.",
            )
        check_forbidden(self.forbidden)
        if self.npu_gib is not None and not 0.0 <= self.npu_gib < math.inf:
            raise OptionError(
                f"The NPU cannot hold {self.npu_gib} GiB of slices.", fix="Give a number of at least 0."
            )
