"""Fits the modelled Snapdragons to public measurements, and sets all others beside the model.

    python bench/anchors.py            # prints every anchor: measured, modelled, ratio
    python bench/anchors.py --write    # fits, writes the YAML files of the SoCs and the rows of the table

An anchor is a speed that others published (:data:`ANCHORS`). Less than half of them are ``used``, the
others ``predicted``: no value was chosen by them. All modelled times are simulated; nothing here was measured
by this project. The 8 Gen 3's NPU with float activations is HeteroLLM's (bench/fit_soc.py).

Each value follows from one or two anchors by arithmetic, so that the fit has no start and no end to tune:

- GPU: :data:`EFFICIENCY_MANY` by generation and :data:`EFFICIENCY_ONE` give the shares of issue slots that
  public kernels fill; the bandwidth of each GPU is that of its kernels on 8 and 16 bits. This program's
  kernels are taken to fill :data:`OWN_SHARE` of what the public ones fill with many tokens, and as much with
  one; their slots are the compiler's (bench/adreno_static.py).
- NPU: a pass of a whole model has a constant and a rate, by an 8B and a 1B; for prompts, decode and float
  activations alike. The 8 Gen 3 has no public 1B for the fit: its constants are those of the 8 Elite.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from conditions import script_parser
from fit_soc import FOLDER, with_values

from heterollm.base import atomic_path
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim.soc.gpu_model import gpu_time, linear_work
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.kernels.sim.soc.quantities import SocParameters
from heterollm.model import find_model, op_specs

RESULTS: Final = Path(__file__).parent / "results"

PASS_TOKENS: Final = 128
"""Tokens of a pass of a prompt in the public engines of the NPU; AI Hub states it."""

KERNELS_A_LAYER: Final = 10
LAYER_LINEARS: Final = 4


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip of the anchors.

    Args:
        soc: Name of its file.
        generation: Of the Adreno.
        alus: ALUs of the GPU.
        ghz: Their clock.
    """

    soc: str
    generation: str
    alus: int
    ghz: float

    @property
    def issue(self) -> float:
        """Issue slots of a second, in 1e12."""
        return self.alus * self.ghz / 1e3


CHIPS: Final[Mapping[str, Chip]] = {
    "8 Gen 3": Chip("snapdragon-8gen3", "A7x", 1536, 0.903),
    "8 Elite": Chip("snapdragon-8elite", "A8x", 1536, 1.1),
    "8 Elite Gen 5": Chip("snapdragon-8elite-gen5", "A8x", 1536, 1.25),
    "X Elite": Chip("snapdragon-x-elite", "A7x", 1536, 1.375),
    "X2 Elite": Chip("snapdragon-x2-elite", "A8x", 2048, 1.7),
    "X2 Elite Extreme": Chip("snapdragon-x2-elite-extreme", "A8x", 2048, 1.85),
}
"""Clocks: middles of the stated ranges, which are in the files."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of an engine on an Adreno.

    Args:
        slots_a_product: Issue slots of a multiply-add with many tokens.
        slots_a_weight: Of a weight with one token; 0 if the kernel waits for memory alone.
        bits: Of a weight.
        block: Weights that share a scale; 0 for floats.
    """

    slots_a_product: float
    slots_a_weight: float
    bits: int
    block: int


LLAMA_SLOTS: Final = 1.3
LLAMA_WEIGHT_SLOTS: Final = 5.5
"""An estimate by reading llama.cpp's kernels for 4-bit weights, as all slots of others are."""

ENGINES: Final[Mapping[str, Kernels]] = {
    "llama.cpp GPU, 4 bits": Kernels(LLAMA_SLOTS, LLAMA_WEIGHT_SLOTS, 4, 32),
    "llama.cpp GPU, 8 bits": Kernels(LLAMA_SLOTS, LLAMA_WEIGHT_SLOTS, 8, 32),
    "llama.cpp GPU, F16": Kernels(LLAMA_SLOTS, 0, 16, 0),
    "MLC GPU": Kernels(LLAMA_SLOTS, LLAMA_WEIGHT_SLOTS, 4, 32),
    "Transformer-Lite GPU": Kernels(LLAMA_SLOTS, LLAMA_WEIGHT_SLOTS, 4, 32),
    "MNN GPU": Kernels(LLAMA_SLOTS, LLAMA_WEIGHT_SLOTS, 4, 32),
    # Half products at their least: two in a slot.
    "LiteRT GPU": Kernels(0.5, LLAMA_WEIGHT_SLOTS, 4, 32),
}
FLOAT_ENGINE: Final = "AI Hub, float activations"
"""All other engines compute in integers on the NPU."""

EFFICIENCY_MANY: Final = {"A7x": ("a5",), "A8x": ("c6",)}
"""Anchors of the share of issue slots that the kernels for many tokens fill, by generation."""

EFFICIENCY_ONE: Final = ("a3", "a5", "b8")
"""Anchors of that share of the kernels for one token; others wait for memory."""

GPU_BANDWIDTH: Final[Mapping[str, tuple[str, ...]]] = {
    "8 Elite": ("b7",),
    "8 Elite Gen 5": ("c8",),
    "X Elite": ("d8", "d11"),
    "X2 Elite": ("e8",),
    "X2 Elite Extreme": ("e8",),
}
"""Anchors of decode on 8 or 16 bits, whose bytes are the bandwidth; the 8 Gen 3's is HeteroLLM's (a1)."""

NPU_FITS: Final[Mapping[str, tuple[str, str, str]]] = {
    "8 Gen 3": ("a8", "", ""),
    "8 Elite": ("b1", "b2", "b4"),
    "8 Elite Gen 5": ("c1", "c2", "c4"),
    "X Elite": ("d1", "d2", "d5"),
    "X2 Elite": ("e1", "e2", "e4"),
}
"""Anchors of an 8B and a 1B on integers, and of a 3B on floats."""

OWN_SHARE: Final = math.sqrt(1 / 3)
"""Slots that this program's kernel for many tokens fills, over llama.cpp's: a prior, between its generic
kernel, which had a third of its Adreno one on an X Elite (llama.cpp#19840: 64 of 214 tokens/s), and 1."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published speed of one engine.

    Args:
        name: Of the anchor.
        chip: The chip.
        engine: The engine and processor.
        model: The model, by its known name; or a rate in GB/s.
        prefill: Tokens a second of a prompt; 0 if not stated.
        decode: Tokens a second of decode, or GB/s; 0 if not stated.
        used: Phases that the fit uses: ``p``, ``d`` or both.
        source: Where it stands.
    """

    name: str
    chip: str
    engine: str
    model: str
    prefill: float
    decode: float
    used: str
    source: str


def _anchors(chip: str, text: str) -> Iterator[Anchor]:
    for line in text.strip().splitlines():
        name, engine, model, prefill, decode, used, source = (part.strip() for part in line.split(" | "))
        yield Anchor(name, chip, engine, model, float(prefill), float(decode), used.strip("-"), source)


ANCHORS: Final = (
    *_anchors(
        "8 Gen 3",
        """
a1 | GPU reads | GB/s | 0 | 43.3 | d | HeteroLLM, section 3.3
a2 | GPU reads | GB/s | 0 | 50 | - | MNN's OpenCL handbook, 4d40bdb
a3 | MLC GPU | llama-2-7b | 0 | 12.5 | d | apache/tvm#16932
a3 | MLC GPU | qwen1.5-7b | 0 | 11 | - | apache/tvm#16932
a4 | Transformer-Lite GPU | gemma-2b | 330 | 30 | - | arXiv 2403.20041
a5 | llama.cpp GPU, 4 bits | qwen2.5-3b | 116 | 14.05 | pd | OnePlus 12, public log
a6 | llama.cpp GPU, 4 bits | qwen2.5-1.5b | 239 | 27.3 | - | llama.cpp#14337
a7 | LiteRT GPU | gemma-3-1b | 1877 | 45 | - | LiteRT-LM, README
a8 | PowerServe | llama-3.1-8b | 468 | 12.03 | pd | README at 0c9ca8e
a9 | PowerServe | llama-3.2-1b | 1877 | 59 | - | README at 0c9ca8e
a9 | PowerServe | qwen2.5-3b | 907 | 21 | - | README at 0c9ca8e
a9 | PowerServe | qwen2-0.5b | 3591 | 104.5 | - | README at 0c9ca8e
a10 | AI Hub | llama-2-7b | 685 | 12.85 | - | ai-hub-models b61a009
a11 | AI Hub | phi-3.5-mini | 871 | 13 | - | ai-hub-models b61a009
a12 | llama.cpp NPU | qwen3.5-4b | 80 | 9 | - | llama.cpp#23816
a12 | llama.cpp NPU | gemma-4-e2b | 873 | 21 | - | llama.cpp#25085
""",
    ),
    *_anchors(
        "8 Elite",
        """
b1 | AI Hub | llama-3.1-8b | 898 | 15.0 | pd | ai-hub-models 1db1fe5
b2 | AI Hub | llama-3.2-1b | 3350 | 60.2 | pd | ai-hub-models 1db1fe5
b2 | AI Hub | llama-3.2-3b | 1635 | 30.0 | - | ai-hub-models 1db1fe5
b3 | AI Hub | qwen3-4b | 1951 | 24.9 | - | ai-hub-models 1db1fe5
b3 | AI Hub | qwen3-8b | 1120 | 13.7 | - | ai-hub-models 1db1fe5
b4 | AI Hub, float activations | llama-3.2-3b | 623 | 12.7 | pd | ai-hub-models 1db1fe5
b4 | AI Hub, float activations | llama-3.2-3b | 1451 | 13.8 | - | ai-hub-models b61a009
b4 | AI Hub, float activations | llama-3.2-1b | 1461 | 31.5 | - | ai-hub-models 1db1fe5
b5 | PowerServe | llama-3.1-8b | 509 | 12.5 | - | README at 0c9ca8e
b5 | PowerServe | llama-3.2-1b | 1952 | 59 | - | README at 0c9ca8e
b5 | PowerServe | qwen2.5-3b | 982 | 22.2 | - | README at 0c9ca8e
b6 | QAIRT | qwen3-0.6b | 7890 | 118 | - | public log
b6 | llama.cpp NPU | qwen3-0.6b | 3409 | 70 | - | public log
b7 | llama.cpp GPU, F16 | llama-3.2-1b | 275 | 21.9 | d | llama.cpp#16469
b8 | llama.cpp GPU, 4 bits | llama-3.2-1b | 0 | 45.2 | d | public log
b9 | llama.cpp NPU | qwen3-4b | 535 | 18.1 | - | GenieX's documents
b10 | MNN NPU | qwen3-0.6b | 2667 | 69 | - | MNN#4633
b10 | MNN GPU | qwen3-0.6b | 1491 | 71 | - | MNN#4633
""",
    ),
    *_anchors(
        "8 Elite Gen 5",
        """
c1 | AI Hub | llama-3.1-8b | 1238 | 16.45 | pd | ai-hub-models 1db1fe5
c2 | AI Hub | llama-3.2-1b | 4604 | 75.5 | pd | ai-hub-models 1db1fe5
c2 | AI Hub | llama-3.2-3b | 2045 | 32.4 | - | ai-hub-models 1db1fe5
c3 | AI Hub | qwen3-4b | 2639 | 28.8 | - | ai-hub-models 1db1fe5
c3 | AI Hub | qwen3-8b | 1373 | 16.1 | - | ai-hub-models 1db1fe5
c4 | AI Hub, float activations | llama-3.2-3b | 924 | 17.9 | pd | ai-hub-models 1db1fe5
c4 | AI Hub, float activations | llama-3.2-1b | 2133 | 40 | - | ai-hub-models 1db1fe5
c5 | llama.cpp GPU, 4 bits | qwen3-1.7b | 615 | 32 | - | PocketPal#702, #722
c5 | llama.cpp GPU, 8 bits | qwen3-1.7b | 533 | 26.5 | - | PocketPal#702, #722
c6 | llama.cpp GPU, 4 bits | qwen3-4b | 292 | 22 | p | public log
c6 | llama.cpp NPU | qwen3-4b | 1484 | 18 | - | public log
c7 | llama.cpp GPU, 4 bits | gemma-3-1b | 999 | 47.7 | - | public log
c7 | llama.cpp GPU, 4 bits | phi-4-mini | 302 | 0 | - | PocketPal#702
c8 | llama.cpp GPU, F16 | qwen3-1.7b | 394 | 13.6 | d | llama.cpp#22755
c9 | llama.cpp NPU | qwen3-4b | 690 | 0 | - | llama.cpp#23368
c9 | llama.cpp NPU | qwen3-0.6b | 744 | 85 | - | llama.cpp#21554
c10 | llama.cpp GPU, 4 bits | qwen3-8b | 0 | 11.1 | - | llama.cpp#27677
c10 | llama.cpp NPU | qwen3-8b | 0 | 6.7 | - | llama.cpp#27677
c11 | LiteRT GPU | gemma-4-e2b | 3808 | 52 | - | LiteRT-LM, README
""",
    ),
    *_anchors(
        "X Elite",
        """
d1 | AI Hub | llama-3.1-8b | 583 | 10.95 | pd | ai-hub-models 1db1fe5
d2 | AI Hub | llama-3.2-1b | 2112 | 43.8 | pd | ai-hub-models 1db1fe5
d2 | AI Hub | llama-3.2-3b | 977 | 19.7 | - | ai-hub-models 1db1fe5
d3 | AI Hub | qwen3-4b | 1310 | 21.8 | - | ai-hub-models 1db1fe5
d3 | AI Hub | qwen3-8b | 823 | 12.95 | - | ai-hub-models 1db1fe5
d3 | AI Hub | qwen2.5-7b | 732 | 12.3 | - | ai-hub-models 1db1fe5
d4 | AI Hub | llama-2-7b | 534 | 11.2 | - | ai-hub-models b61a009
d5 | AI Hub, float activations | llama-3.2-3b | 474 | 8.9 | pd | ai-hub-models 1db1fe5
d5 | AI Hub, float activations | llama-3.2-1b | 986 | 19.7 | - | ai-hub-models 1db1fe5
d7 | llama.cpp NPU | qwen3-4b | 520 | 9.2 | - | GenieX#1447, burst
d8 | llama.cpp GPU, 4 bits | qwen3-4b | 206 | 22.7 | d | GenieX's documents
d8 | llama.cpp NPU | qwen3-4b | 345 | 12.5 | - | GenieX's documents
d9 | llama.cpp GPU, 4 bits | qwen3-4b | 213.7 | 10.9 | - | llama.cpp#19840
d10 | llama.cpp GPU, 4 bits | qwen3-0.6b | 1103 | 45.8 | - | llama.cpp#19840
d11 | llama.cpp GPU, 8 bits | llama-3.2-3b | 0 | 15.8 | d | llama.cpp#10693, Vulkan
d11 | llama.cpp GPU, 8 bits | llama-3.2-3b | 0 | 10.9 | - | llama.cpp#10693
""",
    ),
    *_anchors(
        "X2 Elite",
        """
e1 | AI Hub | llama-3.1-8b | 1142 | 22.8 | pd | ai-hub-models 1db1fe5
e2 | AI Hub | llama-3.2-1b | 4571 | 93.6 | pd | ai-hub-models 1db1fe5
e2 | AI Hub | llama-3.2-3b | 1991 | 43.2 | - | ai-hub-models 1db1fe5
e3 | AI Hub | qwen3-4b | 2765 | 39.1 | - | ai-hub-models 1db1fe5
e3 | AI Hub | qwen3-8b | 1823 | 23.3 | - | ai-hub-models 1db1fe5
e4 | AI Hub, float activations | llama-3.2-3b | 876 | 16.5 | pd | ai-hub-models 1db1fe5
e4 | AI Hub, float activations | llama-3.2-1b | 2265 | 38 | - | ai-hub-models 1db1fe5
e5 | QAIRT | qwen3-4b | 2072 | 27.8 | - | public log
e5 | llama.cpp NPU | qwen3-4b | 1380 | 18.2 | - | public log
e5 | llama.cpp GPU, 4 bits | qwen3-4b | 328 | 22.6 | - | public log
e6 | llama.cpp NPU | qwen3-4b | 787 | 21 | - | GenieX's documents
e11 | onnxruntime-genai NPU | phi-4-mini | 437 | 16.5 | - | onnxruntime-genai, public log
""",
    ),
    *_anchors(
        "X2 Elite Extreme",
        """
e7 | llama.cpp GPU, 8 bits | qwen3-4b | 658 | 23.2 | - | llama.cpp#24896
e8 | GPU reads | GB/s | 0 | 115 | d | public log: 106 to 125
e10 | GPU reads | GB/s | 0 | 129 | - | public log
""",
    ),
)
"""Left out, since no part of the model states them: speeds of a CPU (a14, b11, d12, d13), single calls (b12,
c12, d14, which the files hold as costs of a run and a map), degraded runs (d6), kernels and matrix units that
this program lacks (a15, e9), joint bandwidth (a1's second number, which the paper's file holds), and models
of unknown size (a13, e8's Gemma 4 12B, Falcon 7B, ChatGLM2)."""


# -- what the model says ---------------------------------------------------------------------------------


@cache
def linears(model: str) -> tuple[OpSpec, ...]:
    """Return the groups of linears of a model, the head last."""
    return op_specs(find_model(model, closest=True).config, "w4a16", 128, True)


def weights(model: str, *, head: bool) -> float:
    """Return the weights of a model's linears."""
    return sum(spec.rows * spec.columns for spec in linears(model)[: None if head else -1])


def gpu_pass_us(soc: SocParameters, model: str, tokens: int, kernels: Kernels) -> float:
    """Return the time of a pass on the GPU: linears and what lies between kernels; attention is left out."""
    found = 0.0
    for spec in linears(model):
        own = 1 if spec.group == "head" else tokens
        work = linear_work(spec.rows, spec.columns, own, bits=kernels.bits, block=kernels.block)
        found += gpu_time(soc, work).alone_us
    return found + soc.gpu.kernel_gap_us * KERNELS_A_LAYER * len(linears(model)) / LAYER_LINEARS


def npu_pass_us(soc: SocParameters, model: str, tokens: int, form: str) -> float:
    """Return the time of a pass of whole-model graphs on the NPU, without its constant."""
    found = 0.0
    for spec in linears(model):
        own = 1 if spec.group == "head" else tokens
        found += npu_time(soc, NpuWork(spec.rows, spec.columns, own, 4, 128, form)).busy_us
    return found


def anchor(name: str, *, model: str | None = None) -> Anchor:
    """Return a used anchor; of a name with several the one of a model, or the only one that is used."""
    found = [one for one in ANCHORS if one.name == name and one.used and model in (None, one.model)]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} used anchors are called {name}.")
    return found[0]


# -- the fit ---------------------------------------------------------------------------------------------


def many_share(generation: str) -> float:
    """Return the share of issue slots that llama.cpp's kernels fill with many tokens."""
    found = []
    for name in EFFICIENCY_MANY[generation]:
        own = anchor(name)
        products = own.prefill * weights(own.model, head=False) / 1e12
        found.append(products * LLAMA_SLOTS / CHIPS[own.chip].issue)
    return statistics.geometric_mean(found)


@cache
def one_share() -> float:
    """Return the share of issue slots that public kernels fill with one token."""
    found = []
    for name in EFFICIENCY_ONE:
        own = anchor(name)
        slots = own.decode * weights(own.model, head=True) * ENGINES[own.engine].slots_a_weight / 1e12
        found.append(slots / CHIPS[own.chip].issue)
    return statistics.geometric_mean(found)


def gpu_bandwidth(chip: str) -> float:
    """Return the GB/s of the public kernels that wait for memory."""
    found = []
    for own in (anchor(name) for name in GPU_BANDWIDTH[chip]):
        if own.model == "GB/s":
            found.append(own.decode)
            continue
        kernels = ENGINES[own.engine]
        bytes_a_weight = kernels.bits / 8 + (2 / kernels.block if kernels.block else 0)
        found.append(own.decode * weights(own.model, head=True) * bytes_a_weight / 1e9)
    return statistics.geometric_mean(found)


@cache
def own_slots() -> tuple[float, float, float, float]:
    """Return the slots of this program's kernels, by clang and Mesa for an Adreno 740.

    They are those of a product with many tokens (a half one takes half a slot), of a weight with one, of a
    product with few, and of one in attention.
    """
    table = json.loads((RESULTS / "adreno_static.json").read_text("utf-8"))["tables"]["llvm 740"]
    many, one, few, scores = (
        table[name]
        for name in (
            "linear w4 f16 T64 half",
            "linear w4 f16 T1",
            "linear w4 f16 T8",
            "attention f16 hd128 group4 T64",
        )
    )
    return (
        (many["loop_slots"] - many["loop_half_products"] / 2) / many["loop_products"],
        one["loop_slots"] / 32,
        few["loop_slots"] / 32,
        scores["loop_slots"] / scores["loop_products"],
    )


def kernel_rates(chip: Chip, slots: Sequence[float], share: float) -> dict[str, float]:
    """Return the rates of kernels on a GPU.

    Args:
        chip: The chip.
        slots: Slots of a product and a weight, of a product with few tokens, and of one in attention.
        share: Share of the slots that the kernels for many tokens fill.
    """
    product, weight, few, scores = slots
    most = 1e5
    return {
        "gpu.gemm_tflops": 2 * chip.issue * share / product,
        "gpu.prepare_gweights_per_s": 0.0,
        "gpu.small_tflops": 2 * chip.issue * one_share() / few,
        "gpu.small_gweights_per_s": 1e3 * chip.issue * one_share() / weight if weight else most,
        "gpu.attention_tflops": 2 * chip.issue * share / scores,
    }


@dataclass(frozen=True, slots=True)
class NpuFit:
    """The values of an NPU: parameters by name, and the constants of a pass of a prompt and of one token."""

    values: Mapping[str, float]
    prompt_us: float
    token_us: float


UNBOUND: Final = {
    "memory.limit_gbps": 1e4,
    "npu.dram_gbps": 1e3,
    "npu.int16_tflops": 1e3,
    "npu.array_tflops": 1e3,
    "npu.expand_gweights_per_s": 1e5,
    "npu.dequantize_gweights_per_s": 1e5,
}
"""Rates that bind nothing, beside which one is fitted."""

FLOAT_FORM: Final = "k_chunked"
"""Of float graphs, with long rows cut: nobody publishes that AI Hub's spill."""


def unit_us(chip: str, model: str, tokens: int, form: str, parameter: str) -> float:
    """Return the time of a pass that one rate of 1 alone binds: with another rate it falls in proportion."""
    soc = load_soc(CHIPS[chip].soc, UNBOUND | {parameter: 1.0})
    return npu_pass_us(soc, model, tokens, form)


@cache
def npu_fit(chip: str) -> NpuFit:
    """Return the values of an NPU by its public speeds: a pass takes a constant, and the rest by a rate."""
    large, small, floats = NPU_FITS[chip]
    values: dict[str, float] = {}
    constants_us = []
    for phase, parameter, tokens in (
        ("prefill", "npu.int16_tflops", PASS_TOKENS),
        ("decode", "npu.dram_gbps", 1),
    ):
        rows = [anchor(name) for name in (large, small) if name]
        times_us = [1e6 * tokens / getattr(row, phase) for row in rows]
        units_us = [unit_us(chip, row.model, tokens, "integer", parameter) for row in rows]
        if len(rows) == 1:
            elite = npu_fit("8 Elite")
            constant_us = elite.prompt_us if tokens > 1 else elite.token_us
        else:
            constant_us = (times_us[1] * units_us[0] - times_us[0] * units_us[1]) / (
                units_us[0] - units_us[1]
            )
        values[parameter] = units_us[0] / (times_us[0] - constant_us)
        constants_us.append(constant_us)
        if floats:
            row = anchor(floats)
            parameter = "npu.array_tflops" if tokens > 1 else "npu.dequantize_gweights_per_s"
            left_us = 1e6 * tokens / getattr(row, phase) - constant_us
            values[parameter] = unit_us(chip, row.model, tokens, FLOAT_FORM, parameter) / left_us
    return NpuFit(values, *constants_us)


def fitted(chip: str) -> dict[str, float]:
    """Return the values of a chip's file that the anchors give."""
    base, own = load_soc("snapdragon-8gen3").values(), CHIPS[chip]
    npu = npu_fit(chip if chip in NPU_FITS else "X2 Elite").values
    values = {**kernel_rates(own, own_slots(), many_share(own.generation) * OWN_SHARE), **npu}
    if chip in GPU_BANDWIDTH:
        values["gpu.dram_gbps"] = gpu_bandwidth(chip)
        faster = values["npu.dequantize_gweights_per_s"] / base["npu.dequantize_gweights_per_s"]
        values["npu.dequantize_int8_gweights_per_s"] = base["npu.dequantize_int8_gweights_per_s"] * faster
    return {name: float(f"{value:.4g}") for name, value in values.items()}


# -- the table -------------------------------------------------------------------------------------------


def modelled(one: Anchor) -> tuple[float, float]:
    """Return the modelled speeds of an anchor's prompt and decode."""
    chip = CHIPS[one.chip]
    if one.model == "GB/s":
        return 0.0, load_soc(chip.soc).gpu.dram_gbps
    if one.engine in ENGINES:
        kernels = ENGINES[one.engine]
        slots = (kernels.slots_a_product, kernels.slots_a_weight, kernels.slots_a_product, 1.0)
        soc = load_soc(chip.soc, kernel_rates(chip, slots, many_share(chip.generation)))
        tokens = 512
        return tuple(1e6 * n / gpu_pass_us(soc, one.model, n, kernels) for n in (tokens, 1))
    fit = npu_fit(one.chip)
    soc = load_soc(chip.soc, {"npu.expand_gweights_per_s": 1e5})
    form = FLOAT_FORM if one.engine == FLOAT_ENGINE else "integer"
    prompt_us, token_us = (npu_pass_us(soc, one.model, n, form) for n in (PASS_TOKENS, 1))
    return 1e6 * PASS_TOKENS / (prompt_us + fit.prompt_us), 1e6 / (token_us + fit.token_us)


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each published speed."""
    for one in ANCHORS:
        speeds = zip(("prefill", "decode"), (one.prefill, one.decode), modelled(one), strict=True)
        for phase, measured, found in speeds:
            if measured:
                yield {
                    "anchor": one.name,
                    "chip": one.chip,
                    "engine": one.engine,
                    "model": one.model,
                    "phase": phase,
                    "used": phase[0] in one.used,
                    "measured": measured,
                    "simulated": float(f"{found:.4g}"),
                    "source": one.source,
                }


def main() -> int:
    """Print the anchors, or fit and write."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument(
        "--write", action="store_true", help="write the values into the YAML files, and the rows"
    )
    asked = parser.parse_args()
    if asked.write:
        for chip, own in CHIPS.items():
            path = FOLDER / f"{own.soc}.yaml"
            text = with_values(path.read_text("utf-8"), fitted(chip))
            with atomic_path(path) as unfinished:
                unfinished.write_text(text, "utf-8")
    found = list(rows())
    if asked.write:
        (RESULTS / "anchors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), "utf-8")
    for row in found:
        kind = "used" if row["used"] else "predicted"
        ratio = row["simulated"] / row["measured"]
        print(
            f"{row['anchor']:4} {row['chip']:16} {row['engine']:26} {row['model']:13} {row['phase']:8}"
            f"{kind:10}{row['measured']:8g}{row['simulated']:9.1f}{ratio:6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
