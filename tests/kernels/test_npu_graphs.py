import dataclasses

import numpy as np
import onnx
import pytest

from heterollm.errors import GraphError
from heterollm.kernels.npu import NpuSlice
from heterollm.kernels.npu_graphs import slice_digest, write_graph

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
FORMS = {"matmul_nbits": {}, "activation_first": {"bits": 16}, "weight_first": {"bits": 16}}


def read(path):
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_graphs_keep_to_what_hexagon_takes(make_slice, tmp_path, form, symmetric, dtype):
    part = make_slice(80, 192, symmetric=symmetric, **FORMS[form])
    graph = read(write_graph(part, form, dtype, tmp_path, 32)).graph
    onnx.checker.check_model(str(tmp_path / "graph.onnx"))
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
    assert slice_digest(part) == slice_digest(make_slice(80, 192))
    assert slice_digest(part) != slice_digest(dataclasses.replace(other, weights_key=part.weights_key))


@pytest.mark.parametrize("form", ["activation_first", "weight_first"])
def test_a_form_must_suit_the_format(make_slice, tmp_path, form):
    with pytest.raises(GraphError, match=f"int4 block 32 .* as {form}"):
        write_graph(make_slice(64, 64), form, FLOAT32, tmp_path)
    with pytest.raises(GraphError, match=r"f16 .* as matmul_nbits"):
        write_graph(make_slice(64, 64, bits=16), "matmul_nbits", FLOAT32, tmp_path)


def test_float32_weights_are_not_rounded_unsaid(make_slice, tmp_path):
    with pytest.raises(GraphError, match="round"):
        write_graph(make_slice(64, 64, bits=32, dtype=np.float32), "weight_first", FLOAT16, tmp_path, 32)


@pytest.mark.parametrize("ranges", [((0, 63),), ((0, 32), (0, 33)), ((64, 0),), ((-4, 60),)])
def test_row_ranges_must_add_up(ranges):
    with pytest.raises(GraphError, match="ranges"):
        NpuSlice(np.zeros((64, 8), np.float32), 0, "o", ranges, "key")


def test_a_slice_without_rows_is_refused():
    with pytest.raises(GraphError, match="empty"):
        NpuSlice(np.zeros((0, 8), np.float32), 0, "o", ((0, 0),), "key")
