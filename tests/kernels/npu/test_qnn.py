import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from heterollm.base import CacheError, DeviceError, GraphError
from heterollm.kernels.formats import linear_errors, quantize
from heterollm.kernels.npu import LinearShape, LinearShard, QnnNpu, qnn_available, qnn_runtime
from heterollm.kernels.npu.qnn_binaries import temporary_graphs
from heterollm.kernels.npu.qnn_compile import compile_graph
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.operators.linear import LinearCase, run_part
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]


class TestWithoutQnn:
    def test_another_machine_is_told_what_to_use(self, monkeypatch):
        monkeypatch.setattr("platform.machine", lambda: "arm64")
        monkeypatch.setattr("platform.system", lambda: "Darwin")
        for emulator in (True, False):
            usable, reason, fix = qnn_available(emulator=emulator)
            assert not usable
            assert "Darwin arm64" in reason
            assert "host device" in fix

    def test_a_missing_library_is_named(self, monkeypatch):
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setattr("platform.system", lambda: "Linux")
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name: None if name == "onnxruntime_qnn" else name
        )
        usable, reason, fix = qnn_available(emulator=True)
        assert (usable, reason) == (False, "onnxruntime-qnn is not installed.")
        assert "pip install 'heterollm[emulator]'" in fix
        with pytest.raises(DeviceError, match="not installed"):
            QnnNpu(emulator=True)
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        assert "pip install onnxruntime-qnn" in qnn_available(emulator=False)[2]

    def test_a_library_that_cannot_be_imported_is_named(self, monkeypatch):
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
        with pytest.raises(DeviceError, match=r"cannot be imported.*heterollm\[emulator\]"):
            open_session(Path("graph.onnx"), QnnTarget(False), "graph")

    def test_a_hexagon_is_not_looked_for_on_another_processor(self, monkeypatch):
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setattr("platform.system", lambda: "Linux")
        with pytest.raises(DeviceError, match="Windows on Arm"):
            QnnNpu(emulator=False)

    def test_a_stated_library_that_is_not_there_is_named(self, monkeypatch):
        monkeypatch.setenv(qnn_runtime.LIBRARY_VARIABLE, "/nowhere/libqnn.so")
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        monkeypatch.setattr("platform.system", lambda: "Android")
        usable, reason, fix = qnn_available(emulator=False)
        assert not usable
        assert "HETEROLLM_QNN_LIBRARY names /nowhere/libqnn.so" in reason
        assert "libonnxruntime_providers_qnn.so" in fix

    def test_an_android_with_the_library_needs_no_wheel(self, monkeypatch, tmp_path):
        """The Hexagon finds its own libraries beside the provider's, unless the user says where."""
        library = tmp_path / "libonnxruntime_providers_qnn.so"
        library.write_bytes(b"no library")
        monkeypatch.setenv(qnn_runtime.LIBRARY_VARIABLE, str(library))
        monkeypatch.delenv(qnn_runtime.SKEL_VARIABLE, raising=False)
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        monkeypatch.setattr("platform.system", lambda: "Android")
        monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
        qnn_runtime._provider_device.cache_clear()
        monkeypatch.setattr("onnxruntime.get_ep_devices", list)
        usable, reason, _ = qnn_available(emulator=False)
        assert not usable
        assert "The QNN library does not load" in reason
        assert os.environ[qnn_runtime.SKEL_VARIABLE] == str(tmp_path)


FROM_A_FOLDER = """
import json, sys
sys.modules["onnxruntime_qnn"] = None
from heterollm.kernels.npu import QnnNpu

npu = QnnNpu(emulator=True)
npu.self_test()
print(json.dumps(npu.versions()))
"""


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_library_may_lie_in_any_folder(tmp_path, cache_folder):
    import onnxruntime_qnn

    package, libraries = Path(onnxruntime_qnn.__file__).parent, tmp_path / "libraries"
    libraries.mkdir()
    for file in package.glob("*.so"):
        (libraries / file.name).symlink_to(file)
    (tmp_path / "onnxruntime_qnn.libs").symlink_to(package.with_name("onnxruntime_qnn.libs"))
    provider = libraries / "libonnxruntime_providers_qnn.so"
    environment = os.environ | {qnn_runtime.LIBRARY_VARIABLE: str(provider)}
    command = [sys.executable, "-P", "-c", FROM_A_FOLDER]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(made.stdout)["onnxruntime-qnn"].startswith("library ")


@pytest.fixture
def npu(cache_folder):
    backend = QnnNpu(emulator=True, compile_in_child=False)
    yield backend
    backend.close()


def activations(length, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((length, columns)).astype(np.float16)


def run(npu, part, length):
    x = activations(length, part.columns)
    return x, run_part(npu, part, x, length)


class TestEmulator:
    pytestmark = emulated

    @pytest.fixture
    def check(self, npu, within_gate):
        return lambda case, *graph: within_gate(case.on_npu(npu, *graph), case, *graph)

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128)])
    def test_quantized_formats_against_float64(self, npu, check, bits, block, symmetric):
        for tokens, length in ((1, 1), (20, 32)):
            check(LinearCase(WeightFormat(bits, block, symmetric), (77,), 896, tokens), length)
        assert (npu.compiled_count, npu.loaded_count) == (2, 0)

    def test_minimums_against_float64(self, npu, check):
        for bits, block in ((4, 32), (8, 16)):
            number_format = WeightFormat(bits, block, symmetric=False, minimum=True)
            check(LinearCase(number_format, (77,), 896, 20), 32)

    @pytest.mark.parametrize("columns", [896, 4864])
    @pytest.mark.parametrize(("tokens", "length"), [(1, 1), (20, 32), (33, 64)])
    def test_float_forms_against_float64(self, npu, check, tokens, length, columns):
        forms = npu.forms(LinearShape(WeightFormat(16), columns), length)
        tiles = ("token_tiles",) if length == 64 else ()
        pieces = ("k_chunked",) if columns == 4864 else ()
        assert forms == ("weight_first", "activation_first", "conv_1x1", *tiles, *pieces)
        for form in forms:
            check(LinearCase(WeightFormat(16), (99,), columns, tokens), length, form)

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 128), (8, 32)])
    def test_pieces_of_quantized_weights_against_float64(self, npu, check, bits, block, symmetric):
        number_format = WeightFormat(bits, block, symmetric)
        for tokens, length in ((1, 1), (32, 32), (33, 64)):
            assert npu.forms(LinearShape(number_format, 4864), length) == ("matmul_nbits", "k_chunked")
            check(LinearCase(number_format, (33,), 4864, tokens), length, "k_chunked")

    def test_long_and_wide(self, check):
        check(LinearCase(WeightFormat(4, 32), (35, 35), 4864, 32), 32)
        check(LinearCase(WeightFormat(4, 32), (64,), 256, 1000), 1024)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_heavy_tails_stay_within_the_gate(self, npu, exact, symmetric):
        # Hexagon's own asymmetric MatMulNBits gives NMSE 2.0e-6 on this weight.
        floats = np.random.default_rng(0).standard_t(3, (192, 896)).astype(np.float32)
        weight = quantize(floats, bits=4, block=128, symmetric=symmetric)
        part = LinearShard(weight, 0, "o", ((0, 192),), "tails")
        x, y = run(npu, part, 32)
        assert linear_errors(y, exact(part, x)).within("fp16")

    def test_a_bound_call_reads_and_writes_in_place(self, npu, make_slice, exact):
        part = make_slice(64, 256)
        pool = np.zeros((96, 256), np.float16)
        outputs = np.full((96, 64), 7.0, np.float16)
        call = npu.prepare(part, 32).bind({"x": pool[32:64]}, {"y": outputs[32:64]})
        for seed in range(3):
            pool[32:64] = activations(32, 256, seed)
            call()
            assert linear_errors(outputs[32:64], exact(part, pool[32:64])).within("fp16")
        assert (outputs[:32] == 7).all()
        assert (outputs[64:] == 7).all()

    def test_graphs_past_the_address_space_close_and_open_again(self, npu, make_slice, exact, monkeypatch):
        parts = [make_slice(64 + 32 * number, 256) for number in range(3)]
        largest = parts[2].weight_bytes + 32 * (256 + parts[2].rows) * 2
        npu.addressable_bytes = 2 * largest
        opened = []

        def recorded(model, target, label, **options):
            session = open_session(model, target, label, **options)
            if not options:
                opened.append(weakref.ref(session))
            return session

        monkeypatch.setattr("heterollm.kernels.npu.qnn_runtime.open_session", recorded)
        x = activations(32, 256)
        outputs = [np.zeros((32, part.rows), np.float16) for part in parts]
        calls = []
        for part, y in zip(parts, outputs, strict=True):
            calls.append(npu.prepare(part, 32).bind({"x": x}, {"y": y}))
            assert npu.open_bytes <= npu.addressable_bytes
        gc.collect()
        # The first graph made room for the third: no part of the backend keeps its session.
        assert [session() is not None for session in opened] == [False, True, True]
        for turn in range(2):
            x[:] = activations(32, 256, turn)
            for number, (call, part, y) in enumerate(zip(calls, parts, outputs, strict=True)):
                before = npu.loaded_count
                call()
                call()
                # In turns over three graphs each run finds its own closed; the next finds it open.
                assert npu.loaded_count == before + 1, number
                assert npu.open_bytes <= npu.addressable_bytes
                assert linear_errors(y, exact(part, x)).within("fp16")
        assert npu.compiled_count == 3

    def test_arrays_that_would_be_copied_are_refused(self, npu, make_slice):
        graph = npu.prepare(make_slice(64, 256), 32)
        x, y = activations(32, 256), np.zeros((32, 64), np.float16)
        with pytest.raises(GraphError, match="not contiguous"):
            graph.bind({"x": np.zeros((32, 512), np.float16)[:, :256]}, {"y": y})
        with pytest.raises(GraphError, match="float16"):
            graph.bind({"x": x.astype(np.float32)}, {"y": y})

    def test_what_the_soc_cannot_compute_is_refused_by_name(self, cache_folder, make_slice):
        assert QnnNpu(emulator=True, soc_model="37").forms(LinearShape(WeightFormat(16), 256), 32) == ()
        assert QnnNpu(emulator=True).forms(LinearShape(WeightFormat(32), 256), 32) == ()
        rounded = LinearShape(WeightFormat(4, 32), 256, integer_inputs=True)
        assert QnnNpu(emulator=True).forms(rounded, 32) == ()
        old = QnnNpu(emulator=True, soc_model="30")
        assert old.forms(LinearShape(WeightFormat(16), 256), 32)
        with pytest.raises(GraphError, match="gate_up of layer 1 with int4 block 32"):
            old.prepare(make_slice(64, 256), 32)

    def test_the_self_test_passes_and_says_what_runs(self, npu):
        npu.self_test()
        assert npu.versions()["qairt"].startswith("2.")
        assert npu.versions()["soc"] == "57 (emulated)"

    def test_a_wrong_result_fails_the_self_test(self, npu, monkeypatch):
        monkeypatch.setattr(
            "heterollm.kernels.npu.self_test.linear_errors", lambda y, e: linear_errors(y * 1.01, e)
        )
        with pytest.raises(DeviceError, match="wrong numbers"):
            npu.self_test()


SECOND_PROCESS = """
import sys
import numpy as np
from heterollm.kernels.npu import LinearShard
from heterollm.kernels.npu.qnn import QnnNpu

weight = np.load(sys.argv[1])
npu = QnnNpu(emulator=True)
x, y = np.ones((32, weight.shape[1]), np.float16), np.zeros((32, weight.shape[0]), np.float16)
npu.prepare(LinearShard(weight, 3, "o", ((0, weight.shape[0]),), "key"), 32).bind({"x": x}, {"y": y})()
assert np.abs(y).max() > 0
print(npu.compiled_count, npu.loaded_count)
"""


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_a_backend_that_cannot_be_set_up_is_named(tmp_path, capfd):
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 64]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "small", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "small.onnx")
    target = QnnTarget(emulator=True, options={"backend_path": "/missing/libQnnHtp.so"})
    with pytest.raises(DeviceError, match=r"cannot set up its backend: .*/missing/libQnnHtp\.so"):
        open_session(tmp_path / "small.onnx", target, "small")
    assert capfd.readouterr().err == ""


class TestBinaries:
    pytestmark = emulated

    @pytest.fixture
    def part(self, make_slice):
        return make_slice(64, 256)

    @pytest.fixture
    def built(self, npu, part):
        npu.prepare(part, 32)
        npu.close()
        return npu

    def assert_rebuilt(self, npu, part, exact, caplog, reason):
        with caplog.at_level(logging.WARNING):
            x, y = run(npu, part, 32)
        assert linear_errors(y, exact(part, x)).within("fp16")
        assert (npu.compiled_count, npu.loaded_count) == (2, 0)
        assert len(caplog.messages) == 1
        assert reason in caplog.messages[0]
        npu.close()
        npu.prepare(part, 32)
        assert (npu.compiled_count, npu.loaded_count) == (2, 1)

    def test_the_second_time_it_is_loaded(self, built, part, exact):
        x, y = run(built, part, 32)
        assert linear_errors(y, exact(part, x)).within("fp16")
        assert (built.compiled_count, built.loaded_count) == (1, 1)

    def test_nothing_but_the_three_files_is_left(self, built, cache_folder):
        suffixes = sorted(path.suffix for path in (cache_folder / "graphs").iterdir())
        assert suffixes == [".bin", ".json", ".lock", ".onnx"] or suffixes == [".bin", ".json", ".onnx"]

    def test_four_bits_stay_four_bits(self, npu, make_slice, cache_folder):
        part = make_slice(512, 1024)
        npu.prepare(part, 32)
        size = next((cache_folder / "graphs").glob("*.bin")).stat().st_size
        assert size < part.weight.size_bytes + 70_000

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
    def test_a_damaged_binary_is_rebuilt(self, built, part, exact, caplog, cache_folder, damage):
        path = next((cache_folder / "graphs").glob("*.bin"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        size = {"truncated": len(content) // 2, "flipped": len(content), "empty": 0}[damage]
        path.write_bytes(content[:size])
        self.assert_rebuilt(built, part, exact, caplog, "checksum")

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": 3}', "\x00" * 40])
    def test_a_damaged_description_is_rebuilt(self, built, part, exact, caplog, cache_folder, content):
        next((cache_folder / "graphs").glob("*.json")).write_text(content)
        self.assert_rebuilt(built, part, exact, caplog, "damaged")

    @pytest.mark.parametrize("suffix", ["onnx", "bin"])
    def test_a_lost_file_is_rebuilt(self, built, part, exact, caplog, cache_folder, suffix):
        next((cache_folder / "graphs").glob(f"*.{suffix}")).unlink()
        self.assert_rebuilt(built, part, exact, caplog, "damaged")

    def test_a_build_that_was_killed_is_rebuilt(self, built, part, exact, caplog, cache_folder):
        manifest = next((cache_folder / "graphs").glob("*.json"))
        manifest.unlink()
        leftover = manifest.with_name(f".{manifest.stem}.building")
        leftover.mkdir()
        (leftover / manifest.with_suffix(".onnx").name).write_text("half")
        self.assert_rebuilt(built, part, exact, caplog, "incomplete")

    def test_a_binary_of_another_sdk_is_rebuilt(self, built, part, exact, caplog, cache_folder):
        path = next((cache_folder / "graphs").glob("*.json"))
        stored = json.loads(path.read_text())
        stored["made_by"]["qairt"] = "2.30.0"
        path.write_text(json.dumps(stored))
        self.assert_rebuilt(built, part, exact, caplog, "2.30.0")

    def test_a_binary_that_qnn_refuses_is_rebuilt(self, built, part, exact, caplog, cache_folder):
        import hashlib

        binary = next((cache_folder / "graphs").glob("*.bin"))
        binary.write_bytes(binary.read_bytes()[:1000])
        path = next((cache_folder / "graphs").glob("*.json"))
        stored = json.loads(path.read_text())
        stored["sha256"][binary.name] = hashlib.sha256(binary.read_bytes()).hexdigest()
        path.write_text(json.dumps(stored))
        self.assert_rebuilt(built, part, exact, caplog, "refused by QNN")

    def test_other_slices_lengths_and_socs_have_files_of_their_own(self, npu, make_slice, cache_folder):
        npu.prepare(make_slice(64, 256), 32)
        npu.prepare(make_slice(64, 256), 1)
        npu.prepare(make_slice(64, 256, seed=1), 32)
        QnnNpu(emulator=True, soc_model="60", compile_in_child=False).prepare(make_slice(64, 256), 32)
        assert len(list((cache_folder / "graphs").glob("*.bin"))) == 4

    def test_two_processes_at_once_compile_once_and_a_third_nothing(self, cache_folder, tmp_path):
        weights = tmp_path / "weights.npy"
        np.save(weights, np.random.default_rng(0).standard_normal((64, 128)).astype(np.float16))
        command = [sys.executable, "-P", "-c", SECOND_PROCESS, str(weights)]
        options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both = [subprocess.Popen(command, **options) for _ in range(2)]
        outputs = [process.communicate(timeout=600) for process in both]
        assert sorted(out.strip() for out, _ in outputs) == ["0 1", "1 0"], outputs
        third = subprocess.run(command, check=True, **options)
        assert third.stdout == "0 1\n"  # and no line of the emulator's own
        assert third.stderr == ""

    def test_a_folder_that_cannot_be_written_is_an_error(self, npu, part, cache_folder):
        cache_folder.mkdir(exist_ok=True)
        (cache_folder / "graphs").write_text("not a folder")
        with pytest.raises(CacheError, match="graphs"):
            npu.prepare(part, 32)


class TestRefusals:
    pytestmark = emulated

    @staticmethod
    def model(path, rank=3, bias=False, dynamic=False):
        shape = [1, 32, 256][3 - rank :]
        tensors = {
            "codes": np.zeros((64, 8, 16), np.uint8),
            "scales": np.ones((64, 8), np.float16),
            "bias": np.ones(64, np.float16),
        }
        inputs = ["x", "codes", "scales", *(["", "", "bias"] if bias else [])]
        node = helper.make_node(
            "MatMulNBits", inputs, ["y"], domain="com.microsoft", K=256, N=64, bits=4, block_size=32
        )
        graph_inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, shape)]
        if dynamic:
            graph_inputs.append(helper.make_tensor_value_info("codes", TensorProto.UINT8, [64, 8, 16]))
        graph = helper.make_graph(
            [node],
            "refused",
            graph_inputs,
            [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [*shape[:-1], 64])],
            [
                numpy_helper.from_array(array, name)
                for name, array in tensors.items()
                if name in inputs and not (dynamic and name == "codes")
            ],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        return path

    @pytest.mark.parametrize(
        ("kind", "reason"), [({"rank": 2}, "expecting 3D shape"), ({"bias": True}, "g_idx or bias")]
    )
    @pytest.mark.parametrize("in_child", [True, False])
    def test_a_node_that_hexagon_does_not_take(self, npu, tmp_path, kind, reason, in_child):
        model = self.model(tmp_path / "model.onnx", **kind)
        with pytest.raises(GraphError, match=f"wrong graph .* as a whole: MatMulNBits: .*{reason}"):
            compile_graph(model, tmp_path / "out.onnx", npu._target, "wrong graph", in_child=in_child)
        with pytest.raises(GraphError, match="as a whole"):
            open_session(model, npu._target, "wrong graph")

    def test_a_crash_of_the_compiler_is_an_error(self, npu, tmp_path):
        model = self.model(tmp_path / "model.onnx", dynamic=True)
        with pytest.raises(GraphError, match=r"compiler of moving weights crashed \(SIGSEGV\)"):
            compile_graph(model, tmp_path / "out.onnx", npu._target, "moving weights", in_child=True)

    def test_a_child_compiles_like_the_parent(self, cache_folder, make_slice, exact):
        npu = QnnNpu(emulator=True, compile_in_child=True)
        part = make_slice(64, 256)
        x, y = run(npu, part, 32)
        assert linear_errors(y, exact(part, x)).within("fp16")
        assert npu.compiled_count == 1

    def test_a_compiler_that_hangs_is_stopped(self, npu, tmp_path, monkeypatch):
        monkeypatch.setattr("heterollm.kernels.npu.qnn_compile.TIMEOUT_S", 0.02)
        model = self.model(tmp_path / "model.onnx")
        with pytest.raises(GraphError, match="slow graph took over"):
            compile_graph(model, tmp_path / "out.onnx", npu._target, "slow graph", in_child=True)

    def test_the_emulator_is_no_hexagon(self, tmp_path):
        model, target = self.model(tmp_path / "model.onnx"), QnnTarget(emulator=False)
        with pytest.raises(DeviceError, match="no Hexagon NPU"):
            open_session(model, target, "graph")
        with pytest.raises(DeviceError, match="no Hexagon NPU"):
            compile_graph(model, tmp_path / "out.onnx", target, "graph", in_child=True)

    def test_a_bad_option_is_an_error(self, cache_folder, make_slice):
        npu = QnnNpu(emulator=True, soc_model="not a number", compile_in_child=False)
        with pytest.raises(GraphError):
            npu.prepare(make_slice(64, 256), 32)
        assert not list((cache_folder / "graphs").glob("*.bin"))
        assert not list((cache_folder / "graphs").glob(".*building"))


class TestTemporaryGraphs:
    def test_the_folder_goes_and_so_do_those_of_the_dead(self, cache_folder):
        graphs = cache_folder / "graphs"
        left = graphs / f".{'0' * 32}.temporary"
        left.mkdir(parents=True)
        (left / "a_qnn.bin").write_bytes(b"left by a process that was killed")
        kept = graphs / f"{'1' * 32}.onnx"
        kept.write_bytes(b"a model's")
        with temporary_graphs() as folder:
            assert not left.exists()
            (folder / "b_qnn.bin").write_bytes(b"new")
            with temporary_graphs() as other:
                # The first is at work: its folder is left alone.
                assert folder.exists()
                assert other != folder
            assert (folder / "b_qnn.bin").exists()
        assert sorted(graphs.iterdir()) == [kept]

    def test_an_error_leaves_nothing_either(self, cache_folder):
        with pytest.raises(KeyError), temporary_graphs() as folder:
            raise KeyError(folder)
        assert list((cache_folder / "graphs").iterdir()) == []

    def test_a_killed_process_leaves_its_folder_to_the_next(self, cache_folder):
        code = """
import os
from heterollm.kernels.npu.qnn_binaries import temporary_graphs
with temporary_graphs() as folder:
    (folder / "x_qnn.bin").write_bytes(b"x")
    os._exit(9)
"""
        assert subprocess.run([sys.executable, "-c", code], cwd=cache_folder.parent).returncode == 9
        [folder] = (cache_folder / "graphs").glob(".*.temporary")
        assert (folder / "x_qnn.bin").exists()
        with temporary_graphs():
            assert not folder.exists()
        assert list((cache_folder / "graphs").iterdir()) == []

    def test_an_unwritable_cache_is_said(self, cache_folder):
        cache_folder.write_text("a file")
        with pytest.raises(CacheError), temporary_graphs():
            pass


class TestTemporaryGraphsOfTheEmulator:
    pytestmark = emulated

    def test_files_go_with_their_part_and_at_the_end(self, npu, make_slice, cache_folder):
        first, second, kept = (make_slice(64, 256, seed=seed) for seed in range(3))
        npu.build(kept, 1)
        before = sorted((cache_folder / "graphs").iterdir())
        with npu.temporary_graphs():
            [folder] = (cache_folder / "graphs").glob(".*.temporary")
            for part in (first, second):
                run(npu, part, 1)
                assert npu.stored_bytes(part, 1) > 0
            assert len(list(folder.glob("*_qnn.bin"))) == 2
            npu.release(first)
            assert npu.stored_bytes(first, 1) == 0
            assert len(list(folder.glob("*_qnn.bin"))) == 1
        assert sorted((cache_folder / "graphs").iterdir()) == before
        # What was there before is found again.
        compiled = npu.compiled_count
        run(npu, kept, 1)
        assert npu.compiled_count == compiled
