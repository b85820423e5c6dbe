"""The kept predictor: fitted once, and again where the profile or the file has changed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from heterollm.base import list_cache
from heterollm.profiler.predict import Predictor, fitted_predictor
from heterollm.profiler.predict.predictor import Fits
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record

POINT = LinearPoint("o", (1024,), 1024, 64, 4, 32)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    made = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    for rows in (512, 1024, 2048):
        for tokens in (1, 64, 256):
            point = LinearPoint("o", (rows,), 1024, tokens, 4, 32)
            made.add(Record(LinearKey("gpu", point, "code"), (10.0 + rows * tokens / 100,), taken_s=1))
    return made


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    seen: list[Profile] = []
    fit = Predictor.fit

    def spy(profile: Profile, kept: Fits | None = None) -> Predictor:
        if kept is None:
            seen.append(profile)
        return fit(profile, kept)

    monkeypatch.setattr(Predictor, "fit", spy)
    return seen


def test_a_predictor_is_fitted_once(profile: Profile, fits: list[Profile]) -> None:
    first, second = fitted_predictor(profile), fitted_predictor(Profile.from_json(profile.to_json()))
    assert len(fits) == 1
    assert first.predict_us(POINT, "gpu") == second.predict_us(POINT, "gpu")
    [kind] = list_cache(["predictors"])
    assert kind.files == 1


def test_members_without_rows_are_read_back(profile: Profile, fits: list[Profile]) -> None:
    """Short keys and values stay whole in a cut, on the GPU: the NPU's slice has none of their rows."""
    point = LinearPoint("qkv", (64, 0, 0), 1024, 64, 4, 32)
    for tokens in (1, 64):
        key = LinearKey("npu", replace(point, tokens=tokens, form="plain"), "code")
        profile.add(Record(key, (5.0 + tokens,), taken_s=1))
    first, second = fitted_predictor(profile), fitted_predictor(profile)
    assert len(fits) == 1
    asked = replace(point, form="plain")
    assert first.predict_us(asked, "npu") == second.predict_us(asked, "npu")


@pytest.mark.parametrize("damage", ["node", "length", "order", "type"])
def test_a_model_that_contradicts_itself_is_fitted_again(
    profile: Profile, fits: list[Profile], tmp_path: Path, damage: str
) -> None:
    """A tree with a circle would never end, and a curve without a time at each of its tokens never begin."""
    expected = fitted_predictor(profile).predict_us(POINT, "gpu")
    [path] = (tmp_path / "cache" / "predictors").iterdir()
    data = json.loads(path.read_bytes())
    model = {"model": "roofline", "floor_us": 0, "bytes_per_us": 1, "tokens": [1, 4], "us_per_weight": [1, 2]}
    tree = {"model": "tree", "floor_us": 0, "fixed_units": 0, "feature": [0], "threshold": [0.5]}
    tree |= {"left": [0], "right": [0], "us_per_unit": [1.0]}
    damaged = {
        "node": tree,
        "length": model | {"us_per_weight": model["us_per_weight"][1:]},
        "order": model | {"tokens": [4] * len(model["us_per_weight"])},
        "type": model | {"tokens": ["4"]},
    }
    data["processors"]["gpu"]["model"]["kinds"][0][2] = damaged[damage]
    path.write_text(json.dumps(data))
    assert fitted_predictor(profile).predict_us(POINT, "gpu") == expected
    assert len(fits) == 2


def test_another_measurement_is_another_predictor(profile: Profile, fits: list[Profile]) -> None:
    fitted_predictor(profile)
    profile.add(Record(LinearKey("gpu", POINT, "code"), (1.0,), taken_s=2))
    assert fitted_predictor(profile).predict_us(POINT, "gpu").us == 1.0
    assert len(fits) == 2


def test_a_damaged_file_is_fitted_again(
    profile: Profile, fits: list[Profile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted_predictor(profile)
    [path] = (tmp_path / "cache" / "predictors").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        fitted_predictor(profile)
    assert str(path) in caplog.text
    fitted_predictor(profile)
    assert len(fits) == 2


def test_a_folder_that_cannot_be_written_costs_the_file_only(
    profile: Profile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "predictors").write_text("")
    assert fitted_predictor(profile).predict_us(POINT, "gpu").us > 0
    assert "not kept" in caplog.text
