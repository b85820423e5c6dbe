"""The doctor's check of attention in an NPU graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.formats import ATTENTION_NMSE, ComputeType, linear_errors
from heterollm.kernels.npu import AttentionShard, NpuBackend
from heterollm.kernels.operators import AttentionGraphCase

GRAPH: Final = "attention in a graph"
SHARD: Final = AttentionShard(heads=4, kv_heads=2, keys=640, head_dim=64)
CASES: Final = tuple(AttentionGraphCase(SHARD, 32, position, 8.0) for position in (0, 600))
"""Scores differ by more than float16's exponentials span, and the second range of keys is hidden or seen."""

FIX: Final = "Update onnxruntime, onnxruntime-qnn and the NPU driver. Only npu-attention needs such graphs."


def attention_cases(npu: NpuBackend) -> Iterator[DoctorCase]:
    """Yield attention at the begin and at the end of a session; an NPU without such a form says so."""
    for case in CASES:
        if npu.forms(SHARD.shape, case.tokens):
            yield DoctorCase("NPU", GRAPH, str(case), partial(_attention, npu, case))
        else:
            yield DoctorCase("NPU", GRAPH, str(case), None, f"{npu.name} has no such graph")


def _attention(npu: NpuBackend, case: AttentionGraphCase) -> Seen:
    errors = linear_errors(*case.on_npu(npu))
    compute: ComputeType = "fp16" if npu.activation_dtype.itemsize == 2 else "fp32"
    gate = ATTENTION_NMSE[compute]
    return Seen(
        errors.within(compute, ATTENTION_NMSE), f"NMSE {errors.nmse:.1e}, and the gate is {gate:.0e}", FIX
    )
