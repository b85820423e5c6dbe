"""Writes tables of README.md and docs from bench/results, and holds prose to its rows.

    python bench/figures.py          writes the tables, and says which phrases are not what the rows say
    python bench/figures.py --check  writes nothing; exit code 1 if a table or a phrase differs
    python bench/figures.py --run    simulates the rows behind README.md and docs/simulation.md again; exit
                                     code 1 if a figure of them or a cell of a table differs
    python bench/figures.py --run all            all files of simulated rows, which takes much longer
    python bench/figures.py --run simulated_path one file or several
    python bench/figures.py --take simulated_path writes the rows of a file again whose figures differ

A table stands between two marks, ``<!-- NAME: written by bench/figures.py -->`` and ``<!-- end of NAME -->``;
bench/tables declares it. A phrase is prose with its figures filled in from rows (bench/tables/prose.py); its
page must hold it, wherever its lines end. ``tests/test_docs.py`` checks the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final

import figures_run
from tables import accuracy, anchors, families, measured, simulated  # noqa: F401 - these declare the tables
from tables.prose import flat, phrases
from tables.table import FRESH, ROOT, TABLES, rows_of

from heterollm.kernels.threads import allowed_cores
from heterollm.report import console

PICTURES: Final[Mapping[str, Callable[[], str]]] = {"docs/kept_keys.svg": accuracy.kept_picture}
"""Pictures by path."""


@cache
def tables() -> Mapping[tuple[str, str], str]:
    """Return the tables by page and name."""
    return {place: table.markdown() for place, table in TABLES.items()}


def marks(name: str) -> tuple[str, str]:
    """Return what stands before and behind a table."""
    return f"<!-- {name}: written by bench/figures.py -->\n\n", f"\n\n<!-- end of {name} -->"


def written(page: str, text: str) -> str:
    """Return a page with its tables as the rows have them.

    Args:
        page: Its name.
        text: The page.
    """
    for (where, name), made in tables().items():
        if where == page:
            begin, end = marks(name)
            if text.count(begin) != 1 or text.count(end) != 1:
                raise SystemExit(f"{page} has no place for {name}.")
            before, rest = text.split(begin)
            text = f"{before}{begin}{made}{end}{rest.split(end)[1]}"
    return text


def differences(texts: Mapping[str, str] | None = None) -> list[str]:
    """Return what is not as the rows say: tables by name, phrases as they should be.

    Args:
        texts: Pages in place of those in the repository.
    """
    pages = {page for page, _ in TABLES} | {page for page, _ in phrases()}
    found = {page: (ROOT / page).read_text("utf-8") for page in pages} | dict(texts or {})
    wrong = [
        f"{page}: a table differs" for page in sorted(pages) if written(page, found[page]) != found[page]
    ]
    wrong += [
        f"{path}: differs" for path, made in PICTURES.items() if (ROOT / path).read_text("utf-8") != made()
    ]
    wrong += [f"{page}: {phrase}" for page, phrase in phrases() if flat(found[page]).count(phrase) != 1]
    return wrong


def run(names: Sequence[str]) -> list[str]:
    """Take simulated rows again, and return the figures and cells that differ.

    Args:
        names: Files of ``bench/results`` without their ending; none for the fast ones, or ``all``.
    """
    chosen = figures_run.REPEATABLE if list(names) == ["all"] else names or figures_run.FAST
    wrong: list[str] = []
    for name in chosen:
        if name not in figures_run.REPEATABLE:
            raise SystemExit(f"{name} has no simulated rows: choose {', '.join(figures_run.REPEATABLE)}.")
        old = rows_of(name)
        with console.progress_bars() as progress:
            new = figures_run.rows_again(old, len(allowed_cores()), progress)
        wrong += figures_run.row_differences(name, old, new)
        FRESH[name] = tuple(new)
    rows_of.cache_clear()
    for (page, name), made in tables().items():
        begin, end = marks(name)
        shown = (ROOT / page).read_text("utf-8").partition(begin)[2].partition(end)[0]
        wrong += figures_run.cell_differences(f"{page}, {name}", shown, made)
    return wrong


def main() -> int:
    """Write, check or simulate again; return the exit code."""
    if "--run" in sys.argv[1:2]:
        wrong = run(sys.argv[2:])
        sys.stdout.writelines(f"{line}\n" for line in wrong)
        return int(bool(wrong))
    if "--take" in sys.argv[1:2]:
        for name in sys.argv[2:]:
            with console.progress_bars() as progress:
                count = figures_run.take(name, len(allowed_cores()), progress)
            sys.stdout.write(f"{name}: {count} rows differ, and are written again\n")
        return 0
    if "--check" not in sys.argv[1:]:
        for page in {page for page, _ in TABLES}:
            path = ROOT / page
            path.write_text(written(page, path.read_text("utf-8")), "utf-8")
        for name, made in PICTURES.items():
            (ROOT / name).write_text(made(), "utf-8")
    wrong = differences()
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
