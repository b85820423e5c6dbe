"""The part of an OpenCL program that a compiler sees, so that a change of the rest does not count as one.

Comments, white space, branches of conditionals that are not taken, and macros and options without a use are
left out. Macros are not expanded: programs of equal text compile alike, but not they alone.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

COMPILER_MACROS: Final = {"__clang__": "1"}
"""What clang defines for an Adreno, of the names that the kernels ask for."""

WORD: Final = re.compile(r"\b[A-Za-z_]\w*")
COMMENT: Final = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
DIRECTIVE: Final = re.compile(r"#\s*(\w+)\s*(.*)")


def live_text(source: str, defines: Mapping[str, str]) -> str:
    """Return the lines that conditionals leave, one space between words."""
    macros = COMPILER_MACROS | dict(defines)
    lines: list[str] = []
    taken = [(True, True)]  # of each open conditional: whether its branch is live, whether no other can be
    for line in COMMENT.sub("", source).replace("\\\n", " ").splitlines():
        text = " ".join(line.split())
        found = DIRECTIVE.match(text)
        name, rest = found.groups() if found else ("", text)
        if name in {"if", "ifdef", "ifndef"}:
            condition = {"ifdef": f"defined({rest})", "ifndef": f"!defined({rest})"}.get(name, rest)
            live = taken[-1][0] and _holds(condition, macros)
            taken.append((live, live or not taken[-1][0]))
        elif name in {"elif", "else"}:
            _, done = taken.pop()
            live = not done and (name == "else" or _holds(rest, macros))
            taken.append((live, done or live))
        elif name == "endif":
            taken.pop()
        elif taken[-1][0] and text:
            lines.append(text)
            if name == "define" and (own := re.match(r"(\w+)(?:\(.*?\))?(.*)", rest)):
                macros[own.group(1)] = own.group(2)
            elif name == "undef":
                macros.pop(rest, None)
    return "\n".join(_without_unused(lines))


def live_hash(kernel: str, source: str, defines: Mapping[str, str]) -> str:
    """Return a short hash of a kernel's name, its program's live text, and the options that the text uses."""
    text = live_text(source, defines)
    words = set(WORD.findall(text))
    used = sorted((name, value) for name, value in defines.items() if name in words)
    return hashlib.sha256(repr((kernel, used, text)).encode()).hexdigest()[:12]


def _holds(condition: str, macros: Mapping[str, str]) -> bool:
    """Return whether a condition is true; a name that is no macro is zero, as in C."""
    text = re.sub(
        r"defined\s*(?:\(\s*(\w+)\s*\)|(\w+))",
        lambda found: str(int(found[found.lastindex or 0] in macros)),
        condition,
    )
    while WORD.search(text):
        text = WORD.sub(lambda found: f"({macros[found[0]]})" if macros.get(found[0]) else "0", text)
    python = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).replace("/", "//")
    return bool(eval(python.strip(), {"__builtins__": {}}))  # noqa: S307 - numbers and operators of the kernels


def _without_unused(lines: list[str]) -> list[str]:
    """Return the lines without definitions of macros that no other line names, whole or as a first part."""
    words = [set(WORD.findall(line)) for line in lines]
    pasted = tuple(name for line in lines for name in re.findall(r"(\w+)\s*##", line))
    while True:
        counts = Counter(word for own in words for word in own)
        kept = [
            at
            for at, line in enumerate(lines)
            if not (own := re.match(r"#\s*define (\w+)", line))
            or counts[own.group(1)] > 1
            or own.group(1).startswith(pasted)
        ]
        if len(kept) == len(lines):
            return lines
        lines, words = [lines[at] for at in kept], [words[at] for at in kept]
