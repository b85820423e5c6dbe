"""The request of a simulation."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import OptionError
from heterollm.kernels.gpu import Strategy
from heterollm.kernels.npu import STANDARD_LENGTHS
from heterollm.kernels.ops import Precision
from heterollm.kernels.sim import GpuLoad, load_soc
from heterollm.solver import (
    BEST_TECHNIQUES,
    LLM_NPU,
    NPU_ATTENTION,
    NPU_EXPERTS,
    AttentionRequest,
    ExpertsRequest,
    InFlight,
    Technique,
    check_in_flight,
    check_techniques,
)

PLAN_LEVELS: Final = ("gpu", "npu", "layer", "tensor", "block", "fused")

SimulatedLengthPolicy: TypeAlias = Literal["auto", "padding", "pipe", "online"]
LENGTH_CHOICES: Final[tuple[SimulatedLengthPolicy, ...]] = get_args(SimulatedLengthPolicy)
"""Policies of ``npu`` and ``layer`` for lengths without a graph; ``online`` builds the exact graph in the
prompt's time."""

PlanFor: TypeAlias = Literal["all", "prompt"]
PLAN_FOR_CHOICES: Final[tuple[PlanFor, ...]] = get_args(PlanFor)
"""Lengths that the solver plans for: all of a session alike, as a load does, or the simulated prompt and its
decode alone."""

SimulatedSync: TypeAlias = Literal["finish", "poll", "predict"]
SYNC_CHOICES: Final[Mapping[SimulatedSync, Strategy]] = {
    "finish": "finish",
    "poll": "poll",
    "predict": "sleep_poll",
}
"""The driver's waits and copies, without fast synchronisation; polling; sleeping for the predicted time,
then polling."""

LONGEST_RUN: Final = 1_000_000

OUTLIER_SHARE: Final = 0.02
"""Share of an operator's input channels that have outliers in a pass: the mean over the operators of
SmolLM2-135M-Instruct at the thresholds of its calibration (docs/llm-npu.md). llm.npu's figure 10 has at most
0.003 for Qwen1.5-1.8B, at thresholds that it does not state."""


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """A simulated case.

    Args:
        model: A known model, a folder or a ``config.json``.
        soc: Name of a known SoC, or a YAML file.
        prompt: Tokens of the prompt.
        decode: Tokens decoded after the first.
        level: Level of the plan.
        plan_for: What the solver plans for.
        length_policy: How lengths without a graph run; the solver's levels need none.
        in_flight: Chunks of a long prompt at once, or ``auto``.
        sync: How the processors wait for each other.
        load: A game that uses the GPU at the same time.
        overrides: Parameters of the SoC by dotted name.
        head_bits: Bits of the head and the embedding.
        every_form: Whether the NPU's graphs may have forms that HeteroLLM lacks; None allows them at
            ``block``, and elsewhere as the SoC says.
        numerics: Whether values are computed, too, from a checkpoint with weights; its head has 8 bits.
        trace: Whether every pass is recorded.
        calibrated: Whether weights have stepped scales, and every operator ranges that passed their check, so
            that the plan may use integer graphs: an assumption, since nothing is computed.
        techniques: Techniques of papers: llm.npu over levels ``layer`` and ``tensor``, with weights of
            precision ``w8a8`` and assumed ranges; ``shadowattn`` over any level, with assumed heads;
            NPUMoE over levels that use the NPU, with assumed loads; ``npu-attention`` over such levels.
        attention: Options of ``shadowattn``.
        experts: Options of ``npumoe``.
        imbalance: Of a mixture, the assumed largest load of an expert over the mean one; None for
            :data:`heterollm.simulate.routing.IMBALANCE`.
        head_imbalance: With ``shadowattn``, the assumed largest need of keys of a query head over the mean
            one of its layer; None for heads that are alike.
        pruned: Assumed share of the layers whose outliers llm.npu prunes; the paper's default.
        outlier_share: Assumed share of an operator's input channels that have outliers in a pass; all of them
            count as hot.

    Raises:
        OptionError: A value is not legal.
    """

    model: str
    soc: str = "snapdragon-8gen3"
    prompt: int = 256
    decode: int = 64
    level: str = "tensor"
    plan_for: PlanFor = "all"
    length_policy: SimulatedLengthPolicy = "auto"
    in_flight: InFlight = 1
    sync: SimulatedSync = "predict"
    load: GpuLoad | None = None
    overrides: Mapping[str, float] = field(default_factory=dict)
    head_bits: int = 4
    every_form: bool | None = None
    numerics: bool = False
    trace: bool = False
    calibrated: bool = False
    techniques: tuple[Technique, ...] = ()
    attention: AttentionRequest = field(default_factory=AttentionRequest)
    experts: ExpertsRequest = field(default_factory=ExpertsRequest)
    imbalance: float | None = None
    head_imbalance: float | None = None
    pruned: float = 0.85
    outlier_share: float = OUTLIER_SHARE

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, object, Sequence[object]], ...] = (
            ("plan level", self.level, PLAN_LEVELS),
            ("choice of lengths to plan for", self.plan_for, PLAN_FOR_CHOICES),
            ("length policy", self.length_policy, LENGTH_CHOICES),
            ("sync", self.sync, tuple(SYNC_CHOICES)),
            ("number of head bits", self.head_bits, (4, 8)),
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
        for share, of in ((self.pruned, "shadows is pruned"), (self.outlier_share, "channels has outliers")):
            if not 0.0 <= share <= 1.0:
                raise OptionError(f"A share of {share} of the {of}.", fix="Choose 0 to 1.")
        if not (1 <= self.prompt <= LONGEST_RUN and 0 <= self.decode <= LONGEST_RUN):
            raise OptionError(
                f"A prompt of {self.prompt} and {self.decode} tokens after it cannot be simulated.",
                fix=f"Give 1 to {LONGEST_RUN} and 0 to {LONGEST_RUN}.",
            )
        check_in_flight(self.in_flight)
        check_techniques(self.techniques)
        if BEST_TECHNIQUES in self.techniques:
            raise OptionError(
                "A simulation assumes the calibration of a technique by its name, and auto names none.",
                fix="Name techniques, and simulate each.",
            )
        if self.numerics and ({*self.techniques} - {NPU_ATTENTION} or self.calibrated):
            raise OptionError(
                "With numerics no calibration is assumed, and techniques need one.",
                fix="Leave out one of them, or run `heterollm generate --device sim:SOC --calibration FILE`.",
            )
        if self.techniques and self.in_flight != 1:
            raise OptionError(
                f"The technique {self.techniques[0]} has its own number of chunks in flight.",
                fix="Leave out --in-flight.",
            )
        for name, placed in ((NPU_EXPERTS, "experts"), (NPU_ATTENTION, "attention")):
            if name not in self.techniques or self.level != "gpu":
                continue
            raise OptionError(
                f"The technique {name} places {placed} on the NPU.",
                fix="Choose another level than gpu.",
            )
        if LLM_NPU in self.techniques and self.level not in ("layer", "tensor"):
            raise OptionError(
                f"The technique {LLM_NPU} is none of level {self.level}.",
                fix="Choose level layer, the paper's, or tensor.",
            )
        if LLM_NPU in self.techniques and self.calibrated:
            raise OptionError(
                f"The technique {LLM_NPU} assumes weights and ranges of precision w8a8.",
                fix="Leave out --calibrated.",
            )

    @property
    def online(self) -> bool:
        """Whether graphs are built for the prompt, in its time."""
        return self.length_policy == "online" and self.prompt not in STANDARD_LENGTHS

    @property
    def precision(self) -> Precision:
        """Precision of the linears."""
        if LLM_NPU in self.techniques:
            return "w8a8"
        return "fp16" if self._chip_has("npu.float_weights") else "w4a16"

    @property
    def forms(self) -> bool:
        """Whether the NPU offers every graph form; of an unknown SoC, whether the level asks for them."""
        if self.every_form is not None:
            return self.every_form
        return self.level in ("block", "fused") or self._chip_has("npu.every_form")

    def _chip_has(self, parameter: str) -> bool:
        return _chip_has(self.soc, tuple(self.overrides.items()), parameter)


@functools.cache
def _chip_has(soc: str, overrides: tuple[tuple[str, float], ...], parameter: str) -> bool:
    try:
        return bool(load_soc(soc, dict(overrides)).values()[parameter])
    except OptionError:  # the simulation itself says why
        return False
