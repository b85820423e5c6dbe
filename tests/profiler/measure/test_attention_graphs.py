"""Attention on the NPU is measured with the kernel that writes its inputs, where it is asked for."""

import pytest
from attention_sizes import MODEL, SIZES, measured, take_small_sizes
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.profiler.measure import attention_tasks, layer_tasks
from heterollm.profiler.predict.operators import LayerPredictor


@pytest.fixture(autouse=True)
def small(monkeypatch):
    take_small_sizes(monkeypatch)


def records_of(device, **options):
    return measured(attention_tasks(device, [MODEL, MODEL], **options))


@pytest.mark.parametrize("quick", [False, True])
def test_every_size_is_measured_once(device, quick):
    records = records_of(device, quick=quick)
    assert {(key.tokens, key.keys) for key in records} == set(SIZES[:2] if quick else SIZES)
    assert {(key.operator, key.heads, key.group, key.head_dim) for key in records} == {
        ("attention_graph", 4, 2, 32)
    }
    predictor = LayerPredictor.of(records)
    longer = structs.replace(next(iter(records)), tokens=1024, keys=2048)
    assert predictor.predict(longer).us > max(record.median_us for record in records.values())


def test_the_inputs_are_measured_at_the_same_sizes(device):
    plain, asked = (
        {key for task in layer_tasks(device, [MODEL], on_npu=on_npu) for key in task.keys}
        for on_npu in (False, True)
    )
    added = {(key.operator, key.tokens, key.context) for key in asked - plain}
    inputs = {("attention_inputs", *size) for size in SIZES}
    assert inputs <= added
    assert {operator for operator, *_ in added} == {"attention_inputs", "attention"}


def test_modelled_times_are_those_of_the_model():
    device = open_device("sim:snapdragon-8gen3")
    try:
        times_us = {(key.tokens, key.keys): one.median_us for key, one in records_of(device).items()}
    finally:
        device.close()
    assert 200 < times_us[64, 256] < times_us[64, 512] < times_us[128, 512]


def test_an_npu_without_such_graphs_has_none(device, monkeypatch):
    monkeypatch.setattr(device.npu, "forms", lambda *_: ())
    assert attention_tasks(device, [MODEL]) == []
