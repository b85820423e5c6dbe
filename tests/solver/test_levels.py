"""Plan levels without a profile, and how they run lengths that the NPU has no graph for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import OptionError
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.solver import LENGTH_POLICIES, level_plan

STANDARD = (1, 32, 64, 128, 256, 512, 1024)
WEIGHT = WeightFormat(4, 32)
SPECS = [
    OpSpec(group, layer, (Member(group, 64),), 64, WEIGHT, "x", "y")
    for layer in range(2)
    for group in ("qkv", "o", "gate_up", "down")
] + [OpSpec("head", -1, (Member("head", 128),), 64, WEIGHT, "x", "y")]


def plan(level, policy, chunk=1024, lengths=STANDARD, costs=None):
    return level_plan(
        level,
        SPECS,
        device="host",
        precision="w4a16",
        standard_lengths=lengths,
        chunk_length=chunk,
        length_policy=policy,
        length_costs=costs,
    )


@pytest.mark.parametrize(
    ("tokens", "padding", "pipe"),
    [
        (1, (1,), (1,)),
        (2, (32,), (32,)),
        (135, (256,), (128, 32)),
        (256, (256,), (256,)),
        (300, (512,), (256, 64)),
        (525, (1024,), (512, 32)),
        (600, (1024,), (512, 64, 32)),
        (1000, (1024,), (1024,)),
    ],
)
def test_the_lengths_of_the_issue(tokens, padding, pipe):
    spec = SPECS[0]
    assert plan("layer", "padding").placement("prefill", tokens, spec).npu_lengths == padding
    assert plan("npu", "pipe").placement("prefill", tokens, spec).npu_lengths == pipe
    assert plan("npu", "pipe").placement("decode", tokens, spec).npu_lengths == pipe
    assert plan("layer", "pipe").placement("decode", tokens, spec).npu_lengths == ()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 1100),
    st.sets(st.integers(16, 400), min_size=1, max_size=5),
    st.sampled_from(LENGTH_POLICIES),
    st.sampled_from(["npu", "layer"]),
)
def test_every_length_is_covered_and_the_pipe_pads_least(chunk, lengths, policy, level):
    standard = (1, *sorted(lengths))
    # Every token costs the same and every graph a little, so that `auto` minimises what `pipe` does.
    made = plan(level, policy, chunk, standard, lambda spec, cover: sum(cover) + 0.001 * len(cover))
    padded = plan(level, "padding", chunk, standard)
    piped = plan(level, "pipe", chunk, standard)
    for tokens in {1, 2, chunk, chunk // 2 + 1, *(length for length in standard if length <= chunk)}:
        if tokens > chunk:
            continue
        for spec in (SPECS[0], SPECS[-1]):
            found = made.placement("prefill", tokens, spec)  # raises unless an entry covers it legally
            if spec.group == "head" and level == "layer":
                assert found.npu_lengths == ()
                continue
            assert set(found.npu_lengths) <= set(standard)
            assert sum(found.npu_lengths[:-1]) < tokens <= sum(found.npu_lengths)
            least = sum(piped.placement("prefill", tokens, spec).npu_lengths)
            assert least <= sum(padded.placement("prefill", tokens, spec).npu_lengths)
            if policy != "padding":
                assert sum(found.npu_lengths) == least


def test_auto_goes_by_the_costs_of_each_group():
    def costs(spec, cover):
        graphs = 1000.0 if spec.group == "down" else 1.0
        return sum(cover) + graphs * len(cover)

    made = plan("npu", "auto", costs=costs)
    by_group = {spec.group: made.placement("prefill", 300, spec).npu_lengths for spec in SPECS}
    assert by_group["down"] == (512,)
    assert by_group["qkv"] == (256, 64)


def test_auto_without_costs_is_refused():
    with pytest.raises(OptionError, match="predicted times"):
        plan("npu", "auto")
