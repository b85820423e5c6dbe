"""A part of a feed-forward block on the NPU: its graphs, what backends offer, and its numbers on ``host``."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest

from heterollm.base import GraphError
from heterollm.kernels.formats import linear_errors, quantize
from heterollm.kernels.formats.reference import weight_values
from heterollm.kernels.npu import K_SPLIT_COLUMNS, FfnShape, FfnShard, LinearShard, QnnNpu, qnn_available
from heterollm.kernels.npu.graphs import shard_digest, write_graph
from heterollm.kernels.operators.gated_activation import exact_gated_activation
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
STEPPED = WeightFormat(4, 32, scales="stepped")
ACTIVATIONS = ["silu", "gelu_tanh", "gelu_erf", "relu"]
SQUARES = ["relu_squared", "xielu"]
OPERATORS = {"relu": "Relu", "gelu_erf": "Gelu"}
FORMATS = [(4, 32, True), (4, 64, False), (8, 32, True), (8, 128, False), (16, 0, True)]
FORMS = {
    False: ["ffn", "ffn_weight_first", "ffn_k_chunked"],
    True: ["ffn", "ffn_int8", "ffn_k_chunked", "ffn_k_chunked_int8"],
}


def run(npu, part, length, form=None, seed=0):
    x = np.random.default_rng(seed).standard_normal((length, part.columns)).astype(npu.activation_dtype)
    y = np.full((length, part.rows), np.nan, npu.activation_dtype)
    npu.prepare(part, length, form).bind({"x": x}, {"y": y})()
    return x, y


def read(path):
    return onnx.load(path, load_external_data=False).graph


# -- graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("bits", "block", "symmetric"), FORMATS)
def test_graphs_keep_to_what_hexagon_takes(make_block, tmp_path, bits, block, symmetric, biased, dtype):
    for form in FORMS[bits <= 8]:
        if form.endswith("int8") and dtype == FLOAT16:
            continue
        for activation in ACTIVATIONS:
            part = make_block(128, 512, bits, block, symmetric, activation=activation, biased=biased)
            graph = read(write_graph(part, form, dtype, tmp_path, 32, k_split_columns=256))
            onnx.checker.check_model(str(tmp_path / "graph.onnx"), full_check=True)
            kinds = [node.op_type for node in graph.node]
            assert not {"Cast", "DequantizeLinear"} & set(kinds)
            own = OPERATORS if dtype == FLOAT32 or activation == "relu" else {}
            found = [kind for kind in kinds if kind in ("Sigmoid", *OPERATORS.values())]
            assert found == [own.get(activation, "Sigmoid")]
            for value in (graph.input[0], graph.output[0]):
                assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [1, 32, 128]
            packed = [node for node in graph.node if node.op_type == "MatMulNBits"]
            assert len(packed) == (0 if bits > 8 else 4 if "chunked" in form else 3)
            assert all(len(node.input) <= (4 if dtype == FLOAT32 else 3) for node in packed)
            floats = {init.data_type for init in graph.initializer}
            assert floats & {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16} == {
                onnx.TensorProto.FLOAT16 if dtype == FLOAT16 else onnx.TensorProto.FLOAT
            }
            # gate and up share the sums of their input's blocks.
            corrected = bits <= 8 and not symmetric and dtype == FLOAT16
            assert kinds.count("ReduceSum") == (2 if corrected else 0)


def test_weight_first_is_transposed_at_the_ends_only(make_block, tmp_path):
    part = make_block(128, 512, 16)
    for form in ("ffn_weight_first", "ffn_k_chunked"):
        graph = read(write_graph(part, form, FLOAT16, tmp_path, 32, k_split_columns=256))
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("Transpose") == 2
        assert (kinds[0], kinds[-1]) == ("Transpose", "Transpose")
        assert kinds.count("MatMul") == (4 if form == "ffn_k_chunked" else 3)


@pytest.mark.parametrize("form", ["ffn_k_chunked", "ffn_k_chunked_int8"])
def test_only_the_last_linear_is_cut_into_pieces(make_block, exact_block, tmp_path, form):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for kind in ({}, {"symmetric": False}, {"bits": 8}, {"bits": 16}):
        if kind.get("bits") == 16 and form.endswith("int8"):
            continue
        part = make_block(320, 448, integer=form.endswith("int8"), **kind)
        path = write_graph(part, form, FLOAT32, tmp_path, None, k_split_columns=192)
        (sizes,) = (init for init in read(path).initializer if init.name.endswith("piece_sizes"))
        assert onnx.numpy_helper.to_array(sizes).tolist() in ([192, 192, 64], [160, 160, 128])
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        x = np.random.default_rng(0).standard_normal((3, 320)).astype(np.float32)
        (y,) = session.run(None, {"x": x[None]})
        gate = "fp16" if part.integer_inputs else "fp32"
        assert linear_errors(y[0], exact_block(part, x)).within(gate), kind


def test_a_form_must_suit_format_and_width(make_block, tmp_path):
    for form in ("ffn_weight_first", "matmul_nbits"):
        with pytest.raises(GraphError, match=f"int4 block 32 .* as {form}"):
            write_graph(make_block(64, 64), form, FLOAT32, tmp_path)
    for form in ("ffn_int8", "weight_first"):
        with pytest.raises(GraphError, match=f"f16 .* as {form}"):
            write_graph(make_block(64, 64, 16), form, FLOAT32, tmp_path)
    with pytest.raises(GraphError, match="cannot be split into ranges of at most 4096"):
        write_graph(make_block(64, 64), "ffn_k_chunked", FLOAT32, tmp_path)
    with pytest.raises(GraphError, match="round"):
        write_graph(make_block(64, 64, 32, dtype=np.float32), "ffn", FLOAT16, tmp_path, 32)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *SQUARES])
def test_a_block_without_a_gate(make_block, exact_block, tmp_path, npu, activation, bits):
    """Two linears and the activation of the first, in every form; integers refuse it."""
    part = make_block(128, K_SPLIT_COLUMNS + 64, bits, activation=activation, biased=True, members=1)
    assert (part.gated, part.row_ranges) == (False, (part.cut,))
    assert part.weight_bytes == 2 * part.format.weight_bytes(part.width, 128)
    assert "ffn_integer" not in npu.forms(dataclasses.replace(part.shape, weight=STEPPED), 32)
    for form in npu.forms(part.shape, 32):
        graph = read(write_graph(part, form, FLOAT32, tmp_path, 32))
        kinds = [node.op_type for node in graph.node]
        assert sum(kinds.count(kind) for kind in ("MatMul", "MatMulNBits")) == 2 + ("chunked" in form)
        x, y = run(npu, part, 32, form)
        assert linear_errors(y, exact_block(part, x)).within("fp32"), form


def test_parts_that_differ_have_other_keys_and_digests(make_block):
    part = make_block(128, 256, biased=True)
    assert (part.group, part.rows, part.columns, part.width) == ("ffn", 128, 128, 256)
    assert part.label == "ffn of layer 1"
    assert part.weight_bytes == part.format.weight_bytes(512, 128) + part.format.weight_bytes(128, 256)
    same = make_block(128, 256, biased=True)
    assert (part.key, shard_digest(part)) == (same.key, shard_digest(same))
    others = [
        dataclasses.replace(part, layer=2),
        dataclasses.replace(part, activation="gelu_tanh"),
        dataclasses.replace(part, weights_key="other"),
        dataclasses.replace(part, cut=(256, 512)),
        dataclasses.replace(part, bias=None),
        make_block(128, 192, biased=True),
        make_block(128, 256, block=64, biased=True),
        make_block(128, 256, biased=True, members=1),
    ]
    assert len({other.key for other in (part, *others)}) == 1 + len(others)
    others.append(dataclasses.replace(part, down=make_block(128, 256, seed=7).down))
    others.append(dataclasses.replace(part, gate_up=make_block(128, 256, seed=7).gate_up))
    assert len({shard_digest(other) for other in (part, *others)}) == 1 + len(others)


def test_a_part_whose_weights_do_not_fit_is_refused(make_block):
    part = make_block(128, 256, biased=True)
    with pytest.raises(GraphError, match="gate and up"):
        dataclasses.replace(part, gate_up=make_block(128, 192).gate_up)
    with pytest.raises(GraphError, match="down"):
        dataclasses.replace(part, down=make_block(128, 192).down)
    with pytest.raises(GraphError, match="one graph takes one format"):
        dataclasses.replace(part, down=make_block(128, 256, 8).down)
    with pytest.raises(GraphError, match="bias of 512"):
        dataclasses.replace(part, bias=np.zeros(256, np.float32))
    for cut in ((0, 0), (-256, 0), (0, 128), (256, 0)):
        with pytest.raises(GraphError, match="cut at"):
            dataclasses.replace(part, cut=cut)


# -- backends ------------------------------------------------------------------------------------------------


def test_the_forms_on_host(npu):
    codes, floats = WeightFormat(4, 32), WeightFormat(16)
    for width, more in ((K_SPLIT_COLUMNS, ()), (K_SPLIT_COLUMNS + 64, ("ffn_k_chunked",))):
        assert npu.forms(FfnShape(codes, 512, width, "silu"), 32) == ("ffn", *more)
        rounded = tuple(f"{form}_int8" for form in ("ffn", *more))
        assert npu.forms(FfnShape(codes, 512, width, "silu", integer_inputs=True), 32) == rounded
        both = ("ffn", "ffn_weight_first", *more)
        assert npu.forms(FfnShape(floats, 512, width, "silu"), 32) == both
        assert npu.forms(FfnShape(floats, 512, width, "silu", integer_inputs=True), 32) == ()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bits", "block", "symmetric"), FORMATS)
def test_every_form_matches_float64(npu, make_block, exact_block, bits, block, symmetric, activation):
    for biased, width in ((False, 256), (True, K_SPLIT_COLUMNS + 256)):
        part = make_block(128, width, bits, block, symmetric, activation=activation, biased=biased)
        for length in (1, 32, 64):
            for form in npu.forms(part.shape, length):
                x, y = run(npu, part, length, form)
                assert linear_errors(y, exact_block(part, x)).within("fp32"), (width, length, form)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bits", "block", "symmetric"), FORMATS[:-1])
def test_int8_rounds_each_linears_inputs(npu, make_block, exact_block, bits, block, symmetric, activation):
    for width in (256, K_SPLIT_COLUMNS + 256):
        part = make_block(128, width, bits, block, symmetric, activation=activation, integer=True)
        for length in (1, 32):
            for form in npu.forms(part.shape, length):
                x, y = run(npu, part, length, form)
                rounded, plain = exact_block(part, x), exact_block(part, x, integer=False)
                # Float32 gives a value near a half another code here and there: one of 256 is 2e-6. Rounding
                # as such is ten times more, and at most the gate of each of two linears in a row.
                assert linear_errors(y, rounded).nmse < 1e-5, (width, length, form)
                assert 2e-5 < linear_errors(y, plain).nmse < 2 * 3e-4, (width, length, form)


def test_a_session_serves_all_lengths_and_is_released(npu, make_block):
    part, other = make_block(128, 256), make_block(128, 256, biased=True)
    for length in (1, 32, 256):
        run(npu, part, length)
    run(npu, other, 1)
    assert npu.compiled_count == 2
    npu.release(part)
    run(npu, other, 32)
    assert npu.compiled_count == 2
    run(npu, part, 1)
    assert npu.compiled_count == 3


def test_what_is_not_legal_is_refused(npu, make_block):
    with pytest.raises(GraphError, match="no graphs of length 5"):
        npu.prepare(make_block(128, 256), 5)
    with pytest.raises(GraphError, match=r"cannot run ffn of layer 1 .* as ffn_int8"):
        npu.prepare(make_block(128, 256), 32, "ffn_int8")
    with pytest.raises(GraphError, match=r"cannot run ffn of layer 1 .* as matmul_nbits"):
        npu.prepare(make_block(128, 256), 32, "matmul_nbits")
    with pytest.raises(GraphError, match="int8 activations"):
        npu.prepare(make_block(128, 256, 16, integer=True), 32)
    assert npu.cpu_times_us(make_block(128, 256), 32, runs=1) is None


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
class TestEmulator:
    @pytest.fixture
    def hexagon(self, cache_folder):
        backend = QnnNpu(emulator=True, compile_in_child=False)
        yield backend
        backend.close()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize(("bits", "block", "symmetric"), FORMATS)
    def test_every_form_matches_float64(
        self, hexagon, make_block, exact_block, bits, block, symmetric, activation
    ):
        part = make_block(128, 256, bits, block, symmetric, activation=activation, biased=bits == 4)
        for length in (1, 32, 64):
            forms = hexagon.forms(part.shape, length)
            assert forms
            for form in forms:
                x, y = run(hexagon, part, length, form)
                assert linear_errors(y, exact_block(part, x)).within("fp16"), (length, form)

    @pytest.mark.parametrize("activation", SQUARES)
    def test_squares_have_twice_the_error_of_their_root(self, hexagon, make_block, exact_block, activation):
        for kind in ({}, {"bits": 16}):
            part = make_block(128, 256, **kind, activation=activation, biased=True, members=1)
            for form in hexagon.forms(part.shape, 32):
                x, y = run(hexagon, part, 32, form)
                assert linear_errors(y, exact_block(part, x)).nmse < 4e-6, form

    def test_pieces_of_the_last_linear(self, hexagon, make_block, exact_block):
        for kind in ({}, {"symmetric": False}, {"bits": 16}):
            part = make_block(64, K_SPLIT_COLUMNS + 256, **kind)
            assert hexagon.forms(part.shape, 32)[-1] == "ffn_k_chunked"
            x, y = run(hexagon, part, 32, "ffn_k_chunked")
            assert linear_errors(y, exact_block(part, x)).within("fp16"), kind

    def test_the_forms(self, hexagon):
        floats, codes = WeightFormat(16), WeightFormat(4, 32)
        assert hexagon.forms(FfnShape(codes, 128, 256, "silu"), 32) == ("ffn",)
        assert hexagon.forms(FfnShape(floats, 128, 256, "silu"), 32) == ("ffn_weight_first",)
        assert hexagon.forms(FfnShape(floats, 128, 256, "gelu_tanh"), 32) == ("ffn_weight_first", "ffn")
        assert hexagon.forms(FfnShape(WeightFormat(32), 128, 256, "silu"), 32) == ()
        assert hexagon.forms(FfnShape(codes, 128, 256, "silu", integer_inputs=True), 32) == ()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gates_beyond_a_square_in_float16_stay_finite(self, hexagon, exact_block, activation):
        rng = np.random.default_rng(3)
        for bits in (4, 16):
            part = wide_gates(rng, activation, bits)
            for length in (1, 32):
                x, y = run(hexagon, part, length)
                assert np.abs(x.astype(np.float64) @ weight_values(part.gate_up).T).max() > 300
                assert linear_errors(y, exact_block(part, x)).within("fp16"), (bits, length)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_heavy_tails_cost_little_more_than_slices_do(self, hexagon, exact_block, symmetric):
        rng = np.random.default_rng(4)
        gate_up, down = (
            quantize(rng.standard_t(3, shape).astype(np.float32) / 16, bits=4, block=128, symmetric=symmetric)
            for shape in ((512, 256), (256, 256))
        )
        part = block_of(gate_up, down, "silu")
        x, y = run(hexagon, part, 32)
        products, whole = (np.full((32, rows), np.nan, np.float16) for rows in (512, 256))
        upper = LinearShard(gate_up, 1, "gate_up", ((0, 256), (0, 256)), "tails")
        hexagon.prepare(upper, 32).bind({"x": x}, {"y": products})()
        activated = exact_gated_activation(products[:, :256], products[:, 256:]).astype(np.float16)
        alone = LinearShard(down, 1, "down", ((0, 256),), "tails")
        hexagon.prepare(alone, 32).bind({"x": activated}, {"y": whole})()
        exact = exact_block(part, x)
        # What the block rounds itself: the sigmoid and two products more in float16.
        assert linear_errors(y, exact).nmse < linear_errors(whole, exact).nmse + 4e-7

    def test_a_second_backend_compiles_nothing(self, hexagon, make_block):
        part = make_block(128, 256, biased=True)
        _, y = run(hexagon, part, 32)
        assert (hexagon.compiled_count, hexagon.loaded_count) == (1, 0)
        second = QnnNpu(emulator=True, compile_in_child=False)
        np.testing.assert_array_equal(run(second, part, 32)[1], y)
        assert (second.compiled_count, second.loaded_count) == (0, 1)
        for other in (
            dataclasses.replace(part, bias=None),
            dataclasses.replace(part, activation="gelu_tanh"),
        ):
            assert not np.array_equal(run(second, other, 32)[1], y)
        assert second.compiled_count == 2
        second.release(part)
        assert second.stored_bytes(part, 32) > 0
        second.close()

    def test_emulation_takes_cpu_time(self, hexagon, make_block):
        times_us = hexagon.cpu_times_us(make_block(128, 256), 32, runs=2)
        assert len(times_us) == 2
        assert min(times_us) > 0


def block_of(gate_up, down, activation):
    return FfnShard(gate_up, down, activation, None, 1, "tails", (0, weight_values(down).shape[1]))


def wide_gates(rng, activation, bits):
    gate_up = rng.standard_normal((512, 128)) / np.sqrt(128) * np.repeat([120.0, 0.05], 256)[:, None]
    down = rng.standard_normal((128, 256)) / 16
    if bits == 16:
        return block_of(gate_up.astype(np.float16), down.astype(np.float16), activation)
    packed = (quantize(value.astype(np.float32), bits=4, block=32) for value in (gate_up, down))
    return block_of(*packed, activation)
