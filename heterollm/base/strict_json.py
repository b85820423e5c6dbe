"""JSON that somebody else wrote: one reading or none."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text.

    Of an object that names a field twice, readers keep one or the other in silence; here it is refused.

    Raises:
        ValueError: The text is not JSON, not UTF-8, nested too deeply, names a field twice, or holds half of
            a surrogate pair, which no file could be written with.
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
