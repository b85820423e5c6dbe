"""Groups of experts in one NPU graph, against the graphs of single experts."""

import dataclasses

import numpy as np
import onnx
import pytest

from heterollm.base import GraphError
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu import ExpertsShard, QnnNpu, qnn_available
from heterollm.kernels.npu.graphs import graph_identity, shard_digest, write_graph
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
slow = [*emulated, pytest.mark.slow]
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
KINDS = [
    {},
    {"symmetric": False, "biased": True},
    {"integer": True},
    {"bits": 8, "block": 64},
    {"bits": 16, "activation": "gelu_tanh", "biased": True},
]


@pytest.fixture
def make_group(make_block):
    """A factory of groups of random experts of hidden 128 and width 64."""

    def make(experts, hidden=128, width=64, **kind):
        parts = [make_block(hidden, width, seed=10 * own, **kind) for own in experts]
        return ExpertsShard(
            tuple(experts), tuple(dataclasses.replace(part, weights_key="random") for part in parts)
        )

    return make


def run(npu, shard, capacity, form=None, counts=None, seed=0):
    """Return input and output ``[experts, capacity, h]``; rows past the counts hold NaN."""
    number = len(shard.experts)
    x = np.random.default_rng(seed).standard_normal((number * capacity, shard.columns))
    x = x.astype(npu.activation_dtype)
    for expert, count in enumerate(counts or ()):
        x[expert * capacity + count : (expert + 1) * capacity] = np.nan
    y = np.full((number * capacity, shard.rows), 7, npu.activation_dtype)
    npu.prepare(shard, capacity, form).bind({"x": x}, {"y": y})()
    return x.reshape(number, capacity, -1), y.reshape(number, capacity, -1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("experts", [(5,), (3, 0), (7, 1, 4, 2, 6)], ids=str)
def test_a_group_gives_what_its_experts_give_alone(host, make_group, exact_block, experts, kind):
    shard = make_group(experts, **kind)
    for form in host.forms(shard.shape, 32):
        x, y = run(host, shard, 32, form)
        for own, part in enumerate(shard.parts):
            alone, single = (
                np.zeros((32, part.rows), np.float32),
                dataclasses.replace(part, weights_key=f"{own}"),
            )
            host.prepare(single, 32, form).bind({"x": x[own].copy()}, {"y": alone})()
            host.release(single)
            assert np.array_equal(y[own], alone)
            gate = "fp16" if part.integer_inputs else "fp32"
            assert linear_errors(y[own], exact_block(part, x[own])).within(gate)
    host.release(shard)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_past_an_experts_tokens_do_not_reach_others(host, make_group, kind):
    shard, counts = make_group((2, 9, 4, 0), **kind), (32, 0, 1, 17)
    for form in host.forms(shard.shape, 32):
        _, full = run(host, shard, 32, form)
        _, padded = run(host, shard, 32, form, counts)
        for own, count in enumerate(counts):
            assert np.array_equal(padded[own, :count], full[own, :count])


def test_one_session_serves_all_capacities(npu, make_group, exact_block):
    shard = make_group((1, 0))
    for capacity in (32, 128, 64):
        x, y = run(npu, shard, capacity, seed=capacity)
        for own, part in enumerate(shard.parts):
            assert linear_errors(y[own], exact_block(part, x[own])).within("fp32")
    assert npu.compiled_count == 1


def test_several_groups_of_a_layer_run_beside_each_other(host, make_group, exact_block):
    groups = [make_group(experts) for experts in ((0, 1), (2, 3), (1, 0))]
    assert len({group.key for group in groups}) == len({shard_digest(group) for group in groups}) == 3
    for group in groups * 2:
        x, y = run(host, group, 32)
        for own, part in enumerate(group.parts):
            assert linear_errors(y[own], exact_block(part, x[own])).within("fp32")


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_graphs_keep_to_what_hexagon_takes(make_group, tmp_path, dtype):
    for kind in KINDS:
        if kind.get("integer"):
            continue
        shard = make_group((4, 1, 6), **kind)
        forms = ["ffn", "ffn_weight_first"] if kind.get("bits") == 16 else ["ffn"]
        for form in forms:
            graph = onnx.load(write_graph(shard, form, dtype, tmp_path, 32), load_external_data=False).graph
            onnx.checker.check_model(str(tmp_path / "graph.onnx"), full_check=True)
            kinds = [node.op_type for node in graph.node]
            assert not {"Cast", "DequantizeLinear"} & set(kinds)
            assert (kinds[0], kinds[-1], kinds.count("Sigmoid")) == ("Split", "Concat", 3)
            for value in (graph.input[0], graph.output[0]):
                assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [1, 3 * 32, 128]


def test_keys_tell_groups_apart(make_group):
    shard = make_group((4, 1))
    assert (shard.group, shard.rows, shard.columns, shard.label) == (
        "experts",
        128,
        128,
        "experts 4, 1 of layer 1",
    )
    assert shard.weight_bytes == 2 * shard.parts[0].weight_bytes
    same = make_group((4, 1))
    assert (shard.key, shard_digest(shard)) == (same.key, shard_digest(same))
    other_weights = ExpertsShard((4, 1), (shard.parts[0], make_group((4, 2)).parts[1]))
    assert shard_digest(other_weights) != shard_digest(shard)
    others = [make_group((1, 4)), make_group((4,)), make_group((4, 1, 0)), make_group((4, 1), biased=True)]
    others.append(make_group((4, 1), activation="gelu_tanh"))
    found = [shard, shard.parts[0], *others]
    assert len({own.key for own in found}) == len(found)
    identities = {str(graph_identity(own, "ffn", 32)) for own in found}
    assert len(identities) == len(found)


def test_experts_that_do_not_go_together_are_refused(make_group):
    one = make_group((0, 1))
    for experts, parts, message in (
        ((), (), "needs each once"),
        ((0, 0), one.parts, "needs each once"),
        ((0,), one.parts, "needs each once, with weights, not 2"),
        ((0, 1), (one.parts[0], dataclasses.replace(one.parts[1], layer=3)), "differ in layer"),
        ((0, 1), (one.parts[0], make_group((1,), bits=8).parts[0]), "differ in layer, shape"),
        ((0, 1), (one.parts[0], make_group((1,), width=128).parts[0]), "differ in layer, shape"),
        ((0, 1), (one.parts[0], make_group((1,), biased=True).parts[0]), "differ in layer, shape"),
    ):
        with pytest.raises(GraphError, match=message):
            ExpertsShard(experts, parts)


def test_a_backend_limits_the_weights_of_a_graph(npu, make_group):
    shard = make_group((0, 1))
    npu.graph_weight_bytes = shard.weight_bytes
    npu.prepare(shard, 32)
    npu.graph_weight_bytes -= 1
    with pytest.raises(GraphError, match=r"experts 0, 1 of layer 1 have .* takes .* in one graph"):
        npu.prepare(shard, 32)
    npu.prepare(shard.parts[0], 32)


def test_capacities_are_standard_lengths(npu, make_group):
    shard = make_group((0, 1))
    with pytest.raises(GraphError, match="no graphs of length 48"):
        npu.prepare(shard, 48)
    stepped = WeightFormat(4, 32, scales="stepped")
    shape = dataclasses.replace(shard.shape, one=dataclasses.replace(shard.shape.one, weight=stepped))
    assert "ffn_integer" in npu.forms(shape.one, 32)
    assert npu.forms(shape, 32) == ("ffn",)


@pytest.mark.parametrize(
    ("experts", "capacity", "kind"),
    [
        pytest.param((1, 0), 32, {}, marks=emulated),
        pytest.param((0, 1, 2, 3, 4, 5, 6, 7), 64, {}, marks=slow),
        pytest.param((0, 1, 2), 64, {"symmetric": False, "biased": True}, marks=slow),
        pytest.param((0, 1, 2, 3), 32, {"bits": 16}, marks=slow),
        pytest.param((0, 1), 128, {"bits": 16, "activation": "gelu_tanh"}, marks=slow),
    ],
)
def test_the_emulator_is_within_the_gate(emulator, make_group, exact_block, experts, capacity, kind):
    shard = make_group(experts, **kind)
    counts = [(7 * own + 5) % (capacity + 1) for own in experts]
    for form in emulator.forms(shard.shape, capacity):
        x, y = run(emulator, shard, capacity, form, counts)
        for own, (part, count) in enumerate(zip(shard.parts, counts, strict=True)):
            if count:
                assert linear_errors(y[own, :count], exact_block(part, x[own, :count])).within("fp16")


@pytest.mark.parametrize("kind", [pytest.param("second process", marks=slow)])
def test_the_context_of_a_group_is_cached(kind, make_group, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    shard = make_group((3, 1))
    for counts in ((1, 0), (0, 1)):
        npu = QnnNpu(emulator=True)
        run(npu, shard, 32)
        assert (npu.compiled_count, npu.loaded_count) == counts
        assert npu.open_bytes == shard.weight_bytes + 2 * 2 * 2 * 32 * 128
        npu.close()


def test_a_simulated_npu_takes_groups(make_group):
    npu = open_device("sim:snapdragon-8gen3").npu
    shard = make_group((0, 1, 2, 3))
    works = [npu.prepare(own, 64).work for own in (shard, shard.parts[0])]
    assert works[0] == dataclasses.replace(works[1], experts=4)
    assert npu.graph_weight_bytes == npu.addressable_bytes // 4
