"""Norms in the graphs of q, k and v, where a plan gives the NPU all rows of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from heterollm.kernels.ops import OpSpec, joined_specs
from heterollm.solver.plan import Plan
from heterollm.solver.plan_records import PlanEntry


def with_norms(plan: Plan, specs: Sequence[OpSpec]) -> Plan:
    """Return a plan with ``norm_qkv`` in place of ``qkv`` where the NPU computes all of it.

    The GPU then copies the residual stream in place of its norm, and a fused group behind attention reads the
    same copy.

    Args:
        plan: The plan.
        specs: Every group of the model.
    """
    fused = {spec.layer for spec in joined_specs(specs) if spec.group == "norm_qkv"}

    def takes(entry: PlanEntry) -> bool:
        placement = entry.placement
        own = [spec for spec in specs if entry.group == spec.group == "qkv" and entry.holds(spec)]
        whole = own and all(placement.npu_rows == spec.member_rows for spec in own)
        covers = sum(placement.npu_lengths) >= entry.lengths[1] and not placement.shadow
        return bool(whole and covers and fused.issuperset(spec.layer for spec in own))

    entries = tuple(replace(entry, group="norm_qkv") if takes(entry) else entry for entry in plan.entries)
    return replace(plan, entries=entries, slices=())
