"""Clocks and cores: the biggest cores, the GPU's hint, the NPU's vote, and an engine thread that rests."""

import ctypes
import logging
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from heterollm.base import DeviceError, OptionError
from heterollm.doctor import Diagnosis
from heterollm.doctor.case import run_case
from heterollm.doctor.power import CLOCKS, CORES, power_cases
from heterollm.engine.thread import EngineThread
from heterollm.kernels import threads
from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, list_devices, open_device, runtimes, snapdragon
from heterollm.kernels.formats import random_weight
from heterollm.kernels.gpu import OpenClRuntime, clocks
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.npu import LinearShard, QnnNpu, qnn_available
from heterollm.kernels.npu.qnn_power import QnnPower
from heterollm.kernels.npu.qnn_runtime import QnnTarget
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.threads import ThreadSplit, biggest_cores, middle_cores, on_cores
from heterollm.report import console as report
from heterollm.report import diagnosis_report

USABLE, REASON, _ = qnn_available(emulator=True)
emulated = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]
LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")

EIGHT_GEN_3 = (280, 280, 870, 870, 870, 830, 830, 1024)
"""Capacities of two little cores, three and two medium ones, and the big one."""

EIGHT_GEN_3_KHZ = (2265600, 2265600, 3148800, 3148800, 3148800, 2956800, 2956800, 3302400)
EIGHT_ELITE = (818,) * 6 + (1024,) * 2


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """Make this process one of a phone with ranked cores; returns the list of affinities that are set."""

    def make(ranks, file="cpu_capacity"):
        for core, rank in enumerate(ranks):
            path = tmp_path / f"cpu{core}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{rank}\n")
        monkeypatch.setattr(threads, "CPU_FOLDER", tmp_path)
        current, pinned = [set(range(len(ranks)))], []

        def pin(_thread, wanted):
            pinned.append(tuple(wanted))
            current[0] = set(wanted)

        monkeypatch.setattr(os, "sched_getaffinity", lambda _thread: current[0], raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", pin, raising=False)
        return pinned

    return make


# -- cores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "file", "big"),
    [
        (EIGHT_GEN_3, "cpu_capacity", (2, 3, 4, 7)),
        ((280, 280, *(870,) * 5, 1024), "cpu_capacity", (2, 3, 4, 5, 6, 7)),
        (EIGHT_GEN_3_KHZ, "cpufreq/cpuinfo_max_freq", (2, 3, 4, 7)),
        (EIGHT_ELITE, "cpu_capacity", (6, 7)),
        ((1024,) * 12, "cpu_capacity", tuple(range(12))),
        ((1024,), "cpu_capacity", (0,)),
    ],
)
def test_the_biggest_cores_of_a_phone(cores, ranks, file, big):
    cores(ranks, file)
    assert biggest_cores() == big


@pytest.mark.parametrize(
    ("ranks", "file", "middle"),
    [
        (EIGHT_GEN_3, "cpu_capacity", (2, 3, 4, 5, 6)),
        (EIGHT_GEN_3_KHZ, "cpufreq/cpuinfo_max_freq", (2, 3, 4, 5, 6)),
        (EIGHT_ELITE, "cpu_capacity", (0, 1, 2, 3, 4, 5)),  # two kinds: the slower one
        ((280, 870, 870, 1024), "cpu_capacity", (1, 2)),
        ((280, 280, 870, 1024), "cpu_capacity", (2, 3)),  # one middle core: the biggest ones
        ((1024,) * 12, "cpu_capacity", tuple(range(12))),
        ((1024,), "cpu_capacity", (0,)),
    ],
)
def test_the_middle_cores_of_a_phone(cores, ranks, file, middle):
    cores(ranks, file)
    assert middle_cores() == middle


def test_capacities_count_before_clocks(cores):
    cores(EIGHT_GEN_3_KHZ[::-1], "cpufreq/cpuinfo_max_freq")
    cores(EIGHT_GEN_3)
    assert biggest_cores() == (2, 3, 4, 7)
    assert biggest_cores((0, 1, 5)) == (0, 1, 5)  # one medium and two little ones: two cores at least
    assert biggest_cores((0, 5, 6)) == (5, 6)


@pytest.mark.parametrize("text", ["", "x", "10.5"])
def test_a_core_without_a_rank_leaves_all(cores, tmp_path, text):
    cores(EIGHT_GEN_3)
    (tmp_path / "cpu3" / "cpu_capacity").write_text(text)
    assert biggest_cores() == middle_cores() == tuple(range(8))


def test_cores_are_given_back(cores):
    pinned = cores(EIGHT_GEN_3)
    with pytest.raises(KeyError), on_cores((2, 3)):
        raise KeyError
    assert pinned == [(2, 3), tuple(range(8))]


def phone(power, npu_cores=()):
    split, half = ThreadSplit((), npu_cores), np.dtype(np.float16)
    return Device("snapdragon", None, None, split, half, half, "real", power=power)


@pytest.mark.parametrize(
    ("power", "big"), [("burst", (2, 3, 4, 7)), ("balanced", (2, 3, 4, 5, 6)), ("default", tuple(range(8)))]
)
def test_the_engine_thread_runs_on_the_cores_of_its_power(cores, power, big):
    pinned = cores(EIGHT_GEN_3)
    assert phone(power).pin()
    assert pinned == [big]


def test_a_device_on_cpu_cores_keeps_its_own(cores):
    pinned = cores(EIGHT_GEN_3)
    assert phone("burst", (0, 1)).pin()
    assert pinned == [(0, 1)]


def fake_adreno(**fields):
    driver = "OpenCL 3.0 QUALCOMM build: 0808"
    device = {"name": "QUALCOMM Adreno(TM) 750", "vendor": "QUALCOMM", "type": 4, "driver_version": driver}
    return SimpleNamespace(
        **(device | {"max_compute_units": 6, "host_unified_memory": 1, "extensions": ""} | fields)
    )


def test_no_driver_starts_on_little_cores(cores, monkeypatch):
    """PoCL's workers belong on the cores of the GPU part, the threads of a phone's driver on big ones."""
    pinned, asked = cores(EIGHT_GEN_3), []

    def platform(name, devices):
        def get_devices(*_type):
            asked.append((name, tuple(os.sched_getaffinity(0))))
            return devices

        return SimpleNamespace(name=name, get_devices=get_devices)

    platforms = [platform("QUALCOMM Snapdragon(TM)", [fake_adreno()]), platform("Portable Computing", [])]
    monkeypatch.setattr(
        cl, "get_platforms", lambda: asked.append(("all", tuple(os.sched_getaffinity(0)))) or platforms
    )
    monkeypatch.setattr(runtimes, "_process_split", None)
    monkeypatch.setattr(runtimes, "make_pocl_cache", lambda: None)
    list_devices()
    big, gpu = (2, 3, 4, 7), (0, 1, 2, 3)
    assert asked[:3] == [("all", big), ("QUALCOMM Snapdragon(TM)", big), ("Portable Computing", gpu)]
    assert pinned[-1] == tuple(range(8)), "the caller keeps its cores"


def test_a_snapdragon_opens_on_big_cores(cores, monkeypatch):
    """Contexts, queues and sessions start threads, too."""
    pinned, opened = cores(EIGHT_GEN_3), []
    monkeypatch.setattr(snapdragon, "opencl_devices", lambda split: [("QUALCOMM", fake_adreno())])
    monkeypatch.setattr("heterollm.kernels.devices.software.require_qnn", lambda *, emulator: "")
    for test in ("self_test", "check_endings"):
        monkeypatch.setattr(gpu, test, lambda *_: None)
    power = SimpleNamespace(wake=lambda: opened.append("wake"))

    def part(name):
        def make(*_device, **options):
            opened.append((name, options["power"], tuple(os.sched_getaffinity(0))))
            made = {"self_test": lambda: None, "activation_dtype": np.dtype(np.float16)}
            made |= {"choose_contexts": lambda _layers: None, "recall_memory": lambda: None}
            return SimpleNamespace(power=power, shared_memory="mapped", **made)

        return make

    monkeypatch.setattr("heterollm.kernels.gpu.OpenClRuntime", part("gpu"))
    monkeypatch.setattr("heterollm.kernels.npu.QnnNpu", part("npu"))
    device = open_device("snapdragon")
    big = (2, 3, 4, 7)
    assert opened == [("gpu", "burst", big), ("npu", "burst", big), "wake"]
    assert (device.power, device.power_switch) == ("burst", power)
    assert pinned[-1] == tuple(range(8))
    without = open_device("snapdragon", npu_threads=0, power="default")
    assert (without.npu, without.power_switch) == (None, None)
    assert opened[3:] == [("gpu", "default", big)]


@pytest.mark.parametrize("power", ["", "Burst", None, 3])
def test_powers_that_are_none(power):
    with pytest.raises(OptionError, match="burst, balanced, default"):
        open_device("host", power=power)


# -- the GPU's hint -----------------------------------------------------------------------------------


@pytest.fixture
def device(runtime):
    return runtime._device


@pytest.fixture
def hinting(monkeypatch, device):
    """A device whose driver offers the extension of the hint: another one of PoCL's goes by that name."""
    monkeypatch.setattr(clocks, "EXTENSION", device.extensions.split()[0])
    return device


@pytest.mark.parametrize(("power", "value"), [("burst", 0x40C3), ("balanced", 0x40C4)])
def test_a_driver_that_takes_the_hint(monkeypatch, hinting, power, value):
    real, asked = clocks.opencl_library().clCreateContext, []
    real.restype = ctypes.c_void_p

    def create(properties, *rest):
        asked.append(tuple(properties))
        plain = (ctypes.c_ssize_t * 3)(*properties[:2], 0)
        return real(plain, *rest)

    monkeypatch.setattr(clocks, "opencl_library", lambda: SimpleNamespace(clCreateContext=create))
    context, text = clocks.new_context(hinting, power)
    assert asked == [(0x1084, hinting.platform.int_ptr, 0x40C2, value, 0)]
    assert text == f"{clocks.EXTENSION} {'high' if power == 'burst' else 'normal'}"
    assert context.devices == [hinting]
    queue, x = cl.CommandQueue(context, hinting), np.arange(8, dtype=np.int32)
    buffer, y = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=x), np.zeros_like(x)
    cl.enqueue_copy(queue, y, buffer)
    assert np.array_equal(x, y)


def test_a_driver_that_refuses_the_hint(hinting):
    """PoCL knows no such property."""
    context, text = clocks.new_context(hinting, "burst")
    assert context.devices == [hinting]
    assert text.startswith(f"no hint: the driver refuses {clocks.EXTENSION} with OpenCL error -")


def test_a_driver_without_the_hint(monkeypatch, device):
    monkeypatch.delattr(clocks, "opencl_library")  # would not be called
    assert clocks.new_context(device, "burst")[1] == "no hint: the driver does not offer cl_qcom_perf_hint"
    monkeypatch.setattr(clocks, "EXTENSION", device.extensions.split()[0])
    assert clocks.new_context(device, "default")[1] == "no hint: power is left to the system"


def test_a_runtime_asks_for_its_power(device):
    runtime = OpenClRuntime(device, power="burst")
    assert runtime.clock_hint == runtime.profiling_twin().clock_hint
    assert "does not offer" in runtime.clock_hint


# -- the NPU's vote -----------------------------------------------------------------------------------


class Switch:
    """A switch that records its calls."""

    problem = ""

    def __init__(self):
        self.calls = []
        self.rested = threading.Event()

    def wake(self):
        self.calls.append("wake")

    def rest(self):
        self.calls.append("rest")
        self.rested.set()


def test_an_idle_engine_thread_rests_once_and_wakes_for_the_next_call(monkeypatch):
    monkeypatch.setattr("heterollm.engine.thread.IDLE_S", 0.02)
    thread, switch = EngineThread(), Switch()
    thread.rest_when_idle(switch)
    assert switch.rested.wait(600)
    time.sleep(0.1)
    assert switch.calls == ["rest"]
    switch.rested.clear()
    thread.run(lambda: switch.calls.append("work"))
    assert switch.calls[:3] == ["rest", "wake", "work"]
    assert switch.rested.wait(600)
    thread.close()
    assert switch.calls == ["rest", "wake", "work", "rest"]


def test_a_busy_engine_thread_asks_for_nothing(monkeypatch):
    monkeypatch.setattr("heterollm.engine.thread.IDLE_S", 600.0)
    thread, switch = EngineThread(), Switch()
    thread.rest_when_idle(switch)
    for _ in range(20):
        thread.run(lambda: None)
    thread.close()
    assert switch.calls == []


@pytest.fixture
def make_part():
    """A function that makes a small NPU shard, the same one each time."""

    def make():
        weight = random_weight(np.random.default_rng(0), 64, 64, WeightFormat(4, 32))
        return LinearShard(weight, 0, "o", ((0, 64),), "a shard")

    return make


class TestOnTheEmulator:
    pytestmark = emulated

    def test_graphs_run_under_every_power(self, make_part, monkeypatch):
        part = make_part()
        x = np.random.default_rng(0).standard_normal((32, part.columns)).astype(np.float16)
        answers = []
        for power in ("default", "balanced", "burst"):
            npu = QnnNpu(emulator=True, power=power)
            y = np.zeros((32, part.rows), np.float16)
            call = npu.prepare(part, 32).bind({"x": x}, {"y": y})
            if npu.power is not None:
                npu.power.wake()
            call()
            if npu.power is not None:
                npu.power.rest()
                call()
                assert npu.power.problem == ""
            npu.close()
            answers.append(y)
        assert all(np.array_equal(answers[0], answer) for answer in answers)

    def test_a_compiled_graph_is_the_same_at_every_power(self, make_part):
        models = {
            QnnNpu(emulator=True, power=power)._binary(make_part(), "matmul_nbits", 32).model
            for power in ("default", "burst")
        }
        assert len(models) == 1

    def test_a_vote_names_the_mode(self, monkeypatch):
        power = QnnPower(QnnTarget(True, {"backend_type": "htp", "soc_model": "57"}), "burst")
        power.rest()  # nothing is open yet
        votes = []
        session = SimpleNamespace(set_ep_dynamic_options=votes.append)
        monkeypatch.setattr("heterollm.kernels.npu.qnn_power._small_session", lambda target: session)
        power.wake()
        power.rest()
        power.close()
        power.close()
        key = "ep.dynamic.qnn_htp_performance_mode"
        assert votes == [{key: "burst"}, {key: "low_power_saver"}, {key: "low_power_saver"}]

    @pytest.mark.parametrize("refusal", [RuntimeError("no such option"), DeviceError("no Hexagon")])
    def test_a_refused_vote_is_said_once(self, monkeypatch, caplog, refusal):
        power = QnnPower(QnnTarget(True, {}), "balanced")

        def refuse(_target):
            raise refusal

        monkeypatch.setattr("heterollm.kernels.npu.qnn_power._small_session", refuse)
        with caplog.at_level(logging.WARNING):
            power.wake()
            power.wake()
            power.rest()
        assert len(caplog.records) == 1
        assert str(refusal) in caplog.text
        assert power.problem


# -- the doctor ---------------------------------------------------------------------------------------


def rows(device):
    return {(case.part, case.operator): run_case(case, "fp16") for case in power_cases(device)}


class Timed(Switch):
    """A switch of a processor that is fast while awake."""

    def __init__(self, awake_us, resting_us):
        super().__init__()
        self._times = {"wake": awake_us, "rest": resting_us}

    def run_us(self, _runs):
        return self._times[self.calls[-1]]


@pytest.fixture
def opened(runtime, monkeypatch):
    monkeypatch.setattr("heterollm.doctor.power.REST_S", 0.0)

    def make(switch, time_kind="real"):
        npu = SimpleNamespace(name="Hexagon", time_kind=time_kind)
        half = np.dtype(np.float16)
        return Device("x", runtime, npu, ThreadSplit((), ()), half, half, time_kind, power_switch=switch)

    return make


@pytest.mark.parametrize(
    ("times", "time_kind", "status", "message"),
    [
        ((200.0, 500.0), "real", "pass", "200 us for a small graph, 500 us at rest"),
        ((500.0, 500.0), "real", "unverified", "500 us for a small graph, 500 us at rest"),
        ((200.0, 500.0), "emulated", "unverified", "accepted; the emulator has no clocks"),
    ],
)
def test_the_doctor_compares_a_graph_with_and_without_the_vote(opened, times, time_kind, status, message):
    switch = Timed(*times)
    check = rows(opened(switch, time_kind))["NPU", CLOCKS]
    assert (check.status, check.message) == (status, message)
    assert switch.calls == ["wake", "rest", "wake"]


def test_the_report_names_what_is_unverified(opened):
    checks = tuple(rows(opened(Timed(2.0, 1.0))).values())
    diagnosis = Diagnosis("x", (), checks, (), ())
    shown = report.render(diagnosis_report(diagnosis), width=100)
    assert "unverified  2 us" in shown
    assert "Device x: nothing failed; unverified: clocks." in shown
    assert diagnosis.passed


def test_a_refused_vote_fails(opened):
    switch = Timed(1.0, 1.0)
    switch.problem = "no such option"
    check = rows(opened(switch))["NPU", CLOCKS]
    assert (check.status, check.message) == ("fail", "The vote is refused: no such option")
    assert "--power default" in check.fix


def test_the_doctor_shows_cores_and_claims_no_hint(opened, monkeypatch):
    device = opened(None)
    found = rows(device)
    assert found["GPU", CLOCKS].status == found["NPU", CLOCKS].status == "not offered"
    assert found["GPU", CORES].status == "pass"
    assert "all that are allowed" in found["GPU", CORES].message
    monkeypatch.setattr(device.gpu, "clock_hint", "cl_qcom_perf_hint high")
    hint = rows(device)["GPU", CLOCKS]
    assert (hint.status, hint.message) == ("unverified", "cl_qcom_perf_hint high")


def test_a_system_without_affinity_is_said(opened, monkeypatch):
    monkeypatch.setattr("heterollm.doctor.power.allowed_cores", lambda: (0, 1, 2))
    check = rows(opened(None))["GPU", CORES]
    assert check.status == "unverified"
    assert check.message.startswith("unpinned: this system pins no thread to")
