"""Measured points that lie far off their neighbours, on devices whose times are known."""

import math
import random
from dataclasses import replace

import pytest
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.model import model_shape
from heterollm.model.known import KNOWN_MODELS, default_shapes
from heterollm.profiler import SessionOptions, profile_device
from heterollm.profiler.predict import Predictor, far_off, mark
from heterollm.profiler.records import (
    ExpertsKey,
    LayerKey,
    LinearKey,
    LinearPoint,
    Profile,
    Record,
    SparseKey,
)

SOCS = ("snapdragon-8gen3", "snapdragon-8elite", "snapdragon-8gen3-paper")
HIDDEN, WIDE = 1024, 2816
GROUPS = {
    "qkv": ((1024, 256, 256), HIDDEN),
    "o": ((1024,), HIDDEN),
    "gate_up": ((WIDE, WIDE), HIDDEN),
    "down": ((1024,), WIDE),
}
LENGTHS = (1, 32, 64, 128, 256, 512)
SHARES = (0.25, 0.5, 0.75, 1.0)


def stepped_us(point):
    """A Hexagon: stages of 32 tokens and rows, rows of inputs that spill, a form that falls at 33 tokens."""
    tiles = -(-point.rows // 32) * -(-point.columns // 32)
    spill = 3.5 if point.columns > 2048 and point.tokens > 32 else 1.0
    if point.form == "activation_first" and point.tokens <= 32:
        return 30.0 + tiles * (0.4 if point.tokens <= 4 else 2.6 * -(-point.tokens // 4))
    return 30.0 + tiles * 2.7 * -(-point.tokens // 32) * spill


def gpu_us(point):
    """A GPU bound by bandwidth at few tokens, with a kernel of few rows that is four times as slow."""
    few = 4.0 if 1 < point.tokens <= 8 else 1.0
    return 20.0 + few * max(point.weight_bytes / 8e3, point.rows * point.columns * (point.tokens + 24) / 5e5)


def made(noise=0.0, seed=0, groups=GROUPS, shares=SHARES):
    """Return a profile of a device with steps: both processors, and the operators of a layer."""
    draw = random.Random(seed)

    def record(key, time_us):
        samples = tuple(time_us * math.exp(draw.gauss(0.0, noise)) for _ in range(6))
        return Record(key, samples, taken_s=1.0)

    profile = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    for group, (rows, columns) in groups.items():
        for share in shares:
            own = tuple(int(share * count) // 32 * 32 for count in rows)
            for tokens in LENGTHS:
                point = LinearPoint(group, own, columns, tokens, 4, 32)
                profile.add(record(LinearKey("gpu", point, "k"), gpu_us(point)))
                for form in ("weight_first", "activation_first"):
                    staged = structs.replace(point, form=form, bits=16, block=0)
                    profile.add(record(LinearKey("npu", staged, "g"), stepped_us(staged)))
    for tokens in LENGTHS:
        for position in (0, 256, 1024):
            seen = tokens * (position + tokens / 2)
            key = LayerKey("attention", tokens, position + tokens, 0, 16, 4, 64, "k")
            profile.add(record(key, 8.0 + seen / 40.0 + position / 30.0))
        profile.add(record(LayerKey("rms_norm", tokens, 0, HIDDEN, 0, 0, 0, "k"), 3.0 + tokens / 5.0))
        for keys in (1024, 2048):
            sparse = SparseKey("scores", tokens, keys, 4, 4, 64, 0.0, "g")
            profile.add(record(sparse, 12.0 + tokens * keys / 900.0))
        for experts in (1, 4, 8):
            of_experts = ("products", experts, tokens, 2, HIDDEN, 512, 4, 32, True, False, "", True, "k")
            profile.add(record(ExpertsKey(*of_experts), 5.0 + experts * (3.0 + tokens)))
    return profile


def disturb(profile, key, factor):
    held = profile.records[key]
    profile.records[key] = replace(held, samples_us=tuple(factor * one for one in held.samples_us))


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("budget_s", [None, 240.0])
def test_a_modelled_device_has_no_outliers(soc, budget_s, tmp_path, monkeypatch):
    """Neither a quick profile, which knows little of steps, nor a long one, with all steps of a Hexagon."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    options = SessionOptions.of(budget_s=budget_s, quick=budget_s is None)
    shapes = [*default_shapes("w4a16"), model_shape(KNOWN_MODELS["llama-3-8b"].config, "wide")]
    if budget_s is not None:
        shapes += default_shapes("fp16")[:1]
    profile, _ = profile_device(open_device(f"sim:{soc}"), shapes, options, path=tmp_path / "p.json")
    assert len(profile.records) > 300
    assert far_off(profile) == {}


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 1.0), SHARES])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_steps_and_noise_are_no_outliers(noise, shares):
    for seed in range(3):
        assert far_off(made(noise, seed, shares=shares)) == {}


@pytest.mark.parametrize("factor", [20.0, 113.0, 0.02])
def test_every_point_that_is_far_off_is_found_alone(factor):
    clean = made(0.03)
    keys = sorted(clean.records, key=str)
    for key in keys[:: 9 if factor == 113.0 else 31]:
        profile = Profile(clean.description, dict(clean.records))
        truth_us = profile.records[key].median_us
        disturb(profile, key, factor)
        found = far_off(profile)
        assert set(found) == {key}
        # Neighbours know the time roughly: a step may lie between them.
        assert abs(math.log(found[key] / truth_us)) < abs(math.log(factor)) / 2 + math.log(4.0)


def test_neighbours_of_each_kind_are_enough():
    """In tokens alone, in rows alone and in inputs alone; the example is from a profile of a busy machine."""
    point = LinearPoint("gate_up", (5632, 5632), 2048, 64, 4, 32)
    times = {
        "tokens": ({1: 310.0, 64: 1228.0, 256: 138988.0}, lambda size: structs.replace(point, tokens=size)),
        "rows": (
            {1024: 240.0, 2816: 660.0, 5632: 47000.0},
            lambda size: structs.replace(point, member_rows=(size, size)),
        ),
        "columns": (
            {1024: 620.0, 2048: 1228.0, 4096: 95000.0},
            lambda size: structs.replace(point, columns=size),
        ),
    }
    for own, of_size in times.values():
        profile = made(groups={})
        for size, time_us in own.items():
            profile.add(Record(LinearKey("gpu", of_size(size), "k"), (time_us,), taken_s=1.0))
        [(key, expected_us)] = far_off(profile).items()
        assert key == LinearKey("gpu", of_size(max(own)), "k")
        assert 1000.0 < expected_us < 10000.0


def test_a_burst_over_all_splits_of_a_group_at_one_length_is_found():
    profile = made(0.03)
    burst = {
        key
        for key in profile.records
        if isinstance(key, LinearKey)
        and (key.processor, key.point.group, key.point.tokens) == ("gpu", "gate_up", 256)
    }
    for key in burst:
        disturb(profile, key, 20.0)
    assert len(burst) == len(SHARES)
    assert set(far_off(profile)) == burst


def test_plans_count_neighbours_in_place_of_a_marked_point():
    profile = made(0.03)
    keys = [
        next(key for key in profile.records if isinstance(key, LinearKey) and key.point.tokens == 256),
        LayerKey("attention", 256, 256, 0, 16, 4, 64, "k"),
    ]
    truths = [profile.records[key].median_us for key in keys]
    for key in keys:
        disturb(profile, key, 100.0)

    def predicted(predictor):
        linear, layer = keys
        return [
            predictor.predict_us(linear.point, linear.processor).us,
            predictor.predict_layer_us(layer).us,
        ]

    assert predicted(Predictor.fit(profile)) == [profile.records[key].median_us for key in keys]
    assert mark(profile) == 2
    for found_us, truth_us in zip(predicted(Predictor.fit(profile)), truths, strict=True):
        assert truth_us / 2 < found_us < 2 * truth_us
    # A mark goes when the point is measured well.
    for key, truth_us in zip(keys, truths, strict=True):
        profile.add(Record(key, (truth_us,)))
    assert mark(profile) == 0
    assert profile.disturbed() == []


def test_where_most_points_are_disturbed_all_count():
    profile = made(0.03)
    keys = [key for key in profile.records if isinstance(key, LinearKey) and key.processor == "gpu"]
    for key in keys[1:]:
        profile.records[key] = replace(profile.records[key], expected_us=1.0)
    assert len(Predictor.fit(profile).processors["gpu"].measured) == len(keys)
