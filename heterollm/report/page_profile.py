"""One page about a profile: tables and pictures in one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from heterollm.report.page_parts import kind_word, page_html, pictures_html, section_html
from heterollm.report.tables_profile import sections

if TYPE_CHECKING:
    from heterollm.profiler import ProfileSummary

__all__ = ["profile_page"]


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
