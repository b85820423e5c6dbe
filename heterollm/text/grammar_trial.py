"""Tries a client's grammar in a child process first, since llguidance may crash on it or take hours."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from heterollm.base import MIB, CrashError, GrammarError, LimitedChild, LimitError, OverdueError, format_bytes

MOST_BYTES: Final = 256 << 10
"""Longest grammar or schema: 500 tools of an agent, or 15,000 values of an enumeration."""

CPU_S: Final = 3
MEMORY_BYTES: Final = 512 * MIB
"""Limits of the child. 200 tools in one schema take 0.2 s and 40 MiB; the interpreter takes 0.2 s."""

KEPT: Final = 256
"""Verdicts that stay in memory."""

PLAIN_BYTES: Final = 4096
PLAIN_DEPTH: Final = 16
PLAIN_KEYS: Final = {
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "title"),
    *("description", "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"),
}
"""Parts of a schema that compile in time and on a stack in proportion to its size. References form chains;
patterns, formats and `multipleOf` become automata: 42 bytes of `multipleOf` take 7 s and 300 MiB."""

_verdicts: OrderedDict[bytes, str | None] = OrderedDict()
_keeping = threading.Lock()


def is_plain(schema: Mapping[str, Any], text: str) -> bool:
    """Return whether a schema is so small and simple that it needs no trial."""
    return len(text) <= PLAIN_BYTES and _plain(schema, PLAIN_DEPTH)


def _plain(schema: object, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth == 0 or not schema.keys() <= PLAIN_KEYS:
        return False
    members, kinds = schema.get("properties", {}), schema.get("anyOf", [])
    if not isinstance(members, dict) or not isinstance(kinds, list):
        return False
    others = [schema[name] for name in ("additionalProperties", "items") if name in schema]
    return all(_plain(one, depth - 1) for one in (*members.values(), *kinds, *others))


def refusal_of(grammar: str) -> str | None:
    """Return the reason to refuse a grammar in llguidance's form; None if it compiled in a child.

    Raises:
        GrammarError: It is too long.
        EngineError: The child cannot be started.
    """
    size = len(grammar.encode())
    if size > MOST_BYTES:
        raise GrammarError(
            f"The schema or grammar has {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}.",
            fix="Divide it, or allow more texts with fewer rules.",
        )
    key = hashlib.sha256(grammar.encode()).digest()
    with _keeping:
        if key in _verdicts:
            _verdicts.move_to_end(key)
            return _verdicts[key]
    try:
        verdict = _tried(grammar)
    except OverdueError as error:  # depends on other programs, so it is not kept
        return f"compiling it {error.message}"
    with _keeping:
        _verdicts[key] = verdict
        while len(_verdicts) > KEPT:
            _verdicts.popitem(last=False)
    return verdict


def _tried(grammar: str) -> str | None:
    # A child for each: after other grammars less memory would be left.
    child = LimitedChild("heterollm.text.grammar_child:refusal", cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
    try:
        refusal: str | None = child.ask(grammar)
    except OverdueError:
        raise
    except CrashError:
        return "its rules or references are nested, or follow one another, too deeply"
    except LimitError as error:
        return f"compiling it {error.message}"
    finally:
        child.close()
    return refusal
