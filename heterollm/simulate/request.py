"""The request of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import OptionError
from heterollm.kernels.gpu import Strategy
from heterollm.kernels.npu import GraphForm
from heterollm.kernels.sim import GpuLoad

__all__ = [
    "LENGTH_CHOICES",
    "PLAN_LEVELS",
    "SYNC_CHOICES",
    "SimulatedLengthPolicy",
    "SimulatedSync",
    "SimulationRequest",
]

PLAN_LEVELS: Final = ("gpu", "npu", "layer", "tensor", "block")

SimulatedLengthPolicy: TypeAlias = Literal["auto", "padding", "pipe", "online"]
LENGTH_CHOICES: Final[tuple[SimulatedLengthPolicy, ...]] = get_args(SimulatedLengthPolicy)
"""Policies of ``npu`` and ``layer`` for lengths without a graph; ``online`` builds the exact graph in the
prompt's time."""

SimulatedSync: TypeAlias = Literal["finish", "poll", "predict"]
SYNC_CHOICES: Final[Mapping[SimulatedSync, Strategy]] = {
    "finish": "finish",
    "poll": "poll",
    "predict": "sleep_poll",
}
"""The driver's waits and copies, without fast synchronisation; polling; sleeping for the predicted time,
then polling."""

LONGEST_RUN: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """A simulated case.

    Args:
        model: A known model, a folder or a ``config.json``.
        soc: Name of a known SoC, or a YAML file.
        prompt: Tokens of the prompt.
        decode: Tokens decoded after the first.
        level: Level of the plan.
        length_policy: How lengths without a graph run; the solver's levels need none.
        sync: How the processors wait for each other.
        resolve: Whether the plan is solved for ``sync``; otherwise for the fastest strategy.
        load: A game that uses the GPU at the same time.
        overrides: Parameters of the SoC by dotted name.
        head_bits: Bits of the head and the embedding.
        every_form: Whether the NPU's graphs may have forms that HeteroLLM lacks; None allows them at
            ``block`` only.
        numerics: Whether values are computed, too, from a checkpoint with weights; its head has 8 bits.
        trace: Whether every pass is recorded.
        left_out: Graph forms that the NPU does not offer, to measure their gain.

    Raises:
        OptionError: A value is not legal.
    """

    model: str
    soc: str = "snapdragon-8gen3"
    prompt: int = 256
    decode: int = 64
    level: str = "tensor"
    length_policy: SimulatedLengthPolicy = "auto"
    sync: SimulatedSync = "predict"
    resolve: bool = False
    load: GpuLoad | None = None
    overrides: Mapping[str, float] = field(default_factory=dict)
    head_bits: int = 4
    every_form: bool | None = None
    numerics: bool = False
    trace: bool = False
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, object, Sequence[object]], ...] = (
            ("plan level", self.level, PLAN_LEVELS),
            ("length policy", self.length_policy, LENGTH_CHOICES),
            ("sync", self.sync, tuple(SYNC_CHOICES)),
            ("number of head bits", self.head_bits, (4, 8)),
            *(("form", form, get_args(GraphForm)) for form in self.left_out),
        )
        for what, given, legal in choices:
            if given not in legal:
                raise OptionError(
                    f"There is no {what} {given!r:.40} here.", fix=f"Choose {', '.join(map(str, legal))}."
                )
        if self.numerics and self.head_bits != 8:
            raise OptionError(
                "With numerics the head has 8 bits, as the loader quantises it.", fix="Give 8 head bits."
            )
        if not (1 <= self.prompt <= LONGEST_RUN and 0 <= self.decode <= LONGEST_RUN):
            raise OptionError(
                f"A prompt of {self.prompt} and {self.decode} tokens after it cannot be simulated.",
                fix=f"Give 1 to {LONGEST_RUN} and 0 to {LONGEST_RUN}.",
            )

    @property
    def forms(self) -> bool:
        """Whether the NPU offers every graph form."""
        return self.level == "block" if self.every_form is None else self.every_form
