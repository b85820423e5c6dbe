"""Tries a client's grammar in a child process first, since llguidance may crash on it or take hours."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from heterollm.base import EngineError, GrammarError, format_bytes
from heterollm.text.grammar_child import CPU_S, MEMORY_BYTES

__all__ = ["is_plain", "refusal_of"]

MOST_BYTES: Final = 256 << 10
"""Longest grammar or schema: 500 tools of an agent, or 15,000 values of an enumeration."""

WALL_S: Final = 60
"""Longest wait for the child, whose own limits end it far sooner on a machine that is not overloaded."""

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
    except subprocess.TimeoutExpired:  # depends on other programs, so it is not kept
        return f"compiling it takes more than {WALL_S} s"
    except OSError as error:
        raise EngineError(f"The child process that tries a grammar cannot be started: {error}.") from error
    with _keeping:
        _verdicts[key] = verdict
        while len(_verdicts) > KEPT:
            _verdicts.popitem(last=False)
    return verdict


def _tried(grammar: str) -> str | None:
    # -P: a folder named heterollm in the working directory must not be imported.
    command = [sys.executable, "-P", "-m", "heterollm.text.grammar_child"]
    child = subprocess.run(  # noqa: S603 - our own interpreter and module
        command, input=grammar.encode(), capture_output=True, timeout=WALL_S, check=False
    )
    if child.returncode == 0:
        refusal: str | None = json.loads(child.stdout)
        return refusal
    log = child.stderr.decode(errors="replace")
    if "memory allocation" in log or "MemoryError" in log:
        return f"compiling it takes more than {format_bytes(MEMORY_BYTES)}"
    if _stopped_by_time(child.returncode):
        return f"compiling it takes more than {CPU_S} s of processor time"
    if child.returncode < 0:
        return "its rules or references are nested, or follow one another, too deeply"
    raise EngineError(f"The child process that tries a grammar fails: {log.strip()[-300:]}.")


def _stopped_by_time(code: int) -> bool:
    """Return whether an exit code is that of a process beyond its processor time."""
    import signal

    return code < 0 and -code in (getattr(signal, "SIGXCPU", 0), getattr(signal, "SIGKILL", 0))
