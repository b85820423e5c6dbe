"""The sampling that generation_config.json recommends, as transformers' GenerationConfig reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from heterollm.base import CheckpointError
from heterollm.model import SamplingDefaults, read_sampling_defaults

LLAMA_3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001, 128009]}


def written(folder: Path, values: dict[str, Any], name: str = "generation_config.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


def test_no_file_and_no_field_recommend_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert read_sampling_defaults(written(tmp_path, {"eos_token_id": 2})) == SamplingDefaults()


def test_missing_fields_have_the_values_that_transformers_derives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    found = read_sampling_defaults(written(tmp_path, LLAMA_3))
    derived = transformers.GenerationConfig._get_default_generation_params()
    assert found == SamplingDefaults(
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=derived["top_k"],
        min_p=None,
        repetition_penalty=derived["repetition_penalty"],
    )


def test_every_field_is_read(tmp_path: Path) -> None:
    stated = {
        "do_sample": False,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
    }
    assert read_sampling_defaults(written(tmp_path, stated)) == SamplingDefaults(**stated)
    assert read_sampling_defaults(written(tmp_path, {**stated, "top_k": -1})) == SamplingDefaults(**stated)


def test_config_json_counts_where_the_file_is_missing(tmp_path: Path) -> None:
    folder = written(tmp_path, {"model_type": "llama", "temperature": 0.25}, "config.json")
    assert read_sampling_defaults(folder).temperature == 0.25
    written(folder, {"eos_token_id": 2})
    assert read_sampling_defaults(folder) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", "yes"),
        ("temperature", -0.5),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1"),
    ],
)
def test_an_impossible_value_is_named(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name}|Cannot read"):
        read_sampling_defaults(written(tmp_path, {name: value}))
