"""Notes on a solved plan: what its profile lacks, and where the plan is not what a request asked for.

Each note has the claim that it makes about the plan. A note whose claim the plan contradicts is never shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heterollm.base import format_moment
from heterollm.kernels.ops import PARTS
from heterollm.planning.techniques.llm_npu import request_of_solver
from heterollm.planning.techniques.registry import technique_notes
from heterollm.solver import Plan, PlanRequest

if TYPE_CHECKING:
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.profiler.records import Profile

IN_ORDER: Final = (
    "Chunks of prompts run one after the other: sparse attention, and attention or experts on the NPU, do "
    "not combine with several at once."
)

NAMED: Final = 2
"""Disturbed points that a note names."""


@dataclass(frozen=True, slots=True)
class _Note:
    """A note on a plan.

    Args:
        text: The note.
        holds: Whether its claim about the plan is true.
    """

    text: str
    holds: bool


def plan_notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return the notes on a plan whose claims hold.

    Args:
        model: The model on the profiled device.
        plan: The plan, with all that techniques add to it.
        request: The request.
    """
    return tuple(note.text for note in _notes(model, plan, request) if note.holds)


def _notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> Iterator[_Note]:
    if note := disturbed_note(model.profile):
        yield _Note(note, True)
    if lacking := model.groups_without_npu_times:
        layer = {spec.group for spec in model.specs if spec.group != "head"}
        named = "linear layers" if lacking == layer else f"linear layers {', '.join(sorted(lacking))}"
        error = model.unmeasured(named)
        on_npu = {entry.group for entry in plan.placed if entry.placement.npu_lengths}
        on_npu |= {part for group in on_npu for part in PARTS.get(group, ())}
        claim = "The GPU computes them." if plan.uses_npu else "The GPU computes everything."
        yield _Note(f"{error.message} {claim} {error.fix}", not lacking & on_npu)
    several = request.in_flight != 1 or request_of_solver(request).in_flight != request.in_flight
    yield _Note(IN_ORDER, several and request_of_solver(request).in_flight == 1 and plan.schedule is None)
    for text in technique_notes(model, plan, request):
        yield _Note(text, True)


def disturbed_note(profile: Profile) -> str:
    """Return how many points of a profile are disturbed, and which; empty where none is."""
    from heterollm.profiler import describe

    found = sorted(profile.disturbed(), key=lambda record: -abs(record.median_us - record.expected_us))
    if not found:
        return ""
    named = [
        f"{describe(record.key)}: {record.median_us:.0f} us, expected {record.expected_us:.0f} us"
        for record in found[:NAMED]
    ]
    more = ["..."] if len(found) > NAMED else []
    counts = f"{len(found)} of {len(profile.records)} points"
    return (
        f"The profile is disturbed: {counts} lie far off their neighbours ({'; '.join([*named, *more])}). "
        "`heterollm profile MODEL --update` measures them again."
    )


def profile_words(profile: Profile) -> str:
    """Return the profile that a plan rests on, in one line beside its device: date, mode and points."""
    newest = max(profile.runs.values(), key=lambda run: run["started_s"], default={})
    taken_s = max((record.taken_s for record in profile.records.values()), default=0.0)
    mode = "quick" if newest.get("quick") else "update" if newest.get("update") else "full"
    ended = "" if newest.get("finished", True) else ", stopped"
    disturbed = len(profile.disturbed())
    return (
        f"Profile {profile.fingerprint}: {len(profile.records)} points, {disturbed or 'none'} disturbed, the "
        f"last {format_moment(taken_s)} ({mode} run{ended})"
    )
