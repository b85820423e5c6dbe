"""The command ``paper``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from heterollm.base import FAILED
from heterollm.cli.options import Format, FormatOption, JsonOption, RowsOption, chosen_format, command_group
from heterollm.cli.simulate import check_output, default_jobs, words

if TYPE_CHECKING:
    from heterollm.simulate import SimulatedRow

__all__ = ["commands"]

commands = command_group()

MODELS: Final = "llama-3-8b,llama-2-7b,llama-3.2-3b,internlm2-1.8b"


@commands.command("paper")
def paper(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Models, with commas between them.")] = MODELS,
    soc: Annotated[
        str, typer.Option(help="snapdragon-8gen3, or another simulated SoC.")
    ] = "snapdragon-8gen3",
    jobs: Annotated[int | None, typer.Option(help="Processes; by default one a core.")] = None,
    read: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show the rows of this file; simulate nothing."),
    ] = None,
    form: FormatOption = "table",
    output: RowsOption = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all tables as Markdown."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate HeteroLLM's evaluation, with published numbers beside it: no time it prints was measured.

    Takes minutes: prefill at every level, odd lengths, decode, synchronisation, a game beside it, energy,
    what this project adds, and the plans that were chosen. Names of files get the word simulated where they
    lack it: rows.jsonl is written as rows.simulated.jsonl.
    """
    from heterollm.base import write
    from heterollm.report import console as report
    from heterollm.report import paper_page, read_simulated, write_simulated, write_text

    form = chosen_format(form, as_json=as_json)
    out, page = check_output(output), check_output(page)
    rows = _simulated(words(model, "MODEL"), soc, jobs) if read is None else read_simulated(read)
    if out is not None:
        write_simulated(out, rows)
        report.show(report.note(f"Wrote {len(rows)} simulated rows to {out}."))
    if page is not None:
        write_text(page, paper_page(rows))
        report.show(report.note(f"Wrote the simulated tables to {page}."))
    write(_text(rows, form))
    failed = [row for row in rows if row.error is not None]
    for reason in dict.fromkeys(row.error for row in failed):
        report.show(report.note(f"{sum(row.error == reason for row in failed)} failed: {reason}"))
    if failed:
        raise typer.Exit(FAILED)


def _simulated(models: Sequence[str], soc: str, jobs: int | None) -> list[SimulatedRow]:
    """Simulate the evaluation, once every name is known to be one."""
    from heterollm.kernels.sim import load_soc
    from heterollm.model import find_model
    from heterollm.report import console as report
    from heterollm.simulate import paper_cases, run_sweep

    for name in models:
        find_model(name)
    load_soc(soc)
    cases = paper_cases(models, soc)
    with report.progress_bars() as progress:
        return run_sweep(cases, jobs=default_jobs(jobs, len(cases)), progress=progress)


def _text(rows: list[SimulatedRow], form: Format) -> str:
    """Return everything in one format."""
    import json

    from heterollm.report import SWEEP_FORMATS, paper_page, paper_tables, sections_report
    from heterollm.report import console as report
    from heterollm.simulate import PaperRows, comparisons

    if form == "table":
        return report.render(sections_report(list(paper_tables(PaperRows(rows)))), like=sys.stdout)
    if form == "md":
        return paper_page(rows)
    if form == "json":
        found = {
            "simulated": True,
            "time": "simulated",
            "comparisons": [one.to_dict() for one in comparisons(PaperRows(rows))],
            "rows": [row.to_dict() for row in rows],
        }
        return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return SWEEP_FORMATS[form](rows)
