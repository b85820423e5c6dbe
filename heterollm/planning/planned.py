"""A plan, and the facts of its making."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterollm.planning.lengths import LengthChoice
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.planning.techniques.registry import Evidence
    from heterollm.solver import Plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the facts of its making.

    Args:
        plan: The plan.
        notes: The choice of ``auto`` and its margin, measurements that the profile lacks, and differences of
            the plan from the request.
        model: The model on the profiled device; None for a plan without times.
        length_choice: The standard lengths that are worth building; None without a build budget.
        evidence: Facts by which techniques placed their entries.
    """

    plan: Plan
    notes: tuple[str, ...] = ()
    model: ProfiledModel | None = None
    length_choice: LengthChoice | None = None
    evidence: Evidence = field(default_factory=dict)
