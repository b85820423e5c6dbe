"""Options and rows of scripts: where they run, and the file to which they append."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import heterollm
from heterollm.benchmarks.conditions import (
    commit_of,
    processor_name,
)


def conditions() -> dict[str, Any]:
    """Return the machine, the commit, the load and any chosen processor, for every line of results."""
    from heterollm.kernels.gpu.pocl.target import chosen_target

    return {
        "machine": processor_name(),
        "commit": commit_of(Path(__file__).parent),
        "load_average": os.getloadavg()[0],
        # Rows that name a processor compare with rows that name the same one only.
        "limited_to": chosen_target(),
    }


def origin(bench: str) -> dict[str, Any]:
    """Return the name of a bench, and version and commit of the program, for rows without a clock."""
    return {"bench": bench, "version": heterollm.__version__, "commit": commit_of(Path(__file__).parent)}


def script_parser(text: str | None, *, out: bool = True) -> argparse.ArgumentParser:
    """Return a parser of a script's options.

    Args:
        text: The script's docstring, its help.
        out: Whether it has ``--out``, the file to which rows are appended.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows as JSON lines")
    return parser


def append_rows(out: Path | None, *rows: Mapping[str, Any]) -> None:
    """Append rows to a file, if there is one, as JSON lines."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def with_fixed(function: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
    """Return a function that has its way with these arguments, whatever its caller passes for them."""
    return lambda *arguments, **options: function(*arguments, **{**options, **fixed})
