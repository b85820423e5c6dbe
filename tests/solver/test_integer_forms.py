"""Integer forms in the solver: legal with stepped scales and a calibration, padded to 32 in decode."""

from dataclasses import replace

import pytest
from msgspec import structs

from heterollm.kernels.npu import INTEGER_FORMS, TILE_OF_INTEGERS
from heterollm.kernels.ops import Member, OpSpec, WeightFormat, ffn_spec
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record
from heterollm.solver.candidates import NpuLimits, candidates
from heterollm.solver.costs import NO_SHADOW, Overheads, ShadowTimes, Slowdown, joint_time_us
from heterollm.solver.options import evaluate
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.profile_limits import limits_of
from heterollm.solver.submissions import LayerGroup, layer_us

STEPPED = WeightFormat(4, 32, scales="stepped")
MEMBERS = Member("gate", 512), Member("up", 512)
GATE_UP = OpSpec("gate_up", 0, MEMBERS, 256, STEPPED, "x", "y", before=("rms_norm",))
DOWN = OpSpec("down", 0, (Member("down", 256),), 512, STEPPED, "y", "z")
FFN = ffn_spec(GATE_UP, DOWN)
LENGTHS = (1, 32, 64, 256)


def profile() -> Profile:
    made = Profile(
        {"npu": "an NPU", "npu_standard_lengths": list(LENGTHS), "npu_row_alignment": 64, "device": "host"}
    )
    for length in (1, 32, 64):
        for spec, forms in ((GATE_UP, ("matmul_nbits", "integer")), (FFN, ("ffn", "ffn_integer"))):
            for form in forms:
                if length > 1 or form not in INTEGER_FORMS:
                    point = LinearPoint.of(spec, length, form=form)
                    made.add(Record(LinearKey("npu", point, "code"), (10.0,)))
    return made


def free(spec: OpSpec) -> OpSpec:
    weight = structs.replace(spec.weight, scales="free")
    return replace(spec, weight=weight, then=None if spec.then is None else replace(spec.then, weight=weight))


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_integer_forms_need_both_a_calibration_and_stepped_scales(calibrated: bool, stepped: bool) -> None:
    limits = limits_of(profile(), calibrated=calibrated)
    for spec, form in ((GATE_UP, "integer"), (FFN, "ffn_integer")):
        asked = spec if stepped else free(spec)
        for length in LENGTHS:  # 256 was not measured
            assert (form in limits.forms(asked, length)) == (calibrated and stepped and length > 1)
        # The others are the same: a profile serves both kinds of scales.
        assert limits.forms(asked, 32)[-1] in ("matmul_nbits", "ffn", "integer", "ffn_integer")
        assert {"matmul_nbits", "ffn"} & set(limits.forms(asked, 1))


def test_a_decoded_token_may_run_in_an_integer_graph_of_32() -> None:
    limits = limits_of(profile(), calibrated=True)
    found = [placement for placement in candidates(GATE_UP, 1, limits) if placement.npu_lengths]
    whole = {(one.form, one.npu_lengths) for one in found if one.npu_rows == GATE_UP.member_rows}
    assert whole == {("matmul_nbits", (1,)), ("integer", (32,))}
    assert len(found) == len(set(found))
    for one in found:
        one.check(GATE_UP, 1)
    plain = limits_of(profile())
    assert {one.npu_lengths for one in candidates(GATE_UP, 1, plain)} == {(), (1,)}


def test_weights_with_one_scale_have_static_int8_alone() -> None:
    """At multiples of 64, with a calibration; the head beside them, of the same layout, keeps its form."""
    weight = WeightFormat(8, 32, scales="tensor")
    layer, head = replace(GATE_UP, weight=weight), replace(GATE_UP, group="head", weight=WeightFormat(8, 32))
    made = profile()
    for spec, forms in ((layer, ("static_int8", "integer")), (head, ("matmul_nbits",))):
        for length in (1, 32, 64):
            for form in forms:
                if length % TILE_OF_INTEGERS.get(form, 1) == 0:
                    point = LinearPoint.of(spec, length, form=form)
                    made.add(Record(LinearKey("npu", point, "code"), (10.0,)))
    for calibrated in (True, False):
        limits = limits_of(made, calibrated=calibrated)
        for length in LENGTHS:  # 256 was not measured
            legal = calibrated and length % 64 == 0
            assert limits.forms(layer, length) == (("static_int8",) if legal else ())
        assert limits.forms(head, 32) == ("matmul_nbits",)
    placed = {(one.form, one.npu_lengths) for one in candidates(layer, 1, limits_of(made, calibrated=True))}
    assert placed == {(None, ()), ("static_int8", (64,))}


def test_shards_of_an_ffn_have_integer_forms_too() -> None:
    found = list(candidates(FFN, 64, limits_of(profile(), calibrated=True)))
    for form in ("ffn", "ffn_integer"):
        widths = {one.npu_rows[0] for one in found if one.form == form}
        assert {min(widths), max(widths)} == {64, 512}


@pytest.mark.parametrize("spec", [GATE_UP, DOWN], ids=["norm", "own kernel"])
def test_codes_are_written_before_both_shards_and_read_behind_both(made, spec) -> None:
    class Costs(made.costs):
        def slowdown(self, spec, tokens, form="", length=0):
            return Slowdown(1.0, 2.0) if (form, length) == ("integer", 32) else Slowdown(1.0, 1.5)

        def codes_us(self, spec, member_rows, tokens, covered):
            return self._draw("write", spec.group, tokens), self._draw("read", member_rows, covered)

        def shadow_us(self, spec, member_rows, tokens, covered):
            return shadow

    shadow = NO_SHADOW
    costs = Costs(3, overheads=Overheads(submit_us=1.0, merges_launches=False), low=50.0)
    rows = tuple(own // 2 for own in spec.member_rows)
    for tokens in (20, 1):
        found = evaluate(spec, tokens, RowsPlacement(rows, (32,), "integer"), costs)
        write_us, read_us = costs.codes_us(spec, rows, tokens, tokens)
        npu_us = costs.npu_us(spec, rows, 32, "integer")
        both_us = joint_time_us(costs.gpu_us(spec, rows, tokens), npu_us, Slowdown(1.0, 2.0))
        assert (found.write_us, found.read_us) == (write_us, read_us)
        assert found.time_us == pytest.approx(write_us + max(both_us) + read_us)
        assert found.gpu_us == pytest.approx(write_us + both_us[0] + read_us)
        assert found.shard_us == pytest.approx(both_us[0])
        plain = evaluate(spec, tokens, RowsPlacement(rows, (32,), "matmul_nbits"), costs)
        assert plain.gpu_us == plain.shard_us
        # Both wait for the list of outliers, too; their product is the first kernel of the GPU's shard.
        shadow = ShadowTimes(3.0, 20.0, 5.0)
        with_shadow = evaluate(spec, tokens, RowsPlacement(rows, (32,), "integer"), costs)
        shadow = NO_SHADOW
        more_us = joint_time_us(20.0 + costs.gpu_us(spec, rows, tokens), npu_us, Slowdown(1.0, 2.0))
        assert with_shadow.shard_us == pytest.approx(more_us[0])
        assert with_shadow.time_us == pytest.approx(write_us + 3.0 + max(more_us) + read_us + 5.0)
        assert with_shadow.gpu_us == pytest.approx(write_us + 3.0 + more_us[0] + read_us + 5.0)
    # So in a chain of submissions, where a norm writes codes in the kernel that it has anyway.
    whole_us = 10.0 + write_us + max(both_us) + read_us
    submitted_us = (2 if spec is GATE_UP else 3) * costs.overheads.submit_us
    assert layer_us([LayerGroup(spec, [10.0], [found], 1)], [found], costs.overheads) == pytest.approx(
        whole_us, abs=submitted_us
    )


def test_other_forms_are_padded_as_before() -> None:
    limits = NpuLimits(LENGTHS, 64, lambda _spec, length: ("plain", "tiles") if length >= 64 else ("plain",))
    lengths = {(one.form, one.npu_lengths) for one in candidates(GATE_UP, 20, limits) if one.npu_lengths}
    assert ("tiles", (64,)) not in lengths
    assert ("plain", (32,)) in lengths


def test_integer_ffns_have_the_measured_activation_alone() -> None:
    limits = limits_of(profile(), calibrated=True, activation="gelu_tanh")
    assert limits.forms(FFN, 64) == ("ffn",)
    assert "integer" in limits.forms(GATE_UP, 64)
