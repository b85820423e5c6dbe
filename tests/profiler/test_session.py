"""A profiling run as a whole: what it leaves behind beside the profile."""

import contextlib
from dataclasses import replace

import pytest

from heterollm.base import KernelError
from heterollm.kernels.npu import QnnNpu, qnn_available
from heterollm.model.known import ModelSize
from heterollm.profiler import SessionOptions, profile_device, session
from heterollm.profiler.measure import Task, linear_tasks
from heterollm.profiler.records import GraphKey, LinearKey, LinearPoint, Profile, Record
from heterollm.profiler.work import SkippedPoints

USABLE, REASON, _ = qnn_available(emulator=True)


class Filing:
    """The host's NPU, as if it kept graphs in files."""

    def __init__(self, npu):
        self._npu = npu
        self.events = []

    def __getattr__(self, name):
        return getattr(self._npu, name)

    @contextlib.contextmanager
    def temporary_graphs(self):
        self.events.append("begin")
        try:
            yield
        finally:
            self.events.append("end")


@pytest.fixture
def only_linears(monkeypatch):
    """A run measures what the test says, and nothing else."""
    for name in ("_link_tasks", "bandwidth_tasks", "layer_tasks", "power_tasks", "_copy_tasks"):
        monkeypatch.setattr(session, name, lambda *_, **__: [])
    tasks = []
    monkeypatch.setattr(session, "linear_tasks", lambda *_, **__: (tasks, SkippedPoints()))
    return tasks


def test_graphs_of_random_weights_are_temporary_even_where_a_run_is_stopped(device, only_linears, tmp_path):
    npu = Filing(device.npu)
    points = [LinearPoint("o", (64,), 64, tokens, 4, 32, form="matmul_nbits") for tokens in (1, 32)]
    keys = [LinearKey("npu", point, "graph") for point in points]

    def measure(key):
        npu.events.append(key.point.tokens)
        return [Record(key, (5.0,) * 3)]

    def stop():
        raise KeyboardInterrupt

    options = SessionOptions.of(budget_s=5.0, tune=False)
    path = tmp_path / "profile.json"
    only_linears[:] = [
        Task("x", (keys[0],), lambda: measure(keys[0]), 0.1, essential=True),
        Task("x", (keys[1],), stop, 0.1, essential=True),
    ]
    with pytest.raises(KeyboardInterrupt):
        profile_device(replace(device, npu=npu), [], options, path=path)
    assert npu.events == ["begin", 1, "end"]
    # The next run goes on, and needs no graph of the first.
    only_linears[1] = Task("x", (keys[1],), lambda: measure(keys[1]), 0.1, essential=True)
    _, summary = profile_device(replace(device, npu=npu), [], options, path=path)
    assert npu.events == ["begin", 1, "end", "begin", 32, "end"]
    assert (summary.known, summary.finished) == (1, True)


def test_a_backend_without_files_needs_nothing(device, only_linears, tmp_path):
    profile, summary = profile_device(
        device, [], SessionOptions.of(budget_s=5.0, tune=False), path=tmp_path / "profile.json"
    )
    assert summary.finished
    assert not profile.failures()


@pytest.mark.parametrize(("budget_s", "tuning_s"), [(10.0, 2.5), (240.0, 30.0), (None, 30.0)])
def test_the_budget_covers_tuning(device, only_linears, tmp_path, monkeypatch, budget_s, tuning_s):
    given = []

    def tune(_runtime, _jobs, *, budget_s, progress):
        given.append(budget_s)
        raise KernelError("no tuning in this test")

    monkeypatch.setattr(session, "tune", tune)
    options = SessionOptions.of(budget_s=budget_s)
    profile_device(device, [], options, path=tmp_path / "profile.json")
    assert given == [tuning_s]


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_a_profile_of_the_emulator_leaves_no_graphs(device, only_linears, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("HETEROLLM_CACHE", str(cache))
    shape = ModelSize(256, 512, 1, 4, 2, 512, True, 64, 2048).shape("tiny")
    npu = QnnNpu(emulator=True)
    emulator = replace(device, name="emulator", npu=npu, time_kind="emulated")
    path = tmp_path / "profile.json"
    tasks, _ = linear_tasks(emulator, [shape], tier=0, core=True)
    on_npu = {task.keys[0].point.group: task for task in tasks if task.keys[0].processor == "npu"}
    # No budget leaves one of them out.
    only_linears[:] = [replace(task, essential=True) for task in on_npu.values()]
    profile, _ = profile_device(emulator, [shape], SessionOptions.of(quick=True), path=path)
    npu.close()
    assert not [record.error for record in profile.failures()]
    graphs = [record for _, record in Profile.load(path).of_kind(GraphKey)]
    assert any(record.key.point.is_ffn for record in graphs)
    assert all(record.values["size_bytes"] > 0 and record.samples_us for record in graphs)
    assert list((cache / "graphs").iterdir()) == []
