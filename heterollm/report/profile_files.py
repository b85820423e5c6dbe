"""A profile as pictures and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.base import labelled, save_file
from heterollm.report.page_profile import profile_page
from heterollm.report.plots import draw

if TYPE_CHECKING:
    from heterollm.profiler import ProfileSummary


def write_outputs(summary: ProfileSummary, *, folder: Path | None, page: Path | None) -> list[str]:
    """Write plots and page, and return notes about written files and plots without data.

    Files with simulated times have the word simulated in their names.

    Args:
        summary: The profile.
        folder: Folder of the PNG files; None draws none.
        page: File of the page; None writes none.

    Raises:
        OptionError: A folder is given and matplotlib is missing, or a file cannot be written.
    """
    notes = []
    simulated = summary.time_kind == "simulated"
    if folder is not None:
        count = 0
        for name, title, png in draw(summary):
            if png is None:
                notes.append(f"No data for the picture of {title}.")
            else:
                save_file(labelled(folder / f"{name}.png", simulated=simulated), png)
                count += 1
        notes.append(f"Wrote {count} plots into {folder}.")
    if page is not None:
        page = labelled(page, simulated=simulated)
        save_file(page, profile_page(summary).encode())
        notes.append(f"Wrote {page}.")
    return notes
