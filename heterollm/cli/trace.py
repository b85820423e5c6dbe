"""The command ``trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterollm.cli.options import JsonOption, command_group

commands = command_group()


@commands.command("trace")
def show_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `generate --trace FILE`.")],
    png: Annotated[Path | None, typer.Option(metavar="OUT", help="Draw the timeline into this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write one page with a timeline to zoom into.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a recorded run went; the file also opens in ui.perfetto.dev."""
    from heterollm.base import write_json
    from heterollm.report import console as report
    from heterollm.report import trace as report_trace
    from heterollm.trace import load_trace, summarise, summarise_phases

    trace = load_trace(file)
    if png is not None:
        from heterollm.base import labelled, save_file
        from heterollm.report import trace_png

        png = labelled(png, simulated=trace.time_kind == "simulated")
        save_file(png, trace_png(trace))
        report.show(report.note(f"Wrote {png}."))
    if html is not None:
        from heterollm.base import labelled, save_file
        from heterollm.report import trace_page

        html = labelled(html, simulated=trace.time_kind == "simulated")
        save_file(html, trace_page(trace).encode())
        report.show(report.note(f"Wrote {html}."))
    if as_json:
        phases = {name: summary.to_dict() for name, summary in summarise_phases(trace).items()}
        write_json({"path": str(file), "all": summarise(trace).to_dict(), "phases": phases})
        return
    report.present(report_trace.trace_report(trace))
