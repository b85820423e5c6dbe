import dataclasses
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime
import pytest

from heterollm.base import GraphError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu import LinearShape, LinearShard
from heterollm.kernels.npu.forms import reshaped_forms
from heterollm.kernels.npu.graphs import shard_digest, write_graph
from heterollm.kernels.ops import WeightFormat

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
FLOAT_FORMS = ["activation_first", "weight_first", "conv_1x1", "token_tiles", "k_chunked"]
QUANTIZED_FORMS = ["matmul_nbits", "matmul_nbits_int8", "k_chunked", "k_chunked_int8"]
CASES = [(form, 16) for form in FLOAT_FORMS] + [(form, 4) for form in QUANTIZED_FORMS]


def read(path):
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("form", "bits"), CASES)
def test_graphs_keep_to_what_hexagon_takes(make_slice, tmp_path, form, bits, symmetric, dtype):
    if form.endswith("int8") and dtype == FLOAT16:
        pytest.skip("Hexagon rounds no inputs")
    part = make_slice(80, 192, bits, symmetric=symmetric)
    graph = read(write_graph(part, form, dtype, tmp_path, 32, k_split_columns=64)).graph
    onnx.checker.check_model(str(tmp_path / "graph.onnx"), full_check=True)
    assert not [node for node in graph.node if node.op_type in {"Cast", "DequantizeLinear"}]
    element = onnx.TensorProto.FLOAT16 if dtype == FLOAT16 else onnx.TensorProto.FLOAT
    for value, width in ((graph.input[0], 192), (graph.output[0], 80)):
        tensor = value.type.tensor_type
        assert tensor.elem_type == element
        assert [dim.dim_value for dim in tensor.shape.dim] == [1, 32, width]
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            assert len(node.input) <= (4 if dtype == FLOAT32 else 3)
    floats = {init.data_type for init in graph.initializer} & {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
    }
    assert floats == {element}


def test_weights_lie_in_pages_of_a_file_of_their_own(make_slice, tmp_path):
    model = read(write_graph(make_slice(80, 192, symmetric=False), "matmul_nbits", FLOAT32, tmp_path))
    assert (tmp_path / "graph.onnx").stat().st_size < 2000
    for init in model.graph.initializer:
        fields = {entry.key: entry.value for entry in init.external_data}
        assert fields["location"] == "graph.weights"
        assert int(fields["offset"]) % 4096 == 0
    assert model.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "m"
    assert (model.ir_version, model.opset_import[0].version) == (10, 21)


def test_every_slice_and_length_has_its_own_name(make_slice, tmp_path):
    part = make_slice(80, 192)
    others = [
        dataclasses.replace(part, layer=2),
        dataclasses.replace(part, group="qkv"),
        dataclasses.replace(part, row_ranges=((0, 40), (0, 40))),
        dataclasses.replace(part, weights_key="other"),
        make_slice(80, 192, block=64),
        make_slice(80, 192, seed=1),
    ]
    names = {
        read(write_graph(entry, "matmul_nbits", FLOAT16, tmp_path, length)).graph.name
        for entry in [part, *others]
        for length in (1, 32, None)
    }
    assert len(names) == 3 * (1 + len(others))


def test_the_digest_sees_other_numbers_under_the_same_key(make_slice):
    part, other = make_slice(80, 192), make_slice(80, 192, seed=1)
    assert shard_digest(part) == shard_digest(make_slice(80, 192))
    assert shard_digest(part) != shard_digest(dataclasses.replace(other, weights_key=part.weights_key))


def chunks(path):
    """The pieces of a chunked graph's inputs, as ``[(start, stop), ...]``."""
    graph = read(path).graph
    sizes = next(init for init in graph.initializer if init.name == "piece_sizes")
    stops = np.cumsum(onnx.numpy_helper.to_array(sizes)).tolist()
    return list(pairwise([0, *stops]))


@pytest.mark.parametrize("length", [1, 32, None], ids=str)
@pytest.mark.parametrize("kind", [{"bits": 16}, {}, {"symmetric": False}, {"bits": 8, "symmetric": False}])
def test_pieces_of_any_width_add_up(make_slice, exact, tmp_path, kind, length):
    generator = np.random.default_rng(0)
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1
    for _ in range(8):
        limit = 64 * int(generator.integers(1, 6))
        columns = limit + 32 * int(generator.integers(1, 30))
        part = make_slice(17, columns, **kind)
        path = write_graph(part, "k_chunked", FLOAT32, tmp_path, length, k_split_columns=limit)
        bounds = chunks(path)
        assert bounds[-1][1] == columns
        assert all(start % 64 == 0 or part.format.bits == 16 for start, _ in bounds)
        assert all(0 < stop - start <= limit for start, stop in bounds)
        assert len(bounds) == -(-columns // limit)
        session = onnxruntime.InferenceSession(str(path), session_options, ["CPUExecutionProvider"])
        x = generator.standard_normal((length or 3, columns)).astype(np.float32)
        (y,) = session.run(None, {"x": x[None]})
        assert linear_errors(y[0], exact(part, x)).within("fp32")


def test_published_widths_are_cut_evenly(make_slice, tmp_path):
    for columns, pieces in ((14336, [3584] * 4), (8192, [4096] * 2), (11008, [3712, 3712, 3584])):
        part = make_slice(2, columns, block=64)
        bounds = chunks(write_graph(part, "k_chunked", FLOAT16, tmp_path, 32))
        assert [stop - start for start, stop in bounds] == pieces


def test_a_form_must_suit_the_shape(make_slice, tmp_path):
    with pytest.raises(GraphError, match="4096 inputs cannot be split into ranges of at most 4096"):
        write_graph(make_slice(2, 4096, bits=16), "k_chunked", FLOAT16, tmp_path, 32)
    with pytest.raises(GraphError, match="at most 100 inputs in steps of 128"):
        write_graph(make_slice(2, 192, block=64), "k_chunked", FLOAT16, tmp_path, 32, k_split_columns=100)
    with pytest.raises(GraphError, match="33 tokens has no tiles of 32"):
        write_graph(make_slice(2, 64, bits=16), "token_tiles", FLOAT16, tmp_path, 33)


def test_the_forms_that_a_shape_allows():
    floats, codes = WeightFormat(16), WeightFormat(4, 128)
    for length in (1, 31, 32, 33, 64, 65, 96, 1024):
        tiles = ("token_tiles",) if length in (64, 96, 1024) else ()
        assert reshaped_forms(LinearShape(floats, 4096), length) == ("conv_1x1", *tiles)
        assert reshaped_forms(LinearShape(floats, 4128), length) == ("conv_1x1", *tiles, "k_chunked")
        assert reshaped_forms(LinearShape(codes, 4096), length) == ()
        assert reshaped_forms(LinearShape(codes, 4224), length) == ("k_chunked",)
        rounded = reshaped_forms(LinearShape(codes, 4224, integer_inputs=True), length)
        assert rounded == ("k_chunked_int8",)
    assert reshaped_forms(LinearShape(floats, 8192, integer_inputs=True), 64) == ()
    assert reshaped_forms(LinearShape(WeightFormat(4, 4096), 8192), 64) == ()


@pytest.mark.parametrize("form", ["activation_first", "weight_first", "conv_1x1", "token_tiles"])
def test_a_form_must_suit_the_format(make_slice, tmp_path, form):
    with pytest.raises(GraphError, match=f"int4 block 32 .* as {form}"):
        write_graph(make_slice(64, 64), form, FLOAT32, tmp_path)
    for other in ("matmul_nbits", "k_chunked_int8"):
        with pytest.raises(GraphError, match=rf"f16 .* as {other}"):
            write_graph(make_slice(64, 64, bits=16), other, FLOAT32, tmp_path, k_split_columns=32)


def test_float32_weights_are_not_rounded_unsaid(make_slice, tmp_path):
    with pytest.raises(GraphError, match="round"):
        write_graph(make_slice(64, 64, bits=32, dtype=np.float32), "weight_first", FLOAT16, tmp_path, 32)


@pytest.mark.parametrize("ranges", [((0, 63),), ((0, 32), (0, 33)), ((64, 0),), ((-4, 60),)])
def test_row_ranges_must_add_up(ranges):
    with pytest.raises(GraphError, match="ranges"):
        LinearShard(np.zeros((64, 8), np.float32), 0, "o", ranges, "key")


def test_a_slice_without_rows_is_refused():
    with pytest.raises(GraphError, match="empty"):
        LinearShard(np.zeros((0, 8), np.float32), 0, "o", ((0, 0),), "key")
