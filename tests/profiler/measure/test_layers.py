"""The other operators of a layer: every one is measured, under a key that says all its time depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterollm.base import KernelError
from heterollm.kernels.gpu import STEP_LENGTH, STEP_POSITION, STEP_WORDS
from heterollm.kernels.operators import attention, rope
from heterollm.kernels.operators.registry import timed_operators
from heterollm.model import op_specs, shape_of_specs
from heterollm.model.known import ModelSize
from heterollm.profiler.measure import gpu_timer as timer_module
from heterollm.profiler.measure import layer_key, layer_tasks, layers

POSITIONS = (0, 300)
OF_INTEGER_GRAPHS = ("_uint8", "_uint16", "_codes", "_sum", "_outliers")
SIZES = ModelSize(128, 256, 1, 4, 2, 320, True, 32, 2048)


@pytest.fixture(autouse=True)
def small_caches(device, monkeypatch):
    """Emptying the caches reads little, every model is larger than they are, and passes are short."""
    monkeypatch.setattr(layers, "TOKENS", (1, 32))
    monkeypatch.setattr(layers, "POSITIONS", POSITIONS)
    monkeypatch.setattr(layers, "CASES_OF_A_TASK", len(POSITIONS))
    monkeypatch.setattr(timer_module, "eviction_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(device.gpu, "traits", replace(device.gpu.traits, cache_bytes=0))


OF_OTHER_LAYERS = {
    *("short_conv", "delta_convolution", "delta_rule", "gated_norm", "output_gate", "inner_norm"),
    *("state_convolution", "selective_scan", "gate_cutoff", "stream_mixing", "laurel"),
    *("absorbed_queries", "turned_queries", "expanded_values", "latent_norm"),
    "attention_inputs",  # of attention on the NPU, which is measured where it is asked for
}
"""Operators that this model lacks."""


@pytest.mark.parametrize("precision", ["w4a16", "w4a8"])
def test_every_operator_is_measured_under_the_key_that_was_announced(device, precision):
    tasks = layer_tasks(device, [SIZES.shape("tiny", precision)])
    records = [record for task in tasks for record in task.run()]
    assert [record.key for record in records] == [key for task in tasks for key in task.keys]
    for record in records:
        assert not record.failed, record.error
        assert min(record.samples_us + record.warmup_us) > 0
        assert not record.values  # launches are merged here: none is a submission of its own
    plain = {name for name in timed_operators() if not name.endswith(("_int8", *OF_INTEGER_GRAPHS))}
    found = {record.key.operator for record in records}
    assert {name.removesuffix("_int8") for name in found} == plain - OF_OTHER_LAYERS
    assert ("attention_int8" in found) == (precision == "w4a8")
    contexts = {record.key.context for record in records if record.key.operator.startswith("attention")}
    assert {position + tokens for position in POSITIONS for tokens in (1, 32)} <= contexts


def test_sizes_that_an_operator_does_not_depend_on_are_left_out():
    shape = SIZES.shape("tiny")
    attention = layer_key(shape, "attention", 32, position=256)
    assert (attention.context, attention.hidden, attention.heads) == (288, 0, 4)
    norm = layer_key(shape, "rms_norm", 32, position=256)
    assert (norm.context, norm.hidden, norm.heads, norm.kv_heads, norm.head_dim) == (0, 128, 0, 0, 0)
    assert layer_key(shape, "gated_activation", 1).hidden == 256
    assert layer_key(shape, "join_logits", 1).hidden == 320
    assert layer_key(SIZES.shape("tiny", "w4a8"), "final_norm", 1).operator == "final_norm_int8"


@pytest.mark.parametrize("quick", [False, True])
def test_operators_on_codes_are_measured_where_the_npu_has_integer_graphs(device, quick):
    shape = SIZES.shape("tiny")
    *layer, head = op_specs(SIZES.config(), "w4a16", 32, True, scales="stepped")
    specs = (*layer, replace(head, weight=layer[0].weight))
    stepped = shape_of_specs(SIZES.config(), specs, "stepped")

    def of_codes(shape):
        tasks = layer_tasks(device, [shape], quick=quick)
        return [task for task in tasks if task.keys[0].operator.endswith(OF_INTEGER_GRAPHS)]

    assert not of_codes(shape)
    records = [record for task in of_codes(stepped) for record in task.run()]
    assert all(min(record.samples_us) > 0 for record in records)
    tokens = set(layers.QUICK_TOKENS if quick else layers.TOKENS)
    widths = {"rms_norm_uint16": {128}, "write_codes": {128, 256}, "read_codes": {128, 256, 512}}
    for name, expected in widths.items():
        keys = [record.key for record in records if record.key.operator == name]
        assert {key.hidden for key in keys} == expected
        assert {key.tokens for key in keys} == tokens
    assert {record.key.operator for record in records} == {*widths, "final_norm_uint16"}


@pytest.mark.parametrize("quick", [False, True])
def test_codes_of_8_bits_and_kernels_of_shadows_are_measured_for_weights_with_one_scale(device, quick):
    shape = SIZES.shape("tiny", "w8a8")
    tasks = layer_tasks(device, [shape], quick=quick)
    own = [task for task in tasks if task.keys[0].operator.endswith(OF_INTEGER_GRAPHS)]
    records = [record for task in own for record in task.run()]
    assert all(not record.failed and min(record.samples_us) > 0 for record in records)
    tokens = set(layers.QUICK_TOKENS if quick else layers.TOKENS)
    widths = {
        "rms_norm_uint8": {128},
        "write_codes_uint8": {128, 256},
        "read_codes_uint8": {128, 256, 512},
        "rms_norm_sum": {128},
        "rope_and_store_sum": {0},
        "gated_activation_sum": {256},
        "find_outliers": {128, 256},
        "multiply_outliers": {128, 256, 512},
    }
    assert {record.key.operator for record in records} == set(widths)
    for name, expected in widths.items():
        keys = [record.key for record in records if record.key.operator == name]
        assert {key.hidden for key in keys} == expected
        assert {key.tokens for key in keys} == tokens
        channels = {16, 128} if name == "multiply_outliers" else {0}
        assert {key.context for key in keys} == channels


def test_operators_that_two_models_share_are_measured_once(device):
    shape = SIZES.shape("tiny")
    wider = ModelSize(128, 384, 1, 4, 2, 320, True, 32, 2048).shape("wider")
    keys = [key for task in layer_tasks(device, [shape, wider]) for key in task.keys]
    assert len(set(keys)) == len(keys)
    assert {key.hidden for key in keys if key.operator == "gated_activation"} == {256, 384}


def test_attention_reads_the_context_that_the_step_buffer_states(device, monkeypatch):
    seen = []
    attend = attention.attend

    def watched(kernels, q, cache, out, step, **sizes):
        words = step.array
        seen.append((int(words[STEP_POSITION]), int(words[STEP_LENGTH]), words[STEP_WORDS:].size))
        return attend(kernels, q, cache, out, step, **sizes)

    monkeypatch.setattr(attention, "attend", watched)
    tasks = layer_tasks(device, [SIZES.shape("tiny")])
    [decode] = [task for task in tasks if (task.keys[0].operator, task.keys[0].tokens) == ("attention", 1)]
    assert len(decode.run()) == len(seen) == len(POSITIONS)
    assert [found[0] for found in seen] == list(POSITIONS)
    assert all(64 * pages > position and length == 1 for position, length, pages in seen)


def test_an_operator_that_fails_is_a_record_and_the_others_go_on(device, monkeypatch):
    def broken(*given, **named):
        raise KernelError("No such kernel.")

    monkeypatch.setattr(rope, "rope_and_store", broken)
    for task in layer_tasks(device, [SIZES.shape("tiny")]):
        if task.keys[0].operator in ("rope_and_store", "embedding"):
            errors = {record.error for record in task.run()}
            assert errors == ({"No such kernel."} if task.keys[0].operator == "rope_and_store" else {""})
