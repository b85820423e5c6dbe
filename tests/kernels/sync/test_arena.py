"""Memory that GPU and NPU share without copies: on stand-ins of a phone's drivers, with their faults."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from phone_memory import build_stand_ins, ctypes_variables, run_on_phone_memory

from heterollm.engine.slot_shifts import SlotShifts
from heterollm.kernels.npu import STANDARD_LENGTHS, SharingEdges, qnn_available
from heterollm.kernels.npu.shared_memory import SharedMemory
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.kernels.sync import SPARE_BYTES
from heterollm.solver.placements import RowsPlacement

USABLE, REASON, _ = qnn_available(emulator=True)
EMULATOR = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
SLOW = pytest.mark.slow

FAULTS = {
    "a descriptor of -1": ({"STAND_IN_FAULT": "fd"}, "invalid file descriptor", 0),
    "pages of half the size": ({"STAND_IN_FAULT": "small"}, "does not import", 0),
    "a misaligned pointer": ({"LAYER_FAULT": "aligned"}, "does not import", 0),
    "an unknown policy": ({"LAYER_FAULT": "policy"}, "does not import", 0),
    "kernels on stale pages": ({"LAYER_FAULT": "stale"}, "wrong values", 0),
    "memory that needs maps": ({"LAYER_FAULT": "maps"}, "copies cost less than the maps", 0),
    "no extension": ({"OPENCL_LAYERS": ""}, "no extension", 0),
    "a refused registration": ({"BACKEND_FAULT": "register"}, "1000", 0),
    "graphs on stale pages": ({"BACKEND_FAULT": "stale"}, "wrong values in round 2", 0),
    "refused inputs": ({"BACKEND_FAULT": "inputs"}, "inputs are copied", 1),
    "refused outputs": ({"BACKEND_FAULT": "outputs"}, "outputs are copied", 1),
    "refused offsets": ({"BACKEND_FAULT": "offsets"}, "slots at offsets", 0),
    "a refused second context": ({"BACKEND_FAULT": "contexts"}, "two contexts", 0),
    "a crash": ({"BACKEND_FAULT": "crash"}, "crashed (SIGABRT)", 0),
    "a hang": ({"BACKEND_FAULT": "hang"}, "was stopped", 0),
}
"""Variables of the stand-ins, words of the reason, and tensors of a run that are still in place."""

ROUNDS = 3


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    return build_stand_ins(tmp_path_factory.mktemp("stand-ins"))


def run_chain(folder, cache, *arguments, **variables):
    found = run_on_phone_memory(folder, cache, "chain.py", *arguments, **variables)
    assert len(found["errors"]) == ROUNDS
    assert max(found["errors"]) < 1e-6
    # Nothing outlives the pool and the contexts.
    assert found["left"]["live"] == found["left"]["handles"] == 0
    return found


class TestChain:
    """A kernel, the emulator and a kernel on one allocation."""

    pytestmark = EMULATOR

    @pytest.mark.parametrize("binding", ["pyopencl", "ctypes"])
    def test_no_value_is_copied(self, stand_ins, tmp_path, binding):
        variables = ctypes_variables(tmp_path) if binding == "ctypes" else {}
        found = run_chain(stand_ins, tmp_path, "trusted", **variables)
        assert found["binding"] == binding
        assert found["handles"] == 2
        assert found["counts"] == {
            "allocations": 1,
            "live": 1,
            "imports": 1,
            "registered": 2,
            "handles": 2,
            "runs": ROUNDS,
            "in_place": 2 * ROUNDS,
            "copied": 0,
        }

    @SLOW
    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_ends_in_copies_with_a_reason(self, stand_ins, tmp_path, fault):
        variables, reason, in_place = FAULTS[fault]
        limit_s = "60" if fault == "a hang" else "600"
        found = run_chain(stand_ins, tmp_path, "probed", limit_s, **variables)
        assert reason in found["edges"]
        assert found["usable"] == bool(in_place)
        counts = found["counts"]
        assert (counts["in_place"], counts["copied"]) == (in_place * ROUNDS, (2 - in_place) * ROUNDS)

    @SLOW
    @pytest.mark.parametrize("binding", ["pyopencl", "ctypes"])
    @pytest.mark.parametrize(
        ("kind", "source"),
        [
            ("dmabuf", "cl_qcom_dmabuf_host_ptr, I/O-coherent"),
            ("ion", "cl_qcom_ion_host_ptr, I/O-coherent"),
            ("khr", "cl_khr_external_memory_dma_buf"),
        ],
    )
    def test_the_probe_names_the_extension(self, stand_ins, tmp_path, binding, kind, source):
        variables = ctypes_variables(tmp_path) if binding == "ctypes" else {}
        found = run_chain(stand_ins, tmp_path, "probed", "600", LAYER_TYPES=kind, **variables)
        assert found["edges"] == f"in place, without maps, by {source}"
        assert found["counts"]["copied"] == 0

    @SLOW
    def test_mapped_memory_is_mapped_here_too(self, stand_ins, tmp_path):
        variables = {"LAYER_FAULT": "maps", "HETEROLLM_SHARED_MEMORY": "mapped"}
        found = run_chain(stand_ins, tmp_path, "probed", "600", **variables)
        assert found["edges"].startswith("in place, mapped, by")
        assert (found["counts"]["in_place"], found["counts"]["copied"]) == (2 * ROUNDS, 0)

    def test_a_graph_that_refuses_its_memory_later_copies_it(self, stand_ins, tmp_path):
        """The verdict of an earlier start says that all edges work."""
        found = run_chain(stand_ins, tmp_path, "trusted", BACKEND_FAULT="register")
        assert "1000" in found["edges"]
        assert "from now on" in found["log"]
        assert found["counts"]["in_place"] == 0
        [kept] = tmp_path.rglob("shared-memory-*.json")
        assert "1000" in kept.read_text()

    @SLOW
    @pytest.mark.parametrize(("plan", "kind"), [("npu", "host"), ("splits", "host"), ("splits", "mapped")])
    def test_a_model_computes_the_same_bits(self, stand_ins, tmp_path, plan, kind):
        memory = {"HETEROLLM_SHARED_MEMORY": kind}
        shared = run_on_phone_memory(stand_ins, tmp_path, "model.py", plan, **memory)
        copied = run_on_phone_memory(stand_ins, tmp_path, "model.py", plan, OPENCL_LAYERS="", **memory)
        assert shared["digest"] == copied["digest"]
        assert shared["counts"]["copied"] == copied["counts"]["in_place"] == 0
        assert shared["counts"]["in_place"] == copied["counts"]["copied"] > 0
        assert shared["counts"]["handles"] == shared["handles"] > 0
        assert (shared["counts"]["allocations"], shared["counts"]["imports"]) == (1, 1)


class Pages:
    """Pages of the host as an allocation."""

    def __init__(self, serial, array):
        self.serial, self.array = serial, array
        self.address, self.size_bytes = array.ctypes.data, array.nbytes


class TestHandles:
    """What a context of QNN knows of an address."""

    @pytest.fixture
    def memory(self):
        memory = SharedMemory(SharingEdges())
        self.pages = Pages(0, np.zeros(1 << 16, np.uint8))
        memory._pages.add(self.pages)
        return memory

    def tensor(self, offset, shape, dtype=np.float16):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.pages.array[offset : offset + count].view(dtype).reshape(shape)

    def test_an_address_has_one_tensor_in_a_context(self, memory):
        one, other = memory.new_context(), memory.new_context()
        assert one.in_place(self.tensor(0, (32, 64)), is_input=True)
        assert one.in_place(self.tensor(0, (32, 64)), is_input=False)
        assert one.in_place(self.tensor(0, (1, 64)), is_input=True) is None
        assert one.in_place(self.tensor(0, (32, 64), np.uint16), is_input=True) is None
        assert one.in_place(self.tensor(4096, (1, 64)), is_input=True)
        assert other.in_place(self.tensor(0, (1, 64)), is_input=True)
        assert (memory.handles, memory.copied) == (3, 2)

    def test_memory_of_the_host_is_none_of_it(self, memory):
        assert memory.new_context().in_place(np.zeros((32, 64), np.float16), is_input=True) is None
        assert memory.copied == 0

    def test_a_refused_edge_is_copied(self, memory):
        memory.edges = SharingEdges(outputs="error 1100")
        context = memory.new_context()
        assert context.in_place(self.tensor(0, (32, 64)), is_input=True)
        assert context.in_place(self.tensor(8192, (32, 64)), is_input=False) is None

    def test_new_memory_at_the_same_address_is_registered_anew(self, memory):
        context = memory.new_context()
        assert context.in_place(self.tensor(0, (1, 64)), is_input=True)
        self.pages = Pages(1, self.pages.array)
        memory._pages = {self.pages}
        assert memory.handles == 0
        assert context.in_place(self.tensor(0, (32, 64)), is_input=True)
        assert memory.handles == 1


SPECS = [
    OpSpec("o", layer, (Member("o", 2048),), 2048, WeightFormat(4, 32), "linear_input", "linear_output")
    for layer in range(2)
]
LENGTHS = st.lists(st.sampled_from(STANDARD_LENGTHS), min_size=1, max_size=3).map(tuple)


@given(st.lists(LENGTHS, min_size=1, max_size=24))
def test_a_slice_finds_one_length_at_an_address(passes):
    shifts, seen = SlotShifts(np.dtype(np.float16)), {}
    for lengths in passes:
        shift = shifts.find(0, [(spec, RowsPlacement((256,), lengths)) for spec in SPECS])
        assert 0 <= shift <= SPARE_BYTES
        first = 0
        for length in lengths:
            for edge, columns in (("x", 2048), ("y", 256)):
                assert seen.setdefault((edge, shift + first * columns * 2), length) == length
            first += length
        assert shifts.find(0, [(spec, RowsPlacement((256,), lengths)) for spec in SPECS]) == shift
