"""Refuses plans whose weights, graphs and cache exceed the memory of a modelled phone or of its NPU."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.base import GIB, PlanError
from heterollm.kernels.device import Device
from heterollm.kernels.npu import graph_memory
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import soc_of
from heterollm.model import ModelConfig, shape_of_specs
from heterollm.solver import Plan

__all__ = ["check_memory"]


def check_memory(
    device: Device, name: str, config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, positions: int
) -> None:
    """Refuse a plan that the phone cannot hold, or whose experts exceed what the NPU addresses.

    Args:
        device: The simulated device.
        name: Name of the model.
        config: Its configuration.
        specs: All groups of the model, and the experts of a mixture.
        plan: The plan.
        positions: Positions of the session.

    Raises:
        PlanError: It does not fit; the message has the sum.
    """
    soc, memory = soc_of(device), graph_memory(device.npu)
    graphs = plan.npu_bytes(specs, memory)
    experts = plan.npu_expert_bytes(specs, memory)
    space = soc.npu.address_space_gib * GIB
    if experts and space and graphs > space:
        raise PlanError(
            f"{name} does not fit the NPU's address space: {_gib(experts)} of experts"
            f" + {_gib(graphs - experts)} of other graphs > {_gib(space)} GiB.",
            fix="Let the solver choose the experts (--pass npumoe), or ask about another NPU "
            "(--what-if npu.address_space_gib=0 has no limit).",
        )
    weights = shape_of_specs(config, specs, name).weight_bytes
    cache = 2 * positions * config.layers * config.kv_heads * config.head_dim * device.cache_dtype.itemsize
    available = soc.memory.available_gib * GIB
    if available and weights + graphs + cache > available:
        raise PlanError(
            f"{name} does not fit the phone's memory: {_gib(weights)} of weights + {_gib(graphs)} of NPU graphs "
            f"+ {_gib(cache)} of keys and values > {_gib(available)} GiB.",
            fix="Ask about another phone (--what-if memory.available_gib=0 has no limit).",
        )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"
