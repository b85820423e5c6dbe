"""Attention scores of an NPU graph with two inputs and no weights, against integer arithmetic."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import GraphError
from heterollm.kernels.npu import QnnNpu, ScoresShard, qnn_available
from heterollm.kernels.operators.score_codes import ScoresCase

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
slow = [*emulated, pytest.mark.slow]
SHARD = ScoresShard(2, 128, 64, 10)


def differences(case, npu):
    found, exact = case.on_npu(npu)
    assert {0, 255} <= set(np.unique(exact))  # some scores saturate
    return np.abs(found - exact)


@given(
    heads=st.sampled_from([1, 2, 4, 9]),
    tokens=st.sampled_from([32, 64, 96, 224]),
    keys=st.integers(1, 300),
    head_dim=st.sampled_from([64, 80, 128]),
    seed=st.integers(0, 1000),
)
def test_the_host_gives_the_codes_of_integer_arithmetic(host, heads, tokens, keys, head_dim, seed):
    found, exact = ScoresCase(heads, tokens, keys, head_dim, seed=seed).on_npu(host)
    assert np.array_equal(found, exact)


@pytest.mark.parametrize(
    ("heads", "tokens", "keys", "head_dim"),
    [
        pytest.param(2, 32, 256, 64, marks=emulated),
        *(pytest.param(heads, 128, 512, 64, marks=slow) for heads in (1, 2, 4)),
        pytest.param(1, 128, 2048, 128, marks=slow),
        pytest.param(1, 64, 1000, 80, marks=slow),
        pytest.param(4, 3 * 256, 2048, 64, marks=slow),  # a group of three query heads
        pytest.param(2, 7 * 32, 1024, 128, marks=slow),
    ],
)
def test_the_emulator_is_within_one_code(emulator, heads, tokens, keys, head_dim):
    off = differences(ScoresCase(heads, tokens, keys, head_dim), emulator)
    assert off.max() <= 1
    assert (off > 0).mean() < 1e-3  # products between two codes


@pytest.mark.parametrize(
    ("heads", "rows", "keys"),
    [
        pytest.param(*sizes, marks=slow)
        for sizes in ((1, 128, 128), (2, 224, 512), (4, 128, 128), (4, 768, 2048))
    ],
)
def test_the_compiler_keeps_integers(heads, rows, keys, compiled):
    operations, _ = compiled(dataclasses.replace(SHARD, heads=heads, keys=keys), "scores", rows, {})
    assert operations
    assert not [name for name in operations if ".fp16" in name or "uantize" in name or "Cast" in name]


@pytest.mark.parametrize("soc", [pytest.param(soc, marks=slow) for soc in ("30", "36", "60", "69", "87")])
def test_every_hexagon_takes_the_graph(soc, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    assert QnnNpu(emulator=True, soc_model=soc).build(SHARD, 128).compiled


@pytest.mark.parametrize("kind", [pytest.param("second process", marks=emulated)])
def test_the_context_of_a_graph_without_weights_is_cached(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    case = ScoresCase(2, 32, 128, 64)
    for counts in ((1, 0), (0, 1)):
        npu = QnnNpu(emulator=True)
        assert differences(case, npu).max() <= 1
        assert (npu.compiled_count, npu.loaded_count) == counts
        edges = 2 * (32 * 64 + 128 * 64 + 32 * 128)
        assert 10_000 < npu.open_bytes - edges < 200_000
        assert 10_000 < npu.stored_bytes(case.data()[0], 32) < 200_000
        npu.close()
    assert npu.cpu_times_us(case.data()[0], 32, runs=1)


def test_sums_of_pairs_do_not_saturate(host):
    """Instructions without VNNI add pairs of products in 16 bits, which the largest codes exceed."""
    generator = np.random.default_rng(1)
    for low, high in ((0, 255), (0, 0), (255, 255)):
        codes = np.array([low, high], np.uint8)
        queries, keys = (generator.choice(codes, (2, size, 128)) for size in (32, 96))
        found = np.zeros((2, 32, 96), np.uint8)
        shard = ScoresShard(2, 96, 128, 14)
        host.prepare(shard, 32).bind({"queries": queries, "keys": keys}, {"scores": found})()
        products = (queries.astype(int) - 128) @ (keys.astype(int) - 128).swapaxes(1, 2)
        exact = np.clip(np.rint(products / 2**14), -128, 127) + 128
        assert np.array_equal(found, exact)
        assert exact.max() > 130


def test_layers_share_the_graphs_of_an_exponent(host):
    shard = ScoresShard(2, 128, 64, 9)
    host.prepare(shard, 32)
    built = host.compiled_count
    host.prepare(dataclasses.replace(shard), 32)
    host.prepare(shard, 96)  # the CPU's sessions leave the rows open
    assert host.compiled_count == built


def test_another_exponent_is_another_graph(host):
    case = ScoresCase(2, 32, 128, 64)
    shard, inputs, exact = case.data()
    coarse = dataclasses.replace(shard, exponent=shard.exponent + 1)
    assert coarse.key != shard.key
    scores = np.zeros(exact.shape, np.uint8)
    host.prepare(coarse, 32).bind(inputs, {"scores": scores})()
    inner = (exact > 0) & (exact < 255)
    assert np.abs(2 * (scores.astype(int) - 128) - (exact - 128))[inner].max() <= 2


def test_a_call_reads_new_codes_in_place(host):
    shard, inputs, exact = ScoresCase(2, 64, 128, 64).data()
    scores = np.zeros(exact.shape, np.uint8)
    graph = host.prepare(shard, 64)
    call = graph.bind(inputs, {"scores": scores})
    call()
    first = scores.copy()
    inputs["keys"][:] = inputs["keys"][::-1].copy()
    inputs["queries"][:] = inputs["queries"][::-1].copy()
    call()
    assert np.array_equal(scores, first[::-1])
    assert graph.tensors.size_bytes == sum(array.nbytes for array in (*inputs.values(), scores))


def test_arrays_that_are_not_the_graphs_are_refused(host):
    shard, inputs, exact = ScoresCase(2, 32, 128, 64).data()
    graph, scores = host.prepare(shard, 32), np.zeros(exact.shape, np.uint8)
    queries, keys = inputs["queries"], inputs["keys"]
    for given_inputs, output, message in (
        ({"queries": queries}, scores, "inputs queries, keys, not queries"),
        ({"queries": keys, "keys": queries}, scores, r"queries of .*uint8 \[2, 32, 64\]"),
        ({"queries": queries, "keys": keys.view(np.int8)}, scores, r"keys of .*uint8 .*int8"),
        (inputs, scores[:, :, ::-1], "scores of .*not contiguous"),
        (inputs, np.zeros((2, 32, 256), np.uint8)[:, :, :128], "scores of .*not contiguous"),
    ):
        with pytest.raises(GraphError, match=message):
            graph.bind(given_inputs, {"scores": output})
    square = ScoresShard(1, 64, 64, 8)
    shared = np.zeros((1, 64, 64), np.uint8)
    with pytest.raises(GraphError, match="keys and scores of scores of 1 head overlap"):
        host.prepare(square, 64).bind({"queries": shared.copy(), "keys": shared}, {"scores": shared})


def test_legal_lengths_are_whole_tiles(host):
    for npu in (host, *([QnnNpu(emulator=True)] if USABLE else [])):
        legal = [length for length in npu.standard_lengths if npu.forms(SHARD.shape, length)]
        assert legal == [length for length in npu.standard_lengths if length >= 32]
        for length in (1, 100):
            with pytest.raises(GraphError, match=rf"cannot compute scores of 2 heads .* at {length} tokens"):
                npu.prepare(SHARD, length)


def test_sizes_are_positive_and_exponents_those_of_scales():
    for change in ({"heads": 0}, {"keys": -1}, {"exponent": -1}, {"exponent": 17}):
        with pytest.raises(GraphError, match=r"scores of .* need positive sizes, not .* exponent of 0 to 16"):
            dataclasses.replace(SHARD, **change)
