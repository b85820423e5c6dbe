"""Writes benches as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.errors import CacheError, OptionError
from heterollm.html_bench import bench_page
from heterollm.kernels.cache import atomic_path

if TYPE_CHECKING:
    from heterollm.benchmarks.rows import BenchRow

__all__ = ["check_page", "write_page"]


def check_page(path: Path) -> None:
    """Check that a page can be written, before anything is measured for it.

    Raises:
        OptionError: The path is a folder, or in none.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(
            f"The page cannot be written to {path}.", fix="Name a file in a folder that is there."
        )


def write_page(path: Path, runs: Sequence[Sequence[BenchRow]], notes: Sequence[str] = ()) -> str:
    """Write the rows of some runs as one HTML page, and say where it is.

    Args:
        path: The file; it is replaced once the page is whole.
        runs: The rows of each run.
        notes: What to know about all of them.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(bench_page(runs, notes), "utf-8")
    except CacheError as error:
        raise OptionError(error.message, fix="Name another place for the page.") from error
    return f"Wrote {path}."
