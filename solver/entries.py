"""From choices to a plan's entries: what a placement says of itself, and ranges that are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from msgspec.structs import replace

from heterollm.kernels.ops import Group, Phase
from heterollm.solver.chain import Choice
from heterollm.solver.placements import Alternative, Placement, bare
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.pricing import Priced
from heterollm.solver.words import describe

__all__ = ["in_order", "merged", "placed"]

ALTERNATIVES: Final = 3

SHORT_TOKENS: Final = 32


def placed(
    choice: Choice, tokens: int, every: Iterable[Priced], other_way: Alternative | None = None
) -> Placement:
    """Return what was chosen with its predicted time and the best of what was not, by kind.

    Args:
        choice: The choice among what the NPU holds.
        tokens: Tokens of the pass.
        every: All candidates: a kind that the NPU holds nothing for is named as well.
        other_way: What the groups could be placed as instead.
    """
    others: dict[str, Alternative] = {}
    own = choice.chosen.placement
    for candidates in (choice.others, every):
        for other in sorted(candidates, key=lambda item: item.cost):
            kind = other.placement.kind(choice.spec, tokens)
            if len(others) < ALTERNATIVES and kind not in others and other.placement != own:
                text = describe(other.placement, choice.spec, tokens)
                others[kind] = Alternative(text, round(other.time_us, 3))
    first = () if other_way is None else (other_way,)
    return replace(own, predicted_us=round(choice.chosen.time_us, 3), rejected=(*first, *others.values()))


def in_order(entries: Iterable[PlanEntry]) -> list[PlanEntry]:
    """Return entries by phase, prefill first, and by length; those of one range keep their order."""
    phases = get_args(Phase)
    return sorted(entries, key=lambda entry: (phases.index(entry.phase), entry.lengths))


def merged(entries: Sequence[PlanEntry]) -> Iterator[PlanEntry]:
    """Join ranges of lengths that have the same placement; the longest range's prediction stays.

    Ranges below :data:`SHORT_TOKENS` keep entries of their own.
    """
    open_entries: dict[tuple[Phase, Group], PlanEntry] = {}
    for entry in entries:
        key = entry.phase, entry.group
        held = open_entries.get(key)
        if (
            held is not None
            and SHORT_TOKENS <= held.lengths[1] == entry.lengths[0] - 1
            and _same(held, entry)
        ):
            open_entries[key] = replace(entry, lengths=(held.lengths[0], entry.lengths[1]))
            continue
        if held is not None:
            yield held
        open_entries[key] = entry
    yield from open_entries.values()


def _same(one: PlanEntry, other: PlanEntry) -> bool:
    return bare(one.placement) == bare(other.placement)
