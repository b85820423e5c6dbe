"""The techniques that a plan can have a record of, in the order of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.solver.experts.placements import PlannedExperts
from heterollm.solver.sparse.attention import PlannedAttention
from heterollm.solver.techniques.record import TechniqueRecord

RECORDS: Final[Mapping[str, type[TechniqueRecord]]] = {
    kind.KEY: kind for kind in (PlannedAttention, PlannedExperts)
}
"""Types of records by the fields of a plan's file."""
