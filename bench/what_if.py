"""Simulates what each change of this program's own path on a modelled Snapdragon would be worth.

    python bench/what_if.py --out bench/results/simulated_path.jsonl   # simulates: some minutes
    python bench/what_if.py --from bench/results/simulated_path.jsonl  # prints the table of these rows

All times are simulated. ``bench/figures.py`` writes the table into docs/simulation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conditions import script_parser
from simulated_rows import Simulated, lines, read

from heterollm.base import HeteroLLMError, check_target, labelled
from heterollm.base.output_file import save_file
from heterollm.benchmarks import run_sweep
from heterollm.report import console
from heterollm.simulate import SimulationRequest

MODEL: Final = "llama-3-8b"
SOC: Final = "snapdragon-8gen3"
DECODED: Final = 16

LEVEL: Final = "layer"
"""The level whose graphs of one pass exceed what the modelled NPU addresses."""

LEVEL: Final = "block"
"""Level of the what-ifs: the solver's widest choice, which a load takes by default where it pays."""

NO_LIMITS: Final = {"npu.address_space_gib": 0.0, "memory.available_gib": 0.0}
"""Parameters of a phone that holds everything, on which cases run that the modelled one refuses."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a contributor with a phone could check.

    Args:
        name: The change in words.
        before: Parameters without it, where the file of the SoC has it done.
        after: Parameters with it, where the file has it not done.
        calibrated: Whether it is a calibration of the model.
    """

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    calibrated: bool = False


CHANGES: Final = (
    Change("shared virtual memory in place of maps", {"memory.fine_grained_svm": 0.0}, {}),
    Change("burst clocks, guessed as twice the default ones", {"npu.clock_factor": 0.5}, {}),
    Change("lengths of a slice that share its weights", {}, {"npu.shared_contexts": 1.0}),
    Change("NPU graphs that all fit, the most that packaging can give", {}, NO_LIMITS),
    Change(
        "GPU kernels as fast as llama.cpp's for Adreno",
        {},
        {
            "gpu.gemm_tflops": 0.65,
            "gpu.small_gweights_per_s": 55.0,
            "gpu.attention_tflops": 0.33,
        },
    ),
    Change("16-bit integer activations on the NPU", {}, {}, calibrated=True),
)
"""In the order in which to try them: those first that need a switch and no code."""


def overrides(done: Sequence[Change]) -> dict[str, float]:
    """Return the parameters with some changes done and the others not."""
    found: dict[str, float] = {}
    for change in CHANGES:
        found.update(change.after if change in done else change.before)
    return found


def steps() -> Iterator[tuple[str, tuple[Change, ...], tuple[Change, ...]]]:
    """Yield the rows of the table: the name, the change alone, and with all those above it."""
    yield "none of them", (), ()
    for place, change in enumerate(CHANGES):
        yield change.name, (change,), CHANGES[: place + 1]


def path_cases() -> tuple[SimulationRequest, ...]:
    """Return the cases of the table, each once, planned for all lengths."""
    asked = dict.fromkeys(_case(done) for _, alone, above in steps() for done in (alone, above))
    return tuple(
        SimulationRequest(*(MODEL, SOC, 256, DECODED, LEVEL), overrides=dict(changed), calibrated=calibrated)
        for changed, calibrated in asked
    )


def _case(done: Sequence[Change]) -> tuple[tuple[tuple[str, float], ...], bool]:
    """Return the parameters of some changes in order, and whether the model is calibrated."""
    return tuple(sorted(overrides(done).items())), any(change.calibrated for change in done)


def what_if_table(rows: Sequence[Simulated]) -> list[tuple[str, ...]]:
    """Return the cells of each change: tokens a second of prompt and decode, alone and with all above it.

    Args:
        rows: Rows of :func:`path_cases`.
    """
    lines = []
    for name, alone, above in steps():
        cells = [name]
        for done in (alone, above):
            row = _row(rows, *_case(done))
            cells += [f"{row.prefill_tokens_per_second:.0f}", f"{row.decode_tokens_per_second:.1f}"]
        lines.append(tuple(cells))
    return lines


def _row(rows: Sequence[Simulated], changed: Sequence[tuple[str, float]], calibrated: bool) -> Simulated:
    for row in reversed(rows):
        found = dict(row.what_if), row.calibrated
        if found == (dict(changed), calibrated) and row.plan_level == LEVEL and row.error is None:
            return row
    raise SystemExit(f"No row has the parameters {dict(changed)}, calibrated {calibrated}.")


def main(given: Sequence[str] | None = None) -> int:
    """Simulate or read the cases, write them, and print the table."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE", help="show its rows")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON lines")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args(given)
    out = None if asked.out is None else labelled(asked.out)
    try:
        if out is not None:
            check_target(out, "result")
        if asked.read is not None:
            rows = read(asked.read)
        else:
            with console.progress_bars() as progress:
                rows = [
                    Simulated.of(row.to_dict())
                    for row in run_sweep(path_cases(), jobs=asked.jobs, progress=progress)
                ]
        if out is not None:
            save_file(out, lines(row.raw for row in rows).encode())
    except HeteroLLMError as error:
        print(f"{error}\n{error.fix or ''}", file=sys.stderr)
        return 1
    if failed := [row.error for row in rows if row.error is not None]:
        print("\n".join(failed), file=sys.stderr)
        return 1
    for cells in what_if_table(rows):
        print("simulated | " + " | ".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
