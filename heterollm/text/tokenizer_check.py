"""Checks, once for each `tokenizer.json`, that no text makes it take time or memory without bound.

Normalizers and decoders that replace text may double it, one after the other, and their regular expressions
may backtrack for ever; the tokenizers library has no limit for either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from heterollm.base import MIB, CheckpointError, FileIndex, LimitedChild, LimitError, parse_json, read_file
from heterollm.text.stream_decoder import FIX

LARGEST_BYTES: Final = 256 * MIB
"""Largest file; that of 262,144 tokens has 35 MB."""

VERSION: Final = "1"
"""Part of each verdict; raise it when the check finds more."""

MOST_GROWTH: Final = 64
"""Most characters that all replacements together may make of one."""

LARGEST_REPEAT: Final = 64
"""A larger count of repetitions is taken as endless."""

MEMBERS: Final = ("normalizers", "pretokenizers", "decoders", "processors")
"""Fields of a sequence of parts."""

PROBES: Final = (*"aA1 \n.'-_/\\é漢ا\u0301😀", "ab", "a1", " a", "\r\n", "a.", "a' ")
PROBE_LENGTHS: Final = (64, 4096)
CPU_S: Final = 10

RETRIES: Final = "retry-limit"
"""Words of the library where a pattern backtracks too often."""

LOAD_BYTES: Final = 1024 * MIB
LOAD_FACTOR: Final = 40
"""Memory that a load may take, and more of it for each byte of the file."""


def check_tokenizer_file(path: Path) -> None:
    """Refuse a file whose tokenizer could take time or memory without bound; the cache keeps the verdict.

    Raises:
        CheckpointError: It could, or the file cannot be read.
    """
    index = FileIndex("tokenizers")
    try:
        if index.get(path) == VERSION:
            return
        data = parse_json(read_file(path, LARGEST_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", fix=FIX) from error
    fields = data if isinstance(data, dict) else {}
    stages = [list(_parts(fields.get(name))) for name in ("normalizer", "pre_tokenizer", "decoder")]
    patterns = [pattern for stage in stages for part in stage for pattern in _patterns(part)]
    problem = next(filter(None, [*map(_growth_problem, stages), *map(_pattern_problem, patterns)]), None)
    if problem is None and patterns:
        problem = _trial_problem(path, patterns)
    if problem is not None:
        raise CheckpointError(f"The tokenizer in {path} {problem}.", fix=FIX)
    index.put(path, VERSION)


def try_tokenizer(request: Mapping[str, Any]) -> str | None:
    """Return the fault of a tokenizer that reads long texts; in a child, since it may take for ever.

    Args:
        request: The ``path`` of the file, ``texts`` to repeat, and the ``end`` of each.
    """
    import tokenizers

    fault = None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(request["path"])
        for length in PROBE_LENGTHS:
            for text in request["texts"]:
                whole = text * (length // len(text)) + request["end"]
                encoding = tokenizer.encode(whole, add_special_tokens=False)
                tokenizer.decode(encoding.ids)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - panics of the library are no exceptions
        # Others, such as those of a damaged file, are the load's to report.
        fault = str(error) if RETRIES in str(error) else None
    return fault


def _trial_problem(path: Path, patterns: Sequence[str]) -> str | None:
    words = {word for pattern in patterns for word in re.findall(r"[^\W_]{2,8}", pattern)}
    letters = {letter for pattern in patterns for letter in pattern if letter.isprintable()}
    texts = [*PROBES, *sorted(letters)[:128], *sorted(words)[:32]]
    memory_bytes = LOAD_BYTES + LOAD_FACTOR * path.stat().st_size
    child = LimitedChild(f"{__name__}:try_tokenizer", cpu_s=CPU_S, memory_bytes=memory_bytes)
    try:
        fault = child.ask({"path": str(path), "texts": texts, "end": f"!{''.join(sorted(letters)[:128])}"})
    except LimitError as error:
        return f"{error.message} to read texts of {PROBE_LENGTHS[-1]} characters"
    finally:
        child.close()
    return None if fault is None else f"fails on a text of one letter: {fault:.200}"


def _parts(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield a part, and the members of a sequence of them."""
    pending = [part]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            yield one
            pending += [member for name in MEMBERS for member in _list(one.get(name))]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _patterns(part: Mapping[str, Any]) -> list[str]:
    pattern = part.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    return [text] if isinstance(text, str) else []


def _growth_problem(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the fault of replacements that make a text many times longer, one after the other."""
    growth = math.prod(_growth(part) for part in parts if part.get("type") == "Replace")
    return f"makes {growth} characters of one" if growth > MOST_GROWTH else None


def _growth(part: Mapping[str, Any]) -> int:
    """Return the most characters that a replacement makes of one."""
    content, pattern = part.get("content"), part.get("pattern")
    length = len(content) if isinstance(content, str) else 0
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1, -(-length // len(text)))
    return max(1, length) + all(map(_matches_nothing, _patterns(part)))


def _matches_nothing(pattern: str) -> bool:
    """Return whether a pattern may match the empty text, as one does that Python cannot read."""
    try:
        return re.match(pattern, "") is not None
    except (re.error, OverflowError, RecursionError):
        return True


ENDLESS: Final = re.compile(r"[*+]|\{(\d+),(\d*)\}")
GROUP: Final = re.compile(r"\((?:\?(?:[a-zA-Z-]*:|<?[=!]|>|P?<\w+>|[a-zA-Z-]+(?=\))))?")


def _pattern_problem(pattern: str) -> str | None:
    """Return the fault of a pattern that repeats a repetition without end, or calls itself."""
    shown = f"has the pattern {pattern!r:.80}, which may match for ever"
    groups, place = [False], 0
    while place < len(pattern):
        letter = pattern[place]
        if letter == "\\":
            if pattern.startswith("\\g", place):
                return shown
            place += 2
        elif letter == "[":
            place = _class_end(pattern, place)
        elif letter == "(":
            groups.append(False)
            found = GROUP.match(pattern, place)
            place = found.end() if found else place + 1
            continue
        elif letter == ")" and len(groups) > 1:
            inner, place = groups.pop(), place + 1
            if inner and _is_endless(pattern, place):
                return shown
            groups[-1] |= inner
            continue
        else:
            place += 1
        groups[-1] |= _is_endless(pattern, place)
    return None


def _class_end(pattern: str, place: int) -> int:
    """Return the place after a class of characters, which may hold others."""
    depth, start = 0, place
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
        elif pattern[place] == "]" and place > start + 1 and pattern[start + 1 : place] != "^":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return place


def _is_endless(pattern: str, place: int) -> bool:
    """Return whether a repetition without a small limit stands at a place of a pattern."""
    found = ENDLESS.match(pattern, place)
    if found is None or found[2] is None:
        return found is not None
    return not found[2] or int(found[2]) > LARGEST_REPEAT
