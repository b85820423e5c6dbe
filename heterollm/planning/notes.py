"""Notes on a solved plan: what its profile lacks, and where the plan is not what a request asked for.

Each note has the claim that it makes about the plan. A note whose claim the plan contradicts is never shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heterollm.base import format_moment
from heterollm.planning.experts import expert_notes
from heterollm.planning.passes import request_of_solver
from heterollm.planning.sparse_attention import attention_notes
from heterollm.solver import Plan, PlanRequest

if TYPE_CHECKING:
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.profiler.records import Profile

__all__ = ["disturbed_note", "plan_notes", "profile_words"]

IN_ORDER: Final = (
    "Chunks of prompts run one after the other: neither sparse attention nor experts on the NPU are combined "
    "with several at once."
)

NAMED: Final = 2
"""Disturbed points that a note names."""
