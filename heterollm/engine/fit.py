"""Decides whether a device runs a plan: one rule for loads, plans, benches and simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from heterollm.base import PlanError, format_bytes
from heterollm.engine.memory import NO_VALUES, MemoryNeed, memory_need
from heterollm.model import expert_specs
from heterollm.solver import check_plan

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.kernels.npu import NpuBackend
    from heterollm.kernels.ops import OpSpec
    from heterollm.model import ModelConfig
    from heterollm.solver import Plan

HALF: Final = np.dtype(np.float16)


def check_runs(config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, npu: NpuBackend | None) -> None:
    """Refuse a plan that a model cannot run with an NPU, or without one.

    Raises:
        PlanError: A case has no entry, or its placement is not legal there; the message names it.
    """
    from heterollm.engine.npu_attention.limits import check_attention
    from heterollm.engine.slots import HEAD_ROWS

    check_attention(config, plan)
    check_plan(
        plan,
        (*specs, *expert_specs(config, specs)),
        npu,
        longest=config.max_positions,
        head_rows=HEAD_ROWS,
        activation=config.activation,
        heads=(config.attention.heads, config.attention.kv_heads),
    )


def fitting_need(
    device: Device,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    plan: Plan,
    context: int,
    *,
    given: Mapping[str, Any] = NO_VALUES,
    experts_bytes: int | None = None,
) -> MemoryNeed:
    """Return the memory of a model under a plan that the device runs.

    The NPU holds the graphs of each pass, and closes those of other passes for them. A modelled phone states
    its memory; a real device's is compared at the load, by :func:`heterollm.engine.check_memory`.

    Args:
        device: The device.
        config: The model.
        specs: Every group of it.
        plan: The plan.
        context: Positions of a session.
        given: As of :func:`memory_need`.
        experts_bytes: As of :func:`memory_need`.

    Raises:
        PlanError: The device refuses the plan, or its memory does not hold the model.
    """
    # A late import: without an OpenCL binding, opening the device has raised the error that says so.
    from heterollm.engine.slots import pool_sizes

    check_runs(config, specs, plan, device.npu)

    def need(activation: np.dtype[Any], cache: np.dtype[Any]) -> MemoryNeed:
        slots = pool_sizes(config, specs, plan, activation.itemsize, context)
        return memory_need(
            *(config, specs, plan, context, slots, cache, device.npu),
            given=given,
            item_bytes=activation.itemsize,
            experts_bytes=experts_bytes,
        )

    if device.memory_bytes is not None:
        # What computes the numbers of a modelled phone has activations of 32 bits, and the phone of 16.
        phone = need(HALF, device.cache_dtype)
        if phone.total > device.memory_bytes:
            raise PlanError(
                f"The model takes {format_bytes(phone.total)} ({phone}), and a model can have "
                f"{format_bytes(device.memory_bytes)} of the memory of {device.name}.",
                fix="Use a smaller model or context, or ask about another phone: `heterollm simulate "
                "--what-if memory.available_gib=0` has no limit.",
            )
    return need(device.activation_dtype, device.cache_dtype)
