"""The modules that an adapter's configuration names, by PEFT's rules.

Rules: https://github.com/huggingface/peft/blob/main/src/peft/tuners/tuners_utils.py
(``check_target_module_exists``) and ``utils/other.py`` (``get_pattern_key``).
"""

from __future__ import annotations

import re
from typing import Final

from heterollm.base import CheckpointError, LimitError
from heterollm.model.json_fields import JsonFields
from heterollm.model.module_patterns import full_match

ALL_LINEARS: Final = "all-linear"
FIRST_NUMBER: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")


def matches(fields: JsonFields, name: str, pattern: str, module: str) -> bool:
    """Return whether a regular expression of a field matches a whole module name.

    Raises:
        CheckpointError: It is no regular expression, or takes too long.
    """
    try:
        return full_match(pattern, module)
    except re.error:
        raise fields.fail(name, "regular expressions") from None
    except LimitError as error:
        message = f"Matching {name} of {fields.where} {error.message}."
        raise CheckpointError(message, fix="Write the names out.") from error


def is_target(fields: JsonFields, module: str) -> bool:
    """Return whether the configuration gives a module factors.

    Args:
        fields: ``adapter_config.json``.
        module: Name of a linear, without PEFT's prefix.

    Raises:
        CheckpointError: A field has the wrong type.
    """
    if _named(fields, "exclude_modules", module):
        return False
    targets = fields.get("target_modules")
    if targets is None or (isinstance(targets, str) and targets.lower() == ALL_LINEARS):
        return True  # saved adapters name their modules; PEFT would choose by the architecture
    return _named(fields, "target_modules", module) and (
        isinstance(targets, str) or _in_layers(fields, module)
    )


def module_number(fields: JsonFields, name: str, patterns: str, module: str) -> float:
    """Return the number of the first pattern that matches the end of a module's name, or the common one.

    Args:
        fields: ``adapter_config.json``.
        name: Field of the common number, by default 8.
        patterns: Field of the numbers by pattern.
        module: Name of a linear, without PEFT's prefix.

    Raises:
        CheckpointError: A field has the wrong type.
    """
    stated = JsonFields(fields.section(patterns), f"{fields.where}, {patterns}")
    for pattern in stated.values:
        if matches(fields, patterns, rf"(.*\.)?({pattern})", module):
            return stated.positive(pattern)
    return fields.positive(name, 8)


def _named(fields: JsonFields, name: str, module: str) -> bool:
    """Return whether a regular expression, or a list of endings of names, has a module."""
    stated = fields.get(name)
    if stated is None:
        return False
    if isinstance(stated, str):
        return bool(stated) and matches(fields, name, stated, module)
    if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
        raise fields.fail(name, "a list of names, or a regular expression")
    return any(module == one or module.endswith(f".{one}") for one in stated)


def _in_layers(fields: JsonFields, module: str) -> bool:
    """Return whether ``layers_to_transform`` has the layer of a module."""
    wanted = fields.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    layers = wanted if isinstance(wanted, list) else [wanted]
    if any(type(one) is not int for one in layers):
        raise fields.fail("layers_to_transform", "whole numbers")
    lists = fields.get("layers_pattern")
    if not lists:
        found = FIRST_NUMBER.match(module)
        return found is not None and int(found[1]) in layers
    names = lists if isinstance(lists, list) else [lists]
    return any(
        matches(fields, "layers_pattern", rf"(?:.*\.)?{name}\.{layer}\..*", module)
        for name in names
        for layer in layers
    )
