"""Published numbers of a Snapdragon 8 Gen 3, and the chain of modelled operators that is compared with them.

The numbers are HeteroLLM's (its second version, section 3 and the tables of operators; its first, section 5)
and those of Table 3 of llm.npu; bench/fit_soc.py fits the model's parameters to them. Whatever else was
published stays out of the fit: a model is judged by what it was not fitted to (docs/simulated-paper.md).
"Fast over driver hand-over, decode" is not in the fit, but it chose a parameter.

The simulated device runs the real engine on a virtual clock; the chain is the same arithmetic without an
engine, fast enough to fit parameters with. Nothing in it depends on a model's name. Of each layer it holds
the four groups of linears (each on the GPU, on the NPU, or cut by rows so that both end together), and on the
GPU attention and element-wise work; the head, cut as any group, reads one token's state. It leaves out
sequence cuts and CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from heterollm.kernels.gpu import GpuWork
from heterollm.kernels.sim import SocParameters, Usage
from heterollm.kernels.sim.soc.gpu_model import GpuTime, gpu_time, linear_work
from heterollm.kernels.sim.soc.memory_model import granted_gbps, shared_rates
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


# -- published numbers -----------------------------------------------------------------------------------

OPERATORS: Final = "HeteroLLM v2, operators"
FACTS: Final = "HeteroLLM, section 4.1"
OVERALL: Final = "HeteroLLM, end to end"
TABLE_3: Final = "llm.npu, Table 3"


@dataclass(frozen=True, slots=True)
class Number:
    """One published number.

    Args:
        name: What it is.
        published: Its value.
        unit: Of the value.
        source: Where it was published.
        model: The model's value.
        weight: In the fit: the inverse of a relative error of 5 %; 0 where it is only a check.
        remark: Why it is only a check, or what to know.
    """

    name: str
    published: float
    unit: str
    source: str
    model: Callable[[SocParameters], float]
    weight: float = 1.0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Residual:
    """A number beside the model's."""

    number: Number
    modelled: float

    @property
    def ratio(self) -> float:
        """Modelled over published."""
        return self.modelled / self.number.published

    @property
    def log_error(self) -> float:
        """The weighted error that the fit makes small."""
        return self.number.weight * math.log(self.ratio) / 0.05


def residuals(soc: SocParameters, numbers: Sequence[Number] | None = None) -> list[Residual]:
    """Return each number beside the model's."""
    return [Residual(number, number.model(soc)) for number in (NUMBERS if numbers is None else numbers)]


def markdown(rows: Sequence[Residual]) -> str:
    """Return residuals as a table."""
    lines = [
        "| published number | source | published | modelled | ratio | in the fit | remark |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        number = row.number
        used = "yes" if number.weight else "no"
        lines.append(
            f"| {number.name} | {number.source} | {_shown(number.published)} {number.unit} "
            f"| {_shown(row.modelled)} | {row.ratio:.3f} | {used} | {number.remark} |"
        )
    return "\n".join(lines) + "\n"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# -- operators -----------------------------------------------------------------------------------------


def gpu_row(rows: int, columns: int, tokens: int, soc: SocParameters) -> float:
    """Return what a table shows for the GPU: it ends with a clFinish, which no chain of kernels pays."""
    return gpu_time(soc, linear_work(rows, columns, tokens, block=BLOCK)).alone_us + soc.hand_over.finish_us


def npu_row(rows: int, columns: int, tokens: int, soc: SocParameters) -> float:
    """Return what a table shows for the NPU."""
    return npu_time(soc, NpuWork(rows, columns, tokens, 4, BLOCK)).alone_us


def down_ratio(rows: int, columns: int, tokens: int, soc: SocParameters) -> float:
    """Return how much longer the GPU takes than the NPU for FFN-down, in a chain."""
    gpu = gpu_time(soc, linear_work(rows, columns, tokens, block=BLOCK)).alone_us
    return gpu / npu_time(soc, NpuWork(rows, columns, tokens, 4, BLOCK)).busy_us


def order_effect(soc: SocParameters) -> float:
    """Return by how much the better order of the gate's weight is faster, at the length where it is most."""
    ratios = [order_ratio(soc, 32 * tiles) for tiles in range(1, 9)]
    return max(ratios)


def order_ratio(soc: SocParameters, tokens: int) -> float:
    """Return by how much it is faster at one length."""
    both = [
        npu_time(soc, NpuWork(14336, 4096, tokens, 4, BLOCK, form)).busy_us
        for form in ("activation_first", "weight_first")
    ]
    return both[0] / both[1]


def decode_gbps(soc: SocParameters) -> float:
    """Return what both parts move together while they read weights for one token."""
    gpu = gpu_time(soc, linear_work(21504, 4096, 1, block=BLOCK))
    npu = npu_time(soc, NpuWork(7168, 4096, 1, 4, BLOCK))
    return sum(granted_gbps(soc, gpu.demand_gbps, npu.demand_gbps))


def practice_tflops(part: str, soc: SocParameters) -> float:
    """Return the rate of a large product."""
    if part == "gpu":
        return (
            2 * 4096 * 4096 * 1024 / gpu_time(soc, linear_work(4096, 4096, 1024, block=BLOCK)).alone_us / 1e6
        )
    return 2 * 28672 * 4096 * 1024 / npu_row(28672, 4096, 1024, soc) / 1e6


# -- llm.npu ---------------------------------------------------------------------------------------------

TABLE_3_ROWS: Final = (
    (64, 2048, 2048, 0.9, 1.7),
    (64, 2048, 8192, 1.5, 4.8),
    (64, 2048, 11008, 2.0, 6.9),
    (32, 4096, 4096, 1.7, 3.1),
    (32, 4096, 8192, 2.9, 7.7),
    (32, 4096, 11008, 4.1, 10.4),
)
"""Tokens, inputs, outputs, and milliseconds of NPU INT8 and of GPU FP16.

The table's NPU FP16 column (252 to 3112 ms) is left out: it contradicts HeteroLLM's FP16 rates on the same
chip, which the model follows (docs/soc-model.md).
"""


def integer_busy_us(tokens: int, columns: int, rows: int, soc: SocParameters) -> float:
    """Return the NPU's time with 8-bit weights and inputs, without the cost of calling it."""
    work = NpuWork(rows, columns, tokens, 8, columns, "matmul_nbits_int8", integer_inputs=True)
    return npu_time(soc, work).busy_us


def integer_row(place: int, soc: SocParameters) -> float:
    """Return a row of the INT8 column.

    That engine's cost of a call is its own, so it is no parameter of the SoC: it is the one that fits all six
    rows best.
    """
    busy_ms = [integer_busy_us(*row[:3], soc) / 1e3 for row in TABLE_3_ROWS]
    call_ms = sum(row[3] - busy for row, busy in zip(TABLE_3_ROWS, busy_ms, strict=True)) / len(busy_ms)
    return busy_ms[place] + max(call_ms, 0.0)


def float_row(place: int, soc: SocParameters) -> float:
    """Return a row of the GPU's FP16 column."""
    tokens, columns, rows = TABLE_3_ROWS[place][:3]
    return gpu_time(soc, linear_work(rows, columns, tokens, bits=16, block=0)).alone_us / 1e3


# -- end to end ----------------------------------------------------------------------------------------------


def prefill_rate(tokens: int, soc: SocParameters) -> float:
    """Return tokens a second of a prefill at tensor level."""
    return tokens / run(soc, LLAMA_3_8B, tokens, "tensor").elapsed_us * 1e6


def prefill_sync_gain(soc: SocParameters) -> float:
    """Return what fast synchronisation gains in prefill, the plan being the same."""
    fast, driver = (run(soc, LLAMA_3_8B, 256, "tensor", sync=sync).elapsed_us for sync in ("fast", "driver"))
    return driver / fast


def tensor_gain(soc: SocParameters) -> float:
    """Return what tensor level gains over layer level in prefill."""
    layer, tensor = (run(soc, LLAMA_3_8B, 256, level).elapsed_us for level in ("layer", "tensor"))
    return layer / tensor


def gpu_decode_gbps(soc: SocParameters) -> float:
    """Return what the GPU moves on average while it decodes alone."""
    total = run(soc, LLAMA_3_8B, 1, "gpu", context=256)
    return total.dram_bytes / (total.elapsed_us * 1e3)


def most_gain(soc: SocParameters) -> float:
    """Return the most that tensor level gains over layer level at the lengths of the paper's plots."""
    return max(
        run(soc, LLAMA_3_8B, tokens, "layer").elapsed_us / run(soc, LLAMA_3_8B, tokens, "tensor").elapsed_us
        for tokens in (64, 256, 1024)
    )


def decode_rate(soc: SocParameters) -> float:
    """Return tokens a second of decoding after 256 tokens."""
    return 1e6 / run(soc, LLAMA_3_8B, 1, "tensor", context=256).elapsed_us


def decode_gain(soc: SocParameters) -> float:
    """Return what decoding on both parts gains over the GPU alone."""
    gpu, tensor = (run(soc, LLAMA_3_8B, 1, level, context=256).elapsed_us for level in ("gpu", "tensor"))
    return gpu / tensor


def decode_sync_gain(soc: SocParameters) -> float:
    """Return what fast synchronisation gains in decode, the plan being the same."""
    fast, driver = (
        run(soc, LLAMA_3_8B, 1, "tensor", context=256, sync=sync).elapsed_us for sync in ("fast", "driver")
    )
    return driver / fast


# -- all -------------------------------------------------------------------------------------------------


def _operators() -> list[Number]:
    found = []
    rows = (
        (4096, 4096, 1, 511, 693),
        (28672, 4096, 1, 1903, 3886),
        (4096, 14336, 1, 1467, 6506),
        (4096, 4096, 128, 7306, 912),
        (4096, 4096, 256, 10841, 1884),
        (4096, 14336, 256, 35231, 23445),
        (4096, 4096, 224, 10000, 1550),
        (4096, 14336, 320, 42500, 27500),
    )
    for n, k, m, gpu_us, npu_us in rows:
        shape = f"{n}x{k}, {m} token{'s' if m > 1 else ''}"
        middle = "middle of a published range" if m in (224, 320) else ""
        floor = "the three contradict each other" if m == 1 else middle
        gpu = partial(gpu_row, n, k, m)
        npu = partial(npu_row, n, k, m)
        found.append(Number(f"GPU {shape}", gpu_us, "us", OPERATORS, gpu, 0.0 if floor else 1.0, floor))
        found.append(Number(f"NPU {shape}", npu_us, "us", OPERATORS, npu, 0.0 if middle else 1.0, middle))
    return found


def _ffn_down() -> list[Number]:
    """Return rows of one sentence: in every model that was run the NPU is 0.5 to 1.5 times the GPU here."""
    shapes = ((4096, 14336, 64, 1.0), (4096, 11008, 256, 0.0), (3072, 8192, 256, 0.0), (2048, 8192, 256, 0.0))
    return [
        Number(
            f"GPU over NPU time, FFN-down {rows}x{columns}, {tokens} tokens",
            1.5,
            "x",
            FACTS,
            partial(down_ratio, rows, columns, tokens),
            weight,
            "upper end of 0.5 to 1.5",
        )
        for rows, columns, tokens, weight in shapes
    ]


def _table_3() -> list[Number]:
    found = []
    for place, (m, k, n, npu_ms, gpu_ms) in enumerate(TABLE_3_ROWS):
        shape = f"{n}x{k}, {m} tokens"
        npu, gpu = partial(integer_row, place), partial(float_row, place)
        found.append(Number(f"NPU INT8 {shape}", npu_ms, "ms", TABLE_3, npu, 0.3, "another engine"))
        found.append(Number(f"GPU FP16 {shape}", gpu_ms, "ms", TABLE_3, gpu, 0.0, "another engine"))
    return found


NUMBERS: Final[tuple[Number, ...]] = (
    *_operators(),
    Number("order effect, most", 6.0, "x", "HeteroLLM, section 3.2", order_effect),
    *_ffn_down(),
    Number("GPU alone in decode", 43.3, "GB/s", "HeteroLLM v2, section 3", gpu_decode_gbps),
    Number(
        "both read in decode",
        59.5,
        "GB/s",
        "HeteroLLM v2, section 3",
        decode_gbps,
        1.0,
        "middle of 59 to 60; 59.1 in section 5.3",
    ),
    Number(
        "GPU, large product",
        1.0,
        "TFLOP/s",
        "HeteroLLM, section 1",
        partial(practice_tflops, "gpu"),
        0.5,
        "said to be about 1",
    ),
    Number(
        "NPU, large product",
        10.0,
        "TFLOP/s",
        "HeteroLLM, section 1",
        partial(practice_tflops, "npu"),
        0.0,
        "its rows of 256 tokens show 4.6",
    ),
    *_table_3(),
    Number("prefill 256, tensor level", 236.92, "tok/s", OVERALL, partial(prefill_rate, 256), 2.0),
    Number("fast over driver hand-over, prefill 256", 236.92 / 196.44, "x", OVERALL, prefill_sync_gain, 2.0),
    Number("tensor over layer level, prefill 256", 1.244, "x", OVERALL, tensor_gain, 2.0),
    Number("prefill 1024, tensor level", 247.9, "tok/s", OVERALL, partial(prefill_rate, 1024), 2.0),
    Number("decode after 256", 14.01, "tok/s", OVERALL, decode_rate, 2.0),
    Number(
        "tensor level over GPU only, decode",
        1.227,
        "x",
        OVERALL,
        decode_gain,
        2.0,
        "mean of 1.22 (v2) and 1.234 (section 5.3)",
    ),
    Number(
        "fast over driver hand-over, decode",
        4.01,
        "x",
        OVERALL,
        decode_sync_gain,
        0.0,
        "chose where spilled rows go",
    ),
    Number(
        "tensor over layer level, most",
        1.4,
        "x",
        "HeteroLLM, section 1",
        most_gain,
        0.0,
        "8B only here; section 5.2.1: 1.408 at 32 tokens, 1.302 on average",
    ),
)
"""All of them."""
