"""Decides who computes what: plans, and the rules and searches that make them."""

from __future__ import annotations

from heterollm.solver.levels import (
    LENGTH_POLICIES,
    LEVELS,
    SOLVED_LEVELS,
    LengthPolicy,
    PlanLevel,
    SolvedLevel,
    level_plan,
)
from heterollm.solver.plan import Placement, Plan, PlanEntry

__all__ = [
    "LENGTH_POLICIES",
    "LEVELS",
    "SOLVED_LEVELS",
    "LengthPolicy",
    "Placement",
    "Plan",
    "PlanEntry",
    "PlanLevel",
    "SolvedLevel",
    "level_plan",
]
