"""A profile as pictures and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.base import OptionError, labelled, save_file
from heterollm.report.page_parts import kind_word, page_html, pictures_html, section_html
from heterollm.report.plots import draw
from heterollm.report.tables_profile import sections

if TYPE_CHECKING:
    from heterollm.profiler import ProfileSummary


def write_outputs(summary: ProfileSummary, *, folder: Path | None, page: Path | None) -> list[str]:
    """Write plots and page, and return notes about written files and plots without data.

    Without matplotlib the page has tables only, and a note says so. Files with simulated times have the word
    simulated in their names.

    Args:
        summary: The profile.
        folder: Folder of the PNG files; None draws none.
        page: File of the page; None writes none.

    Raises:
        OptionError: A folder is given and matplotlib is missing, or a file cannot be written.
    """
    try:
        drawn = list(draw(summary))
    except OptionError as error:
        if folder is not None:
            raise
        drawn, notes = [], [f"The page has no pictures. {error}"]
    else:
        notes = [f"No data for the picture of {title}." for _, title, png in drawn if png is None]
    simulated = summary.time_kind == "simulated"
    if folder is not None:
        count = 0
        for name, _, png in drawn:
            if png is not None:
                save_file(labelled(folder / f"{name}.png", simulated=simulated), png)
                count += 1
        notes.append(f"Wrote {count} plots into {folder}.")
    if page is not None:
        page = labelled(page, simulated=simulated)
        pictures = [(title, png) for _, title, png in drawn if png is not None]
        save_file(page, profile_page(summary, pictures).encode())
        notes.append(f"Wrote {page}.")
    return notes


def profile_page(summary: ProfileSummary, pictures: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return a profile as one HTML page.

    Args:
        summary: The profile.
        pictures: Caption and PNG of each.
    """
    kind = kind_word(summary.time_kind)
    first, *rest = sections(summary)
    body = [section_html(first, kind)]
    if pictures:
        body.append(pictures_html(pictures))
    body += [section_html(section, kind) for section in rest]
    return page_html(f"Profile of {summary.device}, {kind}", body)
