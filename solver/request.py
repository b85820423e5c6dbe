"""Requests: the options that a plan was solved for; the plan stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from heterollm.base import Amount, OptionError, Positive
from heterollm.solver.experts.placements import ExpertsRequest
from heterollm.solver.placements import PLACEMENT_KINDS
from heterollm.solver.sparse.attention import AttentionRequest

SolvedLevel: TypeAlias = Literal["tensor", "block", "fused"]
"""Levels of the solver: ``tensor`` places every group of linears on its own, ``block`` may also place a
layer's feed-forward network as one operator, ``fused`` also ``o`` with that network, and the norms."""

SOLVED_LEVELS: Final[tuple[SolvedLevel, ...]] = get_args(SolvedLevel)

RequestedLevel: TypeAlias = Literal["auto"] | SolvedLevel
"""A level of the solver, or ``auto``: the fastest of them, as far as the profile has times of the ffn."""

NamedTechnique: TypeAlias = Literal["llm.npu", "shadowattn", "npumoe", "npu-attention"]
"""Techniques of a paper over a plan: llm.npu's chunks out of order with outliers of the activations on the
GPU, over weights of precision ``w8a8``; shadowAttn's sparse attention; NPUMoE's experts of a mixture, and its
attention on the NPU, for any model."""

Technique: TypeAlias = NamedTechnique | Literal["auto"]
"""A technique, or ``auto``: those, or none, with which the plan is predicted to be fastest."""

LLM_NPU: Final = "llm.npu"
SHADOW_ATTENTION: Final = "shadowattn"
NPU_EXPERTS: Final = "npumoe"
NPU_ATTENTION: Final = "npu-attention"
BEST_TECHNIQUES: Final = "auto"
TECHNIQUES: Final[tuple[NamedTechnique, ...]] = get_args(NamedTechnique)

TECHNIQUE_OPTIONS: Final[Mapping[str, tuple[Technique, ...]]] = {
    "attention": (SHADOW_ATTENTION, BEST_TECHNIQUES),
    "experts": (NPU_EXPERTS, BEST_TECHNIQUES),
}
"""Fields of a request with the options of a technique, and the names that have them, its own first."""

FORBIDDEN: Final = ("gpu", "npu", *PLACEMENT_KINDS[2:])
"""Processors that need not compute linear layers, and kinds of splits that a plan can avoid."""


def check_forbidden(names: Iterable[str]) -> None:
    """Refuse names that cannot be forbidden.

    Raises:
        OptionError: A name is not in :data:`FORBIDDEN`.
    """
    for name in names:
        if name not in FORBIDDEN:
            raise OptionError(
                f"There is no {name!r:.40} to forbid.", fix=f"Choose among {', '.join(FORBIDDEN)}."
            )


MOST_IN_FLIGHT: Final = 16
"""Most chunks at once; each has slots of its own."""

InFlight: TypeAlias = Literal["auto"] | Annotated[int, Meta(ge=1, le=MOST_IN_FLIGHT)]
"""Chunks of a long prompt at once, or ``auto``: as few as are predicted nearly as fast as the best number."""


def check_in_flight(given: InFlight) -> None:
    """Refuse a number of chunks that cannot run at once.

    Raises:
        OptionError: It is neither a legal number nor ``auto``.
    """
    if given != "auto" and not (isinstance(given, int) and 1 <= given <= MOST_IN_FLIGHT):
        raise OptionError(
            f"{given!r:.40} chunks cannot run at once.", fix=f"Choose 1 to {MOST_IN_FLIGHT}, or auto."
        )


def check_techniques(given: Sequence[Technique]) -> None:
    """Refuse names that are no technique, a name twice or beside ``auto``, and two that do not combine.

    Raises:
        OptionError: There is no such technique, it is there twice, or two do not combine.
    """
    for name in given:
        if name not in (*TECHNIQUES, BEST_TECHNIQUES):
            names = ", ".join((*TECHNIQUES, BEST_TECHNIQUES))
            raise OptionError(f"There is no technique {name!r:.40}.", fix=f"Choose {names}.")
    if len(given) > len(set(given)):
        raise OptionError(f"The techniques {', '.join(given)} name one twice.", fix="Name each once.")
    if BEST_TECHNIQUES in given and len(given) > 1:
        raise OptionError(
            f"The techniques {', '.join(given)} name others beside auto, which chooses among all.",
            fix="Name auto alone, or leave it out.",
        )
    if {LLM_NPU, NPU_EXPERTS}.issubset(given):
        raise OptionError(
            f"The techniques {', '.join(given)} do not combine: the chunks of llm.npu take turns on the NPU.",
            fix=f"Choose one; {SHADOW_ATTENTION} goes with both.",
        )
    if {SHADOW_ATTENTION, NPU_ATTENTION}.issubset(given):
        raise OptionError(
            f"The techniques {', '.join(given)} do not combine: both say how layers attend.",
            fix="Choose one.",
        )


class PlanRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a plan.

    Args:
        context: Positions of a session.
        gpu_share: Largest fraction of an operator's time that the GPU may compute.
        energy_weight: 0 minimises time alone, 1 energy alone.
        forbidden: Processors and kinds of splits that the plan must not use; see :data:`FORBIDDEN`.
        npu_gib: Memory limit of all NPU graphs together; None is the limit that the device states.
        histogram: Weight of prompts by length, and of decode under length 1; None weighs all lengths alike.
        build_budget_s: Limit of the time for building NPU graphs; the solver then chooses standard lengths
            for the histogram. None uses all lengths of the device.
        level: Level of the solver.
        in_flight: Chunks of a long prompt at once, or ``auto``.
        techniques: Techniques of papers over the plan: ``llm.npu`` or ``npumoe``, and ``shadowattn`` or
            ``npu-attention``; or ``auto``.
        attention: Options of ``shadowattn``.
        experts: Options of ``npumoe``.

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
    in_flight: InFlight = 1
    techniques: tuple[Technique, ...] = ()
    attention: AttentionRequest = AttentionRequest()
    experts: ExpertsRequest = ExpertsRequest()

    def __post_init__(self) -> None:
        if self.level not in ("auto", *SOLVED_LEVELS):
            raise OptionError(
                f"The solver has no level {self.level!r:.40}.",
                fix=f"Choose auto, {' or '.join(SOLVED_LEVELS)}.",
            )
        check_forbidden(self.forbidden)
        check_in_flight(self.in_flight)
        check_techniques(self.techniques)
        if self.npu_gib is not None and not 0.0 <= self.npu_gib < math.inf:
            raise OptionError(
                f"The NPU cannot hold {self.npu_gib} GiB of slices.", fix="Give a number of at least 0."
            )
