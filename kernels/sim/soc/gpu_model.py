"""Time of a GPU kernel: a roofline whose efficiency rises with the number of tokens.

A linear layer has two kernels, and the faster runs. One for few tokens unpacks weights as it reads them:
``max(bytes / bandwidth, weights / unpacked, operations / small)``. One for many multiplies in tiles:
``max(bytes / bandwidth, operations / gemm)``. The rates are issue slots: what a chip issues in a second,
times the share that a kernel reaches, over its slots for a product or a weight. HeteroLLM's kernel for many
brings all weights into tiles first, unpacked: ``weights / prepare`` is a floor that more tokens share. The
FP16 weights of llm.npu's Table 3 show the same floor as HeteroLLM's 4-bit ones. What the queue
costs between kernels (``gpu.kernel_gap_us``) and what a hand-over costs are not in these times. (HeteroLLM,
section 3.1; ``docs/soc-model.md``.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from heterollm.kernels.gpu import GpuWork
from heterollm.kernels.sim.soc.quantities import SocParameters

GpuBound = Literal["memory", "arithmetic", "prepare"]

FLOAT_BYTES: Final = 2
"""Of an activation and of an unpacked weight."""

TILE_TOKENS: Final = 32
"""Of a kernel that unpacks in its tiles, which computes whole tiles."""


@dataclass(frozen=True, slots=True)
class GpuTime:
    """The time of work in a busy queue while nothing else runs.

    Args:
        alone_us: Time, without the gap before it.
        dram_bytes: Bytes moved, those of unpacked weights included.
        bound: The resource that takes longest.
    """

    alone_us: float
    dram_bytes: float
    bound: GpuBound

    @property
    def demand_gbps(self) -> float:
        """DRAM bandwidth that it asks for."""
        return self.dram_bytes / (self.alone_us * 1e3) if self.alone_us > 0 else 0.0

    @property
    def arithmetic_bound(self) -> bool:
        """Whether its units compute all the time, rather than wait for memory."""
        return self.bound != "memory"


def linear_work(rows: int, columns: int, tokens: int, *, bits: int = 4, block: int = 32) -> GpuWork:
    """Return the work of a linear layer.

    Args:
        rows: Output rows ``n``.
        columns: Inputs ``k``.
        tokens: Tokens ``m``.
        bits: Of a weight.
        block: Inputs that share an FP16 scale; 0 for floats.
    """
    weights = rows * columns
    packed_bytes = weights * bits / 8 + (2 * weights / block if block else 0)
    return GpuWork(
        "linear",
        2.0 * weights * tokens,
        packed_bytes + columns * tokens * FLOAT_BYTES,
        rows * tokens * FLOAT_BYTES,
        tokens,
        weights,
        bits,
    )


def gpu_time(soc: SocParameters, work: GpuWork) -> GpuTime:
    """Return what work takes on a modelled GPU.

    Args:
        soc: The SoC.
        work: The work.
    """
    gpu = soc.gpu
    moved_bytes = work.read_bytes + work.written_bytes
    memory_us = moved_bytes / (gpu.dram_gbps * 1e3)
    if work.kind == "selection" and gpu.choose_gscores_per_s:
        return _bounded(memory_us, work.read_bytes / (gpu.choose_gscores_per_s * 1e3), moved_bytes)
    if work.kind != "linear":
        rate = gpu.attention_tflops if work.kind == "attention" else gpu.gemm_tflops
        arithmetic_us = work.flops / (rate * 1e6)
        return _bounded(memory_us, arithmetic_us, moved_bytes)
    slots_us = max(work.weights / (gpu.small_gweights_per_s * 1e3), work.flops / (gpu.small_tflops * 1e6))
    few = _bounded(memory_us, slots_us, moved_bytes)
    many = _prepared(soc, work, moved_bytes, memory_us)
    return min(few, many, key=lambda time: time.alone_us)


def _bounded(memory_us: float, arithmetic_us: float, moved_bytes: float) -> GpuTime:
    bound: GpuBound = "memory" if memory_us >= arithmetic_us else "arithmetic"
    return GpuTime(max(memory_us, arithmetic_us), moved_bytes, bound)


def _prepared(soc: SocParameters, work: GpuWork, moved_bytes: float, memory_us: float) -> GpuTime:
    """Return the time of the kernel for many tokens, which may bring every weight into its tiles first."""
    arithmetic_us = work.flops / (soc.gpu.gemm_tflops * 1e6)
    if not soc.gpu.prepare_gweights_per_s:
        return _bounded(memory_us, arithmetic_us * _whole_tiles(work), moved_bytes)
    prepare_us = work.weights / (soc.gpu.prepare_gweights_per_s * 1e3)
    copied_bytes = 0.0
    if work.bits <= 8:
        # The unpacked copy is written once and read once: tiles are such that it is not read more often.
        copied_bytes = 2.0 * FLOAT_BYTES * work.weights
        prepare_us = max(prepare_us, copied_bytes / (soc.gpu.dram_gbps * 1e3))
    bound: GpuBound = "arithmetic" if arithmetic_us >= prepare_us else "prepare"
    return GpuTime(prepare_us + max(arithmetic_us, memory_us), moved_bytes + copied_bytes, bound)


def _whole_tiles(work: GpuWork) -> float:
    """Return the tiles that a kernel computes, all of them whole, over the tiles of its tokens.

    Each expert of a mixture has at least one. Only the mean rows of experts are known here, which say nothing
    of their last tiles.
    """
    if not work.weights:
        return 1.0
    tokens = work.flops / (2 * work.weights)
    tiles = tokens / TILE_TOKENS
    return (math.ceil(tiles) if tokens == work.tokens else max(1.0, tiles)) / tiles
