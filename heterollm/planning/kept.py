"""Solved plans, kept as JSON in the cache folder: solving takes up to a second, and reading does not.

A plan is filed under all that it follows from: the profile's device and records, the model's groups, the
request and the sources of the solver. One that was damaged or changed is solved again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from heterollm.base import PlanError, cache_root, kept, parse_json
from heterollm.kernels.gpu import source_hash
from heterollm.kernels.ops import Group
from heterollm.profiler.predict import profile_digest
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.profiler.records import Profile
    from heterollm.solver import Slices

__all__ = ["Solution", "kept_solution", "solution_path"]

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found for a model.

    Args:
        plan: The plan of every length.
        slices: What the NPU holds, for lengths that are solved when they come.
    """

    plan: Plan
    slices: Slices

    def to_json(self) -> str:
        """Return the solution as JSON text, with a hash of itself."""
        slices = {
            group: [[list(rows), list(lengths)] for rows, lengths in held.items()]
            for group, held in self.slices.items()
        }
        content = {"plan": json.loads(self.plan.to_json()), "slices": slices}
        return json.dumps({"schema_version": SCHEMA_VERSION, "hash": _hash(content), **content})

    @classmethod
    def from_json(cls, text: str | bytes) -> Solution:
        """Return the solution of :meth:`to_json`.

        Raises:
            PlanError: The text is damaged, was changed, or is of another version.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"The solved plan is not JSON: {error}.") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanError(f"The solved plan has schema version {version!r:.40}.")
        content = {name: data.get(name) for name in ("plan", "slices")}
        if data.get("hash") != _hash(content):
            raise PlanError("The solved plan was changed since it was written.")
        return cls(Plan.from_json(json.dumps(content["plan"])), _slices(content["slices"]))


def kept_solution(path: Path, solve: Callable[[], Solution]) -> Solution:
    """Return the solution that is kept in a file, or a new one, which is then kept.

    Args:
        path: The file, such as :func:`solution_path`.
        solve: Returns a new solution.
    """
    return kept(path, "solving again", read=Solution.from_json, make=solve, text=Solution.to_json)


def solution_path(profile: Profile, inputs: Mapping[str, object]) -> Path:
    """Return the file of the solution of some inputs.

    Args:
        profile: The profile: what was measured decides, whenever it was.
        inputs: All else, by name; their representations must tell different ones apart.
    """
    named = "".join(f"{name} {value!r}\n" for name, value in sorted(inputs.items()))
    key = profile_digest(profile, f" {solver_hash()}\n{named}")
    return cache_root() / "plans" / f"{key}.json"


@functools.cache
def solver_hash() -> str:
    """Return a short hash of the solver's sources: other ones may find other plans."""
    return source_hash("heterollm.solver", (".py",))


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _slices(data: object) -> dict[Group, dict[tuple[int, ...], tuple[int, ...]]]:
    """Return slices of their JSON form, whose hash was right."""
    if not isinstance(data, dict) or not set(data) <= set(get_args(Group)):
        raise PlanError(f"The solved plan holds slices of {data!r:.80}.")
    found: dict[Group, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for group, held in data.items():
        if not isinstance(held, list) or not all(_is_slice(item) for item in held):
            raise PlanError(f"The solved plan holds slices {held!r:.80} of {group}.")
        found[group] = {tuple(rows): tuple(lengths) for rows, lengths in held}
    return found


def _is_slice(item: object) -> bool:
    return (
        isinstance(item, Sequence)
        and len(item) == len(("rows", "lengths"))
        and all(isinstance(part, list) and all(type(size) is int for size in part) for part in item)
    )
