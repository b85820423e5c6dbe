"""Simulates HeteroLLM's evaluation and compares it with published numbers: no printed time was measured.

    python bench/paper.py --out bench/results/simulated_paper.jsonl --page docs/simulated-paper-tables.md
    python bench/paper.py --model llama-3-8b --jobs 2
    python bench/paper.py --from bench/results/simulated_paper.jsonl    # show the rows of a file

The evaluation takes minutes: prefill at every level, odd lengths, decode, synchronisation, a game at the same
time, energy, the additions of this project, and the chosen plans. File names get the word simulated if they
lack it: rows.jsonl becomes rows.simulated.jsonl. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from conditions import script_parser
from paper_cases import PAPER_MODELS, PAPER_SOC, PaperRows, paper_cases
from paper_published import comparisons
from paper_tables import paper_page, paper_tables
from rungs import run_rung
from simulated_rows import Simulated, lines, read

from heterollm.base import HeteroLLMError, check_target, labelled
from heterollm.base.output_file import save_file
from heterollm.benchmarks import run_sweep
from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.kernels.threads import allowed_cores
from heterollm.model import find_model
from heterollm.report import console
from heterollm.report.simulate import sections_report


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, after a check of the files."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--model", default=",".join(PAPER_MODELS), help="models, with commas between them")
    parser.add_argument("--soc", default=PAPER_SOC, help="a simulated SoC, or the path of its YAML")
    parser.add_argument(
        "--jobs", type=int, default=len(allowed_cores()), help="processes; by default one for each core"
    )
    parser.add_argument("--cluster", choices=("dask", "ray"), help="run on a cluster instead")
    parser.add_argument("--from", dest="read", type=Path, metavar="FILE", help="show its rows")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON lines")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write all tables as Markdown")
    parser.add_argument("--json", action="store_true", help="print comparisons and rows as JSON")
    found = parser.parse_args(given)
    if found.jobs < 1:
        parser.error("--jobs is at least 1")
    for name in ("out", "page"):
        if (path := getattr(found, name)) is not None:
            check_target(labelled(path), "result")
            setattr(found, name, labelled(path))
    return found


def simulated(
    models: Sequence[str], soc: str, jobs: int, cluster: Literal["dask", "ray"] | None = None
) -> list[Simulated]:
    """Simulate the evaluation, after a check of all names."""
    for name in models:
        find_model(name)
    load_soc(soc)
    with console.progress_bars() as progress:
        rows = run_sweep(
            paper_cases(models, soc), jobs=jobs, cluster=cluster, progress=progress, run=run_rung
        )
    return [Simulated.of(row) for row in rows]


def text(rows: Sequence[Simulated], *, as_json: bool) -> str:
    """Return all tables, or everything as JSON."""
    found = PaperRows(rows)
    if not as_json:
        return console.render(sections_report(list(paper_tables(found))), like=sys.stdout)
    data = {
        "simulated": True,
        "time": "simulated",
        "comparisons": [one.to_dict() for one in comparisons(found)],
        "rows": [row.raw for row in rows],
    }
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Simulate or read, write files, print tables, and return the exit code."""
    try:
        asked = arguments(given)
        if asked.read is None:
            rows = simulated(asked.model.split(","), asked.soc, asked.jobs, asked.cluster)
        else:
            rows = read(asked.read)
        if asked.out is not None:
            save_file(asked.out, lines(row.raw for row in rows).encode())
            print(f"Wrote {len(rows)} simulated rows to {asked.out}.", file=sys.stderr)
        if asked.page is not None:
            save_file(asked.page, paper_page(rows).encode())
            print(f"Wrote the simulated tables to {asked.page}.", file=sys.stderr)
    except HeteroLLMError as error:
        print(f"{error}\n{error.fix or ''}", file=sys.stderr)
        return 1
    sys.stdout.write(text(rows, as_json=asked.json))
    failed = [row.error for row in rows if row.error is not None]
    for reason in dict.fromkeys(failed):
        print(f"{failed.count(reason)} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
