"""Which points are measured: legal cuts, the coarse ones first, everything left out counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from heterollm.base import MIB, OptionError
from heterollm.kernels.npu import STANDARD_LENGTHS, GraphForm, GraphShape, LinearShape
from heterollm.model import ModelShape, default_shapes
from heterollm.model.known import ModelSize
from heterollm.profiler.records import LinearPoint
from heterollm.profiler.work import (
    HEAD_TOKENS,
    SkippedPoints,
    WorkPoint,
    enumerate_points,
    rest_rows,
    split_rows,
)
from heterollm.profiler.work.points import GPU_TOKENS, NPU_FRACTIONS, SPLIT_TOKENS

LARGE = 1 << 40
TINY = ModelSize(128, 384, 2, 4, 2, 512, True, 32, 2048)


class StatedNpu:
    """What the enumeration asks of a backend."""

    standard_lengths = STANDARD_LENGTHS

    def __init__(self, row_alignment: int, forms: tuple[GraphForm, ...] = ("matmul_nbits",)) -> None:
        self.row_alignment = row_alignment
        self._forms = forms

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Of linears; blocks have tests of their own."""
        return self._forms if isinstance(shape, LinearShape) else ()


def points_of(shapes, npu, cache_bytes=0, max_buffer_bytes=LARGE) -> tuple[list[WorkPoint], SkippedPoints]:
    return enumerate_points(shapes, npu, cache_bytes=cache_bytes, max_buffer_bytes=max_buffer_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_cuts_lie_on_the_alignment_and_keep_members_together(seed):
    generator = np.random.default_rng(seed)
    alignment = int(generator.choice([16, 32, 64, 256]))
    wide = int(generator.integers(1, 60)) * 16
    rows = (wide, wide, int(generator.integers(1, 2 * alignment)))
    before = (0, 0, 0)
    for fraction in sorted(generator.uniform(0, 1, 8)):
        cut = split_rows(rows, fraction, alignment)
        assert all(own % alignment == 0 and own <= whole for own, whole in zip(cut, rows, strict=True))
        assert cut[0] == cut[1], "gate row i must stay with up row i"
        assert all(abs(own - fraction * whole) <= alignment for own, whole in zip(cut, rows, strict=True))
        assert all(now >= then for now, then in zip(cut, before, strict=True))
        assert all(not own for own, whole in zip(cut, rows, strict=True) if whole < alignment)
        before = cut
    assert split_rows(rows, 1.0, alignment) == rows


@pytest.mark.parametrize("alignment", [64, 256])
@pytest.mark.parametrize("precision", ["w4a16", "w4a8", "fp16"])
def test_every_point_is_one_that_a_plan_can_use(alignment, precision):
    shapes = default_shapes(precision)
    points, _ = points_of(shapes, StatedNpu(alignment, ("weight_first", "conv_1x1")))
    assert len({(work.processor, work.point) for work in points}) == len(points)
    cuts: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
    for work in points:
        point, spec = work.point, work.spec
        assert (point.group, point.columns, point.weight) == (spec.group, spec.columns, spec.weight)
        assert point.integer_inputs == (precision == "w4a8")
        assert point.tokens <= HEAD_TOKENS or point.group != "head"
        own = point.member_rows if work.processor == "npu" else rest_rows(spec.member_rows, point.member_rows)
        whole = zip(own, spec.member_rows, strict=True)
        assert all(rows % alignment == 0 or rows == of for rows, of in whole)
        assert any(point.member_rows)
        if work.processor == "npu":
            assert point.tokens in STANDARD_LENGTHS
            assert point.form
        else:
            assert point.tokens in GPU_TOKENS
            assert not point.form
        if point.member_rows != spec.member_rows:
            cuts.setdefault((spec, work.processor), set()).add(own)
    for (spec, part), found in cuts.items():
        assert found == cuts[spec, "npu" if part == "gpu" else "gpu"], "the parts' rows must fit together"


def test_the_coarse_points_come_first_and_cover_every_shape():
    points, _ = points_of(default_shapes(), StatedNpu(64, ("matmul_nbits", "k_chunked")))
    tiers = [work.tier for work in points]
    assert tiers == sorted(tiers)
    assert set(tiers) == {0, 1, 2}
    essential = [work for work in points if work.tier == 0]
    covered = {(work.processor, work.spec) for work in essential}
    assert covered == {
        (part, spec) for shape in default_shapes() for spec in shape.specs for part in ("gpu", "npu")
    }
    assert {work.point.form for work in essential} == {"", "matmul_nbits"}
    # Five sizes and more of each group, where linearity is looked for.
    default = [work for work in points if work.tier <= 1 and work.processor == "gpu"]
    for shape in default_shapes():
        for spec in shape.specs:
            for tokens in SPLIT_TOKENS:
                sizes = {w.point.rows for w in default if w.spec == spec and w.point.tokens == tokens}
                assert len(sizes) >= 5 or (spec.group == "head" and tokens > 1)


def test_what_is_left_out_is_counted_by_reason():
    # Members of 896 rows have three cuts at 256, so four of seven fractions are none, all or one again.
    shape = ModelSize(896, 4864, 1, 14, 2, 1024, True, 64, 2048).shape("narrow")
    _, whole = points_of([shape], StatedNpu(256))
    lengths = len(STANDARD_LENGTHS)
    head_lengths = sum(length <= HEAD_TOKENS for length in STANDARD_LENGTHS)
    unaligned = {"qkv": 4, "o": 4, "gate_up": 0, "down": 4}
    assert whole.counts["alignment"] == lengths * sum(unaligned.values()) + 4 * head_lengths
    # 4864 rows have 18 cuts, of which seven and the narrowest are measured; no other group has cuts between.
    assert whole.counts["stage"] == lengths * (18 - len(NPU_FRACTIONS) - 1)
    assert whole.counts["linear"] > 0
    assert whole.total == sum(whole.to_dict().values())

    _, unsupported = points_of([shape], StatedNpu(256, ()))
    cuts = {"qkv": 3, "o": 3, "gate_up": 8, "down": 3}
    missing = lengths * sum(1 + count for count in cuts.values()) + head_lengths * (1 + 3)
    # And the feed-forward block, whole, at seven widths, the narrowest, and 4096; 4352 is seven eighths.
    missing += lengths * (1 + 9)
    assert unsupported.counts["unsupported"] == missing

    points, small = points_of([shape], StatedNpu(256), max_buffer_bytes=1000)
    assert {work.processor for work in points} == {"npu"}
    tokens = len(GPU_TOKENS)
    head_tokens = sum(count <= HEAD_TOKENS for count in GPU_TOKENS)
    assert small.counts["buffer"] == tokens * sum(1 + count for count in cuts.values()) + head_tokens * 4


def test_a_device_without_an_npu_has_whole_groups_on_its_gpu():
    points, skipped = points_of([TINY.shape("tiny")], None)
    assert {work.processor for work in points} == {"gpu"}
    assert all(work.point.member_rows == work.spec.member_rows for work in points)
    assert skipped.total == 0


def test_a_point_that_two_models_share_is_measured_once_at_the_lower_tier():
    shape = TINY.shape("tiny")
    once, _ = points_of([shape], StatedNpu(64))
    twice, _ = points_of([shape, shape], StatedNpu(64))
    assert once == twice


def test_only_models_that_exceed_the_cache_stream_their_weights():
    shape = TINY.shape("tiny")
    read = 2 * sum(spec.weight_bytes() for spec in shape.layer) + shape.head.weight_bytes()
    for cache_bytes, streamed in ((read - 1, True), (read, False)):
        points, _ = points_of([shape], StatedNpu(64), cache_bytes=cache_bytes)
        assert {work.point.streamed for work in points} == {streamed}


def test_the_default_shapes_are_those_of_the_published_models():
    shapes = default_shapes()
    tiny, qwen, llama = shapes
    assert [spec.group for spec in tiny.specs] == ["qkv", "o", "gate_up", "down", "head"]
    assert tiny.layer[0].member_rows == (2048, 256, 256)
    assert (qwen.layer[3].rows, qwen.layer[3].columns, qwen.head.rows) == (896, 4864, 151936)
    assert llama.layer[1].columns == 24 * 128
    for shape, parameters in zip(shapes, (1.100e9, 0.494e9, 3.213e9), strict=True):
        assert {spec.weight.bits for spec in shape.layer} == {4}
        assert (shape.head.weight.bits, shape.head.weight.block) == (8, 32)
        # 4.5 bits a weight in the layers, 8.5 in embedding and head.
        tables = shape.vocab_size * shape.hidden_size * (2 if shape is tiny else 1)
        expected = (parameters - tables) * 4.5 / 8 + tables * 8.5 / 8
        assert shape.weight_bytes == pytest.approx(expected, rel=0.01)
        assert shape.streamed(32 * MIB)


def test_blocks_that_do_not_divide_the_inputs_are_shortened_or_refused():
    odd = ModelSize(48, 80, 1, 3, 1, 64, True, 16, 2048)
    assert {spec.weight.block for spec in odd.shape("made").specs} == {16}
    with pytest.raises(OptionError):
        ModelSize(40, 80, 1, 5, 1, 64, True, 8, 2048).shape("indivisible")


def test_points_tell_their_precision_apart():
    points: Counter[LinearPoint] = Counter()
    for precision in ("w4a16", "w4a8", "fp16"):
        shape: ModelShape = TINY.shape("tiny", precision)
        points.update(LinearPoint.of(spec, 1) for spec in shape.specs)
    assert max(points.values()) == 1
