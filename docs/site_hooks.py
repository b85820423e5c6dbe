"""Hooks of mkdocs: README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site of docs/.

The pages stand in the repository as well, so that their links are those of its folders. Here a link to one of
the three is a link to its page, and a link to another file outside of docs/ loses its address: there is none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the site by the files of the repository's top folder."""

LINK: Final = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - mkdocs' own configuration
    """Add the three pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=_linked(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs' own page
    """Return a page of docs/ with links of the site; those of the three pages have them already."""
    return markdown if page.file.src_uri in PAGES.values() else _linked(markdown, ROOT / "docs")


def _linked(text: str, folder: Path) -> str:
    """Return a text with links of the site outside of its fenced blocks.

    Args:
        text: A page.
        folder: The folder that its links start from.
    """
    parts, begin = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(lambda found: _link(found, folder), text[begin : fence.start()]), fence[0]]
        begin = fence.end()
    return "".join([*parts, LINK.sub(lambda found: _link(found, folder), text[begin:])])


def _link(found: re.Match[str], folder: Path) -> str:
    target, mark, anchor = found["target"].partition("#")
    if not target or "://" in target:
        return found[0]
    path = (folder / target).resolve()
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return f"{found['image']}[{found['text']}]({PAGES[name]}{mark}{anchor})"
    if path.parent == ROOT / "docs":
        return f"{found['image']}[{found['text']}]({path.name}{mark}{anchor})"
    return found["text"] if not name.startswith("docs/") else found[0]
