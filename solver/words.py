"""Placements in words, for tables and explanations."""

from __future__ import annotations

from typing import Final

from heterollm.kernels.ops import OpSpec
from heterollm.solver.placements import Placement

PLAIN_FORMS: Final = (None, "matmul_nbits", "matmul_nbits_int8")
"""Default graph forms of linear layers with 4-bit weights."""


def describe(placement: Placement, spec: OpSpec, tokens: int) -> str:
    """Return a placement of a group as a few words, such as ``row: NPU 1024 of 2048 rows``."""
    kind = placement.kind(spec, tokens)
    if kind == "gpu":
        return "GPU"
    lengths = "+".join(map(str, placement.npu_lengths))
    form = f", {placement.form}" if placement.form else ""
    form += " with shadow outliers" if placement.shadow else ""
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


def notation(placement: Placement, spec: OpSpec, tokens: int) -> str:
    """Return a short notation of a placement, for tables with a column for each group.

    ``G`` is the GPU and ``N`` the NPU alone. Splits are ``NPU:GPU``: of rows in percent (``r75:25``), of
    tokens in numbers (``s512+32:56``), of an ffn's width in percent (``b66:34``). After an ``@`` come the
    lengths of the NPU's graphs if they differ from that of the pass, in brackets the form of the graphs if it
    is not the default.
    """
    kind = placement.kind(spec, tokens)
    if kind == "gpu":
        return "G"
    lengths = "+".join(map(str, placement.npu_lengths))
    form = (
        "" if placement.form in PLAIN_FORMS else f"({placement.form}{'+shadow' if placement.shadow else ''})"
    )
    if kind == "sequence":
        return f"s{lengths}:{tokens - sum(placement.npu_lengths)}{form}"
    at = "" if placement.npu_lengths == (tokens,) else f"@{lengths}"
    if kind == "npu":
        return f"{'b100' if spec.then is not None else 'N'}{at}{form}"
    percent = round(100 * sum(placement.npu_rows) / spec.rows)
    return f"{'b' if kind == 'block' else 'r'}{percent}:{100 - percent}{at}{form}"
