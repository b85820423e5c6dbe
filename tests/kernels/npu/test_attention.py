"""Attention of an NPU graph whose queries, keys and values are inputs, against float64."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import GraphError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.formats.tolerances import ATTENTION_NMSE
from heterollm.kernels.npu import RANGE_KEYS, AttentionShard, QnnNpu, qnn_available
from heterollm.kernels.operators import AttentionGraphCase

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
slow = [*emulated, pytest.mark.slow]
SHARD = AttentionShard(heads=4, kv_heads=2, keys=256, head_dim=64)


def check(case, npu, compute):
    errors = linear_errors(*case.on_npu(npu))
    assert errors.within(compute, ATTENTION_NMSE), (case, errors)


@given(
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 2]),
    tokens=st.sampled_from([32, 96, 128]),
    keys=st.integers(1, 3 * RANGE_KEYS),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    spread=st.sampled_from([1.0, 8.0]),
    data=st.data(),
)
def test_the_host_attends_as_float64_does(host, group, kv_heads, tokens, keys, head_dim, spread, data):
    position = data.draw(st.integers(0, keys - 1))
    shard = AttentionShard(group * kv_heads, kv_heads, keys, head_dim)
    check(AttentionGraphCase(shard, tokens, position, spread), host, "fp32")


@pytest.mark.parametrize(
    ("shard", "tokens", "position", "spread"),
    [
        pytest.param(SHARD, 32, 100, 30.0, marks=emulated),
        pytest.param(SHARD, 32, 0, 1.0, marks=slow),
        # Whole ranges are hidden from the first tokens.
        pytest.param(dataclasses.replace(SHARD, keys=640), 64, 0, 1.0, marks=slow),
        pytest.param(dataclasses.replace(SHARD, keys=1100), 32, 1000, 10.0, marks=slow),
        pytest.param(AttentionShard(7, 1, 1024, 128), 128, 700, 1.0, marks=slow),
        pytest.param(AttentionShard(3, 3, 600, 80), 32, 560, 4.0, marks=slow),
        pytest.param(AttentionShard(4, 1, 512, 256), 32, 400, 1.0, marks=slow),
        pytest.param(AttentionShard(8, 2, 2048, 64), 256, 1500, 1.0, marks=slow),
    ],
)
def test_the_emulator_is_within_the_gate_of_float16(emulator, shard, tokens, position, spread):
    check(AttentionGraphCase(shard, tokens, position, spread), emulator, "fp16")


@pytest.mark.parametrize("soc", [pytest.param(soc, marks=slow) for soc in ("36", "60", "69", "87")])
def test_every_hexagon_with_float16_takes_the_graph(soc, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    assert QnnNpu(emulator=True, soc_model=soc).build(SHARD, 128).compiled


def test_hidden_keys_and_rows_do_not_count(host):
    case = AttentionGraphCase(dataclasses.replace(SHARD, keys=700), 64, 600)
    inputs, exact = case.data(host.activation_dtype)
    inputs["keys"][:, :, 664:], inputs["values"][:, 664:] = 1e3, 1e4
    inputs["queries"][:, 50:] = 10.0
    output = np.zeros(exact.shape, np.float32)
    host.prepare(case.shard, 64).bind(inputs, {"y": output})()
    assert linear_errors(output[:50], exact[:50]).within("fp32", ATTENTION_NMSE)


def test_layers_and_lengths_share_a_session(host):
    host.prepare(SHARD, 32)
    built = host.compiled_count
    host.prepare(dataclasses.replace(SHARD), 96)
    assert host.compiled_count == built
    host.prepare(dataclasses.replace(SHARD, keys=257), 96)
    assert host.compiled_count == built + 1


def test_legal_lengths_are_whole_tiles(host):
    for npu in (host, *([QnnNpu(emulator=True)] if USABLE else [])):
        assert [length for length in (1, 32, 96, 100) if npu.forms(SHARD.shape, length)] == [32, 96]
        with pytest.raises(GraphError, match=r"cannot compute attention of 4 heads .* at 100 tokens"):
            npu.prepare(SHARD, 100)


def test_sizes_are_positive_and_heads_share_keys():
    for change in ({"heads": 0}, {"keys": -1}, {"head_dim": 0}, {"kv_heads": 3}):
        with pytest.raises(GraphError, match=r"attention of .* needs positive sizes, not .* share"):
            dataclasses.replace(SHARD, **change)


def test_the_context_counts_its_inputs_and_outputs(host):
    tensors = host.prepare(SHARD, 32).tensors
    assert tensors.size_bytes == 4 * (4 * 32 * 64 + 2 * 2 * 256 * 64 + 32 + 32 * 4 * 64)
