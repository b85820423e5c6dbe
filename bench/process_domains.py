"""Simulates models that exceed one process domain of the NPU, with one domain and with two.

    python bench/process_domains.py --out bench/results/process_domains.jsonl   # simulates: some minutes

All times are simulated. The chips are as their files have them, of a phone with memory for both copies of
the weights: 7 billion weights of 8 bits as llm.npu places them, all on the NPU in prompts, and 8 billion of
4 bits with the cuts of the solver. ``bench/figures.py`` writes the table into docs/simulation-tables.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from conditions import script_parser
from simulated_rows import lines

from heterollm.base.output_file import save_file
from heterollm.benchmarks import run_sweep
from heterollm.report import console
from heterollm.simulate import SimulationRequest

SOCS: Final = ("snapdragon-8gen3", "snapdragon-8elite")
DOMAINS: Final = (1, 2)
ONCE: Final = {"npu.io_by_graph": 0.0}
"""Graphs that use the same buffers of inputs and outputs."""

MODELS: Final = (
    ("llama-2-7b", "layer", "llm.npu", {}),
    ("llama-2-7b", "layer", "llm.npu", ONCE),
    ("llama-3-8b", "tensor", "", {}),
)
"""Model, level of the plan, technique, and what differs from the file of the chip."""

MEMORY: Final = {"memory.available_gib": 20.0}
"""A phone with 24 GB, of which Android and other programs keep 4."""


def overrides(domains: int) -> dict[str, float]:
    """Return the parameters of a phone with so many process domains."""
    return MEMORY | ({"npu.process_domains": float(domains)} if domains > 1 else {})


def cases() -> Iterator[tuple[SimulationRequest, int]]:
    """Yield the cases of the table, with their process domains."""
    for (model, level, technique, changed), soc, domains in product(MODELS, SOCS, DOMAINS):
        techniques = (technique,) if technique else ()
        found = overrides(domains) | changed
        yield (
            SimulationRequest(*(model, soc, 512, 16, level), overrides=found, techniques=techniques),
            domains,
        )


def main() -> None:
    """Simulate the cases and write their rows."""
    parser = script_parser(__doc__)
    out = parser.parse_args().out
    with console.progress_bars() as progress:
        rows = [
            row.to_dict() for row in run_sweep(tuple(one for one, _ in cases()), jobs=1, progress=progress)
        ]
    if out is not None:
        save_file(out, lines(rows).encode())
    for row in rows:
        print(f"simulated | {row['setup']['device']} | {row['label']} | {row['error'] or row['modelled']}")


if __name__ == "__main__":
    main()
