"""JSON that somebody else wrote: one reading or none."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text.

    Of an object that names a field twice, readers keep one or the other in silence; here it is refused.

    Raises:
        ValueError: The text is not JSON, not UTF-8, nested too deeply, or names a field twice.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"it names {name!r:.80} twice")
        fields[name] = value
    return fields
