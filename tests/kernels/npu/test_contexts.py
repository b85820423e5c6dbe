"""Contexts that several graphs share: what opens, closes and is counted together, and who decides on it.

:class:`FakeQnn` plays QNN's part, by what the emulator showed: the first session of a binary owns all of its
graphs, and hands those that it does not use to the sessions after it.
"""

import ctypes
import gc
import json
import random
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from heterollm.base import DeviceError, GraphError, OptionError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu import (
    ContextGraph,
    LinearShard,
    QnnNpu,
    fits_domains,
    qnn_available,
    qnn_held,
    qnn_runtime,
    qnn_sharing,
    small_shard,
)
from heterollm.kernels.npu import qnn as npu_qnn
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.npu.qnn_child import ChildError
from heterollm.kernels.npu.qnn_compile import compile_shared
from heterollm.kernels.npu.qnn_contexts import chosen_process_domains
from heterollm.kernels.npu.qnn_runtime import PROVIDER, NoRoomError, QnnTarget, open_context, open_session
from heterollm.kernels.npu.qnn_sharing import kept_verdict, run_sharing_test
from heterollm.kernels.npu.session import session_options

USABLE, REASON, _ = qnn_available(emulator=True)
HALF = np.dtype(np.float16)
OPTIONS = {"backend_type": "htp", "enable_htp_fp16_precision": "1", "soc_model": "57"}


def emulated(test):
    return pytest.mark.emulator(pytest.mark.skipif(not USABLE, reason=REASON)(test))


class FakeSession:
    """A session whose graph writes its number; it fails where one of QNN does."""

    def __init__(self, qnn, number, owner, context):
        self._qnn, self._number, self._context = qnn, number, context
        self._owner = None if owner is None else weakref.ref(owner)

    def __del__(self):
        self._qnn.closed.append(self._number)

    def io_binding(self):
        return FakeBinding()

    def run_with_iobinding(self, binding):
        if self._owner is not None and self._owner() is None:
            raise RuntimeError("No valid QNN context!")
        size = int(np.prod(binding.output.shape()))
        words = (ctypes.c_uint16 * size).from_address(binding.output.data_ptr())
        np.ctypeslib.as_array(words).view(np.float16)[:] = self._number


class FakeBinding:
    def bind_ortvalue_input(self, name, value):
        pass

    def bind_ortvalue_output(self, name, value):
        self.output = value


class FakeQnn:
    """The provider's list of shared graphs, and its compiler, which writes names in place of graphs."""

    def __init__(self):
        self.left = {}
        self.closed = []
        self.targets = []
        self.refusal = ""
        self.compiled = []

    def open_session(self, model, target, label, *, sharing=None, context=None):
        assert context is None
        found = json.loads(Path(model).read_text())
        assert Path(model).with_name(found["binary"]).read_bytes() == b"binary"
        if self.refusal and sharing is not None:
            raise GraphError(self.refusal)
        self.targets.append(target)
        if sharing is not None and found["name"] in self.left:
            owner = self.left.pop(found["name"])
            return FakeSession(self, found["number"], owner, None)
        session = FakeSession(self, found["number"], None, None)
        for name in found["all"]:
            if name != found["name"]:
                if name in self.left:
                    raise GraphError(f"Duplicate graph names detect across sessions: {name}")
                self.left[name] = session
        return session

    def compile(self, sources, models, target, label, **_):
        graphs = [onnx.load(source, load_external_data=False).graph for source in sources]
        self.compiled.append([graph.name for graph in graphs])
        for graph, model in zip(graphs, models, strict=True):
            _, layer, _, tokens, _ = graph.name.rsplit("_", 4)
            found = {
                "name": str(model),
                "number": int(tokens) + 1024 * int(layer) / 2048,
                "all": [str(other) for other in models],
                "binary": f"{models[0].stem}_qnn.bin",
            }
            model.write_text(json.dumps(found))
        models[0].with_name(f"{models[0].stem}_qnn.bin").write_bytes(b"binary")


@pytest.fixture
def qnn(monkeypatch, cache_folder):
    """A QNN that is not there: no library is needed."""
    fake = FakeQnn()
    monkeypatch.setattr(npu_qnn, "qnn_available", lambda *, emulator: (True, "", ""))
    versions = {"onnxruntime": "1", "onnxruntime-qnn": "2.7.0", "qairt": "2.51"}
    monkeypatch.setattr(npu_qnn, "this_soc", lambda: "57")
    monkeypatch.setattr(qnn_held, "qnn_versions", lambda: versions)
    monkeypatch.setattr(qnn_sharing, "qnn_versions", lambda: versions)
    monkeypatch.setattr(qnn_sharing, "provider_metadata", lambda: ("driver 1",))
    monkeypatch.setattr("heterollm.kernels.npu.qnn_runtime.open_session", fake.open_session)
    monkeypatch.setattr(qnn_held, "compile_shared", fake.compile)
    monkeypatch.setattr(
        qnn_held, "compile_graph", lambda model, context, *rest, **_: fake.compile([model], [context], *rest)
    )
    fake.versions = versions
    return fake


LENGTHS = (1, 32, 64)


def shard_of(make_slice, layer, rows=64, model="model"):
    weight = make_slice(rows, 256, seed=layer).weight
    return LinearShard(weight, layer, "o", ((0, rows),), model)


def packaged(npu, shards, layers):
    """Package all lengths of some shards, each context with so many layers, and return the shards."""
    contexts = [
        [
            ContextGraph(shard.layer, "o", (shard.rows,), length, None, lambda shard=shard: shard)
            for shard in shards[first : first + layers]
            for length in LENGTHS
        ]
        for first in range(0, len(shards), layers)
    ]
    npu.package(contexts)
    return shards


def run(npu, shard, length):
    y = np.zeros((length, shard.rows), np.float16)
    npu.prepare(shard, length).bind({"x": np.zeros((length, shard.columns), np.float16)}, {"y": y})()
    assert (y == length + shard.layer / 2).all()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_context_holds_all_lengths_of_its_layers_and_their_weights_once(
    qnn, make_slice, cache_folder, layers
):
    npu = QnnNpu(emulator=True, context_layers=layers)
    assert not npu.copies_by_length
    assert npu.graphs_by_length
    shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(3)], layers)
    for shard in reversed(shards):
        for length in (64, 1, 32):
            run(npu, shard, length)
    contexts = -(-3 // layers)
    assert [len(names) for names in qnn.compiled] in ([3] * 3, [3, 6], [6, 3], [9])
    assert len(list((cache_folder / "graphs").glob("*.bin"))) == contexts
    assert (npu.compiled_count, npu.loaded_count) == (9, 0)
    io_bytes = sum(LENGTHS) * (256 + 64) * 2
    assert npu.open_bytes == sum(shard.weight_bytes + io_bytes for shard in shards)
    npu.close()
    gc.collect()
    assert len(qnn.closed) == 9
    # In a new process nothing compiles; the files have the same names in whichever order graphs are prepared.
    again = QnnNpu(emulator=True, context_layers=layers)
    packaged(again, shards, layers)
    run(again, shards[0], 32)
    assert (again.compiled_count, again.loaded_count) == (0, 3 * min(layers, 3))


def test_without_a_package_or_sharing_each_graph_has_its_own(qnn, make_slice, cache_folder):
    shard = shard_of(make_slice, 0)
    for npu in (QnnNpu(emulator=True, context_layers=1), QnnNpu(emulator=True)):
        if not npu.context_layers:
            packaged(npu, [shard], 1)
            assert npu.copies_by_length
        for length in LENGTHS:
            run(npu, shard, length)
        assert npu.open_bytes == sum(shard.weight_bytes + n * (256 + 64) * 2 for n in LENGTHS)
    assert len(list((cache_folder / "graphs").glob("*.bin"))) == 3


def test_contexts_open_and_close_whole_within_the_address_space(qnn, make_slice):
    npu = QnnNpu(emulator=True, context_layers=1)
    shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(4)], 1)
    one = shards[0].weight_bytes + sum(LENGTHS) * (256 + 64) * 2
    npu.addressable_bytes = 2 * one
    calls, draw = {}, random.Random(0)
    for shard in shards:
        for length in LENGTHS:
            x, y = np.zeros((length, 256), np.float16), np.zeros((length, 64), np.float16)
            calls[shard.layer, length] = npu.prepare(shard, length).bind({"x": x}, {"y": y}), y
    for _ in range(60):
        layer, length = draw.choice(list(calls))
        call, y = calls[layer, length]
        y[:] = 0
        call()
        assert (y == length + layer / 2).all()
        assert npu.open_bytes <= 2 * one
    assert not qnn.left
    gc.collect()
    # Three at a time, the owner, which was opened first, last.
    triples = [tuple(qnn.closed[at : at + 3]) for at in range(0, len(qnn.closed), 3)]
    assert set(triples) <= {(64 + n / 2, 32 + n / 2, 1 + n / 2) for n in range(4)}


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(40, 100), st.integers(1, 5), st.data())
def test_contexts_fit_whole_into_process_domains(sizes, domain, domains, data):
    memory = domains * domain - data.draw(st.integers(0, domain - 1))
    fits = fits_domains(sizes, memory, domain)
    assert fits_domains(sizes, memory, memory) is (sum(sizes) <= memory)
    if sum(sizes) > memory:
        assert not fits
    if fits:  # so do fewer, in a larger memory too
        assert fits_domains(sizes[:-1], memory, domain)
        assert fits_domains(sizes, memory + domain, domain)
    # What finds no place in any domain exceeds the memory less the largest context for each but one.
    if sum(sizes) <= memory - (-(-memory // domain) - 1) * max(sizes, default=0):
        assert fits
    # In order, each in the first with room.
    rooms = [min(domain, memory - first) for first in range(0, memory, domain)]
    for size in sizes:
        place = next((place for place, room in enumerate(rooms) if room >= size), None)
        if place is None:
            assert not fits
            return
        rooms[place] -= size
    assert fits


def test_contexts_make_room_by_process_domains(qnn, make_slice):
    """Two contexts of three fifths of a domain need a domain each, though two fifths of both are left."""
    npu = QnnNpu(emulator=True)
    shards = [shard_of(make_slice, layer) for layer in range(3)]
    one = shards[0].weight_bytes + 32 * (256 + 64) * 2
    npu.domain_bytes, npu.addressable_bytes = one * 5 // 3, one * 10 // 3
    for shard in shards:
        run(npu, shard, 32)
        assert npu.open_bytes <= 2 * one
    assert qnn.closed == [32]


FULL = {
    1002: "contextCreateFromBinary failed. Error: QNN_COMMON_ERROR_MEM_ALLOC: Memory allocation related.",
    1009: "Failed to create context from binary. Error code: 1009",
}


class TestFullNpu:
    """QNN refuses the fourth context: what three take is the memory of the NPU from then on."""

    @pytest.fixture(params=sorted(FULL))
    def refusal(self, request):
        """The text of QNN's error."""
        return FULL[request.param]

    def refuse_from(self, monkeypatch, qnn, number, text):
        opened, open_session = [0], qnn.open_session

        def refusing(model, target, label, **options):
            opened[0] += 1
            if opened[0] > number:
                raise qnn_runtime._session_error(label, text)
            return open_session(model, target, label, **options)

        monkeypatch.setattr("heterollm.kernels.npu.qnn_runtime.open_session", refusing)

    @pytest.mark.parametrize("layers", [0, 1])
    def test_a_refusal_is_a_number_found(self, qnn, make_slice, monkeypatch, cache_folder, refusal, layers):
        monkeypatch.setenv("HETEROLLM_NPU_DOMAINS", "2")
        npu = QnnNpu(emulator=True, context_layers=layers)
        npu.recall_memory()
        assert npu.addressable_bytes == 2 * npu.domain_bytes == 7 * 2**30
        shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(5)], 1)
        self.refuse_from(monkeypatch, qnn, 9 if layers else 3, refusal)
        for shard in shards[:3]:
            run(npu, shard, 32)
        held, compiled = npu.open_bytes, len(qnn.compiled)
        with pytest.raises(
            NoRoomError, match=r"holds \d+\.\d KiB of graphs, and QNN loads no further"
        ) as found:
            npu.prepare(shards[3], 32)
        assert refusal in found.value.message
        assert "Load the model again" in found.value.fix
        # It is no fault of a file or of contexts that share weights.
        assert len(qnn.compiled) == compiled + 1
        assert bool(npu.context_layers) is bool(layers)
        again = QnnNpu(emulator=True, context_layers=layers)
        assert again.addressable_bytes == 7 * 2**30
        again.recall_memory()
        assert again.addressable_bytes == npu.addressable_bytes == held
        # Within that the next load holds as many, and never asks for more.
        monkeypatch.setattr("heterollm.kernels.npu.qnn_runtime.open_session", qnn.open_session)
        for shard in packaged(again, shards, 1):
            run(again, shard, 32)
            assert again.open_bytes <= held
        # Another statement is another try.
        monkeypatch.setenv("HETEROLLM_NPU_DOMAINS", "3")
        other = QnnNpu(emulator=True)
        other.recall_memory()
        assert other.addressable_bytes == 3 * other.domain_bytes

    def test_a_context_larger_than_all_that_is_open_says_nothing_of_the_memory(
        self, qnn, make_slice, monkeypatch, refusal
    ):
        npu = QnnNpu(emulator=True)
        run(npu, shard_of(make_slice, 0), 32)
        limit = npu.addressable_bytes
        self.refuse_from(monkeypatch, qnn, 0, refusal)
        with pytest.raises(GraphError) as found:
            npu.prepare(shard_of(make_slice, 1, rows=512), 32)
        assert not isinstance(found.value, NoRoomError)
        npu.recall_memory()
        assert npu.addressable_bytes == limit

    def test_a_graph_that_does_not_open_again_is_a_number_found(self, qnn, make_slice, monkeypatch, refusal):
        npu = QnnNpu(emulator=True, context_layers=1)
        shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(4)], 1)
        one = shards[0].weight_bytes + sum(LENGTHS) * (256 + 64) * 2
        npu.addressable_bytes = 3 * one
        x, y = np.zeros((32, 256), np.float16), np.zeros((32, 64), np.float16)
        first, *_ = [npu.prepare(shard, 32).bind({"x": x}, {"y": y}) for shard in shards]
        self.refuse_from(monkeypatch, qnn, 0, refusal)
        with pytest.raises(NoRoomError, match="loads no further"):
            first()
        assert npu.addressable_bytes == 2 * one
        assert npu.context_layers == 1


def test_other_refusals_are_none_of_memory():
    for text in (
        "Error code: 5000",
        "graphFinalize failed: 1002",
        "contextCreateFromBinary failed. Error: 1003",
    ):
        assert not isinstance(qnn_runtime._session_error("a graph", text), NoRoomError)


def test_the_number_of_process_domains_is_checked(monkeypatch):
    for text in ("0", "-1", "x", "1e3", "1000"):
        monkeypatch.setenv("HETEROLLM_NPU_DOMAINS", text)
        with pytest.raises(OptionError, match="HETEROLLM_NPU_DOMAINS is") as found:
            chosen_process_domains()
        assert "at least 1" in found.value.fix


def test_models_share_no_contexts(qnn, make_slice):
    npu = QnnNpu(emulator=True, context_layers=2)
    first, _ = (
        packaged(npu, [shard_of(make_slice, layer, model=name) for layer in range(2)], 2) for name in "ab"
    )
    run(npu, first[0], 32)
    assert npu.open_bytes == first[0].weight_bytes + sum(LENGTHS) * (256 + 64) * 2


def test_contexts_are_kept_by_chip_version_and_content(qnn, make_slice, cache_folder, caplog):
    shard = shard_of(make_slice, 0)

    def compiled(soc="57"):
        npu = QnnNpu(emulator=True, soc_model=soc, context_layers=1)
        packaged(npu, [shard], 1)
        run(npu, shard, 32)
        return npu.compiled_count

    assert (compiled(), compiled(), compiled("69"), compiled("69")) == (3, 0, 3, 0)
    assert len(list((cache_folder / "graphs").glob("*.bin"))) == 2
    qnn.versions["qairt"] = "2.52"
    assert (compiled(), compiled()) == (3, 0)
    assert "stale" in caplog.text
    for damaged in ("*_qnn.bin", "*.2.onnx"):
        for path in (cache_folder / "graphs").glob(damaged):
            path.write_bytes(b"{}")
        caplog.clear()
        assert (compiled(), compiled()) == (3, 0)
        assert "damaged (a checksum differs)" in caplog.text


def test_a_context_that_does_not_open_again_is_an_error_and_ends_sharing(qnn, make_slice, caplog):
    """The engine takes the error as any failure of the NPU (tests/heterollm/engine/test_fallback.py)."""
    npu = QnnNpu(emulator=True, context_layers=1)
    shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(2)], 1)
    npu.addressable_bytes = shards[0].weight_bytes + sum(LENGTHS) * (256 + 64) * 2
    x, y = np.zeros((32, 256), np.float16), np.zeros((32, 64), np.float16)
    first, _second = (npu.prepare(shard, 32).bind({"x": x}, {"y": y}) for shard in shards)
    qnn.refusal = "QNN_COMMON_ERROR_MEM_ALLOC"
    loaded = npu.loaded_count
    with pytest.raises(GraphError, match="MEM_ALLOC") as refused:
        first()
    assert "share no contexts" in refused.value.fix
    assert npu.loaded_count == loaded
    assert npu.copies_by_length
    assert not npu.reuses_io
    assert kept_verdict(npu._target, "57").reason == qnn.refusal
    later = QnnNpu(emulator=True)
    later.choose_contexts(1)
    assert later.copies_by_length
    for shard in shards:
        run(later, shard, 64)


def test_a_refused_context_ends_sharing_and_is_remembered(qnn, make_slice, caplog):
    npu = QnnNpu(emulator=True, context_layers=1)
    shards = packaged(npu, [shard_of(make_slice, layer) for layer in range(2)], 1)
    qnn.refusal = "QNN_COMMON_ERROR_MEM_ALLOC"
    for shard in shards:
        run(npu, shard, 32)
    assert npu.copies_by_length
    assert caplog.text.count("share no contexts from now on: QNN_COMMON_ERROR_MEM_ALLOC") == 1
    assert kept_verdict(npu._target, "57").reason == "QNN_COMMON_ERROR_MEM_ALLOC"
    npu.choose_contexts(1)
    assert npu.copies_by_length


class TestVerdict:
    """A child that is played by a function decides; the real ones are below."""

    TARGET = QnnTarget(False, {"soc_model": "57"})

    @pytest.fixture
    def child(self, monkeypatch, qnn):
        """Play the loading child: by default it computes in float32; ``child.fault`` may change that."""

        class Child:
            def __init__(self):
                self.runs = 0
                self.options = []

            def fault(self, request, outputs):
                pass

            def __call__(self, module, request, answer, task, *, timeout_s):
                self.runs += 1
                self.options.append(request["session_options"])
                folder = Path(request["folder"])
                weight = (
                    small_shard("sharing", qnn_sharing.ROWS, qnn_sharing.COLUMNS)
                    .weight.dequantize()
                    .astype(np.float32)
                )
                outputs = {}
                for number in range(len(request["models"])):
                    x = np.load(folder / f"x{number}.npy").astype(np.float32)
                    for turn in (0, 1):
                        outputs[turn, number] = (x @ weight.T).astype(np.float16)
                self.fault(request, outputs)
                for (turn, number), y in outputs.items():
                    np.save(folder / f"y{turn}-{number}.npy", y)
                return ""

        child = Child()
        monkeypatch.setattr(qnn_sharing, "run_child", child)
        monkeypatch.setattr(qnn_sharing, "compile_shared", qnn.compile)
        return child

    def test_right_numbers_pass_and_are_kept_for_the_same_software(self, child, qnn, cache_folder, caplog):
        verdict = kept_verdict(self.TARGET, "57")
        assert (verdict.status, verdict.reuses_io, verdict.io_reason) == ("pass", True, "")
        assert child.options == [{}, {"htp_reused_io_limit_mb": "1"}]
        assert kept_verdict(self.TARGET, "57") == verdict
        assert child.runs == 2
        qnn.versions["qairt"] = "2.52"
        kept_verdict(self.TARGET, "57")
        kept_verdict(self.TARGET, "60")
        assert child.runs == 6
        for path in (cache_folder / "graphs").glob("shared-contexts-*.json"):
            path.write_text(path.read_text()[:-3])
        assert kept_verdict(self.TARGET, "57") == verdict
        assert "testing shared contexts again" in caplog.text

    @pytest.mark.parametrize("turn", [0, 1])
    @pytest.mark.parametrize("number", [0, 1])
    def test_wrong_numbers_fail(self, child, turn, number):
        def fault(request, outputs):
            outputs[turn, number][5, 7] += 1

        child.fault = fault
        verdict = run_sharing_test(self.TARGET, loads=True)
        assert verdict.status == "fail"
        assert f"wrong numbers at {(32, 64)[number]} tokens, opening {turn + 1}" in verdict.reason

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ChildError("The test crashed (SIGSEGV)."), "SIGSEGV"),
            (ChildError("The test took over 120 s and was stopped."), "stopped"),
            (DeviceError("The QNN library does not load."), "does not load"),
        ],
    )
    def test_a_crash_or_hang_fails(self, child, error, reason):
        def fault(request, outputs):
            raise error

        child.fault = fault
        verdict = run_sharing_test(self.TARGET, loads=True)
        assert verdict.status == "fail"
        assert reason in verdict.reason

    def test_only_the_reuse_of_buffers_may_be_refused(self, child):
        def fault(request, outputs):
            if request["session_options"]:
                raise ChildError("QNN_CONTEXT_ERROR_INVALID_CONFIG")

        child.fault = fault
        verdict = run_sharing_test(self.TARGET, loads=True)
        assert (verdict.status, verdict.reuses_io) == ("pass", False)
        assert verdict.io_reason == "QNN_CONTEXT_ERROR_INVALID_CONFIG"

    def test_a_compiler_that_stores_the_weights_twice_fails(self, child, qnn, monkeypatch):
        def compile_apart(sources, models, *rest):
            qnn.compile(sources, models, *rest)
            models[0].with_name(f"{models[0].stem}_qnn.bin").write_bytes(bytes(300_000))

        monkeypatch.setattr(qnn_sharing, "compile_shared", compile_apart)
        verdict = run_sharing_test(self.TARGET, loads=True)
        assert verdict.status == "fail"
        assert "shares no weights" in verdict.reason
        assert child.runs == 0

    @pytest.mark.parametrize("reuses", [True, False])
    def test_the_largest_graph_of_a_context_is_the_size_of_its_buffers(
        self, child, qnn, make_slice, monkeypatch, reuses
    ):
        def fault(request, outputs):
            if request["session_options"] and not reuses:
                raise ChildError("refused")

        child.fault = fault
        npu = QnnNpu(emulator=False)
        npu.choose_contexts(0)
        assert child.runs == 0
        npu.choose_contexts(2)
        assert npu.context_layers == 2
        (shard,) = packaged(npu, [shard_of(make_slice, 0, rows=16384)], 2)
        npu.prepare(shard, 1)
        # 64 tokens of 256 inputs and 16,384 outputs in float16 are 2.03 MiB.
        want = {"htp_reused_io_limit_mb": "3"} if reuses else {}
        assert [target.session_options for target in qnn.targets] == [want] * 3
        assert npu.reuses_io is reuses
        tokens = max(LENGTHS) if reuses else sum(LENGTHS)
        assert npu.open_bytes == shard.weight_bytes + 2 * tokens * (256 + 16384)


def sources_of(folder, shard, lengths):
    models = []
    for number, length in enumerate(lengths):
        own = folder / f"source{number}"
        own.mkdir()
        models.append(write_graph(shard, "matmul_nbits", HALF, own, length))
    return models


@emulated
def test_the_real_compiler_stores_weights_once(make_slice, tmp_path):
    shard = shard_of(make_slice, 0, rows=1024)
    models = [tmp_path / f"c{number}.onnx" for number in range(3)]
    compile_shared(sources_of(tmp_path, shard, (1, 32, 256)), models, QnnTarget(True, OPTIONS), "three")
    assert all(path.exists() for path in models)
    (binary,) = tmp_path.glob("*.bin")
    assert shard.weight_bytes < binary.stat().st_size < 2 * shard.weight_bytes


@emulated
def test_sessions_of_one_context_on_the_emulator(make_slice, exact, tmp_path):
    """The emulator loads two graphs in one context if they share no weights.

    The provider puts the parts of a model between which another processor works into one context, without
    sharing. ``Hardmax``, which Hexagon lacks, divides this model.
    """
    shards = [LinearShard(make_slice(256, 256, seed=n).weight, n, "o", ((0, 256),), "m") for n in (0, 1)]
    models = [onnx.load(write_graph(shard, "matmul_nbits", HALF, tmp_path, 32)) for shard in shards]
    nodes, initializers = [], []
    for number, model in enumerate(models):
        for node in model.graph.node:
            node.input[:] = [f"{name}{number}" if name else "" for name in node.input]
            node.output[:] = [f"{name}{number}" for name in node.output]
            node.name += str(number)
        for tensor in model.graph.initializer:
            tensor.name += str(number)
        nodes += model.graph.node
        initializers += model.graph.initializer
    nodes.insert(len(models[0].graph.node), helper.make_node("Hardmax", ["y0"], ["x1"]))
    value = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 32, 256]) for name in ("x0", "y0", "y1")
    ]
    graph = helper.make_graph(nodes, "two", value[:1], value[1:], initializers)
    two = helper.make_model(graph, opset_imports=models[0].opset_import, ir_version=10)
    onnx.save(two, tmp_path / "two.onnx")
    target = QnnTarget(True, OPTIONS)
    open_session(tmp_path / "graph.onnx", target, "the provider")  # registers it
    options = session_options(1)
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", str(tmp_path / "both.onnx"))
    (device,) = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    options.add_provider_for_devices([device], OPTIONS)
    onnxruntime.InferenceSession(str(tmp_path / "two.onnx"), options)
    nodes = [node for node in onnx.load(tmp_path / "both.onnx").graph.node if node.op_type == "EPContext"]
    wrappers = []
    for number, node in enumerate(nodes):
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 32, 256])
            for name in (node.input[0], node.output[0])
        ]
        own = helper.make_node(
            "EPContext",
            [node.input[0]],
            [node.output[0]],
            node.name,
            domain="com.microsoft",
            main_context=1,
            embed_mode=0,
            ep_cache_context="both_qnn.bin",
            source="QNNExecutionProvider",
            partition_name=node.name,
        )
        wrapper = helper.make_graph([own], "one", values[:1], values[1:])
        wrappers.append(tmp_path / f"wrapper{number}.onnx")
        onnx.save(helper.make_model(wrapper, opset_imports=two.opset_import, ir_version=10), wrappers[-1])
    x = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float16)
    for _ in range(2):
        sessions = open_context(wrappers, target, "two")
        for number, (session, shard) in enumerate(zip(sessions, shards, strict=True)):
            (y,) = session.run(None, {f"x{number}": x[np.newaxis]})
            assert linear_errors(y[0], exact(shard, x)).within("fp16")
        while sessions:
            sessions.pop()
    # With the first session its graphs are gone: a context closes as a whole.
    sessions = open_context(wrappers, target, "two")
    del sessions[0]
    with pytest.raises(Exception, match="No valid QNN context"):
        sessions[0].run(None, {"x1": x[np.newaxis]})


@emulated
def test_the_emulator_leaves_it_unverified(cache_folder):
    npu = QnnNpu(emulator=True)
    verdict = npu.test_sharing()
    assert verdict.status == "unverified"
    assert "2 graphs with 144.0 KiB of weights take" in verdict.reason
    npu.choose_contexts(1)
    assert npu.copies_by_length


@pytest.mark.slow
@emulated
def test_loading_shared_weights_on_the_emulator_crashes_a_child_only():
    """A newer QNN may load such contexts on x86; then this fails, and the emulator can use them."""
    target = QnnTarget(True, OPTIONS)
    verdict = run_sharing_test(target, loads=True)
    assert verdict.status == "fail"
    assert "crashed (SIG" in verdict.reason
    hung = run_sharing_test(target, loads=True, timeout_s=0.05)
    assert "was stopped" in hung.reason
