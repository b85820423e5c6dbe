"""How long does the solver take for a whole model, and for one more length at run time?

The plan of every length up to 1024 and of decode for a model of 32 layers in Llama-3-8B's shape (aim: under
1 s), and then single lengths that no plan names, with the slices that the plan holds (aim: under 5 ms each)
and with every cut allowed. Costs come from a formula (floors, rates, a slow FFN-down), and with `--profile`
from a profile too, whose predictor is fitted before the clock starts but has seen none of the questions: a
solver is new in every round. Each line has the least, the median and the largest time.

    python bench/bench_solver.py --out bench/results/solver.jsonl
    python bench/bench_solver.py --profile PROFILE.json --out bench/results/solver.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from conditions import conditions

from heterollm.kernels.npu import K_SPLIT_COLUMNS, STANDARD_LENGTHS
from heterollm.kernels.ops import GraphMemory, OpSpec
from heterollm.model import ModelShape
from heterollm.model.known import ModelSize
from heterollm.solver import SOLVED_LEVELS, Budget, NpuLimits, Slices, Solver
from heterollm.solver.costs import Costs, Overheads, Slowdown
from heterollm.solver.request import SolvedLevel

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
SIZES: Final = ModelSize(4096, 14336, 32, 32, 8, 128256, False, 128, 8192)
LENGTHS: Final = (2, 45, 135, 193, 300, 525, 600, 777, 1000, 1023)
PLAN_AIM_MS: Final = 1000.0
LENGTH_AIM_MS: Final = 5.0


class FormulaCosts:
    """Rates of a phone, roughly, with a fixed cost for each kernel and graph; of a block with one for all."""

    overheads = Overheads(hand_over_us=8.0, refill_us=75.0)

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Bandwidth or operations."""
        weights = sum(member_rows) * spec.columns
        return 5.0 + weights * max(0.52 / 43e3, 2 * tokens / 1.2e6)

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Unpacking or operations; long rows cost more unless they are in chunks."""
        weights = sum(member_rows) * spec.columns
        slower = 3.5 if spec.columns > K_SPLIT_COLUMNS and form != "k_chunked" else 1.0
        if spec.then is not None:
            own = 3.5 if member_rows[0] > K_SPLIT_COLUMNS and form != "ffn_k_chunked" else 1.0
            weights += int(own * member_rows[0] * spec.then.rows)
        return 110.0 + slower * weights * max(1 / 30.7e3, 2 * length / 5.6e6)

    def slowdown(self, spec: OpSpec, tokens: int, *_: object) -> Slowdown:
        """A little, where both compute rather than read."""
        return Slowdown(1.06, 1.06) if tokens * spec.columns > 1 << 16 else Slowdown()

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Norms and the like: what they read and write."""
        return 10.0 + 8 * tokens * spec.columns / 43e3

    def mixture_us(self, tokens: int, kind: str = "") -> tuple[float, ...]:  # noqa: ARG002
        """Return no kernels: the model has no experts."""
        return ()

    def kernels_us(self, spec: OpSpec) -> tuple[float, ...]:
        """One kernel before each group."""
        return (self.between_us(spec, 1),)


def formula_forms(spec: OpSpec, length: int) -> tuple[str, ...]:
    """Return two forms where chunks make sense, as on Hexagon."""
    plain, columns = ("matmul_nbits", spec.columns) if spec.then is None else ("ffn", spec.then.columns)
    chunked = "k_chunked" if spec.then is None else "ffn_k_chunked"
    return (plain, chunked) if columns > K_SPLIT_COLUMNS and length else (plain,)


def sources(profile: Path | None, shape: ModelShape) -> Iterator[tuple[str, Callable[[], Costs], NpuLimits]]:
    """Yield names of costs, how to make them new, and what the NPU can be given."""
    yield "formula", FormulaCosts, NpuLimits(STANDARD_LENGTHS, 256, formula_forms)
    if profile is None:
        return
    from heterollm.profiler.predict import Predictor
    from heterollm.profiler.records import Profile
    from heterollm.solver import ProfileCosts, limits_of

    measured = Profile.load(profile)
    fits = Predictor.fit(measured).fits
    limits = limits_of(measured)
    if limits is None:
        raise SystemExit(f"{profile} is of a device without an NPU")

    def costs() -> Costs:
        predictor = Predictor.fit(measured, fits)
        return ProfileCosts(measured, shape, predictor=predictor)

    yield f"profile of {measured.device}", costs, limits


def milliseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def spread(what: str, costs: str, times_ms: list[float], aim_ms: float | None) -> dict[str, Any]:
    """Return one line of results."""
    return {
        "what": what,
        "costs": costs,
        "least_ms": round(min(times_ms), 3),
        "median_ms": round(statistics.median(times_ms), 3),
        "largest_ms": round(max(times_ms), 3),
        "rounds": len(times_ms),
        "aim_ms": aim_ms,
    }


def measure(
    name: str, level: SolvedLevel, costs: Callable[[], Costs], limits: NpuLimits, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one source of costs at one level."""
    shape = SIZES.shape("Llama-3-8B")
    layers = tuple(replace(spec, layer=layer) for layer in range(shape.layers) for spec in shape.layer)
    specs = (*layers, shape.head)
    whole_bytes = sum(spec.weight_bytes() for spec in specs)
    for title, budget in (
        ("plan", Budget()),
        ("plan within half the weights", Budget(whole_bytes // 2, GraphMemory(True))),
    ):
        times = []
        for _ in range(rounds):
            solver = Solver(specs, limits, costs(), budget=budget, level=level)
            times.append(milliseconds(lambda: solver.plan(device="bench", precision="w4a16")))  # noqa: B023
        yield spread(f"{level}: {title}, {shape.layers} layers", name, times, PLAN_AIM_MS)
    slices: Slices = Solver(specs, limits, costs(), level=level).slices()
    for title, held, aim in (("the plan's slices", slices, LENGTH_AIM_MS), ("every cut", None, None)):
        times = []
        for _ in range(rounds):
            solver = Solver(specs, limits, costs(), level=level)
            for tokens in LENGTHS:
                times.append(milliseconds(lambda: solver.length(tokens, held)))  # noqa: B023
        yield spread(f"{level}: another length, {title}", name, times, aim)


def main() -> None:
    """Measure, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="a profile whose costs are used as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    options = parser.parse_args()
    rows = []
    print("| what | costs | least ms | median | largest | aim |")
    print("|---|---|---:|---:|---:|---:|")
    for name, costs, limits in sources(options.profile, SIZES.shape("Llama-3-8B")):
        for level in SOLVED_LEVELS:
            for row in measure(name, level, costs, limits, options.rounds):
                cells = [
                    row[key] for key in ("what", "costs", "least_ms", "median_ms", "largest_ms", "aim_ms")
                ]
                print(f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |", flush=True)
                rows.append({**conditions(), **row})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
