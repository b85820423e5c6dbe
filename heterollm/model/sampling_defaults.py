"""Reads the sampling that a checkpoint's ``generation_config.json`` recommends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from heterollm.model.json_fields import JsonFields, read_json_object

FILE: Final = "generation_config.json"

DERIVED: Final[Mapping[str, object]] = MappingProxyType(
    {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
)
"""Values that transformers takes for fields that the file lacks (GenerationConfig,
``_get_default_generation_params``); it leaves them out of the files that it writes."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling that a checkpoint recommends; all fields are None if it recommends none.

    Args:
        do_sample: Whether to sample; None if the file does not say, and transformers answers greedily then.
        temperature: Divisor of the logits, at least 0.
        top_p: Probability that the kept tokens reach together, in (0, 1].
        top_k: Number of kept tokens; 0 for all.
        min_p: Least probability as a fraction of the largest, in [0, 1]; None for no limit.
        repetition_penalty: Divisor of earlier tokens' positive logits, above 0.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling_defaults(folder: Path | str) -> SamplingDefaults:
    """Return the sampling that a checkpoint recommends.

    Once the file states one field, the others have the values that transformers derives. Without the file
    the fields of ``config.json`` count, as in transformers.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        CheckpointError: The file is damaged, or a field has an impossible value.
    """
    folder = Path(folder)
    values = read_generation(folder)
    if not (folder / FILE).is_file() and (folder / "config.json").is_file():
        values = read_json_object(folder / "config.json")
    stated = {name: values.get(name) for name in SamplingDefaults.__dataclass_fields__}
    if all(value is None for value in stated.values()):
        return SamplingDefaults()
    missing = {name: value for name, value in DERIVED.items() if stated[name] is None}
    fields = JsonFields({**stated, **missing}, FILE)
    return SamplingDefaults(
        do_sample=None if stated["do_sample"] is None else fields.flag("do_sample", False),
        temperature=_within(fields, "temperature", float("inf")),
        top_p=_within(fields, "top_p", 1.0, positive=True),
        # llama.cpp, too, takes -1 for all tokens.
        top_k=max(0, fields.count("top_k", minimum=-1)),
        min_p=None if stated["min_p"] is None else _within(fields, "min_p", 1.0),
        repetition_penalty=_within(fields, "repetition_penalty", float("inf"), positive=True),
    )


def read_generation(folder: Path | str) -> dict[str, Any]:
    """Return the content of ``generation_config.json``; empty without that file."""
    path = Path(folder) / FILE
    return read_json_object(path) if path.is_file() else {}


def _within(fields: JsonFields, name: str, most: float, *, positive: bool = False) -> float:
    """Return a finite number up to a limit, from 0 or above it."""
    value = fields.get(name)
    least = "above 0" if positive else "from 0"
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if number == float("inf") or not (0 < number <= most or (number == 0 and not positive)):
        raise fields.fail(name, f"a number {least}" + ("" if most == float("inf") else f" to {most:g}"))
    return float(number)
