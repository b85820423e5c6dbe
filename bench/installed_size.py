"""How large is heterollm with its requirements, and how much of it does each of them bring alone?

Sizes are those of the files that pip recorded, bytecode included; numbers are megabytes of 10⁶ bytes.

    python -m venv fresh && fresh/bin/pip install . && fresh/bin/python bench/installed_size.py [EXTRA ...]
"""

import sys
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(extras: list[str], without: str = "") -> set[str]:
    """Return the distributions that heterollm needs, apart from one and what only that one needs."""
    seen, todo = set(), [("heterollm", frozenset(extras))]
    while todo:
        item = name, chosen = todo.pop()
        if item in seen or name == without:
            continue
        seen.add(item)
        for one in map(Requirement, distribution(name).requires or ()):
            if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
                todo.append((canonicalize_name(one.name), frozenset(one.extras)))  # noqa: PERF401
    return {name for name, _ in seen}


def megabytes(names: set[str]) -> float:
    """Return the size of the installed files of some distributions."""
    files = (file.locate() for name in names for file in distribution(name).files or ())
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


everything = needed(sys.argv[1:])
alone = {name: megabytes(everything - needed(sys.argv[1:], name)) for name in everything - {"heterollm"}}
print(f"{megabytes(everything):8.1f} MB in {len(everything)} distributions")
for name, size in sorted(alone.items(), key=lambda item: -item[1]):
    print(f"{size:8.1f} {name} {distribution(name).version}")
