"""Finds options of a load without effect on a checkpoint, or on the chosen device and plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from heterollm.base import idle_options, refuse_idle, shown_option
from heterollm.model import ModelConfig, kept_formats
from heterollm.planning.load_effects import CHOSEN_EFFECTS, SOURCE_EFFECTS
from heterollm.planning.load_options import LoadOptions, load_facts

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.solver import Plan


def check_source_effects(options: LoadOptions, config: ModelConfig) -> None:
    """Refuse an option of a load that has no effect on a checkpoint.

    Args:
        options: Of the load.
        config: The model.

    Raises:
        OptionError: There is one.
    """
    facts, given = load_facts(options)
    stored = kept_formats(config, options.precision, options.scales) is not None
    refuse_idle(SOURCE_EFFECTS, given, facts | {"stored": stored, "experts": config.mixture is not None})


def idle_notes(options: LoadOptions, device: Device, plan: Plan) -> Iterator[str]:
    """Yield a note for each option of a load without effect on the chosen device or plan."""
    facts, given = load_facts(options)
    chosen = {
        "asks_for_power": device.power == options.power,
        "has_threads": bool(device.split.gpu_cores),
        "uses_npu": plan.uses_npu,
        "reads_calibration": plan.has_integer_forms
        or any(record.is_active for record in plan.techniques)
        or options.experts_gib is not None,
    }
    for name, effect in idle_options(CHOSEN_EFFECTS, given, facts | chosen):
        reason = effect.reason.format(device=device.name, plan=plan.level)
        yield f"{shown_option(name, facts[name])} changes nothing: {reason}"
