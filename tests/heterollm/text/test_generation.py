"""The token loop over scripted logits, and over the bundled model's tokenizer."""

import itertools
import json
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import EngineError, InputError, OptionError
from heterollm.text import GenerationOptions, SamplingOptions, Tokenizer, TokenSequence, drive
from heterollm.text.stop_strings import StopStrings

VOCAB = 2048
EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(Path(tiny.__file__).parent)


class Script:
    """Logits that make greedy sampling say a fixed list of tokens, then end tokens for ever."""

    prepared_s = 0.0

    def __init__(self, tokens, context=256, position=0, vocab=VOCAB):
        self.tokens = list(tokens)
        self.context = context
        self.position = position
        self.prefilled = []
        self.decoded = []
        # one array for all calls, so that a loop that reads old logits gets wrong ones
        self._logits = np.zeros(vocab, np.float32)

    def prefill_in_place(self, ids, /):
        self.prefilled.append(list(ids))
        self.position += len(ids)
        return self._next()

    def decode_in_place(self, token_id, /):
        assert type(token_id) is int
        self.decoded.append(token_id)
        self.position += 1
        assert self.position <= self.context
        return self._next()

    def _next(self):
        step = len(self.decoded)
        self._logits[:] = 0
        self._logits[self.tokens[step] if step < len(self.tokens) else EOS] = 5
        return self._logits


def asked(source, tokenizer, prompt=(5, 6, 7), clock=time.perf_counter, **options):
    options = GenerationOptions(**options)
    return TokenSequence(tokenizer, prompt, options, context=source.context, clock=clock)


def run(source, tokenizer, prompt=(5, 6, 7), cancel=None, **options):
    sequence, reused = asked(source, tokenizer, prompt, **options), source.position
    steps = list(drive(sequence, source, cancel=cancel))
    result = sequence.result
    assert "".join(step.text for step in steps) == result.text
    assert tuple(step.token_id for step in steps) == result.token_ids
    assert result.generated_tokens == len(steps)
    assert source.position == (sequence.held if source.prefilled else reused)
    return result, steps


def test_an_answer_ends_at_the_end_token(tokenizer):
    ids = tokenizer.encode("def f(x):\n    return x", add_bos=False)
    source = Script(ids)
    result, steps = run(source, tokenizer)
    assert result.text == "def f(x):\n    return x"
    assert result.stop_reason == "eos"
    assert result.token_ids == (*ids, EOS)
    assert result.prompt_tokens == 3
    assert source.prefilled == [[5, 6, 7]]
    assert source.decoded == ids
    assert all(step.log_probability is None for step in steps)
    assert result.log_probabilities is None


def test_every_end_id_stops_and_ignoring_goes_on(tokenizer):
    class TwoEnds:
        eos_ids = frozenset({EOS, 9})
        stream_decoder = tokenizer.stream_decoder

    assert run(Script([50, 9, 51]), TwoEnds())[0].token_ids == (50, 9)
    assert run(Script([50, EOS, 51]), TwoEnds())[0].token_ids == (50, EOS)
    result, _ = run(Script([50, 9, EOS, 51]), TwoEnds(), ignore_eos=True, max_new_tokens=4)
    assert result.token_ids == (50, 9, EOS, 51)
    assert result.stop_reason == "length"


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_the_length_limit(tokenizer, limit):
    ids = tokenizer.encode("import os, sys, re", add_bos=False)
    source = Script(ids)
    result, _ = run(source, tokenizer, max_new_tokens=limit)
    assert result.token_ids == tuple(ids[:limit])
    assert result.text == tokenizer.decode(ids[:limit])
    assert result.stop_reason == "length"
    # the last token is not fed back: nobody needs the logits after it
    assert source.decoded == ids[: max(0, limit - 1)]
    assert source.prefilled == ([[5, 6, 7]] if limit else [])


def test_prompt_and_answer_fill_at_most_the_context(tokenizer):
    result, _ = run(Script([50] * 99, context=10), tokenizer)
    assert (result.generated_tokens, result.stop_reason) == (7, "context")
    result, _ = run(Script([50] * 99, context=10), tokenizer, max_new_tokens=50)
    assert (result.generated_tokens, result.stop_reason) == (7, "context")
    result, _ = run(Script([50] * 99, context=10), tokenizer, max_new_tokens=7)
    assert (result.generated_tokens, result.stop_reason) == (7, "length")
    source = Script([50], context=3)
    result, _ = run(source, tokenizer)
    assert (result.generated_tokens, result.stop_reason) == (0, "context")
    assert source.prefilled == []


def test_bad_prompts_are_refused_with_numbers(tokenizer):
    for prompt, pattern in ([], "no tokens"), ([1] * 11, "11 tokens.* 10"):
        with pytest.raises(InputError, match=pattern):
            TokenSequence(tokenizer, prompt, GenerationOptions(), context=10)


def test_a_held_beginning_is_not_prefilled_again(tokenizer):
    source = Script([50, 51], position=4)
    result, _ = run(source, tokenizer, prompt=[5, 6, 7, 8, 9, 10])
    assert source.prefilled == [[9, 10]]
    assert result.prompt_tokens == 6
    assert source.position == 6 + 2


def test_the_penalty_sees_prompt_and_answer(tokenizer):
    class Same(Script):
        def _next(self):
            self._logits[:] = -1
            self._logits[[60, 61, 62, 63]] = [4.0, 3.9, 3.8, 3.7]
            return self._logits

    sampling = SamplingOptions(repetition_penalty=1.5)
    result, _ = run(Same([]), tokenizer, prompt=[5, 61], max_new_tokens=3, sampling=sampling)
    assert result.token_ids == (60, 62, 63)
    result, _ = run(Same([], position=1), tokenizer, prompt=[61, 5], max_new_tokens=3, sampling=sampling)
    assert result.token_ids == (60, 62, 63)


def test_log_probabilities(tokenizer):
    result, steps = run(Script([50, 51]), tokenizer, log_probabilities=True)
    exact = 5 - np.log(np.exp(5.0) + VOCAB - 1)
    assert result.log_probabilities == pytest.approx([exact] * 3, rel=1e-12)
    assert [step.log_probability for step in steps] == list(result.log_probabilities)


def test_times_and_their_json_form(tokenizer):
    class Slow(Script):
        clock = 0.0

        def prefill_in_place(self, ids, /):
            Slow.clock += 2.0
            return super().prefill_in_place(ids)

        def decode_in_place(self, token_id, /):
            Slow.clock += 0.25
            return super().decode_in_place(token_id)

    def now_s():
        return Slow.clock

    answer = list(range(50, 62))
    source, prompt = Slow(answer), list(range(1, 41))
    sequence = asked(source, tokenizer, prompt, clock=now_s, max_new_tokens=len(answer))
    for _ in drive(sequence, source):
        Slow.clock += 100.0  # what the caller does between tokens is not the model's time
    result = sequence.result
    assert (result.ttft_s, result.prepared_s) == (2.0, 0.0)
    assert result.prefill_tokens_per_s == 20.0
    assert result.decode_tokens_per_s == 4.0
    assert result.decode_s == 2.75
    data = json.loads(json.dumps(result.to_dict()))
    assert data["stop_reason"] == "length"
    assert data["token_ids"] == answer
    assert data["decode_tokens_per_s"] == 4.0
    nothing, _ = run(Script([50]), tokenizer, max_new_tokens=0)
    assert (nothing.ttft_s, nothing.prefill_tokens_per_s, nothing.decode_tokens_per_s) == (None, None, None)
    one, _ = run(Slow([50]), tokenizer, max_new_tokens=1, clock=now_s)
    assert one.ttft_s == 2.0
    assert one.decode_tokens_per_s is None


@pytest.mark.parametrize(
    ("prompt", "answer", "prefill", "decode"),
    [(31, 8, False, False), (32, 9, True, True), (400, 1, True, False)],
)
def test_few_tokens_have_no_rate(tokenizer, prompt, answer, prefill, decode):
    ticks = itertools.count(0.0)
    script = Script([50] * answer)
    script.context = 1000
    clock = ticks.__next__
    result, _ = run(script, tokenizer, [1] * prompt, max_new_tokens=answer, clock=clock)
    assert (result.prefill_tokens_per_s is not None) == prefill
    assert (result.decode_tokens_per_s is not None) == decode


def test_a_pass_that_is_compiled_has_no_rate(tokenizer):
    class Compiling(Script):
        prepared_s = 0.0

        def prefill_in_place(self, ids, /):
            self.prepared_s += 0.5
            return super().prefill_in_place(ids)

        def decode_in_place(self, token_id, /):
            if self.position == 40:
                self.prepared_s += 0.25
            return super().decode_in_place(token_id)

    result, _ = run(Compiling([50] * 12), tokenizer, [1] * 40, max_new_tokens=12)
    assert (result.prepared_s, result.prefill_tokens_per_s) == (0.75, None)
    assert result.decode_tokens_per_s > 10 / result.decode_s  # the token with the compiler is left out


def test_cancel_before_and_between_tokens(tokenizer):
    cancel, source = threading.Event(), Script([50] * 50)
    sequence = asked(source, tokenizer)
    for count, _ in enumerate(drive(sequence, source, cancel=cancel), 1):
        if count == 3:
            cancel.set()
    assert sequence.result.stop_reason == "cancelled"
    assert sequence.result.token_ids == (50, 50, 50)
    assert source.decoded == [50, 50]
    source = Script([50])
    result, _ = run(source, tokenizer, cancel=cancel)
    assert (result.stop_reason, result.text, source.prefilled) == ("cancelled", "", [])


def test_a_prompt_that_is_cancelled_has_no_token(tokenizer):
    source = Script([50] * 50)
    sequence = asked(source, tokenizer)
    assert list(drive(sequence, source, read=lambda _: None)) == []
    assert (sequence.result.stop_reason, sequence.result.generated_tokens) == ("cancelled", 0)
    assert source.position == 0


def test_a_driver_that_leaves_early_ends_the_answer(tokenizer):
    source = Script([50] * 50)
    sequence = asked(source, tokenizer)
    sequence.begin(source)
    (step,) = sequence.accept(source.prefill_in_place(sequence.next_input()))
    assert (step.token_id, sequence.result) == (50, None)
    sequence.end("cancelled")
    assert sequence.result.stop_reason == "cancelled"
    assert sequence.result.token_ids == (50,)


def test_an_error_of_the_source_ends_the_answer(tokenizer):
    class Broken(Script):
        def decode_in_place(self, token_id, /):
            if len(self.decoded) == 2:
                raise EngineError("the GPU is gone")
            return super().decode_in_place(token_id)

    source = Broken([50] * 9)
    sequence = asked(source, tokenizer)
    steps = drive(sequence, source)
    with pytest.raises(EngineError, match="the GPU is gone"):
        list(steps)
    assert list(steps) == []
    assert sequence.result is None


def test_unsound_logits_end_the_answer(tokenizer):
    class Unsound(Script):
        def _next(self):
            super()._next()[7] = np.nan
            return self._logits

    with pytest.raises(EngineError, match="NaN"):
        run(Unsound([50]), tokenizer)


# Stop strings


def test_a_stop_string_over_several_tokens_is_cut_and_never_shown(tokenizer):
    ids = tokenizer.encode("x = 1\n\nclass Foo:\n    pass", add_bos=False)
    stop = "\n\nclass F"
    result, steps = run(Script(ids), tokenizer, stop=(stop,))
    assert result.text == "x = 1"
    assert result.stop_reason == "stop"
    assert tokenizer.decode(result.token_ids).startswith("x = 1\n\nclass F")
    seen = ""
    for step in steps:
        seen += step.text
        assert "x = 1".startswith(seen)


def test_text_that_only_looked_like_a_stop_string_comes_later(tokenizer):
    text = "x = 1\n\nclaim"
    ids = tokenizer.encode(text, add_bos=False)
    for limit in (None, len(ids)):
        result, _ = run(Script(ids), tokenizer, stop=("\n\nclass",), max_new_tokens=limit)
        assert result.text == text
    # held back when the end comes
    ids = tokenizer.encode("x = 1\n\ncla", add_bos=False)
    assert run(Script(ids), tokenizer, stop=("\n\nclass",))[0].text == "x = 1\n\ncla"
    result, _ = run(Script(ids), tokenizer, stop=("\n\nclass",), max_new_tokens=len(ids))
    assert (result.text, result.stop_reason) == ("x = 1\n\ncla", "length")


def test_a_stop_string_in_the_middle_of_a_token(tokenizer):
    ids = tokenizer.encode("import os", add_bos=False)
    assert run(Script(ids), tokenizer, stop=("por",))[0].text == "im"


@pytest.mark.parametrize("text", ["x = '😀'", "日本", "a\u00e9"])
def test_unfinished_characters_come_out_at_the_end(tokenizer, text):
    ids = tokenizer.encode(text, add_bos=False)
    for limit in range(1, len(ids) + 1):
        result, steps = run(Script(ids), tokenizer, max_new_tokens=limit)
        assert result.text == tokenizer.decode(ids[:limit])
        for step in steps[:-1]:
            assert "\ufffd" not in step.text
    # the flushed text may itself complete a stop string
    cut = next(limit for limit in range(1, len(ids)) if tokenizer.decode(ids[:limit]).endswith("\ufffd"))
    result, _ = run(Script(ids), tokenizer, max_new_tokens=cut, stop=("\ufffd",))
    assert result.stop_reason == "stop"
    assert "\ufffd" not in result.text


def naive(text, stops):
    """The stop string that completes first, by trying every beginning of the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_however_the_text_is_divided(pieces, stops):
    wanted = naive("".join(pieces), stops)[0]
    finder = StopStrings(stops)
    seen = ""
    for index, piece in enumerate(pieces):
        text, hit = finder.push(piece)
        seen += text
        assert wanted.startswith(seen)
        assert hit == naive("".join(pieces[: index + 1]), stops)[1]
        if hit:
            break
        # no more is held than could begin a stop string
        held = "".join(pieces[: index + 1])[len(seen) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    seen += finder.finish()
    assert seen == wanted
    assert finder.finish() == ""


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_tokens_give_the_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(1, VOCAB - 1), max_size=40))
    stop = tuple(data.draw(st.lists(st.sampled_from(["\n", "self", "\ufffd\ufffd", " (", "e"]), max_size=2)))
    result, _ = run(Script(ids), tokenizer, stop=stop)
    wanted, stopped = naive(tokenizer.decode(ids), stop)
    assert result.text == wanted
    assert result.stop_reason == ("stop" if stopped else "eos")


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.0},
        {"max_new_tokens": True},
        {"stop": ("",)},
        {"stop": "abc"},
        {"stop": ["abc"]},
        {"stop": (1,)},
    ],
    ids=str,
)
def test_illegal_options_are_named_with_their_value(values):
    ((name, value),) = values.items()
    with pytest.raises(OptionError, match=name) as caught:
        GenerationOptions(**values)
    assert repr(value) in str(caught.value)


def test_a_seed_gives_the_same_answer(tokenizer):
    class Flat(Script):
        def _next(self):
            self._logits[:] = np.sin(np.arange(VOCAB) * (1 + len(self.decoded)))
            return self._logits

    def answer(seed):
        sampling = SamplingOptions(temperature=1.0, top_p=0.9, seed=seed)
        return run(Flat([]), tokenizer, max_new_tokens=20, sampling=sampling, ignore_eos=True)[0]

    assert answer(1).token_ids == answer(1).token_ids
    assert answer(1).token_ids != answer(2).token_ids


def test_the_loop_does_not_grow_with_the_vocabulary_or_the_answer(tokenizer):
    source = Script([50] * 4000, context=5000)
    options = {"max_new_tokens": 3000, "log_probabilities": True, "stop": ("zzz",)}
    steps = drive(asked(source, tokenizer, [5], **options), source)
    for _ in range(100):
        next(steps)
    tracemalloc.start()
    try:
        for _ in range(200):
            next(steps)
        base_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(1000):
            next(steps)
        now_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # a reference per text piece, and the numbers that the script itself collects
    assert now_bytes - base_bytes < 100_000
    assert peak_bytes - base_bytes < 120_000


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The bundled tokenizer with two special tokens more."""
    folder = tmp_path_factory.mktemp("marked")
    backend = tokenizers.Tokenizer.from_file(str(Path(tiny.__file__).parent / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return Tokenizer.from_folder(folder)


def spelled(ids, tokenizer):
    """The text of tokens with the special ones spelled out."""
    special = tokenizer.special_tokens
    return b"".join(
        special[i].encode() if i in special else tokenizer.token_bytes.of(i) or b"" for i in ids
    ).decode()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_special_token_is_a_stop_string_by_its_spelling(marked, ignore_eos):
    tokenizer, special = marked, marked.special_tokens
    one, two = sorted(special)[-2:]
    assert EOS not in (one, two)
    word = tokenizer.encode("été", add_bos=False)
    more = tokenizer.encode(" more", add_bos=False)
    ids = [*word, one, *more, two, *word]
    options = {"ignore_eos": ignore_eos, "max_new_tokens": len(ids)}
    # without it, a special token is no text and does not end the answer
    assert run(Script(ids, vocab=VOCAB + 2), tokenizer, **options)[0].text == "été moreété"
    for stop, text, count in (
        (special[one], "été", len(word) + 1),
        (special[two], "été more", len(ids) - len(word)),
        ("té" + special[one] + " mo", "é", None),
        (special[one] + " more" + special[two], "été", len(ids) - len(word)),
        # one of them is in no stop string, and has no text
        ("été more", "", len(word) + 1 + len(more)),
        (special[two] + "x", "été moreété", len(ids)),
    ):
        result, steps = run(Script(ids, vocab=VOCAB + 2), tokenizer, stop=(stop,), **options)
        assert result.text == text
        assert count in (None, result.generated_tokens)
        assert result.stop_reason == ("length" if count == len(ids) else "stop")
        assert not any(special[one] in step.text for step in steps)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stop_strings_match_the_text_with_special_tokens_spelled_out(marked, data):
    tokenizer, special = marked, marked.special_tokens
    words = [[token] for token in sorted(set(special) - {EOS})]
    words += [tokenizer.encode(word, add_bos=False) for word in ("a", " b", "\n", "\U0001f600", "é", "<|")]
    ids = [i for word in data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=9)) for i in word]
    whole = spelled(ids, tokenizer)
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : begin + data.draw(st.integers(1, 12))]
    named = {i: name for i, name in special.items() if name in stop}
    # the text in which a stop string is sought
    sought = spelled([i for i in ids if i in named or i not in special], tokenizer)
    result, _ = run(
        Script(ids, vocab=VOCAB + 2), tokenizer, stop=(stop,), ignore_eos=True, max_new_tokens=len(ids)
    )
    shown = sought.partition(stop)[0] if stop in sought else sought
    for name in named.values():
        shown = shown.replace(name, "")
    assert result.text == shown
    assert (result.stop_reason == "stop") == (stop in sought)
