"""The KV cache in 8 bits: near the answers of floats, and as exact as they are in forks and going back."""

import numpy as np
import pytest

from heterollm import LLM
from heterollm.base import OptionError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.planning import LoadOptions
from heterollm.solver import PlanRequest

CONTEXT = 320
CODES_DB = 60.0
LEAST_DB = 30.0
"""SQNR of the logits against those over floats; the bundled model has 50 dB on text."""


@pytest.fixture(scope="module")
def coded(bundled_model):
    with LLM.load(bundled_model, device="host", plan="gpu", context=CONTEXT, kv_bits=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def floats(bundled_model):
    with LLM.load(bundled_model, device="host", plan="gpu", context=CONTEXT) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids(floats):
    return np.random.default_rng(3).integers(3, floats.config.vocab_size, 300).tolist()


def test_logits_are_near_those_over_floats(coded, floats, ids):
    sessions = coded.session(), floats.session()
    for part in (ids[:257], ids[257:264]):
        actual, expected = (session.prefill(part, all_logits=True) for session in sessions)
        assert LEAST_DB < sqnr_db(actual, expected) < 60
    for token in ids[264:270]:
        assert LEAST_DB < sqnr_db(*(session.decode(token) for session in sessions)) < 60


@pytest.mark.parametrize(("family", "level"), [("gemma2", "gpu"), ("phi3", "layer"), ("olmoe", "gpu")])
def test_families_with_windows_caps_and_partial_rotation(checkpoint, host_llm, token_ids, family, level):
    folder = checkpoint(family)
    found = []
    for bits in (8, None):
        session = host_llm(folder, plan=level, context=96, kv_bits=bits).session()
        prompt = session.prefill(token_ids(70), all_logits=True).copy()
        found.append(np.concatenate([prompt, [session.decode(token) for token in (5, 6, 7)]]))
    assert LEAST_DB < sqnr_db(*found) < 80


def test_forks_and_positions_are_exact(coded, ids):
    session = coded.session()
    logits = session.prefill(ids[:101]).copy()
    fork = session.fork()
    ahead = [session.decode(token).copy() for token in ids[101:106]]
    assert np.array_equal([fork.decode(token) for token in ids[101:106]], ahead)
    session.truncate(101)
    other = session.fork()
    assert np.array_equal(session.decode(ids[101]), ahead[0])
    # The fork has copies of its own.
    other.decode(ids[0])
    session.decode(ids[102])
    assert np.array_equal(session.decode(ids[103]), ahead[2])
    assert np.array_equal(coded.session().prefill(ids[:101]), logits)


def test_memory_is_that_of_codes_and_scales(coded, floats):
    config = coded.config
    heads = 2 * config.layers * config.attention.kv_heads

    def cache_bytes(llm):
        return llm.session().memory_bytes

    assert cache_bytes(floats) == heads * CONTEXT * config.attention.head_dim * 4
    exact = heads * CONTEXT * (config.attention.head_dim + 4)
    assert exact <= cache_bytes(coded) < exact + heads * 4096


def test_every_token_of_a_mixture_is_that_of_another_plan(checkpoint, host_llm, half_rows_plan, token_ids):
    """A code that rounding turns leaves a token at 68 dB; no token in 250,000 chose another expert."""
    folder, ids = checkpoint("qwen3_moe"), token_ids(180)
    on_gpu = host_llm(folder, plan="gpu", kv_bits=8)
    split = host_llm(folder, plan=half_rows_plan(on_gpu), kv_bits=8)
    expected = on_gpu.session().prefill(ids, all_logits=True)
    session = split.session()
    rows = [session.prefill(ids[:33], all_logits=True), session.prefill(ids[33:140], all_logits=True)]
    found = np.concatenate([*rows, *(session.decode(token)[np.newaxis] for token in ids[140:])])
    assert min(sqnr_db(*pair) for pair in zip(found, expected, strict=True)) > CODES_DB


@pytest.mark.parametrize("bits", [4, 16, 8.5, True, "8"])
def test_other_bits_are_refused(bits):
    with pytest.raises(OptionError, match="kv_bits"):
        LoadOptions(kv_bits=bits)


def test_sparse_attention_is_refused():
    sparse = PlanRequest(techniques=("shadowattn",))
    with pytest.raises(OptionError, match="Sparse attention reads no KV cache of 8 bits"):
        LoadOptions(
            kv_bits=8, request=sparse, plan="tensor", scales="stepped", calibration="calibration.json"
        )
