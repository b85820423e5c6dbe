"""What a profile says of blocks: their forms by width, and the GPU's part from linears and the activation."""

import pytest
from msgspec.structs import replace

from heterollm.kernels.npu import K_SPLIT_COLUMNS
from heterollm.kernels.ops import ffn_spec
from heterollm.model.known import ModelSize
from heterollm.profiler.measure import layer_key
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record
from heterollm.solver import ProfileCosts, limits_of
from heterollm.solver.ffn import ffn_groups, ffn_shard, gpu_shard_us

WIDE = 2 * K_SPLIT_COLUMNS
SHAPE = ModelSize(512, WIDE, 2, 8, 8, 1024, False, 64, 2048).shape("made")
GATE_UP = next(spec for spec in SHAPE.layer if spec.group == "gate_up")
DOWN = next(spec for spec in SHAPE.layer if spec.group == "down")
BLOCK = ffn_spec(GATE_UP, DOWN)


def made_profile(widths, forms=("ffn", "ffn_k_chunked")):
    """Return a profile with blocks of some widths at 1 and 64 tokens; wide ones in pieces, too."""
    description = {
        "device": "made",
        "time": "real",
        "npu": "an NPU",
        "cache_bytes": 0,
        "npu_standard_lengths": [1, 64, 256],
        "npu_row_alignment": 64,
    }
    made = Profile(description)

    def add(part, spec, tokens, us, **options):
        made.add(Record(LinearKey(part, LinearPoint.of(spec, tokens, **options), "code"), (us,)))

    for tokens in (1, 64):
        for spec in (*SHAPE.layer, SHAPE.head):
            for share in (1, 2):
                rows = tuple(count // share for count in spec.member_rows)
                work_us = sum(rows) * spec.columns * (20 + tokens) / 1e6
                add("gpu", spec, tokens, 5.0 + work_us, member_rows=rows)
                add("npu", spec, tokens, 9.0 + work_us / 2, member_rows=rows, form="matmul_nbits")
        for width in widths:
            for form in forms if width > K_SPLIT_COLUMNS else forms[:1]:
                rows_us = 3 * width * 512 * (20 + tokens) / 2e6
                add("npu", BLOCK, tokens, 9.0 + rows_us, member_rows=(width, width), form=form)
    for tokens in (1, 64):
        for width in (WIDE, WIDE // 2):
            key = replace(layer_key(SHAPE, "gated_activation", tokens), hidden=width)
            made.add(Record(key, (1.0 + width * tokens / 1e4,)))
    return made


@pytest.mark.parametrize(
    ("widths", "narrow", "wide"),
    [
        ((256, WIDE), ("ffn",), ("ffn", "ffn_k_chunked")),
        ((WIDE,), ("ffn",), ("ffn", "ffn_k_chunked")),
        ((256,), ("ffn",), ("ffn",)),
        ((), (), ()),
    ],
)
def test_forms_are_those_of_measured_blocks_by_width(widths, narrow, wide):
    limits = limits_of(made_profile(widths))
    # Also at a length that was not measured.
    for length in (1, 64, 256):
        assert limits.forms(ffn_shard(BLOCK, 1024), length) == narrow
        assert limits.forms(ffn_shard(BLOCK, K_SPLIT_COLUMNS), length) == narrow
        assert limits.forms(ffn_shard(BLOCK, K_SPLIT_COLUMNS + 64), length) == wide
        assert limits.forms(BLOCK, length) == wide
        assert limits.forms(GATE_UP, length) == limits.forms(DOWN, length) == ("matmul_nbits",)
    assert limits.runs(BLOCK) == bool(widths)


def test_the_gpus_part_is_linears_and_a_narrower_activation(monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    costs = ProfileCosts(made_profile((256, WIDE)), SHAPE)
    rest = WIDE // 2
    _, narrow_down = ffn_groups(ffn_shard(BLOCK, rest))
    for tokens in (1, 64):
        assert costs.between_us(DOWN, tokens) == pytest.approx(1.0 + WIDE * tokens / 1e4)
        assert costs.between_us(narrow_down, tokens) == pytest.approx(1.0 + rest * tokens / 1e4)
        expected = costs.gpu_us(GATE_UP, (rest, rest), tokens) + costs.between_us(narrow_down, tokens)
        expected += costs.gpu_us(narrow_down, DOWN.member_rows, tokens)
        assert gpu_shard_us(costs, BLOCK, (rest, rest), tokens) == pytest.approx(expected)
        # Half the width is half the work and a floor.
        whole = gpu_shard_us(costs, BLOCK, (WIDE, WIDE), tokens)
        assert 0.4 * whole <= expected <= 0.6 * whole + 12.0
        assert costs.slowdown(BLOCK, tokens) == costs.slowdown(GATE_UP, tokens)
        measured = 9.0 + 3 * 256 * 512 * (20 + tokens) / 2e6
        assert costs.npu_us(BLOCK, (256, 256), tokens, "ffn") == pytest.approx(measured)
    assert not costs.missing
