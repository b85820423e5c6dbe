"""Speculative decoding over scripted logits: whatever is guessed, the answer is that of plain decoding."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import EngineError
from heterollm.text import (
    LOOKUP_PRIORS,
    MOST_GUESSES,
    GenerationOptions,
    GuessPace,
    LookupProposer,
    Sampler,
    SamplingOptions,
    Tokenizer,
    TokenSequence,
    drive,
)

VOCAB = 40
PROMPT = (5, 6, 7)
EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(Path(tiny.__file__).parent)


class Model:
    """Logits that depend on all tokens so far, and refuses every use that a session refuses."""

    prepared_s = 0.0

    def __init__(self, context=64, sharp=4.0, fails_at=None):
        self.ids = []
        self.context = context
        self.sharp = sharp
        self.fails_at = fails_at
        self.passes = []
        # The rows of the latest pass, so that a loop that reads old ones gets wrong logits.
        self._rows = np.empty((MOST_GUESSES + 1, VOCAB), np.float32)

    @property
    def position(self):
        return len(self.ids)

    def prefill_in_place(self, ids, /):
        return self._run(ids.tolist())[-1]

    def decode_in_place(self, ids, /):
        if type(ids) is int:
            return self._run([ids])[0]
        assert 2 <= len(ids) <= MOST_GUESSES + 1
        return self._run(ids.tolist())

    def truncate(self, position, /):
        assert 0 <= position <= len(self.ids)
        del self.ids[position:]

    def _run(self, ids):
        if self.fails_at is not None and len(self.passes) == self.fails_at:
            raise EngineError("the GPU is gone")
        self.passes.append(len(ids))
        assert len(self.ids) + len(ids) <= self.context
        self._rows[:] = np.nan
        for row, token in enumerate(ids):
            self.ids.append(token)
            self._rows[row % len(self._rows)] = self.row(self.ids)
        return self._rows[: len(ids)]

    def row(self, ids):
        generator = np.random.default_rng(ids[-2:])
        return (self.sharp * generator.standard_normal(VOCAB)).astype(np.float32)


def warm(*arguments, **options):
    """Return a pace that has seen a pass of one token."""
    found = GuessPace(*arguments, **options)
    found.learn_pass(1, 1.0)
    return found


class Scripted:
    """Guesses what a test decides, drawn or not."""

    def __init__(self, decide, drawn=None):
        self.decide, self.drawn, self.pace = decide, drawn, pace()
        self.learnt = []

    was_behind = runs_passes = False

    def kind(self, _history, _end, /):
        return 0

    def propose(self, history, end, count, /):
        guesses = self.decide(history[:end].tolist(), count)[:count]
        history[end : end + len(guesses)] = guesses
        return len(guesses)

    def drawn_from(self, index, /):
        return None if self.drawn is None else self.drawn[index]

    def learn(self, tried, right, /):
        assert 0 <= tried - right <= 1
        self.learnt.append((tried, right))


def pace(**options):
    return warm([1.0] * 16, LOOKUP_PRIORS, **options)


def asked(model, tokenizer, proposer=None, **options):
    ticks = itertools.count(0.0)
    options = GenerationOptions(**options)
    speculator = None if proposer is None else lambda *_: proposer
    return TokenSequence(
        *(tokenizer, PROMPT, options),
        context=model.context,
        speculator=speculator,
        clock=ticks.__next__,
    )


def answer(model, tokenizer, proposer=None, **options):
    """Return a finished answer, checked against its steps, and its source."""
    sequence = asked(model, tokenizer, proposer, **options)
    steps = list(drive(sequence, model))
    assert tuple(step.token_id for step in steps) == sequence.result.token_ids
    assert "".join(step.text for step in steps) == sequence.result.text
    return sequence.result


def same(one, other):
    """Whether two answers are equal but for their times and guesses."""
    fields = ("text", "token_ids", "stop_reason", "log_probabilities")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def truth(tokenizer, **options):
    """Return the answer of plain decoding, and the tokens that it leaves in the source."""
    model = Model()
    return answer(model, tokenizer, **options), model.ids


def guesses_of(kind, plain, data=None):
    """Return a function that guesses right, wrong, too much, or at random."""
    whole = [*PROMPT, *plain.token_ids]

    def decide(known, most):
        right = [*whole[len(known) :], *[1] * MOST_GUESSES][:MOST_GUESSES]
        if kind == "right":
            return right
        if kind == "wrong":
            return [(token + 1) % VOCAB for token in right]
        if kind == "half":
            return [*right[:2], (right[2] + 1) % VOCAB, *right[3:]]
        return data.draw(st.lists(st.sampled_from([*right[:3], 2]), max_size=MOST_GUESSES))

    return decide


OPTIONS = (
    {"max_new_tokens": 23},
    {},  # to the end of the context
    {"max_new_tokens": 23, "log_probabilities": True, "sampling": SamplingOptions(temperature=0.9, seed=3)},
    {
        "max_new_tokens": 17,
        "sampling": SamplingOptions(
            temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=4
        ),
    },
    {"max_new_tokens": 1},
    {"max_new_tokens": 2, "sampling": SamplingOptions(repetition_penalty=1.5)},
)


@pytest.mark.parametrize("kind", ["right", "wrong", "half"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_guess_changes_an_answer(tokenizer, kind, options):
    plain, held = truth(tokenizer, ignore_eos=True, **options)
    model = Model()
    guessed = answer(model, tokenizer, Scripted(guesses_of(kind, plain)), ignore_eos=True, **options)
    assert same(guessed, plain)
    assert model.ids == held
    counts = guessed.speculation
    assert counts.passes == len(model.passes) - 1
    assert plain.speculation is None
    if kind == "wrong":
        assert counts.accepted == 0
    # Each pass gives a token, and one more for each right guess.
    assert counts.passes + counts.accepted == guessed.generated_tokens - 1
    if kind == "right" and guessed.generated_tokens > 16:
        assert counts.accepted == counts.guesses
        assert max(model.passes[1:]) == MOST_GUESSES + 1
        assert counts.estimated_gain > 1


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_guesses_change_nothing(tokenizer, data):
    options = {**data.draw(st.sampled_from(OPTIONS)), "ignore_eos": data.draw(st.booleans())}
    options["stop"] = data.draw(st.sampled_from([(), ("e",), (" ",), ("self",)]))
    plain, held = truth(tokenizer, **options)
    model, proposer = Model(), Scripted(guesses_of("random", plain, data))
    assert same(answer(model, tokenizer, proposer, **options), plain)
    assert model.ids == held


def test_an_end_inside_a_run_of_right_guesses(tokenizer):
    """End tokens, stop strings and a caller that leaves: the source holds what plain decoding leaves."""
    plain, _ = truth(tokenizer, max_new_tokens=20, ignore_eos=True)
    for position in range(20):
        token = plain.token_ids[position]
        first = plain.token_ids.index(token)

        class Ends:
            eos_ids = frozenset({token})
            stream_decoder = tokenizer.stream_decoder

        model = Model()
        ended = answer(model, Ends(), Scripted(guesses_of("right", plain)), max_new_tokens=20)
        assert (ended.token_ids, ended.stop_reason) == (plain.token_ids[: first + 1], "eos")
        assert model.ids == [*PROMPT, *plain.token_ids[:first]]
    for count in range(1, 20):
        model, cancel = Model(), threading.Event()
        proposer = Scripted(guesses_of("half", plain))
        sequence = asked(model, tokenizer, proposer, max_new_tokens=20, ignore_eos=True)
        for number, step in enumerate(drive(sequence, model, cancel=cancel)):
            assert step.token_id == plain.token_ids[number]
            if number + 1 == count:
                cancel.set()
        # The pass that computed the token has given its others, too.
        assert count <= sequence.result.generated_tokens < count + 3
        assert model.ids == [*PROMPT, *sequence.result.token_ids[:-1]]


def test_a_step_that_fails_leaves_no_guesses(tokenizer, monkeypatch):
    """The third token of a pass cannot be sampled."""
    plain, _ = truth(tokenizer, max_new_tokens=40, ignore_eos=True)
    model = Model()
    sequence = asked(model, tokenizer, Scripted(guesses_of("right", plain)), ignore_eos=True)
    steps = drive(sequence, model)
    next(steps)
    sample, calls = Sampler.sample, itertools.count(1)

    def fails(*arguments):
        if next(calls) == 3:
            raise EngineError("no token")
        return sample(*arguments)

    monkeypatch.setattr(Sampler, "sample", fails)
    with pytest.raises(EngineError, match="no token"):
        next(steps)
    assert model.ids == [*PROMPT, *plain.token_ids[:2]]


def test_a_failed_pass_leaves_no_guesses(tokenizer):
    plain, _ = truth(tokenizer, max_new_tokens=40, ignore_eos=True)
    model = Model(fails_at=3)
    proposer = Scripted(guesses_of("half", plain))
    seen = []
    with pytest.raises(EngineError, match="the GPU is gone"):
        seen.extend(drive(asked(model, tokenizer, proposer, ignore_eos=True), model))
    assert model.ids == [*PROMPT, *plain.token_ids[: len(model.ids) - 3]]


# Sampling


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.7, top_k=12, repetition_penalty=1.4),
        SamplingOptions(temperature=1.3, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", ["near", "far", "point", "same"])
def test_accepted_and_other_tokens_have_the_sampled_distribution(options, draft):
    """A draw from any q, accepted or replaced, has the distribution p, whatever q is."""
    generator, count = np.random.default_rng(1), 2500
    logits = (2 * generator.standard_normal(VOCAB)).astype(np.float32)
    history = np.array([3, 9, 9, 11])
    shift = {"near": 0.5, "far": 3.0, "point": 0.0, "same": 0.0}[draft]
    others = (logits + shift * generator.standard_normal(VOCAB)).astype(np.float32)
    sampler = Sampler(options, VOCAB, np.random.default_rng(2))
    drafting = SamplingOptions() if draft == "point" else options
    draws = Sampler(drafting, VOCAB, np.random.default_rng(3))
    wanted, q = sampler.distribution(logits, history), np.empty(VOCAB)
    counts, kept = np.zeros(VOCAB), 0
    for _ in range(count):
        guess = draws.draw(others, history, q)
        token = sampler.accept(logits, history, guess, q)
        counts[token] += 1
        kept += token == guess
    assert counts[wanted == 0].sum() == 0
    # The smallest ones together, so that every class has some members.
    order = np.argsort(wanted)
    few = np.cumsum(wanted[order]) * count < 10
    groups = [order[few], *([place] for place in order[~few])]
    expected = np.array([wanted[group].sum() for group in groups if len(group)])
    seen = np.array([counts[group].sum() for group in groups if len(group)])
    keep = expected > 0
    assert stats.chisquare(seen[keep], expected[keep] * count).pvalue > 1e-3
    # The most that any rule can accept is the common part of p and q.
    assert kept / count == pytest.approx(np.minimum(wanted, q).sum(), abs=0.04)


def test_the_test_of_distributions_would_find_a_wrong_rule():
    """Taking every guess gives q, which the same statistic tells from p."""
    generator = np.random.default_rng(1)
    p, q = (np.exp(2 * generator.standard_normal(VOCAB)) for _ in range(2))
    seen = np.random.default_rng(2).multinomial(6000, 0.9 * p / p.sum() + 0.1 * q / q.sum())
    assert stats.chisquare(seen, p / p.sum() * 6000).pvalue < 1e-6


# Lookup


def lookup(tokens, most=8):
    history = np.zeros(len(tokens) + most, np.int64)
    history[: len(tokens)] = tokens
    proposer = LookupProposer(pace())
    if proposer.kind(history, len(tokens)) is None:
        return []
    count = proposer.propose(history, len(tokens), most)
    return history[len(tokens) : len(tokens) + count].tolist()


def test_lookup_takes_what_followed_the_longest_match():
    assert lookup([1, 2, 3]) == []
    assert lookup([1]) == []
    assert lookup([1, 2, 9, 1, 2], most=1) == [9]
    # The longer match wins over the later one, and the later one of two equals.
    assert lookup([7, 1, 2, 50, 1, 2, 60, 7, 1, 2], most=1) == [50]
    assert lookup([1, 2, 50, 1, 2, 60, 7, 1, 2], most=1) == [60]
    # A match that reaches the end goes on with its period.
    assert lookup([4, 5, 6, 4, 5, 6, 4, 5], most=7) == [6, 4, 5, 6, 4, 5, 6]
    assert lookup([8] * 5, most=3) == [8, 8, 8]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_an_index_that_grows_finds_what_a_search_finds(tokens, step):
    history = np.zeros(len(tokens) + 4, np.int64)
    history[: len(tokens)] = tokens
    proposer = LookupProposer(pace())
    for end in range(1, len(tokens) + 1, step):
        before = history.copy()
        count = 0 if proposer.kind(history, end) is None else proposer.propose(history, end, 1)
        known = tokens[:end]
        lengths = {
            place: next(
                size
                for size in range(min(place, 16), -1, -1)
                if known[place - size : place] == known[end - size : end]
            )
            for place in range(2, end)
        }
        # The index compares the latest 32 places of a pair.
        places = [place for place, length in lengths.items() if length >= 2][-32:]
        best = max((lengths[place] for place in places), default=0)
        if not best:
            assert count == 0
        else:
            place = max(place for place in places if lengths[place] == best)
            assert history[end] == known[place]
        history = before


# The number of guesses


def test_guesses_are_as_many_as_pay():
    assert GuessPace([1.0] * 16, (0.8,)).guesses(0, 15) == 0  # the first pass tells the time of one token
    flat = warm([1.0] * 16, (0.8,))
    assert flat.guesses(0, 15) == 15
    assert flat.guesses(0, 4) == 3  # few lengths are compiled and learnt
    linear = warm([float(n) for n in range(1, 17)], (0.8,))
    assert linear.guesses(0, 15) == 0
    steps = warm([1.0, 1.05, 1.1, 1.15, *[3.0] * 12], (0.6,))
    assert steps.guesses(0, 15) == 3
    assert warm([1.0] * 16, (0.8,), guess_s=0.9).guesses(0, 15) == 0
    assert warm([1.0] * 4, (0.8,)).guesses(0, 15) == 3
    assert warm([1.0] * 16, (0.1,), fixed=5).guesses(0, 15) == 5
    assert warm([1.0] * 16, (0.1,), fixed=5).guesses(0, 2) == 2
    assert warm([1.0] * 4, (0.8,), fixed=9).guesses(0, 15) == 3
    assert warm([1.0], (0.8,), fixed=9).guesses(0, 15) == 0


def test_acceptance_and_times_correct_the_number():
    own = warm([1.0, *[1.3] * 15], (0.8, 0.8))
    for _ in range(30):
        own.learn(0, 1, 0)
    assert own.acceptance(0) < 0.1 < own.acceptance(1) == 0.8
    assert own.guesses(0, 15) == 0
    assert own.guesses(1, 15) > 3
    # After a while without a try the guesses get another chance.
    assert any(own.guesses(0, 15) for _ in range(200))
    slow = warm([1.0, *[1.3] * 15], (0.8,))
    for tokens in (2, 9, 16):
        for _ in range(9):
            slow.learn_pass(tokens, 2.0 * tokens)
    assert slow.guesses(0, 15) == 0
    # A time of one token that grows old is measured again.
    seen = []
    for _ in range(100):
        seen.append(own.guesses(1, 15))
        own.learn_pass(seen[-1] + 1, 1.3)
    assert 2 <= seen.count(0) <= 4
    assert max(seen) > 3
    # Times that were wrong at first, so that no guess seemed to pay.
    wrong = warm([1.0, *[9.0] * 15], (0.8,))
    seen = []
    for _ in range(300):
        seen.append(wrong.guesses(0, 15))
        wrong.learn_pass(seen[-1] + 1, 1.0 + 0.01 * seen[-1])
    assert seen[0] == 0
    assert sum(seen[-32:]) > 10 * 31
    # One pass that took long, as it was compiled, does not count; the second one does.
    once = warm([1.0] * 16, (0.8,))
    once.learn_pass(16, 3.0)
    assert once.pass_s(16) == once.pass_s(15) == 1.0
    once.learn_pass(16, 3.0)
    assert once.pass_s(16) == once.pass_s(15) == 2.0
    # The time of one token is measured again at once.
    first = GuessPace([1.0] * 16, (0.8,))
    first.learn_pass(1, 9.0)
    assert first.guesses(0, 15) == 0
    first.learn_pass(1, 1.0)
    assert first.plain_pass_s == 1.0
    assert first.guesses(0, 15) == 15
