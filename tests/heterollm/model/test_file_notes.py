"""Fields of generation_config.json and of the tokenizer's files: read, noted or refused, row by row."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from heterollm.base import UnsupportedModelError
from heterollm.data import bundled_model
from heterollm.model import ModelConfig, read_sampling_defaults
from heterollm.model.fields.generation import GENERATION_FIELDS
from heterollm.model.fields.table import Field, FieldTable
from heterollm.model.fields.tokenizer import (
    ADDED_TOKENS_FIELDS,
    SPECIAL_TOKENS_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
)
from heterollm.model.file_notes import file_notes
from heterollm.text import Tokenizer

TOKENIZER_TABLES = (TOKENIZER_CONFIG_FIELDS, SPECIAL_TOKENS_FIELDS, ADDED_TOKENS_FIELDS, TOKENIZER_FIELDS)
READ = {
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "eos_token_id": [3, 4],
    "bos_token_id": 5,
    "pad_token_id": 6,
}
REFUSED = {
    "min_length": 10,
    "min_new_tokens": 10,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "num_beams": 4,
    "typical_p": 0.9,
    "guidance_scale": 1.5,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "penalty_alpha": 0.6,
    "token_healing": True,
    "stop_strings": ["END"],
    "bad_words_ids": [[5]],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "sequence_bias": [[[5], 1.0]],
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "top_h": 0.5,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": [5, 1.1],
    "watermarking_config": {"bias": 2.0},
    "dola_layers": "high",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model without its weights."""
    ignored = shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__")
    return shutil.copytree(bundled_model(), tmp_path / "model", ignore=ignored)


def put(folder: Path, name: str, changes: dict[str, Any]) -> None:
    path = folder / name
    stated = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(stated | changes), "utf-8")


def test_the_bundled_model_has_no_unknown_field(folder: Path) -> None:
    assert file_notes(folder) == ()


@pytest.mark.parametrize("row", GENERATION_FIELDS.fields, ids=lambda row: row.name)
def test_each_default_of_answers_is_read_or_ignored_or_noted(row: Field, folder: Path) -> None:
    put(folder, "generation_config.json", {"eos_token_id": 0})
    before = (read_sampling_defaults(folder), ModelConfig.from_folder(folder), file_notes(folder))
    if row.effect == "read":
        put(folder, "generation_config.json", {row.name: READ[row.name]})
        after = (read_sampling_defaults(folder), ModelConfig.from_folder(folder), file_notes(folder))
        assert after[:2] != before[:2]
        assert after[2] == ()
        return
    put(folder, "generation_config.json", {row.name: REFUSED.get(row.name, "any")})
    assert (read_sampling_defaults(folder), ModelConfig.from_folder(folder)) == before[:2]
    notes = file_notes(folder)
    if row.effect == "none":
        assert notes == ()
    else:
        (note,) = notes
        assert re.search(rf"generation_config\.json: {row.name} = .*{re.escape(row.meaning)}", note)
        for neutral in (*row.neutral, None):
            put(folder, "generation_config.json", {row.name: neutral})
            assert file_notes(folder) == ()


def test_without_the_file_defaults_of_config_json_are_noted(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    put(folder, "config.json", {"no_repeat_ngram_size": 3})
    (note,) = file_notes(folder)
    assert "no_repeat_ngram_size = 3" in note
    put(folder, "generation_config.json", {"eos_token_id": 0})
    assert file_notes(folder) == ()


def test_every_default_that_transformers_knows_has_a_row() -> None:
    transformers = pytest.importorskip("transformers")
    names = set(vars(transformers.GenerationConfig())) - {"generation_kwargs", "_original_object_hash"}
    assert len(names) > 50
    assert {name for name in names if GENERATION_FIELDS.find(name) is None} == set()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
    ],
)
def test_a_field_that_no_table_has_is_noted(name: str, folder: Path) -> None:
    put(folder, name, {"new_thing": {"inner": 1}, "empty_thing": None})
    (note,) = file_notes(folder)
    assert note.startswith(f"{name}: no table of heterollm has new_thing")
    assert "empty_thing" not in note


TOKENIZER_VALUES: dict[str, Any] = {
    "chat_template": "{{ messages[0]['content'] }}!",
    "add_prefix_space": True,
    "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
    "extra_special_tokens": ["<y>"],
    "additional_special_tokens": ["<y>"],
    "model_specific_special_tokens": {"image_token": "<z>"},
    "tokenizer_class": "PreTrainedTokenizerFast",
}


@pytest.mark.parametrize(
    ("table", "row"),
    [(table, row) for table in TOKENIZER_TABLES for row in table.fields],
    ids=lambda one: one.name if isinstance(one, Field) else one.title,
)
def test_each_field_of_a_tokenizer_is_known(table: FieldTable, row: Field, folder: Path) -> None:
    """Ignored ones change no token and no text; a refused one is named."""
    pytest.importorskip("transformers")
    text = "def f(x): return [x , 'a .']  # <y> <s>"
    messages = [{"role": "user", "content": text}]
    before = Tokenizer.from_folder(folder)
    ids = before.encode(text)
    if row.effect == "refused":
        put(folder, table.title, {row.name: True})
        with pytest.raises(UnsupportedModelError, match=f"{table.title}: {row.name} = True.*{row.meaning}"):
            file_notes(folder)
    elif row.effect == "none" and table is not TOKENIZER_FIELDS:
        value = {"padding_side": "left", "truncation_side": "left", "model_max_length": 5, "auto_map": {}}
        put(folder, table.title, {row.name.replace("*", ""): value.get(row.name, True)})
        assert file_notes(folder) == ()
        if row.name in ("vocab_file", "merges_file", "name_or_path", "tokenizer_file", "model_input_names"):
            return  # paths, which transformers sets itself
        after = Tokenizer.from_folder(folder)
        assert after.encode(text) == ids
        assert after.decode(ids) == before.decode(ids)
        assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
        assert after.eos_ids == before.eos_ids
    else:
        assert table.find(row.name) is row


def test_what_a_tokenizer_reads_changes_it(folder: Path) -> None:
    pytest.importorskip("transformers")
    before = Tokenizer.from_folder(folder)
    put(folder, "tokenizer_config.json", {"chat_template": TOKENIZER_VALUES["chat_template"]})
    template = Tokenizer.from_folder(folder)
    assert template.apply_chat_template([{"role": "user", "content": "a"}]) == before.encode(
        "a!", add_bos=False
    )
    other = next(name for name, index in sorted(before.vocabulary.items()) if index not in before.eos_ids)
    put(folder, "tokenizer_config.json", {"eos_token": other})
    assert before.vocabulary[other] in Tokenizer.from_folder(folder).eos_ids
    for field in ("extra_special_tokens", "additional_special_tokens"):
        put(folder, "tokenizer_config.json", {field: [other], "eos_token": None})
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.decode([before.vocabulary[other]]) == ""
        put(folder, "tokenizer_config.json", {field: []})
