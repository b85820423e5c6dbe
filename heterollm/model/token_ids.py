"""Reads the special token ids of a checkpoint, by the rule of transformers' ``generate``."""

from __future__ import annotations

from typing import Any

from heterollm.model.json_fields import JsonFields


def token_ids(
    config: JsonFields, generation: JsonFields, name: str, default: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the distinct ids under a name: those of ``generation_config.json``, else of ``config.json``.

    Args:
        config: Content of ``config.json``.
        generation: Content of ``generation_config.json``.
        name: Field of both files, a number or a list of numbers; -1 stands for none.
        default: Ids if neither file has the field.

    Raises:
        CheckpointError: The field holds something else.
    """
    fields = config if generation.get(name) is None else generation
    if name not in fields.values:
        return default
    value = fields.get(name)
    listed: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < -1 for token in listed):
        raise fields.fail(name, "token ids")
    return tuple(dict.fromkeys(token for token in listed if token >= 0))
