"""A table of fields: unknown ones are named, refused ones raise, neutral values pass."""

import pytest

from heterollm.base import UnsupportedModelError
from heterollm.model.fields.table import Field, FieldTable

TABLE = FieldTable(
    "made up",
    (
        Field("size", "read", "the size", "a page"),
        Field("rope.*", "read", "positions", "a page"),
        Field("cap", "refused", "a cap changes the result", "a page", neutral=(0, False)),
        Field("alibi", "refused", "no positions of this kind", "a page", only=frozenset({"bloom"})),
    ),
)


def test_known_fields_pass() -> None:
    assert TABLE.check({"size": 3, "rope": {"factor": 2, "type": "yarn"}, "cap": 0}, "a.json") == ()
    assert TABLE.check({"cap": None, "new": None}, "a.json") == ()
    assert TABLE.check({"cap": [0, 0]}, "a.json") == TABLE.check({"cap": []}, "a.json") == ()


def test_an_unknown_field_is_named_with_its_section() -> None:
    (note,) = TABLE.check({"size": 3, "new": {"inner": 1}, "alibi": 1}, "a.json")
    assert "a.json" in note
    assert "alibi, new.inner" in note


@pytest.mark.parametrize("value", [1, True, 0.5, "yes", [0, 3]])
def test_a_refused_field_is_named_with_value_and_reason(value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a\.json: cap = .* a cap changes the result"):
        TABLE.check({"cap": value}, "a.json")


def test_a_field_of_some_kinds_is_refused_for_these() -> None:
    with pytest.raises(UnsupportedModelError, match="alibi"):
        TABLE.check({"alibi": 1}, "a.json", "bloom")


def test_the_architecture_is_part_of_a_name() -> None:
    table = FieldTable("made up", (Field("{arch}.size", "read", "the size", "a page"),))
    assert table.check({"llama.size": 3}, "a.gguf", "llama") == ()
    assert "qwen2.size" in table.check({"qwen2.size": 3}, "a.gguf", "llama")[0]
