import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from heterollm.base import CheckpointError, OptionError
from heterollm.kernels.formats import effective_block, quantize
from heterollm.kernels.formats.quantisation import BATCH_BYTES

FORMATS = [
    (bits, symmetric, block) for bits in (4, 8) for symmetric in (True, False) for block in (16, 32, 64, 128)
]


def block_errors(weight, values, block):
    difference = (weight.astype(np.float64) - values.astype(np.float64)).reshape(-1, block)
    return (difference**2).sum(axis=1)


def scaled_by_maximum(weight, bits, block, symmetric):
    """Plain scaling: the largest magnitude, or the range, on the outermost codes; scale in FP16."""
    blocks = weight.astype(np.float64).reshape(-1, block)
    levels = (1 << bits) - 1
    if symmetric:
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        scale = np.abs(blocks).max(axis=1, keepdims=True) / high
    else:
        bottom = np.minimum(blocks.min(axis=1, keepdims=True), 0)
        scale = (np.maximum(blocks.max(axis=1, keepdims=True), 0) - bottom) / levels
    scale = np.maximum(scale, 2.0**-24).astype(np.float16).astype(np.float64)
    if not symmetric:
        low = np.clip(np.rint(bottom / scale), -levels, 0)
        high = low + levels
    return (np.clip(np.rint(blocks / scale), low, high) * scale).reshape(weight.shape)


def reference_dequantize(tensor):
    """MatMulNBits' definition, element by element."""
    rows, blocks, _ = tensor.codes.shape
    result = np.empty((rows, blocks * tensor.block), np.float32)
    for row in range(rows):
        for column in range(blocks * tensor.block):
            group, offset = divmod(column, tensor.block)
            zero = 2 ** (tensor.bits - 1)
            if tensor.bits == 8:
                code = int(tensor.codes[row, group, offset])
                if tensor.zero_points is not None:
                    zero = int(tensor.zero_points[row, group])
            else:
                code = (int(tensor.codes[row, group, offset // 2]) >> 4 * (offset % 2)) & 15
                if tensor.zero_points is not None:
                    zero = (int(tensor.zero_points[row, group // 2]) >> 4 * (group % 2)) & 15
            result[row, column] = np.float32(code - zero) * np.float32(tensor.scales[row, group])
    return result


def test_effective_block_is_the_largest_power_of_two_that_divides():
    assert effective_block(4096, 128) == 128
    assert effective_block(4864, 128) == 128
    assert effective_block(896, 512) == 128
    assert effective_block(352, 128) == 32
    assert effective_block(304, 64) == 16
    assert effective_block(16, 16) == 16


@pytest.mark.parametrize(("columns", "block"), [(100, 32), (8, 16), (64, 48), (64, 8), (64, 0), (64, -32)])
def test_effective_block_refuses_and_names_the_values(columns, block):
    with pytest.raises(OptionError) as caught:
        effective_block(columns, block)
    assert str(block) in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 5),
    form=st.sampled_from(FORMATS),
    spread=st.sampled_from([1e-9, 3e-7, 1e-5, 1e-3, 0.02, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 0.0, 2.0, -5.0]),
    tails=st.sampled_from([1, 3]),
)
def test_error_never_exceeds_scaling_by_the_maximum(seed, rows, blocks, form, spread, shift, tails):
    bits, symmetric, block = form
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((rows, blocks * block)) ** tails + shift
    weight = (weight * spread).astype(np.float32)
    tensor = quantize(weight, bits=bits, block=block, symmetric=symmetric)
    assert (tensor.rows, tensor.columns) == weight.shape
    assert (tensor.format.bits, tensor.format.block, tensor.format.symmetric) == (bits, block, symmetric)
    got = block_errors(weight, tensor.dequantize(), block)
    plain = block_errors(weight, scaled_by_maximum(weight, bits, block, symmetric), block)
    # The choice is made in float32, whose rounding is that of the values themselves; and among subnormal
    # scales there may be none near the one wanted, so that luck decides which weights are clipped.
    energy = (weight.astype(np.float64).reshape(-1, block) ** 2).sum(axis=1)
    normal = np.abs(tensor.scales).reshape(-1) >= np.finfo(np.float16).smallest_normal
    assert (got <= plain * np.where(normal, 1 + 1e-4, 1.5) + energy * (1e-6 if bits == 4 else 1e-9)).all()


@pytest.mark.parametrize("block", [16, 32, 128])
def test_symmetric_error_is_near_that_of_an_exhaustive_search(block):
    weight = np.random.default_rng(3).standard_t(5, (64, block)).astype(np.float32)
    got = block_errors(weight, quantize(weight, bits=4, block=block).dequantize(), block)
    extreme = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64)
    best = np.full(len(weight), np.inf)
    for reach in np.linspace(4, 14, 400):
        for sign in (1, -1):
            steps = np.clip(np.rint(weight * (sign * reach / extreme)), -8, 7)
            scale = (weight * steps).sum(axis=1, keepdims=True) / (steps**2).sum(axis=1, keepdims=True)
            values = steps * scale.astype(np.float16).astype(np.float64)
            best = np.minimum(best, block_errors(weight, values, block))
    assert (got >= best * 0.999).all()
    assert got.sum() <= 1.02 * best.sum()
    assert (got <= 1.25 * best).all()


def test_asymmetric_error_is_near_that_of_an_exhaustive_search():
    weight = np.random.default_rng(4).standard_normal((64, 32)).astype(np.float32)
    got = block_errors(weight, quantize(weight, bits=4, block=32, symmetric=False).dequantize(), 32)
    span = (weight.max(axis=1, keepdims=True) - weight.min(axis=1, keepdims=True)).astype(np.float64)
    best = np.full(len(weight), np.inf)
    for shrink in np.linspace(0.6, 1.05, 91):
        scale = (span * shrink / 15).astype(np.float16).astype(np.float64)
        for zero in range(16):
            values = np.clip(np.rint(weight / scale), -zero, 15 - zero) * scale
            best = np.minimum(best, block_errors(weight, values, 32))
    assert got.sum() <= 1.06 * best.sum()


def test_symmetric_scales_beat_the_maximum_clearly():
    weight = np.random.default_rng(5).standard_normal((256, 128)).astype(np.float32)
    got = block_errors(weight, quantize(weight, bits=4, block=32).dequantize(), 32).sum()
    plain = block_errors(weight, scaled_by_maximum(weight, 4, 32, True), 32).sum()
    assert got < 0.75 * plain


@pytest.mark.parametrize(("bits", "symmetric", "block"), FORMATS)
def test_what_was_quantised_once_is_found_again(bits, symmetric, block):
    generator = np.random.default_rng(6)
    half = 1 << (bits - 1)
    steps = generator.integers(-half, half, (8, 3 * block)).astype(np.float32)
    # Both ends of the range are in every block, so that no other grid fits.
    steps[:, ::block], steps[:, 1::block] = (-half, half - 1) if bits == 4 else (1 - half, half - 1)
    if bits == 8:
        np.clip(steps, 1 - half, half - 1, out=steps)
    scales = generator.choice(
        np.float32([0.25, 0.011726379, -0.5]) if symmetric else np.float32([0.25]), (8, 3)
    )
    scales = scales.astype(np.float16).astype(np.float32)
    weight = steps * np.repeat(scales, block, axis=1)
    got = quantize(weight, bits=bits, block=block, symmetric=symmetric).dequantize()
    if symmetric:
        np.testing.assert_array_equal(got, weight)
    else:
        assert np.abs(got - weight).max() <= np.abs(scales).max() * (0.01 if bits == 4 else 0.51)


@pytest.mark.parametrize(("bits", "symmetric", "block"), FORMATS)
def test_dequantize_agrees_with_the_definition(bits, symmetric, block):
    weight = np.random.default_rng(7).standard_normal((3, 3 * block)).astype(np.float32)
    tensor = quantize(weight, bits=bits, block=block, symmetric=symmetric)
    np.testing.assert_array_equal(tensor.dequantize(), reference_dequantize(tensor))
    assert ((tensor.dequantize() - weight) ** 2).sum() < (0.02 if bits == 4 else 1e-4) * (weight**2).sum()


@pytest.mark.parametrize(("bits", "symmetric", "block"), FORMATS)
def test_onnxruntime_computes_with_the_same_weight(bits, symmetric, block):
    rows, columns = 24, 3 * block
    generator = np.random.default_rng(8)
    weight = generator.standard_normal((rows, columns)).astype(np.float32)
    tensor = quantize(weight, bits=bits, block=block, symmetric=symmetric)
    initializers = [
        numpy_helper.from_array(tensor.codes, "codes"),
        numpy_helper.from_array(tensor.scales.astype(np.float32).reshape(-1), "scales"),
    ]
    if tensor.zero_points is not None:
        initializers.append(numpy_helper.from_array(tensor.zero_points.reshape(-1), "zeros"))
    node = helper.make_node(
        "MatMulNBits",
        ["x", *(item.name for item in initializers)],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=rows,
        bits=bits,
        block_size=block,
    )
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "m", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "m", rows])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for tokens in (1, 7):
        x = generator.standard_normal((1, tokens, columns)).astype(np.float32)
        y = session.run(None, {"x": x})[0][0].astype(np.float64)
        expected = x[0].astype(np.float64) @ tensor.dequantize().astype(np.float64).T
        assert ((y - expected) ** 2).sum() <= 1e-10 * (expected**2).sum()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_weights_and_zeros_keep_finite_scales(bits, symmetric):
    weight = np.zeros((6, 32), np.float32)
    weight[1] = 1e-9
    weight[2] = 2e-6 * np.random.default_rng(9).standard_normal(32)
    weight[3, 5] = 1e-40
    weight[4] = -0.0
    weight[5] = 0.25
    tensor = quantize(weight, bits=bits, block=32, symmetric=symmetric)
    assert np.isfinite(tensor.scales).all()
    assert (np.abs(tensor.scales) >= np.finfo(np.float16).smallest_subnormal).all()
    got = tensor.dequantize()
    assert (got[[0, 3, 4]] == 0).all()
    assert np.abs(got - weight).max(axis=1)[[1, 2]].max() <= 5e-7
    np.testing.assert_allclose(got[5], 0.25, rtol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [1e9, -1e9, 3e38, np.inf, -np.inf, np.nan])
def test_values_without_a_scale_are_refused(bits, symmetric, value):
    weight = np.ones((4, 64), np.float32)
    weight[2, 40] = value
    with pytest.raises(CheckpointError, match="magnitude"):
        quantize(weight, bits=bits, block=32, symmetric=symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_scale_is_still_used(symmetric):
    weight = np.full((1, 16), 65504.0 * 7, np.float32)
    weight[0, ::2] *= -1
    got = quantize(weight, bits=4, block=16, symmetric=symmetric).dequantize()
    np.testing.assert_allclose(got, weight, rtol=0.08)


def test_impossible_formats_are_refused():
    weight = np.ones((2, 64), np.float32)
    for options in ({"bits": 3, "block": 32}, {"bits": 4, "block": 24}, {"bits": 4, "block": 128}):
        with pytest.raises(OptionError):
            quantize(weight, **options)


@pytest.mark.parametrize("symmetric", [True, False])
def test_chunks_do_not_show(symmetric):
    rows = 2 * BATCH_BYTES // (4 * 96) + 11
    weight = np.random.default_rng(10).standard_normal((rows, 96)).astype(np.float32)
    whole = quantize(weight, bits=4, block=32, symmetric=symmetric)
    parts = [
        quantize(weight[part], bits=4, block=32, symmetric=symmetric)
        for part in (slice(0, 100), slice(100, None))
    ]
    np.testing.assert_array_equal(whole.codes, np.concatenate([part.codes for part in parts]))
    np.testing.assert_array_equal(whole.scales, np.concatenate([part.scales for part in parts]))
    if not symmetric:
        np.testing.assert_array_equal(whole.zero_points, np.concatenate([part.zero_points for part in parts]))


def test_strided_input_is_taken_as_it_reads():
    weight = np.random.default_rng(11).standard_normal((64, 40)).astype(np.float32)
    strided = quantize(weight.T, bits=4, block=32)
    plain = quantize(np.ascontiguousarray(weight.T), bits=4, block=32)
    np.testing.assert_array_equal(strided.codes, plain.codes)
    np.testing.assert_array_equal(strided.scales, plain.scales)
