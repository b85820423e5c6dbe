"""Answers that follow a JSON Schema or a grammar, over random logits."""

import json
import sys
import tracemalloc
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import InputError, OptionError
from heterollm.text import (
    GenerationOptions,
    GrammarTokens,
    SamplingOptions,
    Tokenizer,
    TokenSequence,
    drive,
)

FOLDER = Path(tiny.__file__).parent
ROWS = 2100
"""More rows than the tokenizer has tokens, as published models have."""


class Noise:
    """Random logits in one array, with end tokens and tokens without text among the likeliest."""

    position = 0
    context = 400
    prepared_s = 0.0

    def __init__(self, seed):
        self._random = np.random.default_rng(seed)
        self._logits = np.empty(ROWS, np.float32)

    def prefill_in_place(self, ids, /):
        return self.decode_in_place(None)

    def decode_in_place(self, token_id, /):
        self._logits[:] = self._random.standard_normal(ROWS)
        self._logits[[0, 1, 2048, ROWS - 1]] = 9
        return self._logits


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return GrammarTokens(tokenizer, ROWS)


@pytest.fixture(scope="module")
def answer(tokenizer, tokens):
    def run(seed=0, temperature=0.0, limit=200, **options):
        sampling = SamplingOptions(temperature=temperature, seed=seed)
        asked = GenerationOptions(sampling=sampling, max_new_tokens=limit, **options)
        constraint = tokens.constraint(asked)
        source = Noise(seed)
        sequence = TokenSequence(tokenizer, [5, 6], asked, context=source.context, constraint=constraint)
        assert list(drive(sequence, source))
        return sequence.result

    return run


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 120}),
    st.integers(0, 9).map(lambda length: {"type": "string", "maxLength": length}),
    st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=5)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.dictionaries(st.text('abc日" ', min_size=1, max_size=3), inner, max_size=3).map(
            lambda members: {
                "type": "object",
                "properties": members,
                "required": sorted(members)[1:],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda kinds: {"anyOf": kinds}),
    ),
    max_leaves=5,
)


@given(SCHEMAS, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0]))
@settings(max_examples=40, deadline=None)
def test_whatever_the_model_says_the_answer_follows_the_schema(answer, schema, seed, temperature):
    result = answer(seed, temperature, json_schema=schema)
    if result.stop_reason == "complete":
        jsonschema.validate(json.loads(result.text), schema)
    else:  # a long way through strings and white space
        assert result.stop_reason == "length"
        assert result.generated_tokens == 200


def test_every_end_but_complete_cuts_the_answer(answer):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
    whole = answer(json_schema=schema)
    assert whole.stop_reason == "complete"
    assert len(json.loads(whole.text)) == 20
    short = answer(json_schema=schema, limit=5)
    assert (short.stop_reason, short.token_ids) == ("length", whole.token_ids[:5])
    stopped = answer(json_schema=schema, stop=("true",))
    assert stopped.stop_reason == "stop"
    assert stopped.text == whole.text.split("true")[0]


def test_a_json_object_and_a_grammar(answer):
    assert isinstance(json.loads(answer(1, json_schema='{"type": "object", "maxProperties": 0}').text), dict)
    assert answer(1, 1.0, json_object=True, limit=3).text.lstrip().startswith("{")
    chosen = answer(2, grammar='start: "yes" | "no" " really"{2}')
    assert chosen.text in ("yes", "no really really")
    assert chosen.stop_reason == "complete"
    # The text may end at any letter, so the likeliest token of all ends it: the end token.
    ended = answer(3, grammar="start: /[a-z]*/")
    assert (ended.text, ended.stop_reason) == ("", "complete")


def test_log_probabilities_are_the_models_own(answer):
    result = answer(0, json_schema={"type": "boolean"}, top_log_probabilities=2)
    assert len(result.log_probabilities) == len(result.top_log_probabilities) == result.generated_tokens
    for value, top in zip(result.log_probabilities, result.top_log_probabilities, strict=True):
        assert [token for token, _ in top] == [0, 1]
        assert value <= top[1][1]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": '{"type": "null", "type": "null"}'}, "twice"),
        ({"json_schema": {"enum": {1, 2}}}, "not JSON"),
        ({"json_schema": "[1]"}, "not an object"),
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"json_schema": {"$ref": "http://127.0.0.1/schema"}}, "127.0.0.1"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": '{"items":' * 400 + "{}" + "}" * 400}, "recursion"),
        ({"grammar": ""}, "Empty grammar"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "start: " + "(" * 3000}, "nested"),
    ],
)
def test_an_illegal_schema_or_grammar_has_the_librarys_message(tokens, options, part):
    with pytest.raises(InputError, match=part):
        tokens.constraint(GenerationOptions(**options))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"json_schema": {}, "grammar": "x"}, "json_schema and grammar"),
        ({"json_object": True, "ignore_eos": True}, "ignore_eos"),
        ({"json_object": "yes"}, "True or False"),
        ({"json_schema": 3}, "json_schema is 3"),
        ({"grammar": b"start:"}, "grammar is b'start:'"),
        ({"top_log_probabilities": -1}, "top_log_probabilities is -1"),
    ],
)
def test_illegal_options_are_named(options, part):
    with pytest.raises(OptionError, match=part):
        GenerationOptions(**options)


def test_without_the_library_the_error_names_the_extra(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"heterollm\[grammar\]"):
        GrammarTokens(tokenizer, ROWS)


def test_a_token_allocates_nothing_of_the_vocabularys_size(tokenizer):
    rows = 151_936
    constraint = GrammarTokens(tokenizer, rows).constraint(GenerationOptions(json_object=True))
    logits = np.zeros(rows, np.float32)
    constraint.allowed(logits)
    tracemalloc.start()
    try:
        token = int(constraint.allowed(logits).argmax())
        constraint.accept(token)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 20_000
