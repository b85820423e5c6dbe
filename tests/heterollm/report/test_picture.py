"""Reports as pictures: whole, well formed, and with nothing that is loaded from elsewhere."""

import re
import xml.etree.ElementTree as ET

import pytest
from rich.console import Group
from rich.text import Text

from heterollm.base import OptionError
from heterollm.report import check_picture, write_picture
from heterollm.report.console import table
from heterollm.report.picture import PICTURE_WIDTH, picture_svg

SVG = "{http://www.w3.org/2000/svg}"


def example():
    made = table("configuration", ">tokens/s", title="pp256 <w4a16> & more")
    made.add_row("tensor, 1+1", "79.4")
    return Group(Text("Device host, real time"), made, Text("█" * 40, "green"))


def test_a_picture_has_every_word_and_loads_nothing():
    text = picture_svg(example(), title="a <title>")
    root = ET.fromstring(text)
    words = " ".join("".join(node.itertext()).replace("\xa0", " ") for node in root.iter(f"{SVG}text"))
    for word in ("Device host, real time", "pp256 <w4a16> & more", "tensor, 1+1", "79.4", "█" * 40):
        assert word in words
    assert root.find(f"{SVG}title").text == "a <title>"
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in text
    assert "<script" not in text


def test_all_lines_lie_in_the_picture():
    for lines in (1, 40):
        root = ET.fromstring(picture_svg(Text(("x" * PICTURE_WIDTH + "\n") * lines), title="lines"))
        width, height = (float(word) for word in root.get("viewBox").split()[2:])
        texts = [node for node in root.iter(f"{SVG}text") if node.text.strip()]
        assert len(texts) == lines
        assert max(float(node.get("y")) for node in texts) + 14 < height
        assert height < 24.4 * (lines + 1) + 40
        assert max(float(node.get("x")) + float(node.get("textLength")) for node in texts) < width


def test_a_picture_is_written_whole_or_refused(tmp_path):
    path = tmp_path / "report.svg"
    check_picture(path)
    write_picture(path, example(), title="t")
    assert path.read_text().startswith("<svg")
    assert [found.name for found in tmp_path.iterdir()] == ["report.svg"]
    (tmp_path / "folder.svg").mkdir()
    for wrong in ("report.png", "folder.svg", "nowhere/report.svg"):
        with pytest.raises(OptionError):
            check_picture(tmp_path / wrong)
