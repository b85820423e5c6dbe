"""What a run on an emulated NPU would take, so that nobody starts an hour's wait unawares."""

from __future__ import annotations

from typing import Final

from heterollm.base import OptionError, see
from heterollm.kernels.device import Device
from heterollm.kernels.ops import feed_forward_blocks
from heterollm.model import ModelWeights
from heterollm.solver import Plan

__all__ = ["check_emulation", "step_seconds"]

SECONDS_PER_WEIGHT: Final = 1.3e-7
"""Measured on the HTP emulator: 0.5 s for one token through 3.7 million MatMulNBits weights."""

LIMIT_S: Final = 3.0
"""One step may take this long without a flag."""


def step_seconds(weights: ModelWeights, plan: Plan) -> float:
    """Return the estimated seconds of one pass through everything that the plan places on the NPU.

    A lower bound for prefill: the emulator's time grows with the tokens beyond about a hundred.
    """
    placed = {(entry.group, entry.layers) for entry in plan.entries if entry.placement.npu_lengths}
    count = sum(
        spec.flops(1) // 2
        for spec in (*weights.specs, *feed_forward_blocks(weights.specs))
        if any(group == spec.group and low <= spec.layer <= high for group, (low, high) in placed)
    )
    return count * SECONDS_PER_WEIGHT


def check_emulation(device: Device, weights: ModelWeights, plan: Plan, allow_slow: bool) -> None:
    """Refuse a model that an emulated NPU would take long for, unless the user accepts it.

    Raises:
        OptionError: One pass is estimated above :data:`LIMIT_S` and ``allow_slow`` is not set.
    """
    if device.time_kind != "emulated" or allow_slow:
        return
    estimate_s = step_seconds(weights, plan)
    if estimate_s > LIMIT_S:
        raise OptionError(
            f"One pass of this model through the emulated NPU takes about {estimate_s:.0f} s.",
            fix="Pass --allow-slow (allow_slow=True) to run it all the same, or use device host. "
            + see("the-emulator-is-slow"),
        )
