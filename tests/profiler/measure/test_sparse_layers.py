"""Sparse attention is measured on the GPU and on the NPU, under the keys that were announced."""

import pytest
from attention_sizes import MODEL, SIZES, measured, take_small_sizes
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import qnn_available
from heterollm.profiler.measure import layer_tasks, sparse_tasks
from heterollm.profiler.predict.operators import LayerPredictor
from heterollm.profiler.records import Record, SparseKey

USABLE, REASON, _ = qnn_available(emulator=True)
slow = [pytest.mark.emulator, pytest.mark.slow, pytest.mark.skipif(not USABLE, reason=REASON)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    take_small_sizes(monkeypatch)


def records_of(device, **options):
    return measured(sparse_tasks(device, [MODEL, MODEL], **options))


def test_every_operator_is_measured(device):
    records = records_of(device)
    assert {(key.tokens, key.keys) for key in records} == set(SIZES)
    fused = {key.heads for key in records if key.operator == "scores"}
    assert fused == {1, 2, 4}
    assert {key.keep for key in records if key.operator == "sparse_attention"} == {0.2, 0.5}
    assert len(records) == len(SIZES) * 8
    assert len(LayerPredictor.of(records).operators) == 5


def test_budgets_may_leave_out_all_sizes_but_two(device, monkeypatch):
    monkeypatch.undo()
    for quick, left_out in ((True, {(1024, 4096)}), (False, {(1024, 1024), (256, 2048), (1024, 4096)})):
        tasks = sparse_tasks(device, [MODEL], quick=quick)
        tasks += [
            task for task in layer_tasks(device, [MODEL], quick=quick, sparse=True) if not task.essential
        ] * quick
        sizes = {
            (key.tokens, key.keys if isinstance(key, SparseKey) else key.context)
            for task in tasks
            if not task.essential
            for key in task.keys
        }
        assert sizes == left_out
    # The essential ones give every cost.
    tasks = [task for task in sparse_tasks(device, [MODEL], quick=True) if task.essential]
    records = {key: Record(key, (float(key.keys),)) for task in tasks for key in task.keys}
    predictor = LayerPredictor.of(records)
    longer = next(key for key in records if key.operator == "selection")
    assert predictor.predict(structs.replace(longer, tokens=1024)).us > 0


@pytest.mark.parametrize("name", [pytest.param("emulator", marks=slow)])
def test_the_emulator_estimates_scores(name):
    device = open_device(name)
    try:
        records = records_of(device, quick=True)
    finally:
        device.close()
    assert {key.heads for key in records if key.operator == "scores"} == {1, 2, 4}


@pytest.mark.parametrize("quick", [False, True])
def test_a_simulated_device_has_the_same_records(quick):
    device = open_device("sim:snapdragon-8gen3")
    try:
        records = records_of(device, quick=quick)
    finally:
        device.close()
    assert {(key.tokens, key.keys) for key in records} == set(SIZES[:2] if quick else SIZES)
    assert {key.operator for key in records} == {
        "score_codes",
        "scores",
        "score_estimate",
        "selection",
        "sparse_attention",
    }
    # One launch of four heads is faster than four of one.
    scores = {key: found.median_us for key, found in records.items() if key.operator == "scores"}
    times_us = {(key.heads, key.keys): time_us for key, time_us in scores.items()}
    assert times_us[4, 512] < 4 * times_us[1, 512]
