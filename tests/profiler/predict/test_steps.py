"""Steps of tokens: a default profile measures whether there are some, and predictions read it."""

import dataclasses

import pytest
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.model import find_model, op_specs, shape_of_specs
from heterollm.profiler import SessionOptions, profile_device, summary
from heterollm.profiler.measure import step_tasks
from heterollm.profiler.measure.sweeps import STEP_TOKENS
from heterollm.profiler.predict import Predictor
from heterollm.profiler.predict.steps import grows_within_tiles
from heterollm.profiler.predict.time_model import TimeModel
from heterollm.profiler.records import LinearPoint, Profile, SweepKey
from heterollm.report.tables_npu import npu_sections

POINT = LinearPoint("o", (2048,), 2048, 1, 4, 32, form="matmul_nbits", streamed=False)


def costs(**by_tokens):
    return {structs.replace(POINT, tokens=int(name[1:])): cost for name, cost in by_tokens.items()}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (costs(t32=10.0, t33=20.0, t48=20.0, t64=20.0), False),
        (costs(t32=10.0, t33=10.3, t48=15.0, t64=20.0), True),
        # In one order 33 tokens cost less than 32, and nothing can be told.
        (costs(t32=80.0, t33=20.0, t64=20.0), None),
        (costs(t32=10.0, t33=10.2, t64=10.3), None),
        (costs(t32=10.0, t33=10.3, t64=20.0, t65=30.0, t96=30.0, t97=40.0, t128=40.0), False),
        (costs(t32=10.0, t64=20.0), None),
        ({}, None),
    ],
)
def test_what_the_lengths_around_the_end_of_a_tile_tell(found, expected):
    assert grows_within_tiles(found) is expected


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    config = find_model("qwen2.5-0.5b").config
    shape = shape_of_specs(config, op_specs(config, "w4a16", 128, True), "small")
    options = SessionOptions(60.0, tune=False)
    device = open_device("sim:snapdragon-8gen3")
    return profile_device(device, [shape], options, path=tmp_path_factory.mktemp("steps") / "p.json")[0]


def test_a_default_profile_of_a_simulated_device_shows_its_steps(profile):
    found = {key.point.tokens for key, _ in profile.of_kind(SweepKey)}
    assert found == set(STEP_TOKENS)
    own = summary.summarize(profile, accuracy=False)
    assert own.grows_within_tiles is False
    (section,) = npu_sections(own)
    assert any("steps of 32 tokens, as predictions assume" in note for note in section.notes)
    assert sum(task.estimate_s for task in step_tasks(open_device("sim:snapdragon-8gen3"))) < 10
    assert not Predictor.fit(profile).processors["npu"].fit.model.continuous


def test_predictions_take_the_line_within_a_tile_where_times_rise_there(profile):
    stepped = Predictor.fit(profile)
    records = dict(profile.records)
    for key, record in profile.of_kind(SweepKey):
        if key.point.tokens == 97:
            twin = next(own for other, own in profile.of_kind(SweepKey) if other.point.tokens == 96)
            records[key] = dataclasses.replace(record, samples_us=twin.samples_us)
    risen = Predictor.fit(Profile(profile.description, records, profile.runs))
    assert risen.processors["npu"].fit.model.continuous
    assert not risen.processors["gpu"].fit.model.continuous
    wide = structs.replace(POINT, member_rows=(1000,), block=128)

    def us(of: Predictor, tokens: int) -> float:
        model: TimeModel = of.processors["npu"].fit.model
        return model.predict(structs.replace(wide, tokens=tokens)).us

    for tokens in (1, 31, 32, 64, 512):
        assert us(risen, tokens) == us(stepped, tokens)
    assert us(stepped, 65) == us(stepped, 96)
    assert us(risen, 80) == pytest.approx((us(risen, 64) + us(risen, 96)) / 2)
