"""Speeds of two processors that use the same DRAM at once.

Each processor demands the bandwidth that it takes alone. If the memory can move the sum, both get their
demand. Otherwise they share the memory fairly: neither gets more than its demand, and the rest of one share
goes to the other. With the published numbers a GPU that reads weights and an NPU that unpacks them stay
within the limit, so that decode on both moves nearly all of it. (HeteroLLM, section 3.3;
``docs/soc-model.md``.)
"""

from __future__ import annotations

from heterollm.base import OptionError
from heterollm.kernels.sim.soc.gpu_model import GpuTime
from heterollm.kernels.sim.soc.npu_model import NpuTime
from heterollm.kernels.sim.soc.quantities import SocParameters


def granted_gbps(soc: SocParameters, gpu_demand_gbps: float, npu_demand_gbps: float) -> tuple[float, float]:
    """Return the bandwidth that each part gets: at most its demand, together at most the memory's limit.

    Args:
        soc: The SoC.
        gpu_demand_gbps: What the GPU would take alone.
        npu_demand_gbps: What the NPU would take alone.

    Raises:
        OptionError: A demand is negative.
    """
    if not min(gpu_demand_gbps, npu_demand_gbps) >= 0:
        raise OptionError(
            f"Demands for bandwidth must not be negative: {gpu_demand_gbps}, {npu_demand_gbps}."
        )
    limit = soc.memory.limit_gbps
    if gpu_demand_gbps + npu_demand_gbps <= limit:
        return gpu_demand_gbps, npu_demand_gbps
    half = limit / 2
    if gpu_demand_gbps <= half:
        return gpu_demand_gbps, limit - gpu_demand_gbps
    if npu_demand_gbps <= half:
        return limit - npu_demand_gbps, npu_demand_gbps
    return half, half


def shared_rates(
    soc: SocParameters,
    gpu_demand_gbps: float,
    npu_demand_gbps: float,
    *,
    gpu_arithmetic: bool = False,
    npu_arithmetic: bool = False,
) -> tuple[float, float]:
    """Return how fast two jobs that run at once go on, each as a fraction of its speed alone.

    A job that gets less bandwidth than it asks for is slowed in proportion. One that computes all the time is
    slowed at least by ``memory.corun_slowdown``, whatever the other one does: published joint rates show no
    slowdown of parts that wait for weights, and one of those that compute.

    Args:
        soc: The SoC.
        gpu_demand_gbps: What the GPU's job takes alone.
        npu_demand_gbps: What the NPU's job takes alone.
        gpu_arithmetic: Whether the GPU's job computes all the time.
        npu_arithmetic: Whether the NPU's job computes all the time.

    Raises:
        OptionError: A demand is negative.
    """
    gpu_gbps, npu_gbps = granted_gbps(soc, gpu_demand_gbps, npu_demand_gbps)
    slowed = 1 / soc.memory.corun_slowdown
    gpu = gpu_gbps / gpu_demand_gbps if gpu_demand_gbps > 0 else 1.0
    npu = npu_gbps / npu_demand_gbps if npu_demand_gbps > 0 else 1.0
    return (min(gpu, slowed) if gpu_arithmetic else gpu), (min(npu, slowed) if npu_arithmetic else npu)


def together_us(soc: SocParameters, gpu: GpuTime, npu: NpuTime) -> tuple[float, float]:
    """Return the end times of two jobs that start together; the longer one ends alone.

    The NPU's fixed cost is left out: who starts the jobs knows how much of it is hidden.

    Args:
        soc: The SoC.
        gpu: The GPU's job.
        npu: The NPU's job.
    """
    gpu_rate, npu_rate = shared_rates(
        soc,
        gpu.demand_gbps,
        npu.demand_gbps,
        gpu_arithmetic=gpu.arithmetic_bound,
        npu_arithmetic=npu.arithmetic_bound,
    )
    gpu_us, npu_us = gpu.alone_us, npu.busy_us
    first_us = min(gpu_us / gpu_rate, npu_us / npu_rate)
    return (
        first_us + max(gpu_us - first_us * gpu_rate, 0.0),
        first_us + max(npu_us - first_us * npu_rate, 0.0),
    )
