"""Estimates the time of an emulated NPU, and refuses runs that would take minutes or hours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from heterollm.base import OptionError, see
from heterollm.engine.step import Step
from heterollm.kernels.ops import Phase

if TYPE_CHECKING:
    from heterollm.engine.runner import Engine

SECONDS_PER_WEIGHT: Final = 1.3e-7
"""Measured on the HTP emulator: 0.5 s for one token through 3.7 million MatMulNBits weights."""

LIMIT_S: Final = 3.0
"""Longest estimated pass without ``--allow-slow``."""


def step_seconds(steps: Iterable[Step]) -> float:
    """Return a lower bound of the graph runs' time, which grows with more than about a hundred tokens."""
    works = (step.work for step in steps if step.processor == "npu" and step.work is not None)
    return SECONDS_PER_WEIGHT * sum(work.flops // (2 * work.tokens) for work in works)


def check_emulation(engine: Engine) -> None:
    """Refuse a model that is slow on an emulated NPU, before any graph is built.

    Raises:
        OptionError: The estimate of a decoded token or a short prompt is above :data:`LIMIT_S`.
    """
    if engine.device.time_kind != "emulated":
        return
    short = min(engine.device.standard_lengths[1], engine.plan.chunk_length, engine.context)
    passes: tuple[tuple[Phase, int], ...] = (("decode", 1), ("prefill", short))
    estimate_s = max(step_seconds(engine.planned_steps(*one)) for one in passes)
    if estimate_s > LIMIT_S:
        raise OptionError(
            f"One pass of this model through the emulated NPU takes about {estimate_s:.0f} s.",
            fix="Pass --allow-slow (allow_slow=True) to run it all the same, or use device host. "
            + see("the-emulator-is-slow"),
        )
