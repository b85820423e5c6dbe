"""Simulates conclusions of the papers as modelled, and with what each paper pays and the model does not.

    python bench/conclusions.py            # simulates: some minutes; rows in simulated_conclusions.jsonl
    python bench/figures.py                # writes the tables of these rows into docs

A conclusion is a number above 1 where the order is the paper's. One parameter is swept from its modelled value
over the paper's, and the table names the value at which the order turns. All times are simulated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from conditions import script_parser
from figures_run import RESULTS
from rungs import RungRequest, run_rung
from simulated_rows import NAIVE, lines

from heterollm.benchmarks import run_sweep
from heterollm.kernels.sim import GpuLoad
from heterollm.report import console
from heterollm.solver import AttentionRequest

FILE: Final = "simulated_conclusions"
PAPER: Final = "snapdragon-8gen3-paper"
OWN: Final = "snapdragon-8gen3"
APPLE: Final = "apple-m2"
NO_LIMITS: Final = {"npu.address_space_gib": 0.0, "memory.available_gib": 0.0}
BY_WEIGHTS: Final = {"build.graph_us": 0.0, "build.graph_us_per_token": 0.0, "build.shared_graphs": 0}
"""Graphs that are built in a time by their weights alone, as llm.npu's graph of a whole model."""

Row = Mapping[str, Any]
Rows = Mapping[str, Row]
Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """An order that a paper finds.

    Args:
        key: Its name in code.
        words: The conclusion, and its section.
        published: The paper's number.
        parameter: The swept parameter; empty where chips are swept.
        swept: Its values, the modelled one first.
        source: The paper's value, and where it stands.
        cases: Requests of a value by name, without it.
        number: The number of their rows: above 1 where the order is the paper's.
        beside: Overrides beside the parameter, at all values but the modelled one.
    """

    key: str
    words: str
    published: str
    parameter: str
    swept: tuple[float | str, ...]
    source: str
    cases: Mapping[str, Case]
    number: Callable[[Rows], float]
    beside: Mapping[str, float] = field(default_factory=dict)

    def requests(self, value: float | str) -> dict[str, RungRequest]:
        """Return the requests of a value by name."""
        found = {}
        for name, case in self.cases.items():
            given = {"decode": 0, "plan_for": "prompt", "soc": PAPER, **case}
            changed, changes = dict(given.pop("overrides", {})), given.pop("changes", True)
            if isinstance(value, str):
                given["soc"] = value
            elif value != self.swept[0] and changes:
                changed |= {self.parameter: value, **self.beside}
            found[name] = RungRequest(**given, overrides=changed)
        return found

    def turn(self, numbers: Sequence[float]) -> float | None:
        """Return the first value at which the number is 1, on a line through two; None without one.

        Args:
            numbers: By swept value.
        """
        values = [value for value in self.swept if not isinstance(value, str)]
        for at in range(1, len(values)):
            (low, high), (before, after) = values[at - 1 : at + 1], map(math.log, numbers[at - 1 : at + 1])
            if (before > 0) != (after > 0):
                return low + (high - low) * before / (before - after)
        return None


def _time(row: Row) -> float:
    return float(row["ttft_ms"])


def _faster(slow: str, fast: str) -> Callable[[Rows], float]:
    """Return the function that finds how much faster one case is than another."""
    return lambda rows: _time(rows[slow]) / _time(rows[fast])


def _watts(row: Row) -> float:
    return 1e3 * float(row["prefill_joules"]) / _time(row)


def _shadow_step(rows: Rows) -> float:
    times = [_time(rows[name]) for name in ("naive", "chunks", "shadows", "out of order")]
    chunks, shadows, order = (before / after for before, after in zip(times, times[1:], strict=False))
    return shadows / max(chunks, order)


def _prompt(model: str, rung: str = "", **options: Any) -> Case:  # noqa: ANN401 - a request's own types
    """Return a case of llm.npu with 1024 tokens; the graphs of a prompt are built in its time."""
    if rung == NAIVE:
        return {"model": model, "prompt": 1024, "level": "layer", "rung": rung, "length_policy": "online"}
    technique = ("llm.npu",) if "techniques" not in options else options.pop("techniques")
    return {"model": model, "prompt": 1024, "level": "layer", "techniques": technique, "rung": rung, **options}


def _sparse(**options: Any) -> Case:  # noqa: ANN401 - a request's own types
    return {"model": "qwen2-1.5b", "prompt": 1024, "level": "tensor", "soc": OWN, **options}


QWEN, GEMMA = "qwen1.5-1.8b", "gemma-2b"
GAME: Final = {"load": GpuLoad(60.0, 3000.0)}
LLAMA: Final = {"model": "llama-3-8b", "prompt": 256}
ESTIMATED: Final = {"techniques": ("shadowattn",), "attention": AttentionRequest(keep=0.2, estimator="npu")}
STEPS: Final = {
    "naive": _prompt(QWEN, NAIVE),
    "chunks": _prompt(QWEN, "llm.npu:chunks"),
    "shadows": {**_prompt(QWEN, "llm.npu:shadow"), "changes": False},
    "out of order": {**_prompt(QWEN), "changes": False},
}
"""Shadows take the place of groups: graphs with shadows have one scale for a tensor."""

LONG: Final = {"prompt": 2048, "soc": OWN, "overrides": NO_LIMITS}
CORE: Final = (0.1852, 0.1, 0.05, 0.02)
"""TFLOP/s of attention: of the GPU as modelled, down to what one core reaches."""

CORE_SOURCE: Final = "0.05 TFLOP/s, the most of a middle core in FP32 (Cortex-A720 at 3.15 GHz); one computes attention in shadowAttn, section 4"

CONCLUSIONS: Final = (
    Conclusion(
        "game",
        "H 5.5: a game slows tensor level less than layer level",
        "7.3 and 9.6 %",
        "npu.row_limit_columns",
        (4096, 16384),
        "",
        {level: {**LLAMA, **GAME, "level": level} for level in ("layer", "tensor")},
        lambda rows: rows["layer"]["slowdown"]["prefill"] / rows["tensor"]["slowdown"]["prefill"],
    ),
    Conclusion(
        "power",
        "H 5.6: tensor level draws less than the GPU alone",
        "0.63",
        "npu.row_limit_columns",
        (4096, 16384),
        "",
        {level: {**LLAMA, "level": level} for level in ("gpu", "layer", "tensor")},
        lambda rows: _watts(rows["gpu"]) / _watts(rows["tensor"]),
    ),
    Conclusion(
        "chunks",
        "L 4.7: Gemma-2B gains more from chunks than Qwen1.5-1.8B",
        "the most",
        "build.graph_us_per_mweight",
        (0.0, 600.0, 6010.0),
        "6010 us: 11.9 s for Gemma-2B's 1980 million weights (2.3)",
        {
            f"{model} {step}": _prompt(model, f"llm.npu:{step}")
            for model in (GEMMA, QWEN)
            for step in ("naive", "chunks")
        },
        lambda rows: (
            _faster(f"{GEMMA} naive", f"{GEMMA} chunks")(rows) / _faster(f"{QWEN} naive", f"{QWEN} chunks")(rows)
        ),
        BY_WEIGHTS,
    ),
    Conclusion(
        "shadows",
        "L 4.7: shadows are the largest step",
        "3.91 to 8.68",
        "npu.group_slowdown",
        (1.0, 2.0, 4.0, 8.1),
        "8.1 to 10.7: groups of 8 bits before shadows (figure 4)",
        STEPS,
        _shadow_step,
    ),
    Conclusion(
        "pruning",
        "L 4.4: pruning the shadows of 85 % of the layers buys speed",
        "3.49",
        "hand_over.shadow_us",
        (0.0, 1000.0, 12600.0),
        "",
        {name: _prompt(QWEN, pruned=share) for name, share in (("all", 0.0), ("pruned", 0.85))},
        _faster("all", "pruned"),
    ),
    Conclusion(
        "estimates",
        "A 5.1: the NPU's estimates pay at 1024 tokens",
        "2.9, end to end",
        "gpu.attention_tflops",
        CORE,
        CORE_SOURCE,
        {"dense": _sparse(), "sparse": _sparse(**ESTIMATED)},
        _faster("dense", "sparse"),
    ),
    Conclusion(
        "plugged in",
        "A 5.1: sparse attention makes llm.npu faster",
        "2.9",
        "gpu.attention_tflops",
        CORE,
        CORE_SOURCE,
        {
            "llm.npu": _prompt(QWEN, **LONG),
            "both": _prompt(QWEN, **LONG, techniques=("llm.npu", "shadowattn")),
        },
        _faster("llm.npu", "both"),
    ),
    Conclusion(
        "gpu",
        "M A.3: the GPU is faster than the NPU in attention and experts",
        "1.26",
        "",
        (OWN, APPLE),
        "the machine of the paper",
        {
            "gpu": {"model": "phi-3.5-moe", "prompt": 1024, "level": "gpu", "overrides": NO_LIMITS},
            "npu": {
                **{"model": "phi-3.5-moe", "prompt": 1024, "level": "layer", "overrides": NO_LIMITS},
                **{"techniques": ("npumoe",), "rung": "npumoe:groups"},
            },
        },
        _faster("npu", "gpu"),
    ),
    Conclusion(
        "lead",
        "L: the NPU leads the best GPU engine by about two",
        "1.43",
        "gpu.gemm_tflops",
        (0.4699, 1.0, 2.6),
        "2.6 TFLOP/s: TFLite, and ML Drift on this chip (arXiv 2505.00232)",
        {"gpu": {**_prompt(GEMMA, **LONG), "level": "gpu", "techniques": ()}, "npu": _prompt(GEMMA, **LONG)},
        lambda rows: 2 / _faster("gpu", "npu")(rows),
    ),
)
"""The conclusions that a model of HeteroLLM's chip, or this program's own path, had in another order."""

MIXTURES: Final = ("phi-3.5-moe", "qwen3-30b-a3b", "phi-tiny-moe")
APPLE_PROMPTS: Final = (256, 1024)
APPLE_STEPS: Final = (
    ("all on the GPU", "gpu", ""),
    ("linear layers on the NPU", "layer", ""),
    ("a graph each", "layer", "npumoe:each"),
    ("tiers of capacity", "layer", "npumoe:tiers"),
    ("groups", "layer", "npumoe:groups"),
    ("the solver's choice", "layer", "npumoe"),
)
"""Steps of NPUMoE on its machine: words, level, rung or technique."""


def apple_requests() -> Iterator[RungRequest]:
    """Yield the steps of NPUMoE on its machine."""
    for model in MIXTURES:
        for _, level, rung in APPLE_STEPS:
            for prompt in APPLE_PROMPTS:
                yield RungRequest(
                    *(model, APPLE, prompt, 0, level, "prompt"),
                    techniques=("npumoe",) if rung.startswith("npumoe") else (),
                    rung=rung if ":" in rung else "",
                )


def requests() -> list[RungRequest]:
    """Return all requests, each once."""
    own = (one.requests(value).values() for one in CONCLUSIONS for value in one.swept)
    return list({repr(one): one for one in (*itertools.chain(*own), *apple_requests())}.values())


def main() -> None:
    """Simulate all cases, and write their rows."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    with console.progress_bars() as progress:
        rows = run_sweep(requests(), jobs=asked.jobs, progress=progress, run=run_rung)
    (RESULTS / f"{FILE}.jsonl").write_text(lines(rows), "utf-8")


if __name__ == "__main__":
    main()
