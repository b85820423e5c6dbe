"""Entries of a plan: placements with their predictions, and merged ranges of lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from msgspec.structs import replace

from heterollm.kernels.ops import Group, Phase
from heterollm.solver.chain import Choice
from heterollm.solver.kinds import PlacedKind
from heterollm.solver.options import Option
from heterollm.solver.placements import Placement, RejectedOption, bare
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.words import describe

MAX_REJECTED: Final = 3

SHORT_TOKENS: Final = 32


def annotated(
    choice: Choice, tokens: int, every: Iterable[Option], rejected_path: RejectedOption | None = None
) -> Placement:
    """Return the chosen placement with its predicted time and the best rejected option of each kind.

    Args:
        choice: The choice among options with resident slices.
        tokens: Tokens of the pass.
        every: All options, those without resident slices included.
        rejected_path: The other path through the feed-forward network.
    """
    others: dict[str, RejectedOption] = {}
    own = choice.chosen.placement
    for candidates in (choice.others, every):
        for other in sorted(candidates, key=lambda item: item.cost):
            kind = other.placement.kind(choice.spec, tokens)
            if len(others) < MAX_REJECTED and kind not in others and other.placement != own:
                text = describe(other.placement, choice.spec, tokens)
                error_us = round(other.error_us, 3) if other.is_split else 0.0
                others[kind] = RejectedOption(text, round(other.time_us, 3), error_us=error_us)
    first = () if rejected_path is None else (rejected_path,)
    return replace(own, predicted_us=round(choice.chosen.time_us, 3), rejected=(*first, *others.values()))


def in_order(entries: Iterable[PlanEntry]) -> list[PlanEntry]:
    """Return entries sorted by phase, prefill first, and by length; the sort is stable."""
    phases = get_args(Phase)
    return sorted(entries, key=lambda entry: (phases.index(entry.phase), entry.lengths))


def without_kinds(entries: Sequence[PlanEntry], kinds: Iterable[PlacedKind]) -> Iterator[PlanEntry]:
    """Yield entries, those of a group without kinds of layers where all that have the group place it alike.

    The prediction of the first kind stays.

    Args:
        entries: Entries of each kind.
        kinds: The kinds with the groups that they have.
    """
    having = Counter(spec.group for kind in kinds for spec in kind.operators)
    found: dict[Group, dict[str, list[PlanEntry]]] = {}
    for entry in entries:
        found.setdefault(entry.group, {}).setdefault(entry.kind, []).append(entry)
    for entry in entries:
        first, *others = found[entry.group].values()
        if having[entry.group] > 1 + len(others) or any(_bare(own) != _bare(first) for own in others):
            yield entry
        elif entry.kind == first[0].kind:
            layers = [layer for own in found[entry.group].values() for layer in own[0].layers]
            yield replace(entry, kind="", layers=(min(layers), max(layers)))


def _bare(entries: Sequence[PlanEntry]) -> list[tuple[object, ...]]:
    return [(one.phase, one.lengths, bare(one.placement)) for one in entries]


def merged(entries: Sequence[PlanEntry]) -> Iterator[PlanEntry]:
    """Merge adjacent ranges of lengths with the same placement; the prediction of the first stays.

    Ranges below :data:`SHORT_TOKENS` keep entries of their own.
    """
    open_entries: dict[tuple[Phase, Group, str], PlanEntry] = {}
    for entry in entries:
        key = entry.phase, entry.group, entry.kind
        held = open_entries.get(key)
        if (
            held is not None
            and SHORT_TOKENS <= held.lengths[1] == entry.lengths[0] - 1
            and bare(held.placement) == bare(entry.placement)
        ):
            open_entries[key] = replace(entry, lengths=(held.lengths[0], entry.lengths[1]))
            continue
        if held is not None:
            yield held
        open_entries[key] = entry
    yield from open_entries.values()
