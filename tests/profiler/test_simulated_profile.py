"""Profiling a simulated device: the profiler is a real device's, its times are the model's."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import Simulation, soc_of
from heterollm.kernels.sim.soc.gpu_model import gpu_time, linear_work
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.model.known import ModelSize
from heterollm.profiler import SessionOptions, essential_work, profile_device
from heterollm.profiler.records import (
    BandwidthKey,
    ContentionKey,
    CopyKey,
    FenceKey,
    GraphKey,
    LaunchKey,
    LayerKey,
    LinearKey,
    PowerKey,
)
from heterollm.solver import ProfileCosts, Solver, best_strategy, limits_of, power_of
from heterollm.solver.costs import Slowdown
from heterollm.solver.profile_costs import DECODE_POSITION
from heterollm.solver.profile_overheads import overheads_of

NAME = "sim:snapdragon-8gen3-paper"
SHAPE = ModelSize(4096, 14336, 8, 32, 8, 128256, False, 128, 2048).shape("wide", group_size=128)


def profiled(folder):
    device = open_device(NAME)
    options = SessionOptions.of(budget_s=None)
    return device, profile_device(device, [SHAPE], options, path=folder / "profile.json")[0]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("profiles")))
        yield profiled(tmp_path_factory.mktemp("profiles"))


def test_a_quick_run_on_a_slow_device_ends_in_time_and_still_plans(monkeypatch, tmp_path):
    """A point takes 1.5 s: those that a default run needs exceed the budget of a quick one."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    monkeypatch.setattr("heterollm.profiler.measure.linears.NOTHING_COMPUTED_S", 1.5)
    device, options = open_device(NAME), SessionOptions.of(quick=True)
    assert essential_work(device, [SHAPE], SessionOptions()).seconds > options.budget_s
    assert essential_work(device, [SHAPE], options).seconds <= options.budget_s
    # Not even one point more than the essential ones ends in time.
    monkeypatch.setattr("heterollm.profiler.measure.linears.NOTHING_COMPUTED_S", options.budget_s + 1)
    profile, summary = profile_device(device, [SHAPE], options, path=tmp_path / "profile.json")
    assert summary.finished
    assert set(summary.left_out) == {"ffn on the NPU", "head on the NPU"} | {
        f"{group} on the {part}" for group in ("qkv", "o", "gate_up", "down") for part in ("GPU", "NPU")
    } | {"head on the GPU"}
    solver = Solver(SHAPE.specs, limits_of(profile), ProfileCosts(profile, SHAPE))
    assert solver.plan(device=NAME, precision="w4a16").uses_npu


def test_everything_is_measured_and_labelled(found):
    _, profile = found
    assert profile.time_kind == "simulated"
    assert not profile.failures()
    for kind in (
        LaunchKey,
        FenceKey,
        BandwidthKey,
        ContentionKey,
        LinearKey,
        LayerKey,
        GraphKey,
        CopyKey,
        PowerKey,
    ):
        assert list(profile.of_kind(kind)), kind
    [run] = profile.runs.values()
    assert run["finished"]
    assert run["clocks_mhz"] == []  # this machine's clocks say nothing
    assert "model of snapdragon-8gen3-paper" in run["power"][0]


def test_equal_devices_give_equal_profiles(found, tmp_path):
    def lines(profile):
        return {key: (record.samples_us, dict(record.values)) for key, record in profile.records.items()}

    first, second = lines(found[1]), lines(profiled(tmp_path)[1])
    # What is measured through a run to see drift is named by the time of the run.
    first, second = (
        {key: value for key, value in one.items() if "Drift" not in type(key).__name__}
        for one in (first, second)
    )
    assert first == second


def test_slices_take_what_the_model_says(found):
    device, profile = found
    soc, checked = soc_of(device), set()
    for key, record in profile.of_kind(LinearKey):
        point = key.point
        if point.is_ffn or point.group == "head":
            continue
        if key.processor == "gpu":
            work = linear_work(point.rows, point.columns, point.tokens, block=point.block)
            truth_us = gpu_time(soc, work).alone_us
        else:
            work = NpuWork(point.rows, point.columns, point.tokens, 4, point.block, point.form)
            truth_us = npu_time(soc, work).alone_us
        assert record.median_us == pytest.approx(truth_us, rel=1e-3), key
        checked.add((key.processor, point.form))
    assert checked >= {("gpu", ""), ("npu", "matmul_nbits"), ("npu", "k_chunked")}


def test_costs_are_those_of_the_parameters(found):
    device, profile = found
    soc = soc_of(device)
    overheads = overheads_of(profile)
    hidden_us = soc.npu.execute_us * (1 - soc.npu.execute_exposed_fraction)
    assert overheads.hand_over_us == pytest.approx(soc.hand_over.poll_us - hidden_us, abs=4.0)
    assert overheads.refill_us == pytest.approx(soc.cpu.submit_us + soc.hand_over.refill_us, abs=4.0)
    assert profile.records[LaunchKey("chained")].median_us == pytest.approx(soc.gpu.kernel_gap_us)
    # What a pass of one token submits, attention in two kernels: it is long.
    costs = ProfileCosts(profile, SHAPE)
    assert costs.overheads.submit_us == soc.cpu.submit_us
    assert costs.overheads.hidden_us == pytest.approx(hidden_us, abs=4.0)
    assert not costs.overheads.merges_launches
    assert [len(costs.kernels_us(spec)) for spec in SHAPE.layer] == [1, 3, 1, 1]
    for spec in SHAPE.layer:
        assert sum(costs.kernels_us(spec)) == pytest.approx(costs.between_us(spec, 1))
    # A token is decoded behind others, unless somebody knows behind how many; a prompt begins a session.
    output = next(spec for spec in SHAPE.layer if spec.group == "o")
    first_us, usual_us = (costs.at(position).between_us(output, 1) for position in (0, DECODE_POSITION))
    assert first_us < costs.between_us(output, 1) == usual_us
    assert costs.between_us(output, 256) == costs.at(0).between_us(output, 256)
    # The NPU pads passes to its graphs, so each is slowed as one of that length.
    up = next(spec for spec in SHAPE.layer if spec.group == "gate_up")
    assert costs.slowdown(up, 5).npu == costs.slowdown(up, 32).npu < costs.slowdown(up, 256).npu
    assert costs.slowdown(up, 200) == costs.slowdown(up, 256)
    # As soon as polling, and asleep meanwhile.
    assert best_strategy(profile) == "sleep_poll"
    power = power_of(profile)
    assert power is not None
    assert power.gpu_watts > 0
    assert power.npu_watts > 0


def test_parts_slow_each_other_by_what_bounds_them(found, monkeypatch):
    device, profile = found
    soc, corun = soc_of(device), soc_of(device).memory.corun_slowdown
    costs = ProfileCosts(profile, SHAPE)
    specs = {spec.group: spec for spec in SHAPE.layer}
    # What waits for weights slows nobody: one token, and as many as take the NPU no longer.
    assert costs.slowdown(specs["gate_up"], 1) == Slowdown()
    assert costs.slowdown(specs["gate_up"], 64).npu == 1.0
    # Starting a graph is a part of each measured run, and slows nothing.
    assert costs.slowdown(specs["gate_up"], 64).gpu == pytest.approx(corun, rel=0.02)
    both = costs.slowdown(specs["gate_up"], 256)
    assert (both.gpu, both.npu) == pytest.approx((corun, corun), rel=0.02)
    # Rows that spill wait as well, for a cache; cut into chunks they do not spill.
    assert specs["down"].columns > soc.npu.row_limit_columns
    assert costs.slowdown(specs["down"], 256) == both
    whole = replace(limits_of(profile), forms=lambda *_: ("matmul_nbits",))
    monkeypatch.setattr("heterollm.solver.contention.limits_of", lambda *_, **__: whole)
    costs = ProfileCosts(profile, SHAPE)
    assert costs.slowdown(specs["down"], 1) == Slowdown()
    assert costs.slowdown(specs["down"], 256).npu == 1.0


def test_predictions_hold_between_the_points(found):
    device, profile = found
    soc, draw = soc_of(device), np.random.default_rng(3)
    costs = ProfileCosts(profile, SHAPE)
    errors: dict[str, list[float]] = {"gpu": [], "npu": []}
    for _ in range(120):
        spec = SHAPE.layer[int(draw.integers(len(SHAPE.layer)))]
        rows = tuple(int(draw.integers(1, own // 256 + 1)) * 256 for own in spec.member_rows)
        tokens, length = int(draw.integers(1, 500)), int(draw.choice(device.standard_lengths))
        truth_us = gpu_time(soc, linear_work(sum(rows), spec.columns, tokens, block=128)).alone_us
        errors["gpu"].append(abs(costs.gpu_us(spec, rows, tokens) / truth_us - 1))
        truth_us = npu_time(soc, NpuWork(sum(rows), spec.columns, length, 4, 128)).alone_us
        errors["npu"].append(abs(costs.npu_us(spec, rows, length, "matmul_nbits") / truth_us - 1))
    assert all(statistics.median(values) <= 0.05 for values in errors.values()), errors


def test_what_is_computed_changes_no_fingerprint():
    plain = open_device(NAME, npu_threads=0)
    assert plain.npu is None
    alike = [open_device(NAME, simulation=Simulation(every_form=True)), open_device(NAME)]
    assert alike[0].fingerprint() == alike[1].fingerprint() != plain.fingerprint()
