"""Devices: what is here, what is missing and what to install, and which threads run where."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources

import numpy as np
import pytest
from faults import StaleArray

from heterollm.base import DeviceError, OptionError
from heterollm.kernels.devices import DEVICE_NAMES, list_devices, open_device, snapdragon
from heterollm.kernels.devices.gpu import open_gpu, self_test
from heterollm.kernels.devices.kind import Opening
from heterollm.kernels.gpu import OpenClRuntime, is_cpu, list_opencl_devices
from heterollm.kernels.gpu.opencl_devices import MEMORY_VARIABLE
from heterollm.kernels.npu import STANDARD_LENGTHS, openvino_npu
from heterollm.kernels.ops import GraphMemory
from heterollm.kernels.threads import allowed_cores, split_threads
from heterollm.profiler.records import Profile

pytestmark = pytest.mark.cpu

# Before any test: the first one that opens a device must not keep this thread's cores.
CORES_AT_START = allowed_cores()
MODEL = str(resources.files("heterollm.data.tiny_python_lm"))
AFFINITY = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")


@dataclass
class FakeDevice:
    """As much of a pyopencl device as is looked at before it is opened."""

    name: str = "QUALCOMM Adreno(TM) 750 "
    vendor: str = "QUALCOMM"
    driver_version: str = "OpenCL 3.0 QUALCOMM build: 0808"
    type: int = 4
    max_compute_units: int = 6
    host_unified_memory: int = 1
    extensions: str = "cl_khr_fp16"


def status(name):
    return next(entry for entry in list_devices() if entry.name == name)


@pytest.fixture
def opencl(monkeypatch, host):
    """Replace the OpenCL devices of this machine."""

    def replace(*devices):
        monkeypatch.setattr("heterollm.kernels.gpu.list_opencl_devices", lambda *_: list(devices))

    return replace


# -- the host -----------------------------------------------------------------------------------------


def test_what_the_host_is(host):
    assert (host.name, host.time_kind, host.reason) == ("host", "real", "")
    assert host.activation_dtype == np.float32
    assert host.standard_lengths == STANDARD_LENGTHS
    assert host.split == split_threads()
    assert host.gpu.traits.is_cpu
    description = host.description()
    assert description["gpu_threads"] == len(host.split.gpu_cores)
    assert description["npu_versions"] == host.npu.versions()
    assert {"device", "time", "gpu", "gpu_driver", "npu", "npu_threads", "activation_dtype"} <= set(
        description
    )


def test_the_fingerprint_follows_what_a_measurement_depends_on(host):
    before = host.fingerprint()
    assert before == host.fingerprint()
    other = open_device("host", gpu_threads=len(host.split.gpu_cores), npu_threads=0)
    assert other.npu is None
    assert other.standard_lengths == ()
    assert other.fingerprint() != before
    other.close()


def test_another_split_in_the_same_process_is_refused(host):
    cores = len(allowed_cores())
    wanted = len(host.split.gpu_cores) + 1 if cores > len(host.split.gpu_cores) else None
    if wanted is None:
        pytest.skip("needs two cores")
    message = rf"already open in this process with {len(host.split.gpu_cores)} thread\(s\), not {wanted}"
    for name in ("host", "auto", "emulator"):
        with pytest.raises(DeviceError, match=message) as caught:
            open_device(name, gpu_threads=wanted, npu_threads=cores - wanted)
        assert "another process" in caught.value.fix
    open_device("host").close()


def test_opening_leaves_the_callers_cores_alone(host):
    assert allowed_cores() == CORES_AT_START
    open_device("host").close()
    assert allowed_cores() == CORES_AT_START


@pytest.mark.parametrize("name", ["", "gpu", "Host", None, 3])
def test_names_that_are_none(name):
    with pytest.raises(
        OptionError, match="Choose auto, snapdragon, opencl, intel, host, emulator, intel:cpu"
    ):
        open_device(name)


def test_thread_counts_that_are_none(host):
    for options in ({"gpu_threads": 0}, {"npu_threads": -1}, {"gpu_threads": 10_000}, {"npu_threads": 1.5}):
        with pytest.raises(OptionError):
            open_device("host", **options)


# -- what is here -------------------------------------------------------------------------------------


def test_every_device_is_listed_with_a_reason_or_its_parts(host):
    statuses = list_devices()
    assert tuple(entry.name for entry in statuses) == DEVICE_NAMES
    for entry in statuses:
        assert entry.usable is not bool(entry.reason)
        assert entry.gpu
        assert entry.npu
        if not entry.usable:
            assert "missing" in (entry.gpu, entry.npu)
            assert entry.fix
    assert status("host").usable
    assert host.gpu.traits.name in status("host").gpu
    assert "onnxruntime" in status("host").npu


@pytest.mark.parametrize(
    ("system", "machine", "advice"),
    [
        ("Linux", "x86_64", "heterollm[host]"),
        ("Windows", "AMD64", "heterollm[host]"),
        ("Linux", "aarch64", "pocl-opencl-icd"),
        ("Darwin", "arm64", "driver"),
    ],
)
def test_without_an_opencl_runtime_the_advice_fits_the_platform(monkeypatch, opencl, system, machine, advice):
    opencl()
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert not status("host").usable
    assert "No OpenCL runtime" in status("host").reason
    assert advice in status("host").fix


def test_both_missing_parts_are_named(monkeypatch, opencl):
    opencl()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    entry = status("snapdragon")
    assert (entry.gpu, entry.npu) == ("missing", "missing")
    assert "No Adreno among the OpenCL devices (none)" in entry.reason
    assert "riscv64" in entry.reason
    assert "emulator or host" in entry.fix
    assert "exists for x86-64 Linux only" in status("emulator").reason


def test_an_adreno_is_seen(opencl):
    opencl(("QUALCOMM Snapdragon(TM)", FakeDevice()))
    entry = status("snapdragon")
    assert entry.gpu == "QUALCOMM Adreno(TM) 750 (QUALCOMM Snapdragon(TM) OpenCL 3.0 QUALCOMM build: 0808)"
    # A GPU is no CPU, so that the host has none now.
    assert "No OpenCL runtime for the CPU" in status("host").reason


def test_the_emulator_needs_its_package(monkeypatch, host):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "onnxruntime_qnn" else find_spec(name),
    )
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    entry = status("emulator")
    assert (entry.usable, entry.npu) == (False, "missing")
    assert "onnxruntime-qnn is not installed" in entry.reason
    assert "pip install 'heterollm[emulator]'" in entry.fix


# -- intel --------------------------------------------------------------------------------------------


@pytest.fixture
def no_openvino(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    for cached in (openvino_npu.load_openvino, openvino_npu._core):
        monkeypatch.setattr(openvino_npu, cached.__name__, cached.__wrapped__)


def openvino():
    """Return OpenVINO, or skip the test."""
    try:
        return openvino_npu.load_openvino()
    except DeviceError as error:
        pytest.skip(str(error))


def test_intel_needs_a_gpu_of_intel_and_openvino(opencl, no_openvino):
    opencl(("NVIDIA CUDA", FakeDevice("H200", "NVIDIA Corporation")))
    entry = status("intel")
    assert (entry.usable, entry.gpu, entry.npu) == (False, "missing", "missing")
    assert "No Intel GPU among the OpenCL devices (H200)" in entry.reason
    assert "openvino is not installed" in entry.reason
    assert "pip install 'heterollm[intel]'" in entry.fix
    opencl(("Intel(R) OpenCL Graphics", FakeDevice("Arc 140V", "Intel(R) Corporation", "26.1")))
    assert status("intel").gpu.startswith("Arc 140V (Intel(R) OpenCL Graphics 26.1; mapped memory")


def test_intel_without_an_npu_opens_nothing_and_says_what_to_try(opencl):
    if "NPU" in openvino().Core().available_devices:
        pytest.skip("has an NPU")
    opencl(("Intel(R) OpenCL Graphics", FakeDevice("Arc 140V", "Intel(R) Corporation", "26.1")))
    assert "OpenVINO finds no NPU" in status("intel").reason
    with pytest.raises(DeviceError, match="OpenVINO finds no NPU") as caught:
        open_device("intel")
    assert "--device intel:cpu" in caught.value.fix


def test_openvinos_cpu_stands_in_for_intels_npu(host):
    openvino()
    device = open_device("intel:cpu")
    assert (device.name, device.time_kind) == ("intel:cpu", "real")
    assert device.activation_dtype == device.cache_dtype == np.float16
    assert device.standard_lengths == (1, 32, 64, 128, 256)
    assert device.split == split_threads()
    assert Profile.of(device).graph_memory == GraphMemory(True, 2, unrolls_blocks=True)
    device.close()
    threads = len(device.split.gpu_cores)
    assert open_device("intel:cpu", gpu_threads=threads, npu_threads=0).npu is None


# -- auto ---------------------------------------------------------------------------------------------


def opens_snapdragon(monkeypatch, function):
    kind = dataclasses.replace(snapdragon.KIND, open=function)
    monkeypatch.setattr(snapdragon, "KIND", kind)


def test_auto_takes_the_host_and_says_why(opencl, host, monkeypatch):
    def no_snapdragon(_wanted):
        raise DeviceError("No Adreno among the OpenCL devices (a CPU).")

    opens_snapdragon(monkeypatch, no_snapdragon)
    device = open_device("auto")
    assert device.name == "host"
    assert device.reason == (
        "no Snapdragon can be used, so this machine's cores compute; see `heterollm devices`"
    )
    device.close()


def test_auto_takes_a_snapdragon_that_passes(host, monkeypatch):
    chosen = open_device("host")
    opens_snapdragon(monkeypatch, lambda _wanted: chosen)
    device = open_device("auto")
    assert device is chosen
    assert device.reason == "both processors passed a self-test"
    device.close()


def test_a_gpu_that_computes_wrongly_fails_its_self_test(host, monkeypatch):
    self_test(host.gpu)
    from heterollm.kernels.gpu import GpuLinear

    launch = GpuLinear.launch
    monkeypatch.setattr(
        GpuLinear, "launch", lambda self, x, y, **options: launch(self, x, y, **options | {"tokens": 3})
    )
    with pytest.raises(DeviceError, match="computes a linear layer wrongly"):
        self_test(host.gpu)


# -- threads ------------------------------------------------------------------------------------------


def run(script, **surroundings):
    environment = {key: value for key, value in os.environ.items() if key != "POCL_MAX_PTHREAD_COUNT"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, MODEL],
        capture_output=True,
        text=True,
        env=environment | surroundings,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


PINNED = """
import os, sys, threading
from heterollm import LLM

allowed = os.sched_getaffinity(0)
with LLM.load(sys.argv[1], device="host", plan="layer") as llm:
    split = llm.device.split
    assert os.sched_getaffinity(0) == allowed, "the caller was pinned"
    engine = llm._thread.run(lambda: os.sched_getaffinity(0))
    assert engine == set(split.npu_cores), (engine, split)
    assert engine <= allowed
    tokens = llm.generate("import os", max_new_tokens=4, ignore_eos=True).token_ids
    # PoCL's workers are the only other threads that may be bound to fewer cores than the process.
    bound = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    assert bound <= {frozenset(allowed), frozenset(split.gpu_cores), frozenset(split.npu_cores)}, bound
    assert os.sched_getaffinity(0) == allowed
    thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0) == allowed))
    thread.start()
    thread.join()
    print(len(split.gpu_cores), len(split.npu_cores), llm.device.gpu.traits.compute_units)
    print(*tokens)
"""


@AFFINITY
def test_only_the_engine_thread_is_pinned(host):
    fresh, counts, tokens = run(PINNED)
    assert fresh == "True"
    gpu, npu, units = map(int, counts.split())
    assert (gpu, npu) == (len(host.split.gpu_cores), len(host.split.npu_cores))
    assert units == gpu
    assert len(tokens.split()) == 4


@AFFINITY
def test_a_process_with_one_core(host):
    core = max(allowed_cores())
    fresh, counts, tokens = run(f"import os\nos.sched_setaffinity(0, {{{core}}})\n{PINNED}")
    assert fresh == "True"
    assert counts == "1 1 1"
    assert len(tokens.split()) == 4


def test_opencl_opened_with_another_split_first(host):
    """The number of threads cannot be changed once something else has asked for the devices."""
    lines = run(
        "import sys\n"
        "from heterollm import LLM\n"
        "from heterollm.base.errors import DeviceError\n"
        "try:\n"
        "    LLM.load(sys.argv[1], device='host')\n"
        "except DeviceError as error:\n"
        "    print(error)\n",
        POCL_MAX_PTHREAD_COUNT="7",
    )
    if host.gpu.traits.platform != "Portable Computing Language" or len(host.split.gpu_cores) == 7:
        pytest.skip("needs PoCL")
    assert "runs 7 thread(s) in this process" in lines[0]


def test_listing_devices_first_does_not_spoil_the_split(host):
    lines = run(
        "import sys\n"
        "from heterollm import LLM, list_devices\n"
        "from heterollm.kernels.threads import allowed_cores\n"
        "before = allowed_cores()\n"
        "usable = [entry.name for entry in list_devices() if entry.usable]\n"
        "assert allowed_cores() == before, 'the caller was pinned'\n"
        "with LLM.load(sys.argv[1], device='host') as llm:\n"
        "    print('host' in usable, len(llm.device.split.gpu_cores), llm.device.gpu.traits.compute_units)\n"
    )
    assert lines == [f"True {len(host.split.gpu_cores)} {len(host.split.gpu_cores)}"]


# -- shared memory -----------------------------------------------------------------------------------


@pytest.fixture
def stale(monkeypatch):
    """Devices whose host never sees a write of a kernel."""
    shared = OpenClRuntime.shared
    monkeypatch.setattr(OpenClRuntime, "shared", lambda *arguments: StaleArray(shared(*arguments)))


def test_a_gpu_whose_shared_virtual_memory_is_stale_maps_memory(stale, monkeypatch, caplog):
    device = next(device for _, device in list_opencl_devices() if is_cpu(device))
    monkeypatch.setenv(MEMORY_VARIABLE, "svm")
    assert open_gpu(device, Opening()).shared_memory == "mapped"
    assert "500 of 500 rounds of the litmus test" in caplog.text
    with pytest.raises(DeviceError, match=r"shared virtual memory .* 500 of 500 rounds"):
        open_gpu(device, Opening(shared_memory="svm"))


def test_a_gpu_keeps_shared_virtual_memory_that_passes():
    device = next(device for _, device in list_opencl_devices() if is_cpu(device))
    assert open_gpu(device, Opening(shared_memory="svm")).shared_memory == "svm"


def test_kinds_of_memory_that_are_missing_are_refused(monkeypatch):
    with pytest.raises(OptionError, match="'shared'"):
        open_device("host", shared_memory="shared")
    monkeypatch.setattr("heterollm.kernels.gpu.opencl_devices.has_fine_grained_atomics", lambda _: False)
    with pytest.raises(DeviceError, match="does not report fine-grained"):
        open_device("host", shared_memory="svm")
    monkeypatch.setattr("heterollm.kernels.gpu.opencl_devices.is_cpu", lambda _: False)
    device = next(device for _, device in list_opencl_devices() if is_cpu(device))
    monkeypatch.setattr("heterollm.kernels.gpu.opencl_devices.is_cpu", lambda _: False)
    with pytest.raises(DeviceError, match="is no CPU"):
        OpenClRuntime(device, shared_memory="host")
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    assert OpenClRuntime(device).shared_memory == "mapped"
