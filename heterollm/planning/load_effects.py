"""Conditions under which the options of a load have an effect, for the command line and the Python API.

A fact has the name of its option; :func:`heterollm.planning.load_facts` also takes apart the request to the
solver.
"""

from __future__ import annotations

from typing import Any, Final

from heterollm.base import Effect, OptionFacts
from heterollm.kernels.devices import option_devices
from heterollm.kernels.sim import is_simulated
from heterollm.solver import (
    BEST_TECHNIQUES,
    LEVELS,
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    Technique,
)


def _techniques(facts: OptionFacts) -> tuple[Any, ...]:
    return tuple(facts.get("techniques") or ())


def _is_device(facts: OptionFacts, *names: str) -> bool:
    """Return whether the device is one of some, or may be; ``sim`` stands for all simulated ones."""
    device = facts.get("device", "auto")
    return "sim" in names if is_simulated(device) else device in names


def _takes(facts: OptionFacts, option: str) -> bool:
    """Return whether the device takes an option that some devices alone take."""
    return facts.get("device", "auto") in option_devices(option)


def is_file(plan: object) -> bool:
    """Return whether a plan is made already: a file of one, or a plan itself."""
    return plan not in ("auto", *LEVELS, *SOLVED_LEVELS)


def _is_solved(facts: OptionFacts) -> bool:
    return facts.get("plan", "auto") in ("auto", *SOLVED_LEVELS)


def _uses_npu(facts: OptionFacts) -> bool:
    return facts.get("plan", "auto") != "gpu" and facts.get("npu_threads") != 0


def _may_have(technique: Technique, facts: OptionFacts) -> bool:
    return technique in _techniques(facts) or BEST_TECHNIQUES in _techniques(facts)


def takes_no_calibration(facts: OptionFacts) -> bool:
    """Return whether neither the weights nor a technique nor the memory of experts can read a calibration."""
    precision, stepped = facts.get("precision", "w4a16"), facts.get("scales", "free") == "stepped"
    weights = precision == "w8a8" or (precision == "w4a16" and stepped)
    experts = _may_have(NPU_EXPERTS, facts) or facts.get("experts_gib") is not None
    return not weights and not (experts and SHADOW_ATTENTION not in _techniques(facts))


PLAN_EFFECTS: Final = (
    Effect(
        "keep keep_by score_buckets estimator head_pipeline",
        lambda facts: _may_have(SHADOW_ATTENTION, facts),
        f"attention is sparse with the technique {SHADOW_ATTENTION} alone",
        f"Add --technique {SHADOW_ATTENTION}",
    ),
    Effect(
        "overflow",
        lambda facts: _may_have(NPU_EXPERTS, facts),
        "experts have capacities with the technique npumoe alone",
        "Add --technique npumoe",
    ),
    Effect(
        "sync",
        lambda facts: (
            _uses_npu(facts) or facts.get("sync") == "operator" or _may_have(SHADOW_ATTENTION, facts)
        ),
        "nothing waits for another processor without the NPU",
        "Choose another plan than gpu",
    ),
    Effect(
        "length_policy",
        lambda facts: facts.get("plan") in ("npu", "layer"),
        "it is for plans npu and layer; others say how each length runs",
        "Choose plan npu or layer",
    ),
)
"""Conditions that loads and simulations share."""

LOAD_EFFECTS: Final = (
    *PLAN_EFFECTS,
    Effect(
        "group_size asymmetric symmetric scales",
        lambda facts: facts.get("precision", "w4a16") != "fp16",
        "weights of precision fp16 have no blocks, scales or zero points",
        "Choose another precision",
    ),
    Effect(
        "calibration",
        lambda facts: not takes_no_calibration(facts),
        "a calibration is for weights of precision w4a16 with stepped scales, or of precision w8a8, or for "
        "the technique npumoe or a memory budget of experts; a plan's file has all that it needs of it",
        "Add --scales stepped or --precision w8a8",
    ),
    Effect(
        "calibration",
        lambda facts: (
            facts.get("plan") != "gpu" or bool(_techniques(facts)) or facts.get("experts_gib") is not None
        ),
        "plan gpu has no integer NPU graphs",
        "Choose another plan",
    ),
    Effect(
        "power",
        lambda facts: _takes(facts, "power"),
        "only a Snapdragon can be asked for clocks",
    ),
    Effect(
        "gpu_threads",
        lambda facts: _is_device(facts, "sim") or _takes(facts, "gpu_threads"),
        "only a GPU on CPU cores has threads",
    ),
    Effect(
        "npu_threads",
        lambda facts: _takes(facts, "npu_threads") or facts.get("npu_threads") == 0,
        "only an NPU on CPU cores has threads; 0 leaves that of other devices out",
    ),
    Effect(
        "npu_threads",
        lambda facts: not _is_device(facts, "emulator"),
        "the emulator always has its NPU, which runs on no threads",
    ),
    Effect(
        "allow_slow",
        lambda facts: _is_device(facts, "emulator"),
        "only the emulator refuses slow models",
        "Choose --device emulator",
    ),
    Effect(
        "allow_fallback",
        _uses_npu,
        "nothing runs on the NPU, which could fail",
        "Choose another plan than gpu",
    ),
    Effect(
        "allow_fallback",
        lambda facts: not _is_device(facts, "sim"),
        "a modelled NPU never fails",
        "Choose another device",
    ),
    Effect(
        "gpu_share energy_weight forbid npu_gib histogram build_budget in_flight",
        _is_solved,
        "the solver makes plans auto, tensor and block alone",
        "Choose such a plan",
    ),
    Effect(
        "build_budget",
        lambda facts: facts.get("histogram") is not None,
        "standard lengths are chosen for the prompts that come, and none are named",
        "Name them with --histogram, such as 1:200,64:10,256:3",
    ),
    Effect(
        "guesses",
        lambda facts: facts.get("speculative") is not None,
        "nothing guesses tokens",
        "Add --speculative lookup, or a model",
    ),
    Effect(
        "experts_gib",
        lambda facts: not _is_device(facts, "sim"),
        "a simulated device has no storage to read experts from, so that a budget of their memory would "
        "cost it no time",
        "Choose another device",
    ),
)
"""Conditions that the options alone decide."""

LOAD_OPTIONS: Final = frozenset(name for effect in LOAD_EFFECTS for name in effect.names.split())
"""Options that may have no effect beside others."""

SOURCE_EFFECTS: Final = (
    Effect(
        "group_size symmetric",
        lambda facts: not facts["stored"],
        "the checkpoint has quantised weights, with blocks and zero points of their own",
        "Choose a checkpoint with float weights",
    ),
    Effect(
        "experts_gib",
        lambda facts: bool(facts["experts"]),
        "a model without experts has no memory of experts",
    ),
)
"""Conditions that the checkpoint decides."""

CHOSEN_EFFECTS: Final = (
    Effect("power", lambda facts: facts["asks_for_power"], "{device} has no clocks to ask for"),
    Effect("gpu_threads", lambda facts: facts["has_threads"], "the GPU of {device} has no threads"),
    Effect(
        "allow_fallback",
        lambda facts: facts["uses_npu"],
        "plan {plan} has nothing on the NPU that could fail",
    ),
    Effect(
        "sync",
        lambda facts: facts["uses_npu"] or facts["sync"] == "operator",
        "plan {plan} runs nothing on the NPU, which could be waited for",
    ),
    Effect("calibration", lambda facts: facts["reads_calibration"], "nothing in plan {plan} is calibrated"),
)
"""Conditions that the device and the plan decide, where ``auto`` or the solver chose them."""
