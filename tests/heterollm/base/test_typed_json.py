"""Typed records of files: what is refused, and how the message names the place."""

from typing import Literal

import pytest
from msgspec import Struct

from heterollm.base import Amount, Count, OptionError, PlanError, Positive, decode, decode_json


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["a", "b"]
    sizes: tuple[Positive, ...]


class Whole(Struct, frozen=True, forbid_unknown_fields=True):
    parts: tuple[Part, ...]
    count: Count = 0
    amount: Amount = 0.0
    weights: dict[int, Amount] | None = None


def read(text):
    data = decode_json(text, source="f.json", error=PlanError, fix="Make it again.")
    return decode(data, Whole, source="f.json is damaged", error=PlanError, fix="Make it again.")


def test_a_record_is_read_whole():
    found = read('{"parts": [{"kind": "a", "sizes": [1, 2]}], "amount": 3, "weights": {"5": 1}}')
    assert found == Whole((Part("a", (1, 2)),), amount=3.0, weights={5: 1.0})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"parts": [{"kind": "a", "sizes": [1]}, {"kind": "a", "sizes": [1, 0]}]}', "parts[1].sizes[1]: "),
        ('{"parts": [{"kind": "a", "sizes": [true]}]}', "parts[0].sizes[0]: "),
        ('{"parts": [{"kind": "a", "sizes": [1.0]}]}', "parts[0].sizes[0]: "),
        ('{"parts": [{"kind": "c", "sizes": [1]}]}', "parts[0].kind: "),
        ('{"parts": [{"kind": ["a"], "sizes": [1]}]}', "parts[0].kind: "),
        ('{"parts": [{"kind": "a"}]}', "parts[0]: "),
        ('{"parts": [{"kind": "a", "sizes": [1], "size": 1}]}', "parts[0]: "),
        ('{"parts": [], "amount": NaN}', "amount: "),
        ('{"parts": [], "amount": Infinity}', "amount: "),
        ('{"parts": [], "amount": 1e999}', "amount: "),
        (f'{{"parts": [], "amount": {10**400}}}', "amount: "),
        (f'{{"parts": [], "count": {2**53}}}', "count: "),
        ('{"parts": [], "weights": {"x": 1}}', "weights: "),
        ('{"parts": [], "weights": {"1": -1}}', "weights[...]: "),
        ("[]", "f.json is damaged: "),
        ('{"parts": [], "parts": []}', "'parts' twice"),
        (r'{"parts": ["\ud800"]}', "half of a surrogate pair"),
        ("{", "f.json is not JSON: "),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(text, place):
    with pytest.raises(PlanError) as caught:
        read(text)
    assert caught.value.message.startswith("f.json")
    assert place in caught.value.message
    assert caught.value.fix == "Make it again."


def test_a_hostile_name_stays_short_and_printable():
    data = {"parts": [], "\x1b[31m\n" + "x" * 10_000: 1}
    with pytest.raises(OptionError) as caught:
        decode(data, Whole, source="f", error=OptionError)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"parts": [{"kind": "c", "sizes": [1]}]}', "parts[0].kind: Invalid enum value 'c'; choose a, b."),
        ('{"parts": [{"kind": "a", "size": [1]}]}', "unknown field `size`; choose kind, sizes."),
        ('{"part": []}', "unknown field `part`; choose parts, count, amount, weights."),
    ],
)
def test_a_wrong_choice_is_told_the_legal_ones(text, told):
    with pytest.raises(PlanError) as caught:
        read(text)
    assert caught.value.message.endswith(told)
