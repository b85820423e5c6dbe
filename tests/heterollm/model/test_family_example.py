import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-a-family.md"


DIFFS = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("diff", "changed"), list(zip(DIFFS, (4, 1), strict=True)))
def test_the_examples_of_a_new_family_are_in_the_code(diff, changed):
    """The page's diffs are what the families took: short, and line by line what the files hold."""
    assert len(diff.splitlines()) < 60
    files = re.split(r"^--- a/.*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]
    assert len(files) == changed
    for part in files:
        path, _, hunks = part.partition("\n")
        source = (ROOT / path).read_text()
        for anchor, added in re.findall(r"^@@ (\w+)\n((?:\+.*\n)+)", hunks, re.MULTILINE):
            table = source[re.search(rf"^{anchor}\b.* = ", source, re.MULTILINE).start() :]
            lines = "".join(line[1:] + "\n" for line in added.splitlines())
            assert table.count(lines) == 1, f"{path}, {anchor}:\n{lines}"
        assert hunks.count("@@ ") == len(re.findall(r"^@@ \w+\n\+", hunks, re.MULTILINE))


def test_the_page_names_files_that_exist():
    text = PAGE.read_text()
    for path in set(re.findall(r"`((?:kernels|tests|heterollm)/[\w/.]+\.py)`", text)):
        assert (ROOT / path).is_file(), path
