"""Simulates this program's own path on six chips, to be set beside the best public engine on each.

    python bench/forecast.py --out bench/results/forecast.jsonl   # simulates: half an hour

All times are simulated. The chips are those of bench/anchors.py. :data:`CONDITIONS` are what the own path
needs beyond the files of the chips; rows of ``as filed`` lack them. Rows that the file has are kept, so that
a run goes on where it ended. ``bench/figures.py`` writes the tables.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

from anchors import CHIPS, OWN_SHARE
from conditions import script_parser
from msgspec import structs

from heterollm.base import HeteroLLMError, atomic_path
from heterollm.kernels.npu import TILE_OF_INTEGERS
from heterollm.kernels.sim import load_soc
from heterollm.planning import PlanInputs, make_plan
from heterollm.simulate import SimulationRequest, SimulationResult
from heterollm.simulate.run import planned, simulated
from heterollm.solver import Plan
from heterollm.solver.placements import RowsPlacement

MODELS: Final = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen3-4b", "gemma-4-e2b")
PROMPTS: Final = (512, 128, 4096)
"""The first has the decoded tokens behind it."""

DECODED: Final = 16

CONDITIONS: Final = {
    "npu.shared_contexts": 1.0,
    "npu.io_by_graph": 0.0,
    "npu.address_space_gib": 7.0,
    "memory.available_gib": 12.0,
}
"""Lengths of a slice that share its weights, buffers of inputs and outputs that count once, two process
domains of the NPU, and a phone that has 12 GiB for the model."""

SLOW_CHIPS: Final = ("8 Gen 3", "X Elite")
SLOW_FLOATS: Final = {"npu.array_tflops": 0.0016}
"""Float products as slow as llm.npu's Table 3 has them: 0.9 to 2.4 GFLOP/s, the middle."""

OWN_KERNELS: Final = ("gpu.gemm_tflops", "gpu.attention_tflops")
RANGES: Final[Mapping[str, Mapping[str, float]]] = {
    "low": dict.fromkeys(OWN_KERNELS, OWN_SHARE)
    | {"gpu.small_gweights_per_s": 0.67, "npu.expand_gweights_per_s": 0.83},
    "high": dict.fromkeys(OWN_KERNELS, 1 / OWN_SHARE)
    | {"gpu.small_gweights_per_s": 1.33, "npu.expand_gweights_per_s": 1.2},
}
"""Ends of the ranges that the files state, over their values: the GPU's kernels, and expansion of weights."""

FREE_STARTS: Final = {"npu.execute_us": 30.0}
"""A run through a queue of packets, as llama.cpp's on an 8 Elite (llama.cpp#18139: 11 to 35 us)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A simulated case.

    Args:
        chip: The chip.
        model: The model.
        level: Level of the plan.
        integer: Whether graphs compute in integers.
        prompt: Tokens of the prompt.
        change: What differs from the conditions, in a word.
    """

    chip: str
    model: str
    level: str
    integer: bool
    prompt: int
    change: str = ""

    def overrides(self) -> dict[str, float]:
        """Return the parameters that differ from the chip's file."""
        soc = load_soc(CHIPS[self.chip].soc).values()
        own = {name: soc[name] * factor for name, factor in RANGES.get(self.change, {}).items()}
        own |= {"slow floats": SLOW_FLOATS, "free starts": FREE_STARTS}.get(self.change, {})
        return own if self.change == "as filed" else CONDITIONS | own


NAMES: Final = tuple(one.name for one in fields(Case))

LEVELS: Final = (
    *(("gpu", False), ("npu", False), ("npu", True)),
    *(("tensor", False), ("tensor", True), ("block", False), ("block", True)),
)
"""Levels, and whether in integers; larger graphs of the NPU will be a level more. ``layer`` has the prompts
of ``npu`` and the decode of ``gpu``."""

BEST_LEVELS: Final = (("gpu", False), ("block", True))
"""Those of the other lengths."""

FLOAT_NETWORKS: Final = ("gemma-4-e2b",)
"""Models whose network has no integer graph as one: their rows of ``block`` are of ``tensor``."""


def cases() -> Iterator[Case]:
    """Yield the cases, the most telling first; changes are of the first model alone."""
    chips = [chip for chip in CHIPS if chip != "X2 Elite Extreme"]
    for model in MODELS:
        for chip in CHIPS if model == MODELS[0] else chips:
            yield from (Case(chip, model, *level, PROMPTS[0]) for level in LEVELS)
            for prompt, level in itertools.product(PROMPTS[1:], BEST_LEVELS):
                yield Case(chip, model, *level, prompt)
        if model == MODELS[0]:
            for change, chip in itertools.product((*RANGES, "free starts", "as filed"), CHIPS):
                yield Case(chip, model, "block", True, PROMPTS[0], change)
            for chip, integer in itertools.product(SLOW_CHIPS, (False, True)):
                yield Case(chip, model, "block", integer, PROMPTS[0], "slow floats")


def in_integers(inputs: PlanInputs) -> Plan:
    """Return the plan of a level that follows a rule, its graphs in integers; the head's are floats."""
    plan = make_plan(inputs).plan
    tile = TILE_OF_INTEGERS["integer"]
    entries = []
    for entry in plan.entries:
        placement = entry.placement
        if isinstance(placement, RowsPlacement) and placement.npu_lengths and entry.group != "head":
            lengths = tuple(max(tile, length) for length in placement.npu_lengths)
            placement = structs.replace(placement, form="integer", npu_lengths=lengths)
        entries.append(structs.replace(entry, placement=placement))
    return structs.replace(plan, entries=tuple(entries), slices=())


def row_of(case: Case) -> dict[str, Any]:
    """Return the row of a case; a plan that the chip refuses is a row with the reason."""
    named = dict(zip(NAMES, astuple(case), strict=True))
    decode = DECODED if case.prompt == PROMPTS[0] else 0
    whole = not (case.integer and case.model in FLOAT_NETWORKS)
    level = "tensor" if case.level == "block" and not whole else case.level
    request = SimulationRequest(
        *(case.model, CHIPS[case.chip].soc, case.prompt, decode, level),
        overrides=case.overrides(),
        calibrated=case.integer,
    )
    rule = case.integer and case.level == "npu"
    try:
        found = simulated(request, plan_of=in_integers if rule else planned)
    except HeteroLLMError as error:
        return {**named, "error": str(error)}
    return {**named, **_figures(found)}


def _figures(found: SimulationResult) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "prefill": found.prefill.tokens_per_second,
        "graphs": found.graphs.count,
        "graphs_gib": found.graphs.held_gib,
        "cuts": {phase: dict(cuts) for phase, cuts in found.splits.items()},
    }
    for use in found.phases:
        passes = use.tokens if use.phase == "decode" else 1
        figures[f"{use.phase}_runs"] = use.npu_runs / passes
        figures[f"{use.phase}_ms"] = {
            name: sum(one.used_us[name] for one in use.account) / passes / 1e3
            for name in use.account[0].used_us
        }
    if found.decode is not None:
        figures["decode"] = found.decode.tokens_per_second
    return json.loads(json.dumps(figures), parse_float=lambda text: float(f"{float(text):.4g}"))


def main() -> int:
    """Simulate and write."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write JSON lines")
    out = parser.parse_args().out
    lines = out.read_text("utf-8").splitlines() if out.exists() else []
    kept = {tuple(row[name] for name in NAMES): row for row in map(json.loads, lines)}
    for case in (asked := list(cases())):
        if astuple(case) not in kept:
            kept[astuple(case)] = row_of(case)
            rows = (kept[astuple(one)] for one in asked if astuple(one) in kept)
            with atomic_path(out) as unfinished:
                unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
