import pytest

from heterollm.base import PlanError
from heterollm.kernels.npu import HostNpu
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.solver import Plan, check_plan
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry


def check(form, lengths, tokens, columns=256, weight=None):
    """Check a plan of one group whose prefill of up to ``tokens`` tokens runs on the NPU in a form."""
    spec = OpSpec("down", 0, (Member("down", 256),), columns, weight or WeightFormat(16), "gated", "x")
    entries = (
        PlanEntry("prefill", (1, tokens), (0, 0), "down", RowsPlacement((256,), lengths, form)),
        PlanEntry("decode", (1, tokens), (0, 0), "down", RowsPlacement()),
    )
    plan = Plan("npu", "host", "fp16", "shape", tokens, entries)
    check_plan(plan, [spec], HostNpu(), longest=2048, head_rows=1)


def test_a_form_must_be_legal_at_every_length_of_a_placement():
    check("token_tiles", (64,), 64)
    with pytest.raises(PlanError, match=r"down of layer 0 .* form 'token_tiles' at 32 tokens"):
        check("token_tiles", (32,), 32)
    check("conv_1x1", (32,), 32)


@pytest.mark.parametrize("weight", [WeightFormat(16), WeightFormat(4, 128, symmetric=False)])
def test_pieces_need_more_inputs_than_one_holds(weight):
    check("k_chunked", (32,), 32, columns=4224, weight=weight)
    with pytest.raises(PlanError, match="form 'k_chunked' at 32 tokens") as caught:
        check("k_chunked", (32,), 32, columns=4096, weight=weight)
    assert "Legal forms" in caught.value.fix
    assert "k_chunked" not in caught.value.fix
