"""Decides who computes what: plans, and the rules and searches that make them."""

from __future__ import annotations

from heterollm.solver.levels import LENGTH_POLICIES, LEVELS, LengthPolicy, PlanLevel, level_plan
from heterollm.solver.plan import Placement, Plan, PlanEntry

__all__ = [
    "LENGTH_POLICIES",
    "LEVELS",
    "LengthPolicy",
    "Placement",
    "Plan",
    "PlanEntry",
    "PlanLevel",
    "level_plan",
]
