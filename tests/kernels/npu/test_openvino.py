"""OpenVINO as the NPU of ``intel``: numbers on its CPU device, since nobody has run it on an NPU."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import DeviceError, GraphError, make_own_folder
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu import ExpertsShard, LinearShape, OpenVinoNpu, ScoresShape, find_openvino
from heterollm.kernels.npu.openvino_npu import load_openvino
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import GraphMemory, WeightFormat

pytestmark = pytest.mark.skipif(find_spec("openvino") is None, reason="needs the extra intel")

FORMATS = [
    WeightFormat(bits, block, symmetric)
    for bits, block in ((4, 32), (4, 128), (8, 64))
    for symmetric in (True, False)
] + [WeightFormat(4, 32, symmetric=False, minimum=True), WeightFormat(16)]
TABLE = Path(__file__).parents[3] / "bench" / "results" / "intel_npu_static.jsonl"


@pytest.fixture
def npu():
    backend = OpenVinoNpu("CPU")
    yield backend
    backend.close()


def run(npu, shard, length):
    tokens = length * len(getattr(shard, "experts", (0,)))
    x = np.random.default_rng(0).standard_normal((tokens, shard.columns)).astype(np.float16)
    y = np.full((tokens, shard.rows), np.nan, np.float16)
    npu.prepare(shard, length).bind({"x": x}, {"y": y})()
    return x, y


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_format", FORMATS, ids=str)
def test_linears_against_float64(npu, within_gate, number_format):
    for columns, (tokens, length) in ((256, (1, 1)), (2560, (20, 32)), (256, (256, 256))):
        case = LinearCase(number_format, (77, 35), columns, tokens)
        within_gate(case.on_npu(npu, length), columns, length)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf", "relu", "relu_squared", "xielu"])
@pytest.mark.parametrize("bits", [4, 16])
def test_ffns_against_float64(npu, make_block, exact_block, activation, bits):
    part = make_block(128, 256, bits, 32 if bits == 4 else 0, activation=activation, biased=True)
    x, y = run(npu, part, 32)
    assert linear_errors(y, exact_block(part, x)).within("fp16")


def test_experts_give_what_each_gives_alone(npu, make_block, exact_block):
    parts = [dataclasses.replace(make_block(128, 64, seed=own), weights_key="one") for own in (5, 2)]
    x, y = run(npu, ExpertsShard((5, 2), tuple(parts)), 32)
    for own, part in enumerate(parts):
        rows = slice(32 * own, 32 * (own + 1))
        assert linear_errors(y[rows], exact_block(part, x[rows])).within("fp16")


def test_a_bound_call_reads_and_writes_rows_of_a_larger_buffer_in_place(npu, make_slice, exact):
    part = make_slice(64, 256)
    x, y = np.zeros((96, 256), np.float16), np.full((96, 64), 7, np.float16)
    call = npu.prepare(part, 32).bind({"x": x[32:64]}, {"y": y[32:64]})
    for seed in range(2):
        x[:] = np.random.default_rng(seed).standard_normal(x.shape)
        call()
        assert linear_errors(y[32:64], exact(part, x[32:64])).within("fp16")
    assert (y[:32] == 7).all()
    assert (y[64:] == 7).all()
    with pytest.raises(GraphError, match="not contiguous"):
        npu.prepare(part, 32).bind({"x": x[::3]}, {"y": y[32:64]})


def test_other_threads_run_during_a_call(npu, make_slice):
    part = make_slice(2048, 2048)
    x, y = np.ones((256, 2048), np.float16), np.zeros((256, 2048), np.float16)
    call = npu.prepare(part, 256).bind({"x": x}, {"y": y})
    counted, ended = [0], threading.Event()

    def count():
        while not ended.is_set():
            counted[0] += 1
            ended.wait(1e-4)

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    call()
    during = counted[0] - before
    ended.set()
    thread.join()
    assert during > 2


# -- legal graphs ------------------------------------------------------------------------------------


def test_what_openvino_cannot_compute_has_no_forms(npu, make_slice):
    weight = WeightFormat(4, 32)
    assert npu.forms(LinearShape(weight, 256), 32) == ("matmul_nbits",)
    refused = [
        LinearShape(weight, 256, integer_inputs=True),
        LinearShape(weight, 256, normed=True),
        LinearShape(WeightFormat(32), 256),
        LinearShape(WeightFormat(8, 32, scales="tensor"), 256),
        ScoresShape(2, 64, 32),
    ]
    assert not any(npu.forms(shape, 32) for shape in refused)
    with pytest.raises(GraphError, match="length 512"):
        npu.prepare(make_slice(64, 256), 512)
    assert npu.compiled_count == 0


def test_openvinos_refusal_names_the_layer(npu, make_slice, monkeypatch):
    monkeypatch.setattr(npu, "_options", {"NO_SUCH_OPTION": "1"})
    with pytest.raises(
        GraphError, match=r"OpenVINO refused the graph of gate_up of layer 1: .*NO_SUCH_OPTION"
    ):
        npu.prepare(make_slice(64, 256), 32)
    with pytest.raises(DeviceError, match=r"opens no graph: .*NO_SUCH_OPTION") as caught:
        npu.self_test()
    assert "--device intel:cpu" in caught.value.fix


def test_a_machine_without_an_npu_says_so():
    if "NPU" in load_openvino().Core().available_devices:
        pytest.skip("has an NPU")
    for look in (find_openvino, OpenVinoNpu):
        with pytest.raises(DeviceError, match=r"OpenVINO finds no NPU \(it finds .*CPU") as caught:
            look()
        assert "linux-npu-driver" in caught.value.fix


def test_openvino_writes_nothing_into_the_home_folder(tmp_path):
    """Its telemetry would, as soon as it is imported outside of CI."""
    home = {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | home
    script = "from heterollm.kernels.npu import find_openvino; find_openvino('CPU')"
    subprocess.run([sys.executable, "-P", "-c", script], cwd="/", env=environment, check=True)
    assert not list(tmp_path.iterdir())


# -- kept graphs -------------------------------------------------------------------------------------


def test_a_second_backend_loads_what_the_first_one_built(npu, make_slice, exact, cache_folder):
    part, folder = make_slice(64, 256), make_own_folder("graphs")
    npu.keep_graphs(part.weights_key, folder)
    built = npu.build(part, 32)
    assert built.compiled
    assert built.size_bytes == npu.stored_bytes(part, 32) > part.weight_bytes
    assert not npu.build(part, 32).compiled
    other = OpenVinoNpu("CPU")
    other.keep_graphs(part.weights_key, folder)
    x, y = run(other, part, 32)
    assert (other.compiled_count, other.loaded_count) == (0, 1)
    assert linear_errors(y, exact(part, x)).within("fp16")
    with pytest.raises(GraphError, match="missing"):
        other.prepare(part, 64)


def test_the_cache_keeps_an_npus_graphs_but_not_a_profiles(npu, make_slice, cache_folder, monkeypatch):
    monkeypatch.setattr(npu, "_in_cache", True)  # as on an NPU
    with npu.temporary_graphs():
        npu.build(make_slice(64, 256), 32)
        run(npu, make_slice(64, 256), 32)
        assert (npu.compiled_count, len(list(cache_folder.rglob("*.bin")))) == (1, 1)
        npu.release(make_slice(64, 256))
        assert not list(cache_folder.rglob("*.bin"))
        run(npu, make_slice(64, 256), 64)
    assert not list(cache_folder.rglob("*.bin"))
    npu.compiled_count = npu.loaded_count = 0
    npu.self_test()
    assert not list(cache_folder.rglob("*.bin"))
    for _ in range(2):
        run(npu, make_slice(64, 256), 32)
        npu.close()
    assert (npu.compiled_count, npu.loaded_count) == (2, 1)
    [blob] = (cache_folder / "graphs").glob("*.bin")
    blob.write_bytes(b"damaged")
    npu.close()
    run(npu, make_slice(64, 256), 32)
    assert npu.compiled_count == 3


# -- memory ------------------------------------------------------------------------------------------


def test_the_counted_bytes_are_those_of_compiled_graphs():
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    own = [row for row in rows if row["counted_bytes"] and row["blob_bytes"]]
    assert {row["platform"] for row in own} == {"3720", "4000", "5010"}
    for row in own:
        # Beside weights a graph has its instructions and the corrections of zero points.
        assert 0.7 < row["counted_bytes"] / row["blob_bytes"] < 1.02, row


def test_a_length_counts_by_how_its_graph_holds_weights():
    weight, memory = WeightFormat(4, 128), GraphMemory(True, unrolls_blocks=True)
    assert memory.weight_bytes(weight, 64, 2048, 32) == 2 * 64 * 2048
    assert memory.weight_bytes(weight, 64, 2048, 1) == 64 * (2048 // 2 + 16 * 16)
    assert memory.weight_bytes(weight, 64, 4096, 32) == 64 * (4096 // 2 + 32 * 16)
    assert memory.weight_bytes(WeightFormat(8, 32), 64, 4096, 1) == 2 * 64 * 4096
