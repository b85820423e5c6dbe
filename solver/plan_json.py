"""Reads the records of a plan from JSON, every field checked.

Raises ``KeyError``, ``TypeError`` or ``ValueError`` where something is missing, unknown or out of range;
:meth:`heterollm.solver.plan.Plan.from_json` turns them into one error that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from heterollm.kernels.gpu import SYNC_CHOICES
from heterollm.kernels.ops import Group, Phase
from heterollm.solver.placements import (
    PLACEMENT_TYPES,
    Alternative,
    BlockPlacement,
    Placement,
    RowsPlacement,
)
from heterollm.solver.plan_records import HeldSlice, PhaseSync, PlanEntry
from heterollm.solver.request import PlanRequest

__all__ = ["read_entry", "read_integer", "read_items", "read_request", "read_slice", "read_sync", "read_text"]


def read_entry(item: Mapping[str, Any]) -> PlanEntry:
    """Return an entry of its JSON form."""
    _only(item, PlanEntry)
    phase, group, placement = item["phase"], _group(item), _placement(item["placement"])
    if phase not in get_args(Phase):
        raise ValueError(f"unknown phase {phase!r:.80}")
    if (group == "ffn") is not isinstance(placement, BlockPlacement):
        raise ValueError(f"a placement of type {placement.type!r} cannot place {group}")
    return PlanEntry(phase, _pair(item["lengths"]), _pair(item["layers"]), group, placement)


def _placement(item: Mapping[str, Any]) -> Placement:
    kind = PLACEMENT_TYPES.get(item["type"]) if isinstance(item["type"], str) else None
    if kind is None:
        raise ValueError(f"type is {item['type']!r:.80}, not {' or '.join(PLACEMENT_TYPES)}")
    _only(item, kind, "type")
    form, predicted = item.get("form"), item.get("predicted_us")
    if form is not None and not isinstance(form, str):
        raise TypeError(f"form is {form!r:.80}, not text")
    lengths = tuple(read_integer(value, at_least=1) for value in read_items(item["npu_lengths"]))
    others: dict[str, Any] = {
        "form": form,
        "predicted_us": None if predicted is None else _number(predicted),
        "rejected": tuple(_alternative(other) for other in read_items(item.get("rejected", []))),
    }
    if kind is BlockPlacement:
        return BlockPlacement(read_integer(item["width"], at_least=1), lengths, **others)
    rows = tuple(read_integer(value, at_least=0) for value in read_items(item["npu_rows"]))
    return RowsPlacement(rows, lengths, **others)


def read_slice(item: Mapping[str, Any]) -> HeldSlice:
    """Return a held slice of its JSON form."""
    _only(item, HeldSlice)
    rows = tuple(read_integer(value, at_least=0) for value in read_items(item["npu_rows"]))
    lengths = tuple(read_integer(value, at_least=1) for value in read_items(item["lengths"]))
    return HeldSlice(_group(item), _pair(item["layers"]), rows, lengths)


def read_sync(item: Mapping[str, Any]) -> PhaseSync:
    """Return the ways of waiting of their JSON form."""
    _only(item, PhaseSync)
    sync = PhaseSync(item["prefill"], item["decode"])
    for choice in (sync.prefill, sync.decode):
        if choice not in SYNC_CHOICES:
            raise ValueError(f"sync is {choice!r:.80}, not one of {', '.join(SYNC_CHOICES)}")
    return sync


def read_request(item: Mapping[str, Any] | None) -> PlanRequest | None:
    """Return a request of its JSON form; None for none."""
    if item is None:
        return None
    _only(item, PlanRequest)
    histogram, budget_s, npu_gib = (item[name] for name in ("histogram", "build_budget_s", "npu_gib"))
    return PlanRequest(
        context=read_integer(item["context"], at_least=1),
        gpu_share=_number(item["gpu_share"]),
        energy_weight=_number(item["energy_weight"]),
        forbidden=tuple(read_items(item["forbidden"])),
        npu_gib=None if npu_gib is None else _number(npu_gib),
        histogram=None if histogram is None else {int(key): _number(n) for key, n in histogram.items()},
        build_budget_s=None if budget_s is None else _number(budget_s),
        level=item["level"],
    )


def _alternative(item: Mapping[str, Any]) -> Alternative:
    _only(item, Alternative)
    of_ffn = item.get("of_ffn", False)
    if not isinstance(of_ffn, bool):
        raise TypeError(f"of_ffn is {of_ffn!r:.80}, not true or false")
    return Alternative(read_text(item, "description"), _number(item["predicted_us"]), of_ffn)


def _only(item: Mapping[str, Any], kind: type, *others: str) -> None:
    """Refuse fields that would be ignored, as a misspelt one would."""
    unknown = set(item).difference(others, (field.name for field in fields(kind)))
    if unknown:
        raise ValueError(f"there is no field {min(unknown)!r:.80} in {sorted(item)}")


def _group(item: Mapping[str, Any]) -> Group:
    group: Group = item["group"]
    if group not in get_args(Group):
        raise ValueError(f"unknown group {group!r:.80}")
    return group


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.80} is not a number of at least 0")
    return float(value)


def read_items(value: object) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def _pair(value: object) -> tuple[int, int]:
    low, high = (read_integer(item, at_least=-1) for item in read_items(value))
    if low > high:
        raise ValueError(f"range {low}..{high} is empty")
    return low, high


def read_integer(value: Any, *, at_least: int) -> int:  # noqa: ANN401 - whatever JSON held
    """Return a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{value!r:.80} is not an integer of at least {at_least}")
    return value


def read_text(data: Mapping[str, Any], key: str) -> str:
    """Return text."""
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r:.80}, not text")
    return value
