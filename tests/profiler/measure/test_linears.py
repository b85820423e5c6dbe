"""Measuring linear groups: the right keys, emptied caches outside the time, failures as records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from heterollm.base import MIB, GraphError
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuLinear, kernel_times_ns
from heterollm.kernels.gpu.traits import host_cache_bytes
from heterollm.kernels.npu import BuiltGraph, GraphForm, GraphShape, LinearShape, LinearShard, NamedArrays
from heterollm.model import ModelShape
from heterollm.model.known import ModelSize
from heterollm.profiler.measure import gpu_timer as timer_module
from heterollm.profiler.measure import linear_tasks
from heterollm.profiler.measure import linears as linear_bench
from heterollm.profiler.measure.caches import HostReader, eviction_bytes
from heterollm.profiler.measure.gpu_timer import GpuTimer, gpu_timer
from heterollm.profiler.measure.linears import LinearBench, code_of
from heterollm.profiler.measure.random_data import random_members
from heterollm.profiler.records import GraphKey, LinearKey, LinearPoint, Profile, Record
from heterollm.profiler.runner import ProfileOptions, run_tasks
from heterollm.profiler.work import WorkPoint

SIZES = ModelSize(128, 256, 1, 4, 2, 320, True, 32, 2048)


@pytest.fixture(autouse=True)
def small_caches(device, monkeypatch):
    """Emptying the caches reads little, and every model is larger than they are."""
    for module in (linear_bench, timer_module):
        monkeypatch.setattr(module, "eviction_bytes", lambda _: MIB)
    monkeypatch.setattr(device.gpu, "traits", replace(device.gpu.traits, cache_bytes=0))


class Clock:
    """Nanoseconds that pass only where something says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class FakeGraph:
    def __init__(self, npu: FakeNpu, length: int, rows: int, columns: int, form: GraphForm) -> None:
        self._npu = npu
        self.length, self.rows, self.columns = length, rows, columns
        self._form = form

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        x, y = inputs["x"], outputs["y"]
        assert x.shape == (self.length, self.columns)
        assert y.shape == (self.length, self.rows)
        assert (x != 0).any(axis=1).all(), "a row of the input is zero"

        def call() -> None:
            self._npu.calls += 1
            if self._npu.fails_at == self._npu.calls:
                raise GraphError("The processor went away.")
            self._npu.clock.now_ns += self._npu.cost_ns(self.length, self._form)

        return call


class FakeNpu:
    """A backend whose runs take a stated time of a clock."""

    name = "fake"
    time_kind = "real"
    standard_lengths = (1, 32, 64, 256)
    graphs_by_length = True
    row_alignment = 64
    activation_dtype = np.dtype(np.float32)
    loaded_count = 0

    def __init__(self, clock: Clock, forms: tuple[GraphForm, ...] = ("matmul_nbits",)) -> None:
        self.clock = clock
        self.calls = self.compiled_count = self.fails_at = 0
        self.released: list[LinearShard] = []
        self.prepared: list[tuple[int, GraphForm]] = []
        self.cost_ns: Callable[[int, GraphForm], int] = lambda length, _: 1000 * length
        self.emulated_us: tuple[float, ...] | None = None
        self._forms = forms
        self._block_forms: tuple[GraphForm, ...] = ()

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        return self._forms if isinstance(shape, LinearShape) else self._block_forms

    def prepare(self, part: LinearShard, length: int, form: GraphForm) -> FakeGraph:
        self.prepared.append((length, form))
        self.compiled_count += 1
        return FakeGraph(self, length, part.rows, part.columns, form)

    def cpu_times_us(self, part: LinearShard, length: int, form: GraphForm, *, runs: int):
        return self.emulated_us

    def release(self, part: LinearShard) -> None:
        self.released.append(part)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake(device, clock) -> Device:
    return replace(device, npu=FakeNpu(clock))


def point_of(shape: ModelShape, group: str, part: str = "npu", tokens: int = 1, **changes: Any) -> WorkPoint:
    spec = next(spec for spec in shape.specs if spec.group == group)
    form = "" if part == "gpu" else "matmul_nbits"
    point = LinearPoint.of(spec, tokens, form=form, **changes)
    return WorkPoint(part, point, 0, spec)  # type: ignore[arg-type]


def linear_of(records: list[Record]) -> Record:
    [record] = [record for record in records if isinstance(record.key, LinearKey)]
    return record


@pytest.mark.parametrize("precision", ["w4a16", "w4a8", "fp16"])
def test_both_parts_are_measured_under_the_keys_that_were_announced(device, precision, monkeypatch):
    packed = []
    pack = GpuLinear.pack
    monkeypatch.setattr(
        GpuLinear, "pack", lambda *given, **named: packed.append(named) or pack(*given, **named)
    )
    shape = SIZES.shape("tiny", precision, float_bits=32)
    tasks, skipped = linear_tasks(device, [shape], tier=0)
    assert all(task.essential for task in tasks)
    assert skipped.total > 0
    gpu_timer(device.gpu)
    packed.clear()
    records = [record for task in tasks for record in task.run()]
    announced = [key for task in tasks for key in task.keys]
    found = {record.key for record in records if isinstance(record.key, LinearKey)}
    assert found <= set(announced)
    assert len(announced) - len(found) == skipped.counts["hopeless"] <= len(announced) // 4
    assert {key.processor for key in announced} == {"gpu", "npu"}
    # A packed group serves all its cuts; one more pack fills the caches with other things.
    assert len(packed) <= len(shape.specs) + 1
    made = Profile.of(device)
    for record in records:
        made.add(record)
    assert Profile.from_json(made.to_json()).records.keys() == made.records.keys()
    for record in records:
        assert not record.failed, record.error
        if isinstance(record.key, LinearKey):
            assert len(record.samples_us) >= 3
            assert min(record.samples_us + record.warmup_us) > 0
            assert record.key.point.integer_inputs == (precision == "w4a8")
        else:
            assert isinstance(record.key, GraphKey)
            assert record.values["build_us"] > 0
    device.npu.close()


def test_a_finer_tier_adds_tasks_behind_the_essential_ones(fake):
    shapes = [SIZES.shape("tiny")]
    essential, _ = linear_tasks(fake, shapes, tier=0)
    more, _ = linear_tasks(fake, shapes, tier=1)
    assert [task.keys for task in more[: len(essential)]] == [task.keys for task in essential]
    assert not any(task.essential for task in more[len(essential) :])
    assert all(task.estimate_s > 0 for task in more)


def test_estimates_count_the_graphs_that_are_built(fake, device):
    shapes = [SIZES.shape("tiny")]
    npu = [task for task in linear_tasks(fake, shapes)[0] if task.keys[0].processor == "npu"]
    gpu = [task for task in linear_tasks(fake, shapes)[0] if task.keys[0].processor == "gpu"]
    # Static graphs: one for each point.
    assert [task.graphs for task in npu] == [len(task.keys) for task in npu]
    assert all(task.build_s > 0 for task in npu)
    assert {(task.graphs, task.build_s) for task in gpu} == {(0, 0.0)}
    # A graph that serves all lengths is built for the first of them.
    fake.npu.graphs_by_length = False
    points = [key.point for task in npu for key in task.keys]
    slices = {(point.group, point.member_rows, point.form) for point in points}
    assert sum(task.graphs for task in linear_tasks(fake, shapes)[0]) == len(slices) < len(points)


@pytest.mark.parametrize(
    ("tokens", "streamed", "is_cold"),
    [(1, True, True), (32, True, True), (64, True, False), (1, False, False)],
)
def test_emptying_the_caches_is_outside_the_time(fake, clock, monkeypatch, tokens, streamed, is_cold):
    def read(reader: HostReader) -> None:
        clock.now_ns += 1_000_000_000

    monkeypatch.setattr(HostReader, "__call__", read)
    bench = LinearBench(fake, timer=clock)
    work = point_of(SIZES.shape("tiny"), "o", tokens=tokens, streamed=streamed)
    record = linear_of(bench.measure(work))
    assert set(record.samples_us + record.warmup_us) == {float(tokens)}
    assert bench.evictions == (len(record.samples_us) if is_cold else 0)


def test_an_emulators_caches_are_left_alone(fake, clock):
    fake.npu.time_kind = "emulated"
    fake.npu.emulated_us = (7001.0, 7000.0, 9000.0)
    bench = LinearBench(fake, timer=clock)
    record = linear_of(bench.measure(point_of(SIZES.shape("tiny"), "o")))
    assert bench.evictions == 0
    assert record.values == {"cpu_us": 7000.0, "cpu_us_most": 9000.0}


def test_the_gpu_empties_its_caches_outside_the_time(device, monkeypatch):
    monkeypatch.setattr(timer_module, "eviction_bytes", lambda _: 64 * MIB)
    timer = GpuTimer(device.gpu)
    weight = np.ones((64, 128), np.float32)
    linear = GpuLinear.pack(timer.runtime, [weight], activation_dtype=np.float32)
    x, y = timer.runtime.shared((1, 128), np.float32), timer.runtime.shared((1, 64), np.float32)
    launch = linear.launch(x, y, tokens=1, label="small")
    read, emptied, asked = timer._evictor(), [], []
    timer._eviction = lambda: emptied.append(read())
    monkeypatch.setattr(
        timer_module, "kernel_times_ns", lambda event: asked.append(kernel_times_ns(event)) or asked[-1]
    )
    timer.time_us([launch])
    assert (timer.evictions, emptied) == (0, [])
    asked.clear()
    cold_us = timer.time_us([launch], cold=True)
    assert timer.evictions == len(emptied) == 1
    last, first = asked
    assert cold_us == (last.end - first.start) / 1e3 > 0
    assert kernel_times_ns(emptied[0]).end <= first.start


def test_rounding_is_timed_with_a_launch_that_does_it_itself(device):
    timer = gpu_timer(device.gpu)
    shape = SIZES.shape("tiny", "w4a8")
    members = random_members(shape.layer[1])
    linear = GpuLinear.pack(timer.runtime, members, activation_dtype=np.float32, integer_inputs=True)
    x, y = timer.runtime.shared((256, 128), np.float32), timer.runtime.shared((256, 128), np.float32)
    launch = linear.launch(x, y, tokens=256, label="both")
    assert len(timer_module._enqueue(launch)) == 2
    timer.runtime.finish()


def test_a_host_clock_that_jumped_is_a_failed_record(fake):
    readings = iter([0, 5000, *([10_000, 9_000] * 50)])
    bench = LinearBench(fake, timer=lambda: next(readings))
    record = linear_of(bench.measure(point_of(SIZES.shape("tiny"), "o")))
    assert "clock jumped" in record.error
    assert not record.samples_us


def test_a_device_clock_that_jumped_is_a_failed_record(device, monkeypatch):
    true_times = timer_module.kernel_times_ns
    monkeypatch.setattr(
        timer_module,
        "kernel_times_ns",
        lambda event: (found := true_times(event))._replace(end=found.end + 3_600_000_000_000),
    )
    bench = LinearBench(device)
    [record] = bench.measure(point_of(SIZES.shape("tiny"), "o", "gpu"))
    assert "clock jumped" in record.error


def test_an_npu_that_fails_half_way_costs_its_points_only(fake, clock, monkeypatch):
    monkeypatch.setattr(linear_bench, "LinearBench", lambda device: LinearBench(device, timer=clock))
    fake.npu.fails_at = 20
    profile = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    tasks, _ = linear_tasks(fake, [SIZES.shape("tiny")], tier=0)
    tasks = [task for task in tasks if task.keys[0].processor == "npu"]
    summary = run_tasks(profile, tasks, ProfileOptions(budget_s=None))
    [failure] = profile.failures()
    assert failure.error == "The processor went away."
    assert isinstance(failure.key, LinearKey)
    assert summary.finished
    assert set(profile.records) >= {key for task in tasks for key in task.keys}


def test_what_was_made_of_a_group_goes_with_the_next(fake, clock):
    shape = SIZES.shape("tiny")
    bench = LinearBench(fake, timer=clock)
    for rows in ((128,), (64,)):
        bench.measure(point_of(shape, "o", member_rows=rows))
    assert not fake.npu.released
    bench.measure(point_of(shape, "down"))
    assert [part.rows for part in fake.npu.released] == [128, 64]
    bench.close()
    assert {part.group for part in fake.npu.released} == {"o", "down"}


class FilingNpu(FakeNpu):
    """A backend that keeps graphs in files."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.files: set[tuple[int, GraphForm]] = set()
        self.built: list[tuple[int, GraphForm]] = []

    def build(self, part: LinearShard, length: int, form: GraphForm) -> BuiltGraph:
        self.built.append((length, form))
        self.compiled_count += (length, form) not in self.files
        self.files.add((length, form))
        return BuiltGraph(1234, True, "")

    def prepare(self, part: LinearShard, length: int, form: GraphForm) -> FakeGraph:
        assert (length, form) in self.files
        self.loaded_count += 1
        return FakeGraph(self, length, part.rows, part.columns, form)


def test_a_graph_in_a_file_is_built_once_and_loading_it_is_timed_apart(device, clock):
    npu = FilingNpu(clock)
    bench = LinearBench(replace(device, npu=npu), timer=clock)
    work = point_of(SIZES.shape("tiny"), "o")
    [graph] = [record for record in bench.measure(work) if isinstance(record.key, GraphKey)]
    assert graph.values["size_bytes"] == 1234
    assert graph.values["build_us"] > 0
    assert len(graph.samples_us) == 1
    # As the drift's reference does: the same again needs nothing.
    assert [type(record.key) for record in bench.measure(work)] == [LinearKey]
    assert npu.built == [(1, "matmul_nbits")]
    # Found in its file, it is only loaded.
    again = LinearBench(replace(device, npu=npu), timer=clock)
    [graph] = [record for record in again.measure(work) if isinstance(record.key, GraphKey)]
    assert "build_us" not in graph.values
    assert len(graph.samples_us) == 1


def test_a_slice_holds_the_leading_rows_of_each_member(fake, clock):
    shape = SIZES.shape("tiny")
    bench = LinearBench(fake, timer=clock)
    spec = shape.layer[0]
    bench.measure(point_of(shape, "qkv", member_rows=(64, 0, 64)))
    bench.close()
    [part] = fake.npu.released
    assert part.row_ranges == ((0, 64), (0, 0), (0, 64))
    q, _, v = random_members(spec)
    assert np.array_equal(part.weight.codes, np.concatenate([q.codes[:64], v.codes]))


def test_poor_forms_are_dropped_after_two_lengths_and_counted(fake, clock, monkeypatch):
    monkeypatch.setattr(linear_bench, "LinearBench", lambda device: LinearBench(device, timer=clock))
    npu = fake.npu
    npu._forms = ("weight_first", "activation_first", "conv_1x1")
    # The second is poor at one length only, the third everywhere.
    costs = {"weight_first": 10, "activation_first": 19, "conv_1x1": 21}
    npu.cost_ns = lambda length, form: (
        1000 * (50 if (length, form) == (32, "activation_first") else costs[form])
    )
    tasks, skipped = linear_tasks(fake, [SIZES.shape("tiny")], tier=1)
    tasks = [task for task in tasks if task.keys[0].processor == "npu"]
    records = [record for task in tasks for record in task.run()]
    points = [record.key.point for record in records if isinstance(record.key, LinearKey)]
    whole = [p for p in points if p.group == "down" and p.member_rows == (128,)]
    lengths = {form: sorted(p.tokens for p in whole if p.form == form) for form in costs}
    assert lengths["weight_first"] == lengths["activation_first"] == [1, 32, 64, 256]
    assert lengths["conv_1x1"] == [1, 32]
    announced = sum(len(task.keys) for task in tasks)
    assert skipped.counts["form"] == announced - len(points) > 0

    # What was measured before says the same at once.
    known = {record.key: record for record in records}
    again, left_out = linear_tasks(fake, [SIZES.shape("tiny")], tier=1, known=known)
    npu.prepared.clear()
    for task in again:
        if task.keys[0].processor == "npu":
            list(task.run())
    assert {form for _, form in npu.prepared} == {"weight_first", "activation_first"}
    assert left_out.counts["form"] > skipped.counts["form"]


def test_cuts_are_not_measured_where_the_npu_cannot_help(fake, clock, monkeypatch):
    monkeypatch.setattr(linear_bench, "LinearBench", lambda device: LinearBench(device, timer=clock))
    # A second a run at one token; else a nanosecond, which no GPU needs twenty times.
    fake.npu.cost_ns = lambda length, form: 10**9 if length == 1 else 1
    tasks, skipped = linear_tasks(fake, [SIZES.shape("tiny")], tier=0)
    points = [record.key.point for task in tasks for record in task.run() if record.key in task.keys]
    cuts = [point for point in points if point.form and point.group == "down" and point.rows < 128]
    assert {point.tokens for point in cuts} == {256}
    assert skipped.counts["hopeless"] == len(SIZES.shape("tiny").specs)


def test_emulated_times_are_not_compared_with_real_ones(fake, clock, monkeypatch):
    monkeypatch.setattr(linear_bench, "LinearBench", lambda device: LinearBench(device, timer=clock))
    fake.time_kind = fake.npu.time_kind = "emulated"
    fake.npu.cost_ns = lambda length, form: 10**9
    fake.npu.emulated_us = (5.0,)
    tasks, skipped = linear_tasks(fake, [SIZES.shape("tiny")], tier=0)
    records = [record for task in tasks for record in task.run() if record.key in task.keys]
    assert {record.key for record in records} == {key for task in tasks for key in task.keys}
    assert not skipped.counts["hopeless"]


def test_a_device_without_an_npu_fails_npu_points_as_records(device):
    record = linear_of(LinearBench(replace(device, npu=None)).measure(point_of(SIZES.shape("tiny"), "o")))
    assert "no NPU" in record.error
    assert record.key.code == code_of("npu")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [({"index0": "48K", "index3": "16384K\n"}, 16 * MIB), ({"index2": "2M"}, 2 * MIB)]
    + [({"index0": text}, 32 * MIB) for text in ("", "many", "12Q", "K")],
)
def test_the_largest_cache_is_read_from_the_system(tmp_path, contents, expected):
    for name, text in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(text)
    assert host_cache_bytes(tmp_path) == expected


def test_a_missing_cache_folder_means_the_default(tmp_path):
    assert host_cache_bytes(tmp_path / "none") == 32 * MIB


def test_emptying_reads_twice_the_cache_within_bounds():
    assert [eviction_bytes(size * MIB) for size in (0, 8, 48, 4096)] == [
        size * MIB for size in (64, 64, 96, 512)
    ]
