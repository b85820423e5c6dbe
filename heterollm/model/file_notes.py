"""Names the fields of a checkpoint's files that heterollm does not know, or does not follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from heterollm.model.config import check_config
from heterollm.model.fields import (
    ADDED_TOKENS_FIELDS,
    GENERATION_FIELDS,
    SPECIAL_TOKENS_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
)
from heterollm.model.json_fields import read_json_object
from heterollm.model.stored_formats import check_quantization, normalized_quantization

TOKENIZER_TABLES = (TOKENIZER_CONFIG_FIELDS, SPECIAL_TOKENS_FIELDS, ADDED_TOKENS_FIELDS)


def file_notes(folder: Path) -> tuple[str, ...]:
    """Return a note for each file with fields that no table has, and for each default that is not followed.

    Args:
        folder: Folder of a checkpoint.

    Raises:
        CheckpointError: A file cannot be read.
        UnsupportedModelError: A field of the model or the tokenizer is not supported.
    """
    return tuple(_notes(folder))


def _notes(folder: Path) -> Iterator[str]:
    config = read_json_object(folder / "config.json")
    yield from check_config(config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") != "gguf":
        yield from check_quantization(
            normalized_quantization(quantization), "config.json, quantization_config"
        )
    generation = folder / "generation_config.json"
    values = config
    if generation.is_file():
        values = read_json_object(generation)
    else:
        values = {name: value for name, value in config.items() if GENERATION_FIELDS.find(name)}
    # They are defaults of answers, which a caller may replace.
    refused, unknown = GENERATION_FIELDS.examine(values, generation.name)
    for sentence in refused:
        yield f"{sentence} Answers are made without it."
    yield from unknown
    for table in TOKENIZER_TABLES:
        path = folder / table.title
        if path.is_file():
            yield from table.check(read_json_object(path), path.name)
    path = folder / TOKENIZER_FIELDS.title
    if path.is_file():
        try:
            # The sections stay text: a vocabulary has a hundred thousand lines.
            sections = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, msgspec.MsgspecError):
            return  # the reader of the tokenizer names the fault
        stated = {name: text for name, text in sections.items() if bytes(text) != b"null"}
        yield from TOKENIZER_FIELDS.check(stated, path.name)
