"""The profiler measures integer graph forms of weights with stepped scales."""

import dataclasses

import pytest

from heterollm.kernels.ops import Member, OpSpec, WeightFormat, ffn_spec
from heterollm.profiler.measure.linears import LinearBench
from heterollm.profiler.records import LinearKey, LinearPoint
from heterollm.profiler.work import WorkPoint

STEPPED = WeightFormat(4, 32, scales="stepped")
GATE_UP = OpSpec("gate_up", 0, (Member("gate", 192), Member("up", 192)), 128, STEPPED, "x", "y")
ONE_SCALE = dataclasses.replace(GATE_UP, weight=WeightFormat(8, 32, scales="tensor"))
DOWN = OpSpec("down", 0, (Member("down", 128),), 192, STEPPED, "y", "z")


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        (GATE_UP, "integer"),
        (ffn_spec(GATE_UP, DOWN), "ffn_integer"),
        (ONE_SCALE, "integer"),
        (ONE_SCALE, "static_int8"),
    ],
)
def test_integer_forms_are_measured(device, spec, form):
    point = LinearPoint.of(spec, 64, form=form)
    records = LinearBench(device).measure(WorkPoint("npu", point, 1, spec))
    [record] = [record for record in records if isinstance(record.key, LinearKey)]
    assert not record.failed, record.error
    assert record.key.point.form == form
    assert record.samples_us
