"""What is known of a Snapdragon 8 Gen 3 before the fit, and what others are extrapolated by.

Values here are published or stated as assumptions; those marked ``fitted`` are only where the fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.sim.soc.quantities import Source

__all__ = ["ELITE_RATIOS", "FREE", "KNOWN", "Known"]


@dataclass(frozen=True, slots=True)
class Known:
    """One parameter.

    Args:
        value: Its value, or where the fit starts.
        source: Where it comes from.
        note: What a reader of the file should know.
    """

    value: float
    source: Source
    note: str


FREE: Final[Mapping[str, tuple[float, float]]] = {
    "gpu.dram_gbps": (43.3, 45.0),
    "gpu.gemm_tflops": (0.5, 2.8),
    "gpu.prepare_gweights_per_s": (1.0, 40.0),
    "gpu.small_tflops": (0.05, 1.2),
    "gpu.attention_tflops": (0.1, 1.5),
    "npu.array_tflops": (2.0, 36.0),
    "npu.tile_load_rows": (16.0, 4000.0),
    "npu.dequantize_gweights_per_s": (5.0, 120.0),
    "npu.dequantize_int8_gweights_per_s": (4.0, 60.0),
    "npu.spill_gbps": (20.0, 61.9),
    "npu.execute_us": (20.0, 400.0),
    "memory.corun_slowdown": (1.0, 1.5),
}
"""What the fit may change, and within which bounds."""

KNOWN: Final[Mapping[str, Known]] = {
    "gpu.dram_gbps": Known(
        44.0, "fitted", "So that decoding moves 43.3 on average (HeteroLLM v2); within its 40 to 45."
    ),
    "gpu.gemm_tflops": Known(1.2, "fitted", "About 1 in practice and 2.8 on paper by HeteroLLM."),
    "gpu.prepare_gweights_per_s": Known(
        5.0,
        "fitted",
        "By the rows of 128 and 256 tokens, and by llm.npu's FP16 rows: so it is not unpacking alone.",
    ),
    "gpu.small_tflops": Known(
        0.5,
        "fitted",
        "By FFN-down at 64 tokens, where HeteroLLM's NPU is at most 1.5 times its GPU; not above 0.62, or "
        "the row of 128 tokens would be faster than it is. Another engine reaches 0.3 (llm.npu, Table 3).",
    ),
    "gpu.attention_tflops": Known(0.44, "fitted", "By the prefill of 1024 tokens beside that of 256."),
    "gpu.kernel_gap_us": Known(
        2.5, "prior", "A busy queue; its submission, 10 to 20 us by HeteroLLM, is CPU time beside it."
    ),
    "npu.tile": Known(32, "published", "HeteroLLM: arrays of 32x32."),
    "npu.array_tflops": Known(
        5.6, "fitted", "HeteroLLM says 10 in practice, but its own rows of 256 tokens show 4.6."
    ),
    "npu.tile_load_rows": Known(500.0, "fitted", "By the order effect of up to 6."),
    "npu.integer_array_ratio": Known(2.0, "published", "73 TOPS INT8 and 36 TFLOPS FP16, HeteroLLM Table 1."),
    "npu.dequantize_gweights_per_s": Known(
        31.0, "fitted", "By the rows of one token of 4096 inputs; 15.8 GB/s of codes."
    ),
    "npu.dequantize_int8_gweights_per_s": Known(
        14.0,
        "fitted",
        "By llm.npu's INT8 rows; float activations, of which nothing is published, are the same.",
    ),
    "npu.dram_gbps": Known(42.5, "published", "HeteroLLM: one processor, NPU included, reads 40 to 45 GB/s."),
    "npu.row_limit_columns": Known(
        4096,
        "prior",
        "Rows of 4096 are fast and of 14336 slow, so it lies between; FFN-down is slow in every model that "
        "HeteroLLM ran, the shortest being 8192, so below that; the smallest such value is assumed.",
    ),
    "npu.spill_gbps": Known(50.0, "fitted", "By the rows of 14336 inputs."),
    "npu.spill_dram_fraction": Known(
        0.0,
        "prior",
        "A tile of unpacked rows (32 x 14336 x 2 bytes = 0.9 MB) fits a cache before DRAM. With 1 no cut of "
        "FFN-down pays in decode; with 0 it does, and both published gains in decode come out: so it was "
        "chosen.",
    ),
    "npu.vector_gbps": Known(
        50.0, "prior", "As spilled rows; sums of chunks and activations inside a block."
    ),
    "npu.execute_us": Known(110.0, "fitted", "By the rows of one and 128 tokens."),
    "npu.execute_exposed_fraction": Known(
        0.2,
        "prior",
        "The rest is hidden behind kernels queued before. The published numbers allow 0 to 0.5, not 1.",
    ),
    "memory.limit_gbps": Known(61.9, "published", "HeteroLLM v2, the best seen; 68 on paper."),
    "memory.corun_slowdown": Known(1.06, "fitted", "By the gain of tensor over layer level."),
    "memory.cache_mib": Known(
        12,
        "prior",
        "Qualcomm publishes none. It decides which models count as larger than the caches, which all of the "
        "paper's do, and how much is read to measure bandwidth: with up to 32 MiB the same.",
    ),
    "hand_over.finish_us": Known(400.0, "published", "HeteroLLM v2: clFinish takes about 400 us."),
    "hand_over.write_us": Known(400.0, "published", "HeteroLLM v1: clEnqueueWriteBuffer, whatever the size."),
    "hand_over.refill_us": Known(75.0, "published", "HeteroLLM: 50 to 100 us more into an empty queue."),
    "hand_over.poll_us": Known(8.0, "prior", "HeteroLLM: a few microseconds, and as much to notify the NPU."),
    "build.graph_us": Known(
        (408_000 - 135 * (2_050_000 - 408_000) / 865) / 4,
        "published",
        "Line through 408 ms at 135 tokens and 2050 ms at 1000 tokens, both of four graphs (HeteroLLM).",
    ),
    "build.graph_us_per_token": Known((2_050_000 - 408_000) / 865 / 4, "published", "The same line."),
    "cpu.submit_us": Known(15.0, "published", "HeteroLLM: 10 to 20 us."),
    "cpu.sleep_granularity_us": Known(90.0, "published", "HeteroLLM: usleep, 80 to 100 us."),
}
"""All parameters but power, which follows from the fitted chain."""

DRAM_RATIO: Final = 5300 / 4800
GPU_RATIO: Final = 1.40
NPU_RATIO: Final = 1.45
ELITE_RATIOS: Final[Mapping[str, tuple[float, str]]] = {
    "gpu.dram_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "gpu.gemm_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.prepare_gweights_per_s": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.small_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.attention_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "npu.array_tflops": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.dequantize_gweights_per_s": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.dequantize_int8_gweights_per_s": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.dram_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "npu.spill_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "npu.vector_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "memory.limit_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
}
"""8 Elite over 8 Gen 3 (Qualcomm's announcement of October 2024 and product briefs); all else is equal.

So is power: Qualcomm states speed for each watt of the NPU up by 45 %, as much as its speed.
"""
