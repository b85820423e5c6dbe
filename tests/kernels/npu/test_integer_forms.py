"""Graph forms with 16-bit activations: numbers, the compiler's own operations, and all that is refused."""

import contextlib
import dataclasses

import numpy as np
import pytest

from heterollm.base import GraphError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, quantize, row_steps, take_columns
from heterollm.kernels.npu import (
    INTEGER_FORMS,
    FfnRanges,
    FfnShape,
    FfnShard,
    HostNpu,
    LinearRanges,
    LinearShape,
    LinearShard,
    QnnNpu,
    qnn_available,
)
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.npu.qnn_compile import compile_graph
from heterollm.kernels.npu.qnn_held import BLOCK_OPTION
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
STEPPED = WeightFormat(4, 32, scales="stepped")


def weight_of(generator, rows, columns, block=32, tails=False):
    values = generator.standard_t(3, (rows, columns)) if tails else generator.standard_normal((rows, columns))
    return quantize((values / np.sqrt(columns)).astype(np.float32), bits=4, block=block, scale_kind="stepped")


def exact(weight):
    return weight.dequantize().astype(np.float64)


def linear_case(rows=96, columns=256, tokens=32, block=32, seed=0, outliers=0, **options):
    """A linear shard, its input with outlier channels of 50 times the others, and the exact output."""
    generator = np.random.default_rng(seed)
    weight = weight_of(generator, rows, columns, block, **options)
    x = generator.standard_normal((tokens, columns))
    x[:, generator.choice(columns, outliers, replace=False)] *= 50
    x = x.astype(np.float16).astype(np.float32)
    y = x.astype(np.float64) @ exact(weight).T
    ranges = LinearRanges(float((np.abs(y).max(axis=1) / np.abs(x).max(axis=1)).max()))
    return LinearShard(weight, 0, "o", ((0, rows),), f"integer {seed}", ranges=ranges), x, y


def ffn_case(hidden=128, width=192, cut=None, tokens=32, seed=0):
    """An ffn shard: the first ``cut`` rows of its width, all by default."""
    generator = np.random.default_rng(seed)
    gate, up = (weight_of(generator, width, hidden) for _ in range(2))
    down = weight_of(generator, hidden, width)
    cut = width if cut is None else cut
    x = generator.standard_normal((tokens, hidden)).astype(np.float16).astype(np.float32)
    gated, upped = (x.astype(np.float64) @ exact(part)[:cut].T for part in (gate, up))
    activated = gated / (1 + np.exp(-gated))
    product = activated * upped
    y = product @ exact(down)[:, :cut].T
    values = (x, gated, upped, activated, product, y)
    ranges = FfnRanges(*(float(np.abs(value).max()) for value in values))
    stacked = quantized_rows(gate, up, cut)
    columns = take_columns(down, 0, cut)
    return FfnShard(stacked, columns, "silu", None, 0, f"ffn {seed}", (0, cut), ranges=ranges), x, y


def quantized_rows(gate, up, cut):
    codes = np.concatenate([gate.codes[:cut], up.codes[:cut]])
    scales = np.concatenate([gate.scales[:cut], up.scales[:cut]])
    return QuantizedTensor(codes, scales, None, 4, gate.block, scale_kind="stepped")


def run(npu, shard, x, form, factor=None):
    """Return the output of a graph, with codes as the GPU's kernels make them; ``factor`` is all tokens'."""
    graph = npu.prepare(shard, len(x), form)
    grid = shard.ranges.grid
    if factor is None:
        given, factors = grid.codes(x)
    else:
        given, _ = dataclasses.replace(grid, per_token=False).codes(x / factor)
        factors = np.full(len(x), factor, np.float32)
    got = np.zeros((len(x), shard.rows), np.uint16)
    graph.bind({"x": given}, {"y": got})()
    return grid.values(got, factors)


def quality_db(actual, expected):
    return -10 * np.log10(linear_errors(actual, expected).nmse)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_linear_is_within_the_gate_on_the_host(host, block):
    shard, x, y = linear_case(block=block, seed=block)
    assert linear_errors(run(host, shard, x, "integer"), y).within("fp16")


@pytest.mark.parametrize("cut", [192, 64])
def test_an_ffn_is_within_the_gate_on_the_host(host, cut):
    shard, x, y = ffn_case(cut=cut)
    assert linear_errors(run(host, shard, x, "ffn_integer"), y).within("fp16")


@pytest.mark.parametrize(
    ("block", "tokens"),
    [
        pytest.param(32, 32, marks=emulated),
        *(
            pytest.param(b, m, marks=[*emulated, pytest.mark.slow])
            for b, m in ((16, 32), (64, 64), (128, 256))
        ),
    ],
)
def test_a_linear_is_within_the_gate_on_the_emulator(emulator, block, tokens):
    shard, x, y = linear_case(block=block, tokens=tokens, seed=block + tokens)
    errors = linear_errors(run(emulator, shard, x, "integer"), y)
    assert errors.within("fp16"), errors


@pytest.mark.parametrize(
    "size", [pytest.param(512, marks=emulated), pytest.param(1024, marks=[*emulated, pytest.mark.slow])]
)
def test_a_scale_for_each_token_stands_outlier_channels(emulator, size):
    """On one static grid for all tokens the same graph is several dB worse."""
    shard, x, y = linear_case(size, size, outliers=6, seed=size)
    own = run(emulator, shard, x, "integer")
    assert linear_errors(own, y).within("fp16")
    factor = 1.5 * float(np.abs(x).max())
    wide = dataclasses.replace(shard, ranges=LinearRanges(float(np.abs(y).max()) / factor))
    static = run(emulator, wide, x, "integer", factor)
    assert quality_db(own, y) > 70
    assert quality_db(own, y) > quality_db(static, y) + 5


@pytest.mark.parametrize(
    "cut", [pytest.param(128, marks=emulated), pytest.param(192, marks=[*emulated, pytest.mark.slow])]
)
def test_an_ffn_is_within_the_gate_on_the_emulator(emulator, cut):
    """With 128 columns of down some rows lack their largest scale, and a block of zeros has it."""
    shard, x, y = ffn_case(cut=cut)
    assert row_steps(shard.down.scales).reaches_largest.all() == (cut == 192)
    errors = linear_errors(run(emulator, shard, x, "ffn_integer"), y)
    assert errors.within("fp16"), errors


@pytest.mark.parametrize("soc", ["30", "36", "60", "87"])
@pytest.mark.parametrize("form", [pytest.param("integer", marks=[*emulated, pytest.mark.slow])])
def test_every_hexagon_takes_the_form(soc, form, tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    npu = QnnNpu(emulator=True, soc_model=soc)
    assert form in npu.forms(LinearShape(STEPPED, 256), 32)
    built = npu.build(linear_case()[0], 32, form)
    assert built.compiled


@pytest.mark.parametrize(
    ("dtype", "compiles"),
    [pytest.param(*case, marks=[*emulated, pytest.mark.slow]) for case in (("f4", True), ("f2", False))],
)
def test_a_hexagon_without_float16_takes_the_form_with_wide_edges(dtype, compiles, tmp_path):
    """docs/integer-activations.md says so of chip 37, and why it is refused all the same."""
    model = write_graph(linear_case()[0], "integer", np.dtype(dtype), tmp_path, 32)
    target = QnnNpu(emulator=True, soc_model="37")._compiler_target("integer")
    with contextlib.nullcontext() if compiles else pytest.raises(GraphError, match="Cast"):
        compile_graph(model, tmp_path / "compiled.onnx", target, "integer", in_child=True)


def expanded(operations):
    """Operations that expand all weights to floats, or multiply in floats."""
    return [name for name in operations if "packed_quant_offset_to_fp16" in name or ".fp16" in name]


@pytest.mark.parametrize(
    "kind", [pytest.param("linear", marks=emulated), pytest.param("ffn", marks=emulated)]
)
def test_the_compiler_keeps_integers(kind, compiled):
    shard = linear_case(512, 512)[0] if kind == "linear" else ffn_case(256, 512, cut=256)[0]
    form = "integer" if kind == "linear" else "ffn_integer"
    operations, blocks = compiled(shard, form, 32, BLOCK_OPTION)
    assert not expanded(operations)
    assert any("expand_block_quant_to_pc_int8_weights" in name for name in operations)
    assert any(name.startswith("q::ConvLayer_s1") for name in operations)
    assert blocks < 150
    # Codes at the edges: nothing inside makes codes of floats or floats of codes.
    assert not [name for name in operations if "uantize" in name or "Cast" in name]


@pytest.mark.parametrize("form", [pytest.param("matmul_nbits", marks=emulated)])
def test_the_compiler_expands_the_weights_of_other_forms(form, compiled):
    operations, _ = compiled(linear_case(512, 512)[0], form, 32, {})
    assert expanded(operations)


@pytest.mark.parametrize("length", [pytest.param(31, marks=[*emulated, pytest.mark.slow])])
def test_a_length_off_the_tiles_has_many_more_blocks(length, compiled):
    shard = linear_case(512, 512)[0]
    _, blocks = compiled(shard, "integer", length, BLOCK_OPTION)
    _, tiled = compiled(shard, "integer", 32, BLOCK_OPTION)
    assert blocks > 3 * tiled


@pytest.mark.parametrize("without", [pytest.param("option", marks=[*emulated, pytest.mark.slow])])
def test_the_compiler_expands_the_weights_without_the_option(without, compiled):
    operations, _ = compiled(linear_case(512, 512)[0], "integer", 32, {})
    assert expanded(operations)


BACKENDS = [HostNpu, pytest.param(lambda: QnnNpu(emulator=True), marks=emulated)]


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("length", [1, 31, 33, 48, 32, 64, 256])
def test_the_forms_need_stepped_weights_and_whole_tiles(make, length):
    npu = make()
    for weight, integer_inputs in (
        (STEPPED, False),
        (STEPPED, True),
        (WeightFormat(4, 32), False),
        (WeightFormat(4, 32, symmetric=False), False),
        (WeightFormat(8, 32), False),
        (WeightFormat(16), False),
    ):
        legal = weight is STEPPED and not integer_inputs and length % 32 == 0
        forms = npu.forms(LinearShape(weight, 256, integer_inputs), length)
        assert ("integer" in forms) == legal
        assert forms[:1] != ("integer",)  # never the default
        for activation in ("silu", "gelu_tanh"):
            forms = npu.forms(FfnShape(weight, 256, 256, activation, integer_inputs), length)
            assert ("ffn_integer" in forms) == (legal and activation == "silu")
    with pytest.raises(GraphError):
        npu.prepare(linear_case()[0], 1, "integer")


def with_weight(shard, **changes):
    return dataclasses.replace(shard, weight=dataclasses.replace(shard.weight, **changes))


FREE = quantize(np.random.default_rng(3).standard_normal((96, 256)).astype(np.float32), bits=4, block=32)
REFUSED = {
    "no ranges": (lambda shard: dataclasses.replace(shard, ranges=None), "no calibrated ranges"),
    "free scales": (lambda shard: dataclasses.replace(shard, weight=FREE), "stepped scales"),
    "free scales called stepped": (
        lambda shard: with_weight(shard, scales=np.abs(FREE.scales)),
        "stepped scales",
    ),
    "negative scales": (lambda shard: with_weight(shard, scales=-shard.weight.scales), "stepped scales"),
    "zero points": (
        lambda shard: with_weight(shard, zero_points=np.full((96, 4), 0x88, np.uint8)),
        "stepped scales",
    ),
    "a multiple of 13 at most": (
        lambda shard: with_weight(shard, scales=thirteen(shard.weight.scales)),
        "do not reach 16",
    ),
}


def thirteen(scales):
    step = scales.max(axis=1, keepdims=True).astype(np.float64) / 16
    return (np.minimum(np.rint(scales / step), 13) * step).astype(np.float16)


@pytest.mark.parametrize("reason", REFUSED)
def test_weights_that_integers_would_change_are_refused(reason, tmp_path):
    change, message = REFUSED[reason]
    shard = change(linear_case()[0])
    with pytest.raises(GraphError, match=message):
        write_graph(shard, "integer", np.dtype(np.float16), tmp_path, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranges": None}, "no calibrated ranges"),
        ({"activation": "gelu_tanh"}, "gelu_tanh"),
        ({"bias": np.ones(384, np.float32)}, "has a bias"),
    ],
)
def test_ffns_that_the_graph_lacks_are_refused(changes, message, tmp_path):
    shard = dataclasses.replace(ffn_case()[0], **changes)
    with pytest.raises(GraphError, match=message):
        write_graph(shard, "ffn_integer", np.dtype(np.float32), tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_ranges_are_positive_and_finite(value):
    with pytest.raises(GraphError, match="calibrate"):
        LinearRanges(value)


def test_other_ranges_are_another_shard(host):
    shard, x, y = linear_case()
    narrow = dataclasses.replace(shard, ranges=LinearRanges(shard.ranges.outputs / 4))
    assert shard.key != narrow.key
    assert linear_errors(run(host, shard, x, "integer"), y).within("fp16")
    assert not linear_errors(run(host, narrow, x, "integer"), y).within("fp16")  # saturated


def test_rows_past_the_tokens_may_hold_any_codes(host):
    shard, x, _ = linear_case()
    first = run(host, shard, x, "integer")[:5]
    x[5:] *= 1000
    x[6:] = 0
    assert np.array_equal(run(host, shard, x, "integer")[:5], first)


def test_the_integer_forms_are_named():
    assert {"integer", "ffn_integer", "static_int8"} == INTEGER_FORMS
