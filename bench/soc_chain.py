"""A chain of modelled operators: what a prefill or a decode step of a model takes on a modelled SoC.

The simulated device runs the real engine on a virtual clock; this is the same arithmetic without an engine,
fast enough to fit parameters with. Nothing in it depends on a model's name. Of each layer it holds the four
groups of linears (each on the GPU, on the NPU, or cut by rows so that both end together), and on the GPU
attention and element-wise work; the head, cut as any group, reads one token's state. It leaves out sequence
cuts and CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from heterollm.kernels.gpu import GpuWork
from heterollm.kernels.sim import SocParameters, Usage
from heterollm.kernels.sim.soc.gpu_model import GpuTime, gpu_time, linear_work
from heterollm.kernels.sim.soc.memory_model import shared_rates
from heterollm.kernels.sim.soc.npu_model import NpuTime, NpuWork, npu_time

Level = Literal["gpu", "layer", "tensor"]
Sync = Literal["fast", "driver"]

ALIGNMENT: Final = 256
"""Row cuts are multiples of this (HeteroLLM, section 4.3)."""

BLOCK: Final = 128
"""Inputs that share a scale in the published W4A16 runs: 4.125 bits a weight."""

FLOAT_BYTES: Final = 2
KERNELS_PER_LAYER: Final = 9
"""Two norms with residuals, rotation and cache write, attention, activation, and four groups of linears."""


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    width: int
    vocabulary: int

    def groups(self) -> list[tuple[int, int]]:
        """Return output rows and inputs of qkv, o, gate and up, down."""
        attention = self.heads * self.head_size
        return [
            (attention + 2 * self.kv_heads * self.head_size, self.hidden),
            (self.hidden, attention),
            (2 * self.width, self.hidden),
            (self.hidden, self.width),
        ]


LLAMA_3_8B: Final = Model(32, 4096, 32, 8, 128, 14336, 128256)


@dataclass(slots=True)
class Total:
    """Sum of what a chain took."""

    elapsed_us: float = 0.0
    gpu_busy_us: float = 0.0
    npu_busy_us: float = 0.0
    poll_us: float = 0.0
    dram_bytes: float = 0.0
    handed_over: int = 0

    def usage(self) -> Usage:
        """Return it as the power model takes it."""
        return Usage(self.elapsed_us, self.gpu_busy_us, self.npu_busy_us, self.poll_us, self.dram_bytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """One group on its parts."""

    elapsed_us: float
    gpu_us: float
    npu_us: float
    dram_bytes: float
    npu_rows: int


def hand_over_us(soc: SocParameters, tokens: int, sync: Sync) -> float:
    """Return what it costs to bring a group's input to the NPU and its output back.

    Through the driver both ways wait for an empty queue, copy, and fill the queue again. The fast way polls;
    in prefill the GPU's queue runs empty while the NPU works, in decode it is kept filled (section 4.2).
    """
    costs = soc.hand_over
    if sync == "driver":
        return 2 * (costs.finish_us + costs.write_us + costs.refill_us)
    return costs.poll_us + (costs.refill_us if tokens > 1 else 0.0)


def both_us(
    soc: SocParameters, gpu: GpuTime | None, npu: NpuTime | None, exposed_us: float
) -> tuple[float, ...]:
    """Return when the GPU's and the NPU's part of a group end, with contention while both run."""
    if gpu is None or npu is None:
        return (gpu.alone_us if gpu else 0.0, exposed_us + npu.busy_us if npu else 0.0)
    rates = shared_rates(
        soc,
        gpu.demand_gbps,
        npu.demand_gbps,
        gpu_arithmetic=gpu.arithmetic_bound,
        npu_arithmetic=npu.arithmetic_bound,
    )
    # The GPU works alone until the NPU has been started.
    gpu_us, npu_us = max(gpu.alone_us - exposed_us, 0.0), npu.busy_us
    first_us = min(gpu_us / rates[0], npu_us / rates[1])
    gpu_end = min(gpu.alone_us, exposed_us) + first_us + max(gpu_us - first_us * rates[0], 0.0)
    return gpu_end, exposed_us + first_us + max(npu_us - first_us * rates[1], 0.0)


def place(soc: SocParameters, rows: int, columns: int, tokens: int, npu_rows: int, sync: Sync) -> Placed:
    """Return a group with so many rows on the NPU."""
    gpu = (
        gpu_time(soc, linear_work(rows - npu_rows, columns, tokens, block=BLOCK)) if npu_rows < rows else None
    )
    npu = npu_time(soc, NpuWork(npu_rows, columns, tokens, 4, BLOCK)) if npu_rows else None
    exposed_us = soc.npu.execute_us * soc.npu.execute_exposed_fraction
    gpu_us, npu_us = both_us(soc, gpu, npu, exposed_us)
    cost_us = hand_over_us(soc, tokens, sync) if npu else 0.0
    moved = (gpu.dram_bytes if gpu else 0.0) + (npu.dram_bytes if npu else 0.0)
    return Placed(max(gpu_us, npu_us) + cost_us, gpu_us, npu_us, moved, npu_rows)


def best_cut(soc: SocParameters, rows: int, columns: int, tokens: int) -> Placed:
    """Return the fastest placement of a group with fast hand-overs."""
    whole = min(
        (place(soc, rows, columns, tokens, part, "fast") for part in (0, rows)),
        key=lambda placed: placed.elapsed_us,
    )
    # More rows make the NPU later and the GPU earlier: the best cut is beside where they meet.
    low, high = 0, (rows - 1) // ALIGNMENT
    while high - low > 1:
        middle = (low + high) // 2
        placed = place(soc, rows, columns, tokens, middle * ALIGNMENT, "fast")
        low, high = (middle, high) if placed.npu_us < placed.gpu_us else (low, middle)
    cuts = [place(soc, rows, columns, tokens, cut * ALIGNMENT, "fast") for cut in (low, high) if cut]
    best = min(cuts, key=lambda placed: placed.elapsed_us, default=whole)
    return min(whole, best, key=lambda placed: placed.elapsed_us)


def run(
    soc: SocParameters,
    model: Model,
    tokens: int,
    level: Level,
    *,
    context: int = 0,
    sync: Sync = "fast",
) -> Total:
    """Return what one pass takes.

    Args:
        soc: The SoC.
        model: The model.
        tokens: Tokens of the pass: the prompt's, or 1 for a decode step.
        level: Where linears run.
        context: Positions cached before.
        sync: How parts wait for each other; the plan is always that of fast hand-overs.
    """
    layer = Total()
    for rows, columns in model.groups():
        _add(soc, layer, _placed(soc, rows, columns, tokens, level, sync), sync)
    for work in gpu_works(model, tokens, context):
        _add_gpu(layer, gpu_time(soc, work))
    layer.elapsed_us += KERNELS_PER_LAYER * soc.gpu.kernel_gap_us
    total = Total(*(model.layers * getattr(layer, name) for name in Total.__slots__))
    head_level: Level = "tensor" if level == "tensor" else "gpu"
    _add(soc, total, _placed(soc, model.vocabulary, model.hidden, 1, head_level, sync), sync)
    return total


def _placed(soc: SocParameters, rows: int, columns: int, tokens: int, level: Level, sync: Sync) -> Placed:
    """Return a group as a level places it."""
    if level == "tensor":
        npu_rows = best_cut(soc, rows, columns, tokens).npu_rows
    else:
        npu_rows = rows if level == "layer" and tokens > 1 else 0
    return place(soc, rows, columns, tokens, npu_rows, sync)


def gpu_works(model: Model, tokens: int, context: int) -> Sequence[GpuWork]:
    """Return what the GPU computes of a layer beside linears."""
    attention = model.heads * model.head_size
    cached = 2 * model.kv_heads * model.head_size
    pairs = tokens * context + tokens * (tokens + 1) / 2
    hidden_bytes, width_bytes = (size * tokens * FLOAT_BYTES for size in (model.hidden, model.width))
    qkv_bytes = (attention + cached) * tokens * FLOAT_BYTES
    # Each of two: read the group's output and the residual, write the residual and the normalised state.
    norm = GpuWork("elementwise", 0.0, 2 * hidden_bytes, 2 * hidden_bytes, tokens)
    return (
        norm,
        GpuWork("elementwise", 0.0, qkv_bytes, qkv_bytes, tokens),
        GpuWork(
            "attention",
            4.0 * attention * pairs,
            attention * tokens * FLOAT_BYTES + cached * (context + tokens) * FLOAT_BYTES,
            attention * tokens * FLOAT_BYTES,
            tokens,
        ),
        norm,
        GpuWork("elementwise", 0.0, 2 * width_bytes, width_bytes, tokens),
    )


def _add(soc: SocParameters, total: Total, placed: Placed, sync: Sync) -> None:
    total.elapsed_us += placed.elapsed_us
    total.gpu_busy_us += placed.gpu_us
    total.npu_busy_us += placed.npu_us
    total.dram_bytes += placed.dram_bytes
    if placed.npu_rows:
        total.handed_over += 1
        total.poll_us += soc.hand_over.poll_us if sync == "fast" else 0.0


def _add_gpu(total: Total, time: GpuTime) -> None:
    total.elapsed_us += time.alone_us
    total.gpu_busy_us += time.alone_us
    total.dram_bytes += time.dram_bytes
