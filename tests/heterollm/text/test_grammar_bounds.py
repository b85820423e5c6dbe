"""Grammars and schemas that would crash llguidance, or occupy it for long."""

import json
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import InputError
from heterollm.text import GenerationOptions, GrammarTokens, Tokenizer, check_structure
from heterollm.text.grammar_trial import MOST_BYTES, is_plain

ROWS = 2100


@pytest.fixture(scope="module")
def tokens():
    return GrammarTokens(Tokenizer.from_folder(Path(tiny.__file__).parent), ROWS)


def lark_chain(count, rule='r{}: r{} "b" | "a"', name="r"):
    lines = [f"start: {name}0", *(rule.format(i, i + 1) for i in range(count)), f'{name}{count}: "b"']
    return {"grammar": "\n".join(lines)}


def references(count, link):
    """A chain of definitions, each of which refers to the next."""
    chain = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"json_schema": {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}}


def member(one):
    return {"type": "object", "properties": {"a": one}, "required": ["a"]}


def nested(count, opening, closing):
    return {"json_schema": opening * count + '{"type": "string"}' + closing * count}


DEEP = {
    "rules": lambda n: lark_chain(n),
    "terminals": lambda n: lark_chain(n, 'T{}: T{} "b"', "T"),
    "negated terminals": lambda n: lark_chain(n, "T{}: ~T{}", "T"),
    "bare rules": lambda n: lark_chain(n, "r{}: r{}"),
    "references": lambda n: references(n, lambda one: one),
    "allOf": lambda n: references(n, lambda one: {"allOf": [one]}),
    "anyOf": lambda n: references(n, lambda one: {"anyOf": [one, {"type": "null"}]}),
    "items": lambda n: references(n, lambda one: {"type": "array", "items": one}),
    "prefixItems": lambda n: references(n, lambda one: {"type": "array", "prefixItems": [one]}),
    "members": lambda n: references(n, member),
    "other members": lambda n: references(n, lambda one: {"type": "object", "additionalProperties": one}),
    "schema in a grammar": lambda n: {
        "grammar": "start: j\nj: %json " + json.dumps(references(n, member)["json_schema"])
    },
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_chain_that_overflows_a_small_stack_compiles_on_one_of_its_own(tokens, kind):
    """Each of these chains overflows the 512 KiB that a thread has on macOS."""
    outcome = []

    def compile_and_step():
        constraint = tokens.constraint(GenerationOptions(**DEEP[kind](300)))
        for _ in range(3):
            allowed = np.flatnonzero(np.isfinite(constraint.allowed(np.zeros(ROWS, np.float32))))
            if not len(allowed) or constraint.accept(int(allowed[-1])):
                break
        outcome.append(len(allowed))

    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=compile_and_step)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert outcome
    assert outcome[0] > 0


REFUSED = {
    "chain of rules": (lark_chain(60_000), "KiB|MiB"),
    "chain of members": (references(20_000, member), "KiB|MiB"),
    "long schema": ({"json_schema": {"enum": ["x" * MOST_BYTES]}}, "KiB|MiB"),
    "parentheses": ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "nested"),
    "question marks": ({"grammar": "start: " + "(" * 3000 + '"a"' + ")?" * 3000}, "nested"),
    "pattern": ({"json_schema": {"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}}, "regex"),
    "regular expression": ({"grammar": "start: /" + "(" * 50_000 + "a" + ")" * 50_000 + "/"}, "regex"),
    "objects in place": (nested(480, '{"properties":{"a":', "}}"), "nested too deeply"),
    "alternatives in place": (nested(2000, '{"anyOf":[', "]}"), "nested too deeply"),
    "automaton": ({"json_schema": {"type": "integer", "multipleOf": 10**6 + 3}}, "3 s of processor time"),
    "alternating terminals": (lark_chain(3000, 'T{0}: T{1} | "c{0}"', "T"), "3 s of processor time"),
    "overflowing rules": (lark_chain(15_000, "a{}:a{}", "a"), "too deeply"),
    "overflowing items": (references(4500, lambda one: {"items": one}), "too deeply"),
    "reference to itself": ({"json_schema": {"$ref": "#"}}, "no text follows it"),
}


@pytest.mark.parametrize(
    "kind",
    [
        # As the automaton, it takes all of the time that it may.
        pytest.param(kind, marks=[pytest.mark.slow] * (kind == "alternating terminals"))
        for kind in REFUSED
    ],
)
def test_a_grammar_beyond_the_bounds_is_refused_by_name(tokens, kind):
    options, part = REFUSED[kind]
    with pytest.raises(InputError, match=part):
        tokens.constraint(GenerationOptions(**options))


def test_a_verdict_is_kept(monkeypatch):
    options = GenerationOptions(**lark_chain(15_000, "a{}:a{}", "a"))
    with pytest.raises(InputError, match="too deeply"):
        check_structure(options)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(InputError, match="too deeply"):
        check_structure(options)


def test_an_answer_whose_next_token_costs_too_much_ends_alone(tokens):
    constraint = tokens.constraint(GenerationOptions(**lark_chain(300, "r{0}: r{1}? r{1}?")))
    allowed = np.flatnonzero(np.isfinite(constraint.allowed(np.zeros(ROWS, np.float32))))
    with pytest.raises(InputError, match="items"):
        constraint.accept(int(allowed[-1]))


SIMPLE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (SIMPLE, True),
        ({"anyOf": [SIMPLE, {"type": "array", "items": SIMPLE, "minItems": 10**9}]}, True),
        ({"properties": {"a": {"$ref": "#"}}}, False),
        ({"items": {"type": "number", "multipleOf": 7}}, False),
        ({"additionalProperties": {"pattern": "a"}}, False),
        ({"anyOf": [{"allOf": [{}]}]}, False),
        ({"items": {"x-guidance": {}}}, False),
        ({"properties": [1]}, False),
        ({"enum": ["x" * 5000]}, False),
    ],
)
def test_only_a_small_and_simple_schema_compiles_without_a_child(tokens, monkeypatch, schema, plain):
    assert is_plain(schema, json.dumps(schema)) == plain
    if plain:
        monkeypatch.setattr(subprocess, "Popen", None)
        assert tokens.constraint(GenerationOptions(json_schema=schema)) is not None
        check_structure(GenerationOptions(json_schema=schema))


def test_a_nested_plain_schema_is_tried():
    deep = SIMPLE
    for _ in range(20):
        deep = {"type": "array", "items": deep}
    assert not is_plain(deep, json.dumps(deep))


def test_answers_with_one_grammar_compile_it_once(tokens, monkeypatch):
    options = GenerationOptions(grammar='start: "once" | "twice"')
    first, logits = tokens.constraint(options), np.zeros(ROWS, np.float32)
    monkeypatch.setattr("heterollm.text.grammar.compiled", None)
    second = tokens.constraint(options)
    token = int(first.allowed(logits).argmax())
    first.accept(token)
    # they are at different places
    assert not np.array_equal(first.allowed(logits).copy(), second.allowed(logits))


def test_a_long_forced_text_costs_little_at_each_token(tokens):
    """llguidance asks for the tokens of all text that must follow, before each token."""
    constraint = tokens.constraint(GenerationOptions(grammar="start: /a{100000}b/"))
    asked = []
    vocabulary = type(tokens._vocabulary)
    original = vocabulary.__call__
    vocabulary.__call__ = lambda self, text: asked.append(original(self, text)) or asked[-1]
    try:
        for _ in range(3):
            token = int(constraint.allowed(np.zeros(ROWS, np.float32)).argmax())
            constraint.accept(token)
    finally:
        vocabulary.__call__ = original
    assert asked
    assert max(map(len, asked)) <= 256
