"""The KV cache in 16 and 8 bits: near the answers of 32, and as exact in forks and going back."""

import numpy as np
import pytest

from heterollm import LLM
from heterollm.base import OptionError
from heterollm.engine import fitting_need
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import CACHE_DTYPES
from heterollm.kernels.sim import Simulation
from heterollm.planning import LoadOptions
from heterollm.solver import PlanRequest

CONTEXT, CONTEXT_8K = 320, 8192
CODES_DB = 60.0
LEAST_DB = 30.0
"""SQNR of the logits against those over 32 bits; the bundled model has 50 dB on text."""
HALF_DB = 50.0
"""The same of 16 bits, of which the bundled model has 74 dB or more."""


@pytest.fixture(scope="module")
def coded(bundled_model):
    with LLM.load(bundled_model, device="host", plan="gpu", context=CONTEXT, kv_bits=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def floats(bundled_model):
    with LLM.load(bundled_model, device="host", plan="gpu", context=CONTEXT, kv_bits=32) as llm:
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


@pytest.mark.parametrize(
    ("family", "level", "bits", "least_db", "most_db"),
    [
        (family, level, *own)
        for family, level in (("gemma2", "gpu"), ("phi3", "layer"), ("olmoe", "gpu"))
        for own in ((8, LEAST_DB, 80), (16, HALF_DB, 120))
    ],
)
def test_families_with_windows_caps_and_partial_rotation(
    checkpoint, host_llm, token_ids, family, level, bits, least_db, most_db
):
    folder = checkpoint(family)
    found = []
    for own in (bits, 32):
        session = host_llm(folder, plan=level, context=96, kv_bits=own).session()
        prompt = session.prefill(token_ids(70), all_logits=True).copy()
        found.append(np.concatenate([prompt, [session.decode(token) for token in (5, 6, 7)]]))
    assert least_db < sqnr_db(*found) < most_db


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


def test_the_default_takes_half_the_bytes_of_32_bits_at_8k(checkpoint, host_llm):
    """In the session, and in the memory check, which is also that of a modelled phone."""
    folder = checkpoint("llama", max_position_embeddings=CONTEXT_8K)
    half, single = (host_llm(folder, plan="gpu", context=CONTEXT_8K, kv_bits=bits) for bits in (None, 32))
    config = half.config
    elements = 2 * config.layers * config.attention.kv_heads * CONTEXT_8K * config.attention.head_dim
    phone = open_device("sim:snapdragon-8gen3", simulation=Simulation(numerics=False))
    for llm, bits in ((half, 16), (single, 32)):
        phone.cache_dtype = CACHE_DTYPES[bits]
        assert llm.session().memory_bytes == elements * bits // 8
        for device in (llm.device, phone):
            need = fitting_need(device, config, llm._weights.specs, llm.plan, CONTEXT_8K)
            assert need.kv_cache == elements * bits // 8


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


@pytest.mark.parametrize("bits", [4, 64, 8.5, True, "8"])
def test_other_bits_are_refused(bits):
    with pytest.raises(OptionError, match="kv_bits"):
        LoadOptions(kv_bits=bits)


def test_sparse_attention_is_refused():
    sparse = PlanRequest(techniques=("shadowattn",))
    with pytest.raises(OptionError, match="Sparse attention reads no KV cache of 8 bits"):
        LoadOptions(
            kv_bits=8, request=sparse, plan="tensor", scales="stepped", calibration="calibration.json"
        )
