"""Options of a load, checked."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from heterollm.base import OptionError, refuse_idle
from heterollm.engine import SYNC_OPTIONS, Sync
from heterollm.kernels.ops import POWERS, Power, Precision, Scales
from heterollm.model import ModelConfig
from heterollm.planning.load_effects import LOAD_EFFECTS
from heterollm.planning.techniques.llm_npu import check_technique
from heterollm.solver import (
    BEST_TECHNIQUES,
    LENGTH_POLICIES,
    SHADOW_ATTENTION,
    AttentionRequest,
    ExpertsRequest,
    LengthPolicy,
    Plan,
    PlanRequest,
)
from heterollm.text import MOST_GUESSES

KvBits: TypeAlias = Literal[8, 16, 32]
"""Bits of a number in the KV cache; those of 8 bits are codes with scales."""

DEFAULT_CONTEXT: Final = 4096
LOOKUP: Final = "lookup"
"""The name of guesses from the text, in place of a draft model's."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model.

    Args:
        device: One of :data:`heterollm.kernels.devices.DEVICE_NAMES`, a simulated one, or ``auto``.
        plan: A plan, a plan file, a level (``gpu``, ``npu``, ``layer``; ``tensor``, ``block``: the solver's)
            or ``auto``: of all levels the one predicted fastest, with the split of the cores on ``host``, or
            ``gpu`` as long as the device has no profile.
        request: Further options of the solver's plan: objective, cap on the GPU's share, memory,
            forbidden processors and kinds. Its context and level are those of the load.
        precision: ``w4a16`` (4-bit weights, 8-bit embedding and head), ``w4a8`` (the same weights, inputs
            rounded to int8; ``host`` only), ``w8a8`` (8-bit weights with one scale for a tensor; the NPU
            computes with 8-bit activations on calibrated ranges, the GPU with floats) or ``fp16`` (float
            weights; FP32 on ``host``).
        group_size: Weights that share a scale: 32, 64 or 128.
        symmetric: Whether 4-bit codes have no zero point of their own.
        scales: ``free``, or ``stepped`` so that the NPU may compute in integers: each scale of a 4-bit row is
            1 to 16 times one number.
        calibration: A file of ``heterollm calibrate``, whose ranges integer NPU graphs need; at ``w8a8`` only
            plan ``gpu`` does without. The technique ``npumoe`` needs its loads of experts, and with
            ``experts_gib`` its most popular experts are in memory first.
        context: Positions of a session; the model's own limit, at most 4096, by default.
        gpu_threads: Threads of a GPU on CPU cores.
        npu_threads: Threads of an NPU on CPU cores; 0 leaves that of any device out.
        profile: A profile's file, in place of that of the device.
        power: Clocks and cores to ask for on ``snapdragon``: ``burst``, ``balanced`` or ``default``, which
            asks for none. Other devices ignore it.
        allow_slow: Run a model on the emulator that takes it more than a few seconds a pass.
        sync: How the processors wait for each other, in place of the plan's strategy: a strategy of
            :mod:`heterollm.kernels.sync.fence`, ``operator`` to finish the GPU's queue after every
            operator, or ``auto`` for the plan's.
        length_policy: How levels ``npu`` and ``layer`` run lengths that the NPU has no graph for:
            ``padding`` to the next one, ``pipe`` (several graphs one after the other) or ``auto`` (the
            faster policy for each group, by the device's profile). The solver needs none.
        kv_bits: Bits of a number in the KV cache: 16 or 32 for floats, 8 for int8 with a scale for each
            position of a head, not with sparse attention. None for the device's, which are 16.
        allow_fallback: Go on with the GPU alone when the NPU fails, with a note.
        trace: Record every pass.
        lora: Folder of a LoRA adapter in PEFT's format, which is merged into the weights before they are
            quantised.
        experts_gib: Memory in GiB for the weights of a mixture's experts on the GPU; other experts are read
            from storage when they are chosen. None for all of them.
        speculative: ``lookup`` to guess that the text repeats itself, or the folder, GGUF file or hub name of
            a draft model with the same tokenizer, which guesses; None to decode one token at a time.
        guesses: Guesses in each pass, 1 to 15; None for the number that pays most, possibly none.
        defaults: Names of options that a file of defaults sets for many commands. One of them that has no
            effect beside the others is left alone; others without effect are refused.

    Raises:
        OptionError: An option is not legal, or has no effect; the message names it.
    """

    device: str = "auto"
    plan: str | Path | Plan = "auto"
    request: PlanRequest | None = None
    precision: Precision = "w4a16"
    group_size: int = 32
    symmetric: bool = True
    scales: Scales = "free"
    calibration: str | Path | None = None
    context: int | None = None
    gpu_threads: int | None = None
    npu_threads: int | None = None
    profile: str | Path | None = None
    power: Power = "burst"
    allow_slow: bool = False
    sync: Sync = "auto"
    length_policy: LengthPolicy = "padding"
    kv_bits: KvBits | None = None
    allow_fallback: bool = False
    trace: bool = False
    experts_gib: float | None = None
    lora: str | Path | None = None
    speculative: str | Path | None = None
    guesses: int | None = None
    defaults: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.plan, str | Path | Plan):
            raise OptionError(
                f"The plan is {self.plan!r}.", fix="Give a level, the path of a plan, or a plan."
            )
        if self.request is not None and not isinstance(self.request, PlanRequest):
            raise OptionError(f"The request is {self.request!r:.80}.", fix="Give a PlanRequest.")
        if self.profile is not None and not isinstance(self.profile, str | Path):
            raise OptionError(f"profile is {self.profile!r:.80}.", fix="Give the path of a profile.")
        if self.lora is not None and not isinstance(self.lora, str | Path):
            raise OptionError(f"lora is {self.lora!r:.80}.", fix="Give the folder of an adapter.")
        check_weights(self.precision, self.group_size, self.symmetric, self.scales)
        if self.request is not None:
            level = self.plan if isinstance(self.plan, str) else "of a file"
            known = self.calibration is not None
            check_technique(self.request, self.precision, level, calibrated=known, routed=known)
        if self.calibration is not None and not isinstance(self.calibration, str | Path):
            raise OptionError(f"The calibration is {self.calibration!r:.80}.", fix="Give the path of a file.")
        techniques = () if self.request is None else self.request.techniques
        alone = self.plan == "gpu" or (isinstance(self.plan, Plan) and not self.plan.uses_npu)
        if self.precision == "w8a8" and self.calibration is None and not alone:
            raise OptionError(
                "Precision w8a8 needs the calibrated ranges of the model's activations.",
                fix="Run `heterollm calibrate MODEL --precision w8a8 -o FILE` and give --calibration FILE, "
                "or choose plan gpu, which computes with float activations.",
            )
        check_kv_bits(
            self.kv_bits, is_sparse=bool({SHADOW_ATTENTION, BEST_TECHNIQUES}.intersection(techniques))
        )
        check_experts_gib(self.experts_gib)
        check_speculative(self.speculative, self.guesses)
        for what, chosen, legal in (
            ("power", self.power, POWERS),
            ("sync", self.sync, SYNC_OPTIONS),
            ("length policy", self.length_policy, LENGTH_POLICIES),
        ):
            if chosen not in legal:
                raise OptionError(
                    f"There is no {what} {chosen!r:.80}.", fix=f"Choose among {', '.join(legal)}."
                )
        facts, given = load_facts(self)
        refuse_idle(LOAD_EFFECTS, given, facts)

    @property
    def weights_calibration(self) -> str | Path | None:
        """The calibration where weights of this format can have ranges, scales and shadows; else None."""
        stepped = self.precision == "w4a16" and self.scales == "stepped"
        return self.calibration if stepped or self.precision == "w8a8" else None


REQUEST_NAMES: Final = {"forbidden": "forbid", "build_budget_s": "build_budget"}
"""Options of the fields of a request that have other names."""

REQUEST_FIELDS: Final = (
    *("gpu_share", "energy_weight", "forbidden", "npu_gib", "histogram", "build_budget_s", "in_flight"),
    "techniques",
)


def technique_facts(attention: AttentionRequest, experts: ExpertsRequest) -> dict[str, Any]:
    """Return the options of techniques by name."""
    return {
        "keep": attention.keep,
        "keep_by": attention.keep_by,
        "score_buckets": attention.buckets,
        "estimator": attention.estimator,
        "head_pipeline": attention.pipeline,
        "overflow": experts.overflow,
    }


def load_facts(options: LoadOptions) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the values of all options of a load by name, and the names of those that are not defaults."""
    values: dict[str, Any] = {one.name: getattr(options, one.name) for one in fields(options)}
    usual: dict[str, Any] = {
        one.name: one.default if one.default is not MISSING else None for one in fields(options)
    }
    for request, target in ((options.request or PlanRequest(), values), (PlanRequest(), usual)):
        for name in REQUEST_FIELDS:
            target[REQUEST_NAMES.get(name, name)] = getattr(request, name)
        target |= technique_facts(request.attention, request.experts)
    given = {name for name, value in values.items() if value != usual[name]}
    return values, frozenset(given - options.defaults)


class LoadKeywords(TypedDict, total=False):
    """The fields of :class:`LoadOptions` as keywords, for type checkers."""

    device: str
    plan: str | Path | Plan
    request: PlanRequest | None
    precision: Precision
    group_size: int
    symmetric: bool
    scales: Scales
    calibration: str | Path | None
    context: int | None
    gpu_threads: int | None
    npu_threads: int | None
    profile: str | Path | None
    power: Power
    allow_slow: bool
    sync: Sync
    length_policy: LengthPolicy
    kv_bits: KvBits | None
    allow_fallback: bool
    trace: bool
    experts_gib: float | None
    lora: str | Path | None
    speculative: str | Path | None
    guesses: int | None
    defaults: frozenset[str]


def check_speculative(speculative: object, guesses: object) -> None:
    """Refuse a draft that is no name, and a number of guesses that no pass checks.

    Raises:
        OptionError: One is not legal; the message names it.
    """
    if speculative is not None and (not isinstance(speculative, str | Path) or not str(speculative)):
        raise OptionError(
            f"speculative is {speculative!r:.80}.", fix=f"Give {LOOKUP!r}, or the folder of a draft model."
        )
    if guesses is None:
        return
    if type(guesses) is not int or not 1 <= guesses <= MOST_GUESSES:
        raise OptionError(
            f"{guesses!r:.80} guesses cannot be checked in a pass.", fix=f"Give 1 to {MOST_GUESSES}."
        )


def check_kv_bits(kv_bits: object, *, is_sparse: bool) -> None:
    """Refuse bits of the KV cache that it cannot have, or that sparse attention cannot read.

    Raises:
        OptionError: The number is not legal, or attention is sparse.
    """
    if kv_bits is None:
        return
    if type(kv_bits) is not int or kv_bits not in get_args(KvBits):
        raise OptionError(f"kv_bits is {kv_bits!r:.80}.", fix="Give 8, or 16 or 32 for floats.")
    if is_sparse and kv_bits == 8:
        raise OptionError(
            "Sparse attention reads no KV cache of 8 bits.",
            fix="Leave --kv-bits out, or choose a plan without the technique shadowattn.",
        )


def check_experts_gib(experts_gib: float | None) -> None:
    """Refuse a memory budget of experts that is no size.

    Raises:
        OptionError: It is not legal.
    """
    if experts_gib is None:
        return
    number = isinstance(experts_gib, int | float) and not isinstance(experts_gib, bool)
    if not number or not 0 < experts_gib < math.inf:
        raise OptionError(
            f"The memory of experts is {experts_gib!r:.80} GiB.", fix="Give a number above 0, such as 1.5."
        )


def check_weights(precision: object, group_size: object, symmetric: object, scales: object = "free") -> None:
    """Refuse a number format that no checkpoint can be given.

    Raises:
        OptionError: An argument is not legal; the message names it.
    """
    if precision not in get_args(Precision):
        raise OptionError(
            f"There is no precision {precision!r}.", fix=f"Choose {' or '.join(get_args(Precision))}."
        )
    if type(group_size) is not int or group_size not in (32, 64, 128):
        raise OptionError(f"group_size is {group_size!r}.", fix="Choose 32, 64 or 128.")
    if not isinstance(symmetric, bool):
        raise OptionError(f"symmetric is {symmetric!r}.", fix="Choose True or False.")
    if scales not in get_args(Scales):
        raise OptionError(
            f"There are no scales {scales!r:.80}.", fix=f"Choose {' or '.join(get_args(Scales))}."
        )
    if scales == "stepped" and precision == "fp16":
        raise OptionError(
            "Weights of precision fp16 have no scales, stepped or free.", fix="Choose w4a16 or w4a8."
        )
    if precision == "w8a8" and (scales != "free" or not symmetric):
        raise OptionError(
            "Weights of precision w8a8 have one scale for a tensor and no zero points.",
            fix="Leave the scales and the zero points out, or choose w4a16.",
        )
    if scales == "stepped" and not symmetric:
        raise OptionError(
            "Stepped scales are for symmetric weights: integer NPU graphs take no zero points.",
            fix="Choose symmetric weights, or free scales.",
        )


def choose_context(config: ModelConfig, context: int | None) -> int:
    """Return the positions of a session; by default the model's limit, at most 4096.

    Raises:
        OptionError: It is outside what the model was made for.
    """
    if context is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    if type(context) is not int:
        raise OptionError(f"context is {context!r}, but must be a whole number of positions.")
    if not 1 <= context <= config.max_positions:
        raise OptionError(
            f"A context of {context} is outside what the model was made for, 1 to {config.max_positions}."
        )
    return context
