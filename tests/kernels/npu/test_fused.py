"""Graphs with a norm of the residual stream: before q, k, v; and between o and a feed-forward network."""

import numpy as np
import pytest

from heterollm.kernels.formats import linear_errors, quantize, take_columns, take_rows
from heterollm.kernels.formats.edge_codes import CodeGrid
from heterollm.kernels.npu import (
    FfnRanges,
    FfnShard,
    FusedOutput,
    FusedRanges,
    LinearRanges,
    LinearShard,
    StreamNorm,
    qnn_available,
    step_of,
)

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
HIDDEN, WIDTH, HEADS = 256, 512, 320
EPSILON = 1e-5
LENGTHS = [1, 8, 33, 64]


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
