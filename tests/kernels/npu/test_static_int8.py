"""Graphs of 8-bit weights with one scale for a tensor: activations of 8 bits or 16, and what is refused."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import GraphError
from heterollm.kernels.formats import concatenate_rows, largest_code, linear_errors, quantize, zero_code
from heterollm.kernels.npu import (
    FfnShape,
    HostNpu,
    LinearRanges,
    LinearShape,
    LinearShard,
    QnnNpu,
    qnn_available,
)
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.npu.qnn_held import BLOCK_OPTION
from heterollm.kernels.npu.session import session_options
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
ONE_SCALE = WeightFormat(8, 32, scales="tensor")
BITS = {"static_int8": 8, "integer": 16}


def case(rows=(96, 32), columns=256, tokens=64, seed=0, form="static_int8"):
    """Members of unlike sizes, each with its own scale and output range, an input, and the exact output."""
    generator = np.random.default_rng(seed)
    members = [generator.standard_normal((own, columns)) * 3.0**-place for place, own in enumerate(rows)]
    weight = concatenate_rows(
        [
            quantize((member / np.sqrt(columns)).astype(np.float32), bits=8, block=32, scale_kind="tensor")
            for member in members
        ]
    )
    x = generator.standard_normal((tokens, columns), np.float32)
    y = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    largest = [float(np.abs(part).max()) for part in np.split(y, np.cumsum(rows)[:-1], axis=1)]
    ranges = LinearRanges(max(largest), float(np.abs(x).max()), BITS[form], tuple(largest))
    row_ranges = tuple((0, own) for own in rows)
    return LinearShard(weight, 0, "qkv", row_ranges, f"one scale {seed} {rows}", ranges=ranges), x, y


def run(npu, shard, codes, form):
    got = np.zeros((len(codes), shard.rows), shard.ranges.grid.dtype)
    npu.prepare(shard, len(codes), form).bind({"x": codes}, {"y": got})()
    return got


def exact_codes(shard, codes):
    """Return the output codes before rounding, in exact arithmetic on the input's codes."""
    grid, zero = shard.ranges.grid, zero_code(shard.ranges.bits)
    x = (codes.astype(np.float64) - zero) * grid.input_step
    rows = [stop - start for start, stop in shard.row_ranges]
    y = x @ shard.weight.dequantize().astype(np.float64).T / np.repeat(grid.member_steps, rows)
    return np.clip(y, -zero, largest_code(shard.ranges.bits)) + zero


def check(npu, shard, codes, form, steps):
    found = run(npu, shard, codes, form)
    assert np.abs(found - exact_codes(shard, codes)).max() <= steps


@given(
    rows=st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple),
    columns=st.sampled_from([32, 320]),
    tokens=st.sampled_from([64, 128]),
    seed=st.integers(0, 99),
)
def test_the_host_rounds_exact_sums(host, rows, columns, tokens, seed):
    """ONNX Runtime multiplies integers: half a step is the rounding of the output."""
    shard, x, _ = case(rows, columns, tokens, seed)
    check(host, shard, shard.ranges.grid.codes(x)[0], "static_int8", 0.502)
    host.release(shard)


def test_sums_of_pairs_do_not_saturate(host):
    """Instructions without VNNI add pairs of products in 16 bits, which large codes exceed."""
    shard, x, _ = case(columns=1024)
    wide = dataclasses.replace(shard.ranges, members=tuple(100 * own for own in shard.ranges.members))
    shard = dataclasses.replace(shard, ranges=wide)
    codes = np.random.default_rng(1).choice(np.array([0, 255], np.uint8), x.shape, p=[0.1, 0.9])
    check(host, shard, codes, "static_int8", 0.502)


def test_16_bits_are_within_the_gate_on_the_host(host):
    shard, x, y = case(form="integer")
    grid = shard.ranges.grid
    codes, factors = grid.codes(x)
    assert linear_errors(grid.values(run(host, shard, codes, "integer"), factors, (96, 32)), y).within("fp16")


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        pytest.param((128,), "static_int8", marks=emulated),
        *(
            pytest.param(rows, form, marks=[*emulated, pytest.mark.slow])
            for rows, form in (((96, 32), "static_int8"), ((96, 32), "integer"))
        ),
    ],
)
def test_the_emulator_is_within_a_step(emulator, rows, form):
    """Of 8 bits; 16-bit forms are not exact integers on the emulator."""
    shard, x, y = case(rows, form=form)
    grid = shard.ranges.grid
    codes, factors = grid.codes(x)
    if form == "static_int8":
        check(emulator, shard, codes, form, 1.0)
    else:
        found = grid.values(run(emulator, shard, codes, form), factors, rows)
        assert linear_errors(found, y).within("fp16")


@pytest.mark.parametrize(
    ("form", "length"),
    [
        pytest.param(form, length, marks=[*emulated, pytest.mark.slow])
        for form, length in (("static_int8", 64), ("integer", 32))
    ],
)
def test_the_compiler_keeps_integers(form, length, compiled):
    shard, _, _ = case((384, 128), 512, form=form)
    operations, blocks = compiled(shard, form, length, BLOCK_OPTION)
    assert any(name.startswith("q::ConvLayer_s1") for name in operations)
    assert not [name for name in operations if ".fp16" in name or "uantize" in name or "Cast" in name]
    assert blocks < 150


def test_onnx_runtime_computes_in_integers(tmp_path):
    shard, _, _ = case()
    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    model = write_graph(shard, "static_int8", np.dtype(np.float32), tmp_path)
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node] == ["QLinearMatMul"]


@pytest.mark.parametrize("make", [HostNpu, pytest.param(lambda: QnnNpu(emulator=True), marks=emulated)])
def test_weights_with_one_scale_have_integer_forms_alone(make):
    npu = make()
    for length, expected in ((1, ()), (31, ()), (32, ("integer",)), (64, ("static_int8", "integer"))):
        assert npu.forms(LinearShape(ONE_SCALE, 8192), length) == expected
        assert npu.forms(LinearShape(ONE_SCALE, 8192, integer_inputs=True), length) == ()
        other = npu.forms(LinearShape(WeightFormat(8, 32), 8192), length)
        assert not {"static_int8", "integer"}.intersection(other)
        assert npu.forms(FfnShape(ONE_SCALE, 8192, 256, "silu"), length) == ()
    npu.close()


def with_weight(shard, **changes):
    return dataclasses.replace(shard, weight=dataclasses.replace(shard.weight, **changes))


def with_ranges(shard, **changes):
    return dataclasses.replace(shard, ranges=dataclasses.replace(shard.ranges, **changes))


REFUSED = {
    "no ranges": (lambda shard: dataclasses.replace(shard, ranges=None), "no calibrated ranges of 8 bits"),
    "ranges of 16 bits": (lambda shard: with_ranges(shard, bits=16), "no calibrated ranges of 8 bits"),
    "free scales": (lambda shard: with_weight(shard, scale_kind="free"), "one scale for a tensor"),
    "unlike scales": (
        lambda shard: with_weight(shard, scales=shard.weight.scales * np.array([1] * 7 + [2], np.float16)),
        "one scale for a tensor",
    ),
    "negative scales": (lambda shard: with_weight(shard, scales=-shard.weight.scales), "one scale"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_integers_would_change_is_refused(reason, tmp_path):
    change, message = REFUSED[reason]
    with pytest.raises(GraphError, match=message):
        write_graph(change(case()[0]), "static_int8", np.dtype(np.float32), tmp_path)


def test_8_bit_ranges_are_static():
    with pytest.raises(GraphError, match="lack that of the input"):
        LinearRanges(1.0, bits=8)
    assert LinearRanges(1.27, 2.54, bits=8).grid.output_step == pytest.approx(0.01)


def test_each_member_has_its_own_range(host):
    """On one grid for all, the small member keeps three bits less."""
    shard, x, y = case(rows=(64, 64, 64))
    codes, factors = shard.ranges.grid.codes(x)
    own = shard.ranges.grid.values(run(host, shard, codes, "static_int8"), factors, (64, 64, 64))
    common = with_ranges(shard, members=())
    shared = common.ranges.grid.values(run(host, common, codes, "static_int8"), factors)
    errors = [np.square(found - y)[:, 128:].mean() for found in (own, shared)]
    assert errors[0] < errors[1] / 8
