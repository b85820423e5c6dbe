"""Placements in words, for tables and reasons."""

from __future__ import annotations

from heterollm.kernels.ops import OpSpec
from heterollm.solver.plan import Placement

__all__ = ["describe"]


def describe(placement: Placement, spec: OpSpec, tokens: int) -> str:
    """Return a placement of a group as a few words, such as ``row: NPU 1024 of 2048 rows``."""
    kind = placement.kind(spec, tokens)
    if kind == "gpu":
        return "GPU"
    lengths = "+".join(map(str, placement.npu_lengths))
    form = f", {placement.form}" if placement.form else ""
    if kind == "npu":
        whole = "whole block: " if spec.then is not None else ""
        return f"{whole}NPU at {lengths}{form}"
    if kind == "block":
        width = f"{placement.npu_rows[0]} of {spec.member_rows[0]}"
        return f"block: NPU {width} of the width at {lengths}{form}"
    if kind == "sequence":
        left = tokens - sum(placement.npu_lengths)
        return (
            f"{'multi-' if len(placement.npu_lengths) > 1 else ''}sequence: NPU {lengths}, GPU {left}{form}"
        )
    return f"{kind}: NPU {sum(placement.npu_rows)} of {spec.rows} rows at {lengths}{form}"
