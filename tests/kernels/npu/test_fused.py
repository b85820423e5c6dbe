"""Graphs with a norm of the residual stream: before q, k, v; and between o and a feed-forward network."""

import dataclasses

import numpy as np
import pytest

from heterollm.base import GraphError
from heterollm.kernels.formats import linear_errors, quantize, take_columns, take_rows
from heterollm.kernels.formats.edge_codes import CodeGrid
from heterollm.kernels.npu import (
    FfnRanges,
    FfnShape,
    FfnShard,
    FusedOutput,
    FusedRanges,
    LinearRanges,
    LinearShape,
    LinearShard,
    StreamNorm,
    qnn_available,
    step_of,
)
from heterollm.kernels.npu.graphs import shard_digest
from heterollm.kernels.npu.qnn_held import BLOCK_OPTION
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
HIDDEN, WIDTH, HEADS = 256, 512, 320
EPSILON = 1e-5
LENGTHS = [1, 8, 33, 64]
BLOCKS = WeightFormat(4, 32, scales="stepped")


def weights(generator, rows, columns):
    values = generator.standard_normal((rows, columns)) / np.sqrt(columns)
    return quantize(values.astype(np.float32), bits=4, block=32, scale_kind="stepped")


def exact(weight):
    return weight.dequantize().astype(np.float64)


def largest(values):
    return float(np.abs(values).max())


def normed(norm, stream):
    mean = np.square(stream).mean(axis=-1, keepdims=True)
    return stream / np.sqrt(mean + norm.epsilon) * norm.weight


def norm_of(generator):
    return StreamNorm(generator.uniform(-0.5, 1.5, HIDDEN).astype(np.float32), EPSILON)


def rounded(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16).astype(np.float64)


def linear_case(tokens, seed=0):
    """Norm and q, k, v, the residual stream, and the exact output."""
    generator = np.random.default_rng([seed, tokens])
    norm, weight = norm_of(generator), weights(generator, 384, HIDDEN)
    stream = rounded(generator, tokens, HIDDEN)
    x = normed(norm, stream)
    y = x @ exact(weight).T
    ranges = LinearRanges(largest(y), largest(stream), normed=largest(x))
    rows = (0, 256), (0, 64), (0, 64)
    return LinearShard(weight, 0, "norm_qkv", rows, f"fused {seed}", ranges=ranges, norm=norm), stream, y


def ffn_case(tokens, cut=WIDTH, seed=0):
    """O, norm and some of a network's width, the inputs, and the exact output."""
    generator = np.random.default_rng([seed, tokens, cut])
    norm, o = norm_of(generator), weights(generator, HIDDEN, HEADS)
    gate_up, down = weights(generator, 2 * WIDTH, HIDDEN), weights(generator, HIDDEN, WIDTH)
    stacked, columns = take_rows(gate_up, [(0, cut), (WIDTH, WIDTH + cut)]), take_columns(down, 0, cut)
    x, stream = rounded(generator, tokens, HEADS), rounded(generator, tokens, HIDDEN)
    output = x @ exact(o).T
    sums = stream + output
    inputs = normed(norm, sums)
    gate, up = np.split(inputs @ exact(stacked).T, 2, axis=1)
    activated = gate / (1 + np.exp(-gate))
    product = activated * up
    network = product @ exact(columns).T
    fused = FusedRanges(largest(x), largest(stream), largest(output), largest(sums))
    inner = map(largest, (inputs, gate, up, activated, product, network))
    ranges = FfnRanges(*inner, partial=largest(network), fused=fused).of_shard(whole=cut == WIDTH)
    shard = FfnShard(
        *(stacked, columns, "silu", None, 0, f"fused {seed}", (0, cut)),
        ranges=ranges,
        fused=FusedOutput(o, norm, is_added=cut == WIDTH),
    )
    return shard, {"x": x, "stream": stream}, network + output if cut == WIDTH else network


def run(npu, shard, inputs, form):
    """Return the output of a graph of floats or of codes as the GPU's kernels make them."""
    tokens = len(inputs["x"])
    integer = form in ("integer", "ffn_integer")
    length = -(-tokens // 32) * 32 if integer else tokens
    graph = npu.prepare(shard, length, form, any_length=True)
    given = {name: np.zeros((length, own.shape[1])) for name, own in inputs.items()}
    for name, own in inputs.items():
        given[name][:tokens] = own
    got = np.zeros((length, shard.rows), np.uint16 if integer else npu.activation_dtype)
    if not integer:
        bound = {name: own.astype(npu.activation_dtype) for name, own in given.items()}
        graph.bind(bound, {"y": got})()
        return got[:tokens]
    grids = {"x": shard.ranges.grid}
    if len(inputs) > 1:
        grids["stream"] = CodeGrid(step_of(shard.ranges.fused.stream), 1.0, per_token=False)
    codes = {name: grids[name].codes(own.astype(np.float32)) for name, own in given.items()}
    graph.bind({name: own for name, (own, _) in codes.items()}, {"y": got})()
    return shard.ranges.grid.values(got, codes["x"][1])[:tokens]


def cases():
    for form in ("matmul_nbits", "integer"):
        yield form, linear_case
    for form in ("ffn", "ffn_integer"):
        yield form, ffn_case
        yield form, lambda tokens: ffn_case(tokens, 192)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_graphs_are_within_the_gate_on_the_host(host, tokens):
    for form, case in cases():
        shard, inputs, y = case(tokens)
        inputs = inputs if isinstance(inputs, dict) else {"x": inputs}
        gate = "fp16" if "integer" in form else "fp32"
        assert linear_errors(run(host, shard, inputs, form), y).within(gate), (form, shard.label)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(1, marks=emulated),
        *(pytest.param(tokens, marks=[*emulated, pytest.mark.slow]) for tokens in LENGTHS[1:]),
    ],
)
def test_graphs_are_within_the_gate_on_the_emulator(emulator, tokens):
    for form, case in cases():
        shard, inputs, y = case(tokens)
        inputs = inputs if isinstance(inputs, dict) else {"x": inputs}
        errors = linear_errors(run(emulator, shard, inputs, form), y)
        print(f"{form} {shard.row_ranges} {tokens} tokens: {errors}")
        assert errors.within("fp16"), (form, shard.row_ranges, errors)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.skipif(not USABLE, reason=REASON)
@pytest.mark.parametrize(
    ("form", "case"), [("ffn", ffn_case), ("ffn_integer", ffn_case), ("integer", linear_case)]
)
def test_graphs_stay_in_the_forms_that_hexagon_has(compiled, form, case):
    """One norm, and in integers no operation in floats; nothing falls back, or the session would not open."""
    shard, _, _ = case(32)
    operations, _ = compiled(shard, form, 32, BLOCK_OPTION if "integer" in form else {})
    assert sum("rmsnorm" in name for name in operations) >= 1
    floats = [name for name in operations if "fp16" in name or "Dequantize" in name]
    assert bool(floats) is (form == "ffn"), floats


def test_a_fused_graph_needs_its_ranges(host):
    shard, _, _ = ffn_case(32)
    for ranges in (None, dataclasses.replace(shard.ranges, fused=None)):
        with pytest.raises(GraphError, match="no calibrated ranges"):
            host.prepare(dataclasses.replace(shard, ranges=ranges), 32, "ffn_integer")


def test_only_weights_in_blocks_are_fused(host):
    for weight, some in (
        (WeightFormat(16), False),
        (WeightFormat(8, 32, scales="tensor"), False),
        (BLOCKS, True),
    ):
        assert bool(host.forms(LinearShape(weight, 256, normed=True), 32)) is some
        assert bool(host.forms(FfnShape(weight, 256, 512, "silu", normed=True), 32)) is some


def test_shards_differ_by_what_is_added():
    shard, _, _ = ffn_case(32)
    other = dataclasses.replace(shard, fused=dataclasses.replace(shard.fused, is_added=False))
    assert shard.key != other.key
    norm = dataclasses.replace(shard.fused.norm, weight=shard.fused.norm.weight * 2)
    assert shard_digest(shard) != shard_digest(
        dataclasses.replace(shard, fused=dataclasses.replace(shard.fused, norm=norm))
    )
