"""Decides who computes what: plans, and the rules and searches that make them."""

from __future__ import annotations

from heterollm.solver.levels import LEVELS, PlanLevel, level_plan
from heterollm.solver.plan import Placement, Plan, PlanEntry

__all__ = ["LEVELS", "Placement", "Plan", "PlanEntry", "PlanLevel", "level_plan"]
