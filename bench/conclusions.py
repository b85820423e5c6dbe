"""Simulates conclusions of the papers as modelled, and with what each paper pays and the model does not.

    python bench/conclusions.py            # simulates: some minutes; rows in simulated_conclusions.jsonl
    python bench/figures.py                # writes the tables of these rows into docs

A conclusion is a number above 1 where the order is the paper's. One parameter is swept from its modelled
value to the paper's, and the table names the value at which the order turns. All times are simulated.
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
            elif value != self.swept[0] and changes and "." in self.parameter:
                changed |= {self.parameter: value, **self.beside}
            elif value != self.swept[0] and changes:
                given[self.parameter] = value
            found[name] = RungRequest(**given, overrides=changed)
        return found

    def turn(self, numbers: Sequence[float]) -> float | None:
        """Return the first value at which the number is 1, on a line through two.

        None without one, and where the order is the paper's as modelled.

        Args:
            numbers: By swept value.
        """
        if numbers[0] > 1.0:
            return None
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
    chunks, shadows, order = (before / after for before, after in itertools.pairwise(times))
    return shadows / max(chunks, order)


def _prompt(model: str, rung: str = "", **options: Any) -> Case:  # noqa: ANN401 - a request's own types
    """Return a case of llm.npu with 1024 tokens; the graphs of a prompt are built in its time."""
    if rung == NAIVE:
        return {"model": model, "prompt": 1024, "level": "layer", "rung": rung, "length_policy": "online"}
    given = {"model": model, "prompt": 1024, "level": "layer", "techniques": ("llm.npu",), "rung": rung}
    return {**given, **options}


def _sparse(**options: Any) -> Case:  # noqa: ANN401 - a request's own types
    return {"model": "qwen2-1.5b", "prompt": 1024, "level": "tensor", "soc": OWN, **options}


QWEN, GEMMA = "qwen1.5-1.8b", "gemma-2b"
GAME: Final = {"load": GpuLoad(60.0, 5300.0)}
"""A frame's time on the GPU is not published; with this one layer level loses 12.8 % (published: 9.6)."""

LLAMA: Final = {"model": "llama-3-8b", "prompt": 256}
SHARES: Final = (1.0, 0.7, 0.5)
"""Of an operator's time that the GPU may work, a plan's option: with 0.5 it works 28 % of the whole."""

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

CORE_SOURCE: Final = "a middle core computes attention (4): 0.05 at most in FP32"
CHOOSING: Final = {"gpu.choose_gscores_per_s": 1.17}
"""That core's: kernels 3.5 times faster (section 5.1) leave 7 % of dense attention for it, of heads of 64 at
0.02 TFLOP/s, since a fifth of the keys takes 22 % (figure 4a)."""

CONCLUSIONS: Final = (
    Conclusion(
        "game",
        "H 5.5: a game slows tensor level less than layer level",
        "7.3 and 9.6 %",
        "gpu_share",
        SHARES,
        "a GPU with a small part of the work (5.5)",
        {"layer": {**LLAMA, **GAME, "level": "layer", "changes": False}, "tensor": {**LLAMA, **GAME}},
        lambda rows: rows["layer"]["slowdown"]["prefill"] / rows["tensor"]["slowdown"]["prefill"],
    ),
    Conclusion(
        "power",
        "H 5.6: tensor level draws less than the GPU alone",
        "0.63",
        "gpu_share",
        SHARES,
        "a GPU that works 29 % of the time at most, by its watts",
        {"gpu": {**LLAMA, "level": "gpu", "changes": False}, "tensor": LLAMA},
        lambda rows: _watts(rows["gpu"]) / _watts(rows["tensor"]),
    ),
    Conclusion(
        "chunks",
        "L 4.7: Gemma-2B gains more from chunks than Qwen1.5-1.8B",
        "the most",
        "build.graph_us_per_mweight",
        (0.0, 600.0, 6010.0),
        "11.9 s for Gemma-2B's 1980 million weights (2.3)",
        {
            f"{model} {step}": _prompt(model, f"llm.npu:{step}")
            for model in (GEMMA, QWEN)
            for step in ("naive", "chunks")
        },
        lambda rows: (
            _faster(f"{GEMMA} naive", f"{GEMMA} chunks")(rows)
            / _faster(f"{QWEN} naive", f"{QWEN} chunks")(rows)
        ),
        BY_WEIGHTS,
    ),
    Conclusion(
        "shadows",
        "L 4.7: shadows are the largest step",
        "3.91 to 8.68",
        "npu.group_slowdown",
        (1.0, 2.0, 4.0, 8.1),
        "groups of 8 bits before shadows (figure 4)",
        STEPS,
        _shadow_step,
    ),
    Conclusion(
        "pruning",
        "L 4.4: pruning the shadows of 85 % of the layers buys speed (5 % and more)",
        "3.49",
        "hand_over.shadow_us",
        (0.0, 660.0, 12600.0),
        "156 and 596 tokens/s with all shadows and none (4.4); 660 by 29.7 % of the time (3.3)",
        {name: _prompt(QWEN, pruned=share) for name, share in (("all", 0.0), ("pruned", 0.85))},
        lambda rows: _faster("all", "pruned")(rows) / 1.05,
    ),
    Conclusion(
        "estimates",
        "A 5.1: the NPU's estimates pay at 1024 tokens (5 % and more)",
        "2.9, end to end",
        "gpu.attention_tflops",
        CORE,
        CORE_SOURCE,
        {"dense": _sparse(), "sparse": _sparse(**ESTIMATED)},
        lambda rows: _faster("dense", "sparse")(rows) / 1.05,
        CHOOSING,
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
        CHOOSING,
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
                "model": "phi-3.5-moe",
                "prompt": 1024,
                "level": "layer",
                "overrides": NO_LIMITS,
                "techniques": ("npumoe",),
                "rung": "npumoe:groups",
            },
        },
        _faster("npu", "gpu"),
    ),
    Conclusion(
        "lead",
        "L: the NPU leads the best GPU engine by about two (here: below three)",
        "1.43",
        "gpu.gemm_tflops",
        (0.6649, 1.0, 2.6),
        "TFLite, and ML Drift on this chip (arXiv 2505.00232)",
        {"gpu": {**_prompt(GEMMA, **LONG), "level": "gpu", "techniques": ()}, "npu": _prompt(GEMMA, **LONG)},
        lambda rows: 3 / _faster("gpu", "npu")(rows),
    ),
)
"""The conclusions that a model of HeteroLLM's chip, or this program's own path, had in another order."""

MIXTURES: Final = ("phi-3.5-moe", "qwen3-30b-a3b", "phi-tiny-moe")
APPLE_STEPS: Final = (
    ("all on the GPU", "gpu", ""),
    ("linear layers on the NPU", "layer", ""),
    ("a graph each", "layer", "npumoe:each"),
    ("tiers of capacity", "layer", "npumoe:tiers"),
    ("groups", "layer", "npumoe:groups"),
    ("the solver's choice", "layer", "npumoe"),
)
"""Steps of NPUMoE on its machine: words, level, rung or technique."""


def busy_shares() -> tuple[float, float]:
    """Return the most of the time that HeteroLLM's GPU may work at tensor level, and the least that it must.

    The most by section 5.6: its three powers, any base within layer level's 2.23 W, and an NPU that works as
    long as at layer level (the modelled shares) less the time that tensor level saves. The least by section
    5.2 and the published operators: the GPU takes at least 1.5 times as long as the NPU saves (FFN-down,
    35231 and 23445 us).
    """
    layer_watts, gain, layer_gpu, layer_npu = 2.23, 1.244, 0.057, 0.934
    tensor_watts = 1.232 * layer_watts
    gpu_watts = tensor_watts / 0.633
    saved = gain - 1  # in times of tensor level
    npu = layer_npu * gain - saved
    bases = [layer_watts * part / 100 for part in range(101)]
    watts = [(base, gpu_watts - base) for base in bases]
    engines = [(layer_watts - base - layer_gpu * gpu) / layer_npu for base, gpu in watts]
    found = zip(watts, engines, strict=True)
    most = max((tensor_watts - base - npu * engine) / gpu for (base, gpu), engine in found if engine >= 0)
    return most, saved * 35231 / 23445


def apple_requests() -> Iterator[RungRequest]:
    """Yield the steps of NPUMoE on its machine."""
    for model in MIXTURES:
        for _, level, rung in APPLE_STEPS:
            yield RungRequest(
                *(model, APPLE, 1024, 0, level, "prompt"),
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
