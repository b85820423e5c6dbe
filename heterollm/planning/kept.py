"""Solved plans, kept as JSON in the cache folder: solving takes up to a second, and reading does not.

A plan is filed under all that it follows from: the profile's records, the model's groups, the request and the
sources of the solver. One that was damaged or changed is solved again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterollm.base import PlanError, load_or_make, own_folder, parse_json
from heterollm.kernels.gpu import source_hash
from heterollm.profiler.predict import profile_digest
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.profiler.records import Profile


def kept_plan(path: Path, solve: Callable[[], Plan]) -> Plan:
    """Return the plan that is kept in a file, or a new one, which is then kept.

    Args:
        path: The file, such as :func:`plan_path`.
        solve: Returns a new plan.
    """
    return load_or_make(path, "solving again", read=_read, make=solve, text=_written)


def plan_path(profile: Profile, inputs: Mapping[str, object]) -> Path:
    """Return the file of the plan of some inputs.

    Args:
        profile: The profile, of which measurements decide, not their dates.
        inputs: All other inputs, by name; different inputs must have different representations.
    """
    named = "".join(f"{name} {value!r}\n" for name, value in sorted(inputs.items()))
    key = profile_digest(profile, f" {solver_hash()}\n{named}")
    return own_folder("plans") / f"{key}.json"


@functools.cache
def solver_hash() -> str:
    """Return a short hash of the solver's sources, since a changed solver may find other plans."""
    return source_hash("heterollm.solver", (".py",))


def _written(plan: Plan) -> str:
    content = json.loads(plan.to_json())
    return json.dumps({"hash": _hash(content), "plan": content})


def _read(text: str | bytes) -> Plan:
    """Return a plan that was kept.

    Raises:
        PlanError: The text is damaged, was changed, or is of another version.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"The solved plan is not JSON: {error}.") from error
    content = data.get("plan") if isinstance(data, dict) else None
    if content is None or data["hash"] != _hash(content):
        raise PlanError("The solved plan was changed since it was written.")
    return Plan.from_json(json.dumps(content))


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
