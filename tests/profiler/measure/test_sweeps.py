"""Stages, order and the effect of k: what is measured, on which lengths, and that plans do not read it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import STANDARD_LENGTHS, LinearShard, QnnNpu, qnn_available
from heterollm.kernels.ops import WeightFormat
from heterollm.model.known import ModelSize
from heterollm.profiler import SessionOptions, profile_device
from heterollm.profiler.measure import sweep_tasks
from heterollm.profiler.predict import Predictor
from heterollm.profiler.records import Profile, Record, SweepKey

SIMULATED = "sim:snapdragon-8gen3-paper"
USABLE, REASON, _ = qnn_available(emulator=True)


def measured(tasks) -> dict[SweepKey, Record]:
    return {record.key: record for task in tasks for record in task.run()}


@pytest.fixture(scope="module")
def simulated():
    return open_device(SIMULATED)


@pytest.fixture(scope="module")
def found(simulated):
    return measured(sweep_tasks(simulated))


def test_lengths_lie_on_and_off_the_standard_ones_in_both_orders(simulated, found):
    tasks = sweep_tasks(simulated)
    assert set(found) == {key for task in tasks for key in task.keys}
    assert not any(record.failed for record in found.values())
    for form in ("weight_first", "activation_first", "matmul_nbits"):
        tokens = {key.point.tokens for key in found if key.point.form == form}
        assert {31, 32, 33, 63, 64, 65} <= tokens
        assert len(tokens - set(STANDARD_LENGTHS)) >= 5


def test_a_simulated_npu_shows_its_steps_and_its_order(found):
    times = {
        (key.point.form, key.point.tokens): round(record.median_us, 1)
        for key, record in found.items()
        if key.point.columns == 2048 and key.point.rows == 2048
    }
    for form in ("weight_first", "activation_first"):
        first, second = times[form, 32], times[form, 33]
        assert times[form, 1] == times[form, 31] == first < second == times[form, 64]
    assert times["activation_first", 32] > times["weight_first", 32]


def test_the_sweep_of_k_keeps_the_size_of_the_weight_and_shows_the_limit(found):
    sweep = {key: record for key, record in found.items() if key.point.rows != key.point.columns}
    assert len({key.point.rows * key.point.columns for key in sweep}) == 1
    plain = {
        key.point.columns: record.median_us
        for key, record in sweep.items()
        if (key.point.form, key.point.tokens) == ("matmul_nbits", 1)
    }
    # The modelled NPU keeps 4096 inputs on its chip.
    assert plain[4096] == pytest.approx(plain[1024])
    assert plain[6144] > 2 * plain[4096]
    chunked = {key.point.columns for key in sweep if key.point.form == "k_chunked"}
    assert chunked == {columns for columns in plain if columns > 4096}


def test_a_form_that_is_not_offered_is_not_measured(simulated, monkeypatch):
    offered = simulated.npu.forms
    monkeypatch.setattr(
        simulated.npu, "forms", lambda *of: tuple(form for form in offered(*of) if form != "activation_first")
    )
    forms = {key.point.form for task in sweep_tasks(simulated) for key in task.keys}
    assert forms == {"weight_first", "matmul_nbits", "k_chunked"}
    assert sweep_tasks(replace(simulated, npu=None)) == []


def test_host_times_any_length(device):
    tasks = sweep_tasks(device)
    [task] = [task for task in tasks if task.keys[0].point.form == "activation_first"]
    keys = [key for key in task.keys if key.point.tokens in (1, 33)]
    # A few of its points: the whole takes half a minute.
    records = [record for record, _ in zip(task.run(), range(8), strict=False)]
    assert {record.key for record in records} >= set(keys)
    assert all(len(record.samples_us) >= 3 for record in records)
    assert task.build_s > 0
    assert task.graphs == 1


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_emulator_takes_cpu_time(device, monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    npu = QnnNpu(emulator=True, compile_in_child=False)
    try:
        emulated = replace(device, npu=npu, time_kind="emulated")
        task = sweep_tasks(emulated)[0]
        assert task.keys[0].point.form == "weight_first"
        records = list(task.run())
    finally:
        npu.close()
    assert not [record.error for record in records if record.failed]
    cpu_us = {record.key.point.tokens: record.values["cpu_us"] for record in records}
    assert all(record.values["cpu_us_most"] >= record.values["cpu_us"] for record in records)
    assert cpu_us[33] > 1.4 * cpu_us[32]
    assert cpu_us[65] > 1.15 * cpu_us[64]


def test_predictions_do_not_read_it(simulated, monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    shape = ModelSize(512, 1024, 2, 8, 4, 2048, True, 64, 2048).shape("small")
    options = SessionOptions(45.0, quick=True, tune=False, characterise=True)
    path = tmp_path / "profile.json"
    profile, _ = profile_device(open_device(SIMULATED), [shape], options, path=path)
    assert len(list(profile.of_kind(SweepKey))) == len(
        {key for task in sweep_tasks(simulated) for key in task.keys}
    )
    assert Profile.load(path).records.keys() == profile.records.keys()
    plain = {key: record for key, record in profile.records.items() if not isinstance(key, SweepKey)}
    without = Profile(profile.description, plain, profile.runs)
    with_sweeps, alone = Predictor.fit(profile), Predictor.fit(without)
    for spec in shape.specs:
        for point in (key.point for task in sweep_tasks(simulated) for key in task.keys):
            asked = structs.replace(point, group=spec.group)
            assert with_sweeps.predict_us(asked, "npu") == alone.predict_us(asked, "npu")


def test_lengths_off_the_standard_ones_stay_refused_where_plans_prepare(device):
    from heterollm.base import GraphError
    from heterollm.kernels.formats import shape_only_weight

    part = LinearShard(shape_only_weight(64, 64, WeightFormat(32)), 0, "o", ((0, 64),), "x")
    for npu in (device.npu, open_device(SIMULATED).npu):
        with pytest.raises(GraphError, match="no graphs of length 33"):
            npu.prepare(part, 33)
        with pytest.raises(GraphError, match="at least one token"):
            npu.prepare(part, 0, any_length=True)
