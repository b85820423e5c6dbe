"""What is known of a Snapdragon 8 Gen 3 before the fit, what this program's path differs by, and ratios.

Values here are published or stated as assumptions; those marked ``fitted`` are only where the fit starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.sim.soc.quantities import Source


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

SCORES_NOTE: Final = (
    "Least squares of 2, 3 and 4 ms for 1, 2 and 4 heads of 128 queries, 2048 keys and 64 elements on an 8 "
    "Gen 3 (shadowAttn, section 3.4). Other sizes are extrapolated."
)

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
    "gpu.small_gbps": Known(10_000.0, "prior", "No limit: the papers' kernels read as fast as DRAM allows."),
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
        "By llm.npu's INT8 rows (Table 3): products of 8-bit activations and weights on static scales. "
        "Others, of which nothing is published, are the same.",
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
    "npu.clock_factor": Known(1.0, "published", "The fitted rates contain the papers' clocks."),
    "npu.every_form": Known(0, "published", "HeteroLLM has one graph for a linear; `block` adds others."),
    "npu.integer_graphs": Known(0, "published", "HeteroLLM: FP16 activations."),
    "npu.int16_tflops": Known(
        9.3,
        "published",
        "GenieX#1266, Snapdragon X Elite, Qwen3-4B: 1230 to 1340 tokens a second x 2 x 3.6 billion weights. "
        "Another chip, and all of its prefill.",
    ),
    "npu.expand_gweights_per_s": Known(
        61.4,
        "prior",
        "A guess: twice the fitted dequantize_gweights_per_s, since a weight becomes one byte instead of "
        "two. The emulator spends 2 ms on it where it unpacks to FP16 for 120 ms, so that more is possible.",
    ),
    "npu.integer_weight_bytes": Known(
        0.54,
        "published",
        "Context binary of a 2048 x 2048 linear in blocks of 64 by QNN's compiler (QAIRT 2.51), per weight.",
    ),
    "npu.io_copy_gbps": Known(0, "published", "HeteroLLM: all processors share one memory pool."),
    "npu.address_space_gib": Known(0, "published", "HeteroLLM runs 8 billion weights; it names no limit."),
    "memory.limit_gbps": Known(61.9, "published", "HeteroLLM v2, the best seen; 68 on paper."),
    "memory.corun_slowdown": Known(1.06, "fitted", "By the gain of tensor over layer level."),
    "memory.cache_mib": Known(
        12,
        "prior",
        "Qualcomm publishes none. It decides which models count as larger than the caches, which all of the "
        "paper's do, and how much is read to measure bandwidth: with up to 32 MiB the same.",
    ),
    "memory.available_gib": Known(0, "prior", "The papers' models fit their phones."),
    "npu.io_by_graph": Known(
        0, "published", "HeteroLLM, section 4.3: all graphs use a few buffers of one pool."
    ),
    "npu.scores_start_us": Known(1350.0, "published", SCORES_NOTE),
    "npu.scores_tops": Known(0.0522, "published", SCORES_NOTE),
    "npu.shared_contexts": Known(0, "prior", "HeteroLLM says nothing of it; without a limit it is the same."),
    "memory.fine_grained_svm": Known(1, "published", "HeteroLLM: a mapped pool, which no pass maps again."),
    "hand_over.finish_us": Known(400.0, "published", "HeteroLLM v2: clFinish takes about 400 us."),
    "hand_over.write_us": Known(400.0, "published", "HeteroLLM v1: clEnqueueWriteBuffer, whatever the size."),
    "hand_over.refill_us": Known(75.0, "published", "HeteroLLM: 50 to 100 us more into an empty queue."),
    "hand_over.poll_us": Known(8.0, "prior", "HeteroLLM: a few microseconds, and as much to notify the NPU."),
    "hand_over.map_us": Known(0, "published", "HeteroLLM maps nothing in a pass."),
    "hand_over.unmap_us": Known(0, "published", "HeteroLLM unmaps nothing in a pass."),
    "hand_over.map_gbps": Known(0, "published", "HeteroLLM maps nothing in a pass."),
    "hand_over.maps_beside_kernels": Known(0, "published", "HeteroLLM maps nothing in a pass."),
    "hand_over.driver_copies": Known(
        1, "published", "HeteroLLM: without fast synchronisation data are copied through the driver."
    ),
    "build.graph_us": Known(
        (408_000 - 135 * (2_050_000 - 408_000) / 865) / 4,
        "published",
        "Line through 408 ms at 135 tokens and 2050 ms at 1000 tokens, both of four graphs (HeteroLLM).",
    ),
    "build.graph_us_per_token": Known((2_050_000 - 408_000) / 865 / 4, "published", "The same line."),
    "build.session_us": Known(0, "prior", "HeteroLLM names none."),
    "build.shared_graphs": Known(1, "prior", "HeteroLLM builds four graphs for a length."),
    "cpu.submit_us": Known(15.0, "published", "HeteroLLM: 10 to 20 us."),
    "cpu.sleep_granularity_us": Known(90.0, "published", "HeteroLLM: usleep, 80 to 100 us."),
}
"""All parameters but power, which follows from the fitted chain."""

OWN_PATH: Final[Mapping[str, Known]] = {
    "gpu.gemm_tflops": Known(
        0.4,
        "prior",
        "This program's kernel has the structure of llama.cpp's generic one, which reached about 0.5 on a "
        "Snapdragon X Elite before its Adreno kernel came (llama.cpp#19840); 0.3 to 0.5. With Adreno kernels "
        "llama.cpp reaches 0.65 on this chip: 116 tokens a second x 2 x 2.77 billion weights (Qwen2.5-3B "
        "Q4_0, 512 tokens, OnePlus 12).",
    ),
    "gpu.small_tflops": Known(0.19, "prior", "As gemm_tflops, relative to the paper's."),
    "gpu.small_gbps": Known(
        15.0,
        "prior",
        "50 to 70 % of what llama.cpp's Adreno kernel reads: 14.05 tokens a second x 1.8 GB, 25 GB/s "
        "(Qwen2.5-3B Q4_0, OnePlus 12); 12 to 18.",
    ),
    "gpu.attention_tflops": Known(0.2, "prior", "As gemm_tflops, relative to the paper's."),
    "npu.execute_us": Known(
        200.0, "published", "clpeak#197, ONNX Runtime with QNN on a Snapdragon X: 196 us for a trivial graph."
    ),
    "npu.execute_exposed_fraction": Known(
        1.0, "prior", "The engine calls the session after its wait; nothing starts a graph ahead."
    ),
    "npu.clock_factor": Known(
        1.0,
        "prior",
        "The paper's clocks. Without the burst mode the NPU is clocked lower and sleeps between graphs: no "
        "number is published; a guess is 0.5, from 0.33 to 0.67.",
    ),
    "npu.every_form": Known(1, "prior", "This program's graphs; a load plans with them."),
    "npu.integer_graphs": Known(
        1,
        "published",
        "QNN's compiler takes 4-bit weights with block scales and 16-bit activations for this chip (QAIRT "
        "2.51). Plans use such graphs for calibrated models only.",
    ),
    "npu.io_copy_gbps": Known(
        12.0,
        "prior",
        "onnxruntime-qnn passes plain memory, which QNN copies into and out of its own buffers; 10 to 15.",
    ),
    "npu.address_space_gib": Known(
        3.5, "published", "onnxruntime-qnn#606: 3.5 GiB for each process domain of a Hexagon."
    ),
    "npu.io_by_graph": Known(1, "published", "onnxruntime-qnn#752: its default."),
    "npu.shared_contexts": Known(
        0, "prior", "1 where the self-test of such contexts passes; nobody has run it on a device."
    ),
    "memory.available_gib": Known(
        20,
        "prior",
        "Of 24 GB, the most that is sold with this chip (12, 16 and 24), if Android and other programs keep "
        "4; of 16 GB it were 12.",
    ),
    "memory.fine_grained_svm": Known(
        1,
        "published",
        "Adreno 740, 750 and 830 report fine-grained SVM with atomics (clinfo#92, llama.cpp#10693, #17370). "
        "0 is mapped memory.",
    ),
    "hand_over.map_us": Known(
        220.0,
        "prior",
        "A blocking map is taken to cost what a blocking upload does: 4940 ms for 22267 (MNN with QNN and "
        "OpenCL on an SM8850, public log).",
    ),
    "hand_over.unmap_us": Known(
        45.0,
        "prior",
        "An unmap is taken to cost what an upload without wait does: 1011 ms for 22267 (same log).",
    ),
    "hand_over.map_gbps": Known(20.0, "prior", "A guess, from 5 to 60: no number is published."),
    "hand_over.maps_beside_kernels": Known(
        0,
        "prior",
        "Not known. OpenCL lets kernels read what is mapped for reading; this program tries it when it opens "
        "a device whose memory is mapped.",
    ),
    "hand_over.driver_copies": Known(0, "prior", "The engine's memory is shared or mapped, never copied."),
    "build.session_us": Known(
        100_000.0,
        "prior",
        "0.1 to 0.49 s: clpeak#197 has 488 ms with compilation; from a context binary less.",
    ),
    "build.shared_graphs": Known(0, "prior", "A graph holds its layer's weights."),
}
"""Where the path of this program's code differs from the paper's conditions, by public reports."""

DRAM_RATIO: Final = 5300 / 4800
GPU_RATIO: Final = 1.40
NPU_RATIO: Final = 1.45
ELITE_RATIOS: Final[Mapping[str, tuple[float, str]]] = {
    "gpu.dram_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "gpu.gemm_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.prepare_gweights_per_s": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.small_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "gpu.small_gbps": (DRAM_RATIO, "LPDDR5X at 5300 instead of 4800 MHz."),
    "gpu.attention_tflops": (GPU_RATIO, "Qualcomm: Adreno 40 % faster."),
    "npu.array_tflops": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.int16_tflops": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.scores_tops": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
    "npu.expand_gweights_per_s": (NPU_RATIO, "Qualcomm: Hexagon 45 % faster."),
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
