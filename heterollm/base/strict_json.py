"""A JSON reader that refuses ambiguous texts."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text in which no object repeats a field.

    Raises:
        ValueError: The text is not JSON, not UTF-8, nested too deeply, repeats a field (most readers keep one
            value silently), or holds half of a surrogate pair, which UTF-8 cannot encode.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"it names {name!r:.80} twice")
        fields[name] = value
    return fields
