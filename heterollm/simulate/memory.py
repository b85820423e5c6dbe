"""Refuses plans whose weights, graphs and cache exceed the memory of a modelled phone."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.base import GIB, PlanError
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import position_bytes
from heterollm.kernels.npu import graph_memory
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import soc_of
from heterollm.model import ModelConfig, shape_of_specs
from heterollm.solver import Plan

__all__ = ["check_memory"]


def check_memory(
    device: Device, name: str, config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, positions: int
) -> None:
    """Refuse a plan that the phone cannot hold.

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
    available = soc_of(device).memory.available_gib * GIB
    graphs = plan.npu_bytes(specs, graph_memory(device.npu))
    weights = shape_of_specs(config, [spec for spec in specs if spec.experts is None], name).weight_bytes
    head_bytes = positions * position_bytes(config.head_dim, device.cache_dtype)
    cache = 2 * config.layers * config.kv_heads * head_bytes
    if available and weights + graphs + cache > available:
        raise PlanError(
            f"{name} does not fit the phone's memory: {_gib(weights)} of weights + {_gib(graphs)} of NPU "
            f"graphs + {_gib(cache)} of keys and values > {_gib(available)} GiB.",
            fix="Ask about another phone (--what-if memory.available_gib=0 has no limit).",
        )


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"
