"""Sampling against transformers' own logits processors, and by statistics."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import EngineError, HeteroLLMError, OptionError
from heterollm.text import SamplingOptions
from heterollm.text.sampling import LogProbabilities, Sampler

NO_HISTORY = np.empty(0, np.int64)


def make_logits(size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def reference(options, logits, history):
    """The distribution from which transformers' generate would draw."""
    import torch
    import transformers as tf

    processors = tf.LogitsProcessorList()
    if options.repetition_penalty != 1:
        processors.append(tf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    processors.append(tf.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(tf.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(tf.TopPLogitsWarper(options.top_p))
    if options.min_p > 0:
        processors.append(tf.MinPLogitsWarper(options.min_p))
    scores = processors(torch.tensor(history)[None], torch.tensor(logits)[None])
    return torch.softmax(scores.double(), -1)[0].numpy()


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 300, "top_p": 0.97, "min_p": 0.01, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_distribution_is_that_of_transformers(filters, temperature):
    options = SamplingOptions(temperature=temperature, **filters)
    for size, seed in ((37, 1), (3000, 2), (20000, 3)):
        logits = make_logits(size, seed)
        history = np.random.default_rng(seed).integers(0, size, 60)
        before = logits.copy()
        ours = Sampler(options, size).distribution(logits, history)
        theirs = reference(options, logits, history)
        assert np.array_equal(ours > 0, theirs > 0)
        assert np.abs(ours - theirs).max() < 1e-6
        assert np.array_equal(logits, before)


def test_a_flat_distribution_needs_more_tokens_than_the_first_guesses():
    for size in (5000, 20000):
        logits = make_logits(size, scale=0.05)
        options = SamplingOptions(temperature=1.0, top_p=0.97)
        ours = Sampler(options, size).distribution(logits, NO_HISTORY)
        theirs = reference(options, logits, NO_HISTORY)
        # float32 sums of thousands of equal terms differ in the last tokens kept
        assert abs(np.count_nonzero(ours) - np.count_nonzero(theirs)) <= 10
        assert 0.96 * size < np.count_nonzero(ours) < 0.98 * size


def test_ties_at_the_limit_of_top_k_stay():
    logits = np.array([1, 3, 2, 2, 0, 2], np.float32)
    options = SamplingOptions(temperature=1.0, top_k=2)
    kept = np.flatnonzero(Sampler(options, 6).distribution(logits, NO_HISTORY))
    assert kept.tolist() == [1, 2, 3, 5]


def test_greedy_takes_the_likeliest_token_and_ignores_filters():
    logits = make_logits(500)
    for options in (SamplingOptions(), SamplingOptions(top_k=3, top_p=0.1, min_p=0.5)):
        assert Sampler(options, 500).sample(logits, NO_HISTORY) == int(logits.argmax())


@pytest.mark.parametrize("signed", [1.0, -1.0])
def test_the_repetition_penalty_counts_a_token_once(signed):
    logits = np.array([4.0, 3.9, 0.1], np.float32) - (10 if signed < 0 else 0)
    sampler = Sampler(SamplingOptions(repetition_penalty=1.05), 3)
    assert sampler.uses_history
    assert sampler.sample(logits, NO_HISTORY) == 0
    assert sampler.sample(logits, np.array([0, 0, 0, 2])) == 1
    scores = sampler._change(logits, np.array([0, 0, 0]))
    assert scores[0] == pytest.approx(logits[0] * 1.05 ** (-signed))


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.7, top_k=8),
        SamplingOptions(temperature=1.3, top_p=0.8),
        SamplingOptions(temperature=1.0, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options):
    logits = make_logits(50, seed=4, scale=1.5)
    sampler = Sampler(SamplingOptions(**{**vars_of(options), "seed": 11}), 50)
    wanted = sampler.distribution(logits, NO_HISTORY)
    draws = 20000
    counts = np.bincount([sampler.sample(logits, NO_HISTORY) for _ in range(draws)], minlength=50)
    assert not counts[wanted == 0].any()
    used = wanted > 0
    expected = wanted[used] * draws
    statistic = float(((counts[used] - expected) ** 2 / expected).sum())
    degrees = int(used.sum()) - 1
    # four standard deviations of the chi-square distribution
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def vars_of(options):
    return {name: getattr(options, name) for name in SamplingOptions.__slots__}


def test_a_seed_gives_equal_tokens_and_another_seed_others():
    logits = make_logits(2000, scale=1.0)

    def draw(seed):
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed), 2000)
        return [sampler.sample(logits, NO_HISTORY) for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


def test_excluded_tokens_are_never_drawn():
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 70]] = [0.0, 0.1]
    for filters in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}, {"repetition_penalty": 1.5}):
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=0, **filters), 100)
        assert {sampler.sample(logits, np.array([5, 3])) for _ in range(60)} == {3, 70}


@pytest.mark.parametrize(("number", "expected"), [(0.0, 300), (1 - 2**-53, 700), (1.0, 700)])
def test_the_least_and_the_greatest_number_draw_no_excluded_token(number, expected):
    """Before, between and behind the two allowed tokens lie whole groups of excluded ones."""

    class Fixed:
        def random(self):
            return number

    logits = np.full(1500, -np.inf, np.float32)
    logits[[300, 700]] = 0.0, 1e-3
    sampler = Sampler(SamplingOptions(temperature=1.0), len(logits), Fixed())
    assert sampler.sample(logits, NO_HISTORY) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all"])
@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_unsound_logits_are_an_engine_error(temperature, bad, penalty):
    logits = make_logits(64)
    if bad == "all":
        logits[:] = -np.inf
    else:
        logits[17] = bad
    sampler = Sampler(SamplingOptions(temperature=temperature, repetition_penalty=penalty), 64)
    with pytest.raises(EngineError, match="logits"):
        sampler.sample(logits, NO_HISTORY)
    with pytest.raises(EngineError, match="logits"):
        LogProbabilities(len(logits)).read(logits)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = make_logits(300)
    logits[10] = -np.inf
    assert (
        Sampler(SamplingOptions(temperature=temperature), 300).sample(logits, NO_HISTORY) == logits.argmax()
    )


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([0.01, 1.0, 1000.0, 1e30]))
@settings(max_examples=60, deadline=None)
def test_log_probability_is_the_float64_log_softmax(size, seed, scale):
    logits = make_logits(size, seed, scale)
    token = seed % size
    exact = logits.astype(np.float64) - logits.max()
    wanted = exact[token] - math.log(np.exp(exact).sum())
    found = LogProbabilities(size)
    found.read(logits)
    assert found.of(token) == pytest.approx(wanted, rel=1e-12)


def test_log_probability_of_an_excluded_token():
    logits = np.array([-np.inf, 0, 0], np.float32)
    found = LogProbabilities(3, most=3)
    found.read(logits)
    assert found.of(0) == -math.inf
    assert found.of(1) == pytest.approx(math.log(0.5))
    assert [token for token, _ in found.likeliest()] == [1, 2]  # JSON has no -inf


@pytest.mark.parametrize("most", [1, 4, 5, 50, 60])
def test_the_likeliest_tokens_are_those_of_a_sort(most):
    logits = make_logits(50)
    logits[[7, 20, 33]] = logits[np.argsort(-logits)[3]]  # ties at the limit of 4 and 5: the smaller id first
    found = LogProbabilities(50, most)
    found.read(logits)
    wanted = sorted(range(50), key=lambda token: (-logits[token], token))[:most]
    assert found.likeliest() == tuple((token, found.of(token)) for token in wanted)


def test_greedy_allocates_nothing_of_the_vocabularys_size():
    import tracemalloc

    logits = make_logits(151_936)
    history = np.arange(100)
    for options in (SamplingOptions(), SamplingOptions(repetition_penalty=1.1)):
        sampler = Sampler(options, 151_936)
        found = LogProbabilities(len(logits), most=5)
        sampler.sample(logits, history)
        tracemalloc.start()
        try:
            sampler.sample(logits, history)
            found.read(logits)
            found.likeliest()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 100_000


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": -1e-9},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"temperature": 101},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"presence_penalty": -math.inf},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "much"},
        {"logit_bias": [1]},
        {"logit_bias": None},
        {"repetition_penalty": -1.0},
        {"seed": -1},
        {"seed": 1.5},
        {"top_k": None},
    ],
    ids=str,
)
def test_illegal_options_are_named_with_their_value(values):
    ((name, value),) = values.items()
    with pytest.raises(OptionError, match=name) as caught:
        SamplingOptions(**values)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("bias", [{-1: 1}, {"5": 1}, {True: 1}, {5: 101}, {5: math.nan}, {5: None}], ids=str)
def test_an_illegal_bias_is_named_with_its_token(bias):
    ((token, _),) = bias.items()
    with pytest.raises(OptionError, match="logit_bias") as caught:
        SamplingOptions(logit_bias=bias)
    assert str(token) in str(caught.value)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0, 1, 1e-300, 5e-324, 1e300, -1])
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 100) | NUMBERS,
        "top_k": st.integers(0, 70) | st.integers(),
        "top_p": st.floats(0, 1) | NUMBERS,
        "min_p": st.floats(0, 1) | NUMBERS,
        "repetition_penalty": st.floats(0.01, 100) | NUMBERS,
        "presence_penalty": st.floats(-2, 2) | NUMBERS,
        "frequency_penalty": st.floats(-2, 2) | NUMBERS,
        "logit_bias": st.dictionaries(st.integers(0, 80), st.floats(-100, 100) | NUMBERS, max_size=4),
        "seed": st.integers(0) | st.none(),
    },
)
SCALES = st.sampled_from([0.0, 1e-40, 1.0, 30.0, 65504.0, 1e30, 3.4e38])


@given(GIVEN, SCALES, st.integers(0, 2**32 - 1), st.sets(st.integers(1, 63)), st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_whatever_is_accepted_gives_finite_probabilities_and_a_token(given, scale, seed, excluded, prompt):
    try:
        options = SamplingOptions(**given)
    except HeteroLLMError:
        return
    random = np.random.default_rng(seed)
    logits = (random.uniform(-1, 1, 64) * scale).astype(np.float32)
    logits[list(excluded)] = -np.inf
    history = random.integers(0, 64, 50)
    sampler = Sampler(options, 64, prompt_tokens=prompt)
    probabilities = sampler.distribution(logits, history)
    assert np.isfinite(probabilities).all()
    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1)
    assert not probabilities[list(excluded)].any()
    for token in (sampler.sample(logits, history), sampler.draw(logits, history, np.empty(64))):
        assert probabilities[token] > 0
    assert probabilities[sampler.accept(logits, history, 5, np.full(64, 1 / 64))] > 0


def test_penalties_count_the_answers_tokens_as_openai_describes():
    logits = make_logits(20)
    options = SamplingOptions(
        temperature=1.0, presence_penalty=0.75, frequency_penalty=-0.5, logit_bias={3: 2}
    )
    history = np.array([7, 7, 3, 5, 5, 5, 9])  # the first three are the prompt
    wanted = logits.astype(np.float64)
    wanted[3] += 2
    wanted[5] -= 0.75 - 0.5 * 3
    wanted[9] -= 0.75 - 0.5
    wanted = np.exp(wanted) / np.exp(wanted).sum()
    found = Sampler(options, 20, prompt_tokens=3).distribution(logits, history)
    assert np.abs(found - wanted).max() < 1e-6
    greedy = SamplingOptions(frequency_penalty=2.0)
    best = int(logits.argmax())
    assert Sampler(greedy, 20).sample(logits, np.full(30, best)) != best


def test_a_top_p_of_0_leaves_the_likeliest_token():
    logits = make_logits(30)
    options = SamplingOptions(temperature=1.0, top_p=0.0)
    assert Sampler(options, 30).sample(logits, NO_HISTORY) == logits.argmax()
