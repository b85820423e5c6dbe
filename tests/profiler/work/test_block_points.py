"""Feed-forward blocks: which widths are measured, how they are measured, predicted and shown."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from heterollm.base import MIB, ProfileError
from heterollm.kernels.gpu.tiled_weights import ROW_ALIGNMENT
from heterollm.kernels.npu import (
    K_SPLIT_COLUMNS,
    STANDARD_LENGTHS,
    FfnShard,
    GraphForm,
    GraphShape,
    LinearShape,
)
from heterollm.kernels.ops import WeightFormat
from heterollm.model import default_shapes
from heterollm.model.known import ModelSize
from heterollm.profiler import held_out, summarize
from heterollm.profiler.comparison import describe
from heterollm.profiler.measure import gpu_timer as timer_module
from heterollm.profiler.measure import linear_tasks, random_data
from heterollm.profiler.measure import linears as linear_bench
from heterollm.profiler.measure.point_filter import PointFilter
from heterollm.profiler.predict import CANDIDATES, Predictor, held_out_predictions
from heterollm.profiler.predict.time_model import Kind, TimeModel
from heterollm.profiler.predict.validation import choices
from heterollm.profiler.records import GraphKey, LinearKey, LinearPoint, Profile, Record
from heterollm.profiler.work import WorkPoint, enumerate_points, ffn_alignment
from heterollm.profiler.work.points import FFN_FRACTIONS
from heterollm.profiler.work.workload import GPU_ROW_ALIGNMENT
from heterollm.profiler.worth import by_worth
from heterollm.report.plots import PLOTS
from heterollm.report.profile_files import profile_page
from heterollm.report.tables_profile import sections

TINY = ModelSize(128, 384, 1, 4, 2, 320, True, 32, 2048)
LARGE = 1 << 40


class BlockNpu:
    """What the enumeration asks of a backend that computes blocks."""

    standard_lengths = STANDARD_LENGTHS

    def __init__(self, row_alignment: int = 64) -> None:
        self.row_alignment = row_alignment

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        if isinstance(shape, LinearShape):
            return ("matmul_nbits",) if shape.weight.quantized else ("weight_first",)
        assert shape.activation == "silu"
        return ("ffn",) if shape.width <= K_SPLIT_COLUMNS else ("ffn", "ffn_k_chunked")


def block_points(shapes, npu) -> list[WorkPoint]:
    points, _ = enumerate_points(shapes, npu, cache_bytes=0, max_buffer_bytes=LARGE)
    assert [work.tier for work in points] == sorted(work.tier for work in points)
    return [work for work in points if work.point.is_ffn]


def block_point(width: int, tokens: int, *, columns: int = 1024, form: str = "ffn", **changes: Any):
    return LinearPoint("ffn", (width, width), columns, tokens, 4, 32, form=form, **changes)


# -- what a point is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["w4a16", "w4a8", "fp16"])
def test_a_block_counts_its_third_linear(precision):
    for shape in default_shapes(precision):
        [spec] = shape.blocks
        whole = LinearPoint.of(spec, 64, form="ffn")
        assert (
            whole.flops == spec.flops(64) == sum(part.flops(64) for part in (shape.layer[2], shape.layer[3]))
        )
        assert whole.weight_bytes == spec.weight_bytes()
        width = 2 * spec.weight.block or 64
        narrow = LinearPoint.of(spec, 1, member_rows=(width, width), form="ffn")
        assert narrow.flops == 2 * 3 * width * spec.columns
        assert narrow.weight_bytes == 3 * spec.weight.weight_bytes(width, spec.columns)
        assert narrow.outputs == whole.outputs == spec.columns
    plain = LinearPoint("o", (512,), 256, 4, 4, 32)
    assert (plain.outputs, plain.flops, plain.is_ffn) == (512, 2 * 4 * 512 * 256, False)


def test_a_record_of_a_block_is_kept_and_nonsense_is_not():
    record = Record(LinearKey("npu", block_point(256, 32), "graph-1"), (5.0,), taken_s=1.0)
    description = {"device": "d", "time": "real", "cache_bytes": 0, "npu_copies_by_length": False}
    profile = Profile(description, {record.key: record})
    assert Profile.from_json(profile.to_json()).records == profile.records
    data = json.loads(profile.to_json())
    for rows in ([256, 128], [256, 256, 256], [0, 0]):
        data["records"][0]["key"]["point"]["member_rows"] = rows
        with pytest.raises(ProfileError, match="cannot be a linear layer"):
            Profile.from_json(json.dumps(data))


def test_a_block_without_a_gate_takes_as_long_as_one_of_as_many_weights():
    gated, plain = block_point(256, 32), block_point(384, 32)
    plain = msgspec.structs.replace(plain, member_rows=(384,))
    assert plain.comparable == gated.comparable == gated
    assert plain.weight_bytes == gated.weight_bytes
    record = Record(LinearKey("npu", plain, "graph-1"), (5.0,), taken_s=1.0)
    description = {"device": "d", "time": "real", "cache_bytes": 0, "npu_copies_by_length": False}
    profile = Profile(description, {record.key: record})
    assert Profile.from_json(profile.to_json()).records == profile.records


# -- which are measured ------------------------------------------------------------------------------


def test_both_parts_alignments_are_kept():
    assert GPU_ROW_ALIGNMENT == ROW_ALIGNMENT
    assert ffn_alignment(WeightFormat(4, 32), 64) == 64
    assert ffn_alignment(WeightFormat(4, 128), 64) == 256
    assert ffn_alignment(WeightFormat(4, 64), 96) == 384
    assert ffn_alignment(WeightFormat(16), 32) == 64


@pytest.mark.parametrize("alignment", [64, 256])
@pytest.mark.parametrize("block", [32, 128])
def test_widths_are_those_that_a_cut_can_use(alignment, block):
    shapes = default_shapes(group_size=block)
    points = block_points(shapes, BlockNpu(alignment))
    assert {work.processor for work in points} == {"npu"}
    assert len({work.point for work in points}) == len(points)
    for work in points:
        width, same = work.point.member_rows
        assert width == same
        assert work.point.columns == work.spec.columns
        whole = work.spec.member_rows[0]
        step = ffn_alignment(work.spec.weight, alignment)
        assert width == whole or (width < whole and width % step == 0)
        assert work.point.form in ("ffn", "ffn_k_chunked")
        assert (work.point.form == "ffn") or width > K_SPLIT_COLUMNS
    for shape in shapes:
        [spec] = shape.blocks
        widths = {work.point.member_rows[0] for work in points if work.spec == spec}
        # The whole, the fractions, the narrowest and, where there are such widths, both sides of a k-split.
        assert 1 + len(FFN_FRACTIONS) <= len(widths) <= 1 + len(FFN_FRACTIONS) + 3
        assert min(widths) == ffn_alignment(spec.weight, alignment)
        assert (K_SPLIT_COLUMNS in widths) is (spec.member_rows[0] >= K_SPLIT_COLUMNS)


def test_quick_runs_measure_three_widths_in_decode_and_two_of_a_prompt():
    for shape in default_shapes():
        points = block_points([shape], BlockNpu())
        whole = shape.layer[2].member_rows[0]
        first = [work.point for work in points if work.tier == 0]
        assert {point.form for point in first} == {"ffn"}
        widths = {
            tokens: sorted(p.rows // 2 / whole for p in first if p.tokens == tokens) for tokens in (1, 256)
        }
        assert len(first) == 5
        assert widths[1] == pytest.approx([0.25, 0.5, 1.0], abs=0.02)
        assert widths[256] == pytest.approx([0.5, 1.0], abs=0.02)
        default = [work.point for work in points if work.tier == 1]
        # Cuts in decode, of one or a few tokens, and at 256 tokens; the whole block at every usual length.
        assert {p.tokens for p in default if p.rows < 2 * whole} == {1, 32, 256}
        assert {p.tokens for p in default if p.rows == 2 * whole and p.form == "ffn"} == {
            length for length in STANDARD_LENGTHS if length not in (1, 256, 1024)
        }


def test_a_block_is_left_out_where_its_linears_differ_in_format():
    shape = TINY.shape("tiny")
    down = replace(shape.layer[3], weight=WeightFormat(4, 64))
    mixed = replace(shape, kinds=(replace(shape.kinds[0], specs=(*shape.layer[:3], down)),))
    assert mixed.blocks == ()
    assert block_points([mixed], BlockNpu()) == []


def test_blocks_are_few_next_to_the_linears():
    points, _ = enumerate_points(default_shapes(), BlockNpu(), cache_bytes=0, max_buffer_bytes=LARGE)
    for tier, share in ((0, 0.4), (1, 0.3)):
        work = [found for found in points if found.tier <= tier]
        flops = {
            kind: sum(found.point.flops for found in work if found.point.is_ffn is kind)
            for kind in (True, False)
        }
        assert flops[True] < share * flops[False]


def test_a_hopeless_npu_is_told_by_the_gpus_gate_and_up():
    shape = TINY.shape("tiny")
    [spec] = shape.blocks
    gate_up = LinearPoint.of(shape.layer[2], 1)
    whole, half = (LinearPoint.of(spec, 1, member_rows=(width, width), form="ffn") for width in (384, 192))

    def judge(npu_us: float) -> PointFilter:
        records = [
            Record(LinearKey("gpu", gate_up, "k"), (10.0,)),
            Record(LinearKey("npu", whole, "g"), (npu_us,)),
        ]
        return PointFilter({record.key: record for record in records}, comparable=True)

    work = WorkPoint("npu", half, 0, spec)
    assert judge(20 * 15.0 + 1).objection(work) == "hopeless"
    assert judge(20 * 15.0 - 1).objection(work) is None
    assert judge(1e9).objection(replace(work, point=whole)) is None


# -- measuring ---------------------------------------------------------------------------------------


@pytest.fixture
def small_caches(device, monkeypatch):
    for module in (linear_bench, timer_module):
        monkeypatch.setattr(module, "eviction_bytes", lambda _: MIB)
    monkeypatch.setattr(device.gpu, "traits", replace(device.gpu.traits, cache_bytes=0))


@pytest.mark.parametrize("precision", ["w4a16", "w4a8", "fp16"])
def test_blocks_are_measured_under_the_keys_that_were_announced(device, precision, small_caches, monkeypatch):
    made: list[FfnShard] = []

    class Noted(FfnShard):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(random_data, "FfnShard", Noted)
    shape = TINY.shape("tiny", precision, float_bits=32)
    tasks, _ = linear_tasks(device, [shape], tier=0)
    blocks = [task for task in tasks if task.keys[0].point.is_ffn]
    assert blocks
    records = [record for task in blocks for record in task.run()]
    measured = {record.key for record in records if isinstance(record.key, LinearKey)}
    assert measured == {key for task in blocks for key in task.keys}
    assert not [record.error for record in records if record.failed]
    assert {record.key.point for record in records if isinstance(record.key, GraphKey)}
    for block in made:
        assert block.down.shape[1] if precision == "fp16" else block.down.columns == block.width
        assert block.integer_inputs == (precision == "w4a8")
        values = block.gate_up if precision == "fp16" else block.gate_up.codes
        assert len(np.unique(values)) > 8
    assert sorted({block.width for block in made}) == [128, 192, 384]
    device.npu.close()


# -- predicting --------------------------------------------------------------------------------------


def block_us(point: LinearPoint) -> float:
    """Three products at one rate, and stages of 32 tokens; the form in pieces is faster."""
    stages = -(-point.tokens // 32)
    pace = 0.6 if "chunked" in point.form else 1.0
    return 40.0 + pace * stages * point.flops / point.tokens / 4e4


def plain_us(point: LinearPoint) -> float:
    return 25.0 + 5 * -(-point.tokens // 32) * point.rows * point.columns / 1e4


def mixed_profile(*, blocks: bool = True, linears: bool = True) -> Profile:
    rng = random.Random(1)
    made = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})

    def add(part: Any, point: LinearPoint, time_us: float) -> None:
        samples = tuple(time_us * rng.uniform(0.98, 1.02) for _ in range(5))
        made.add(Record(LinearKey(part, point, "code"), samples, taken_s=1.0))

    for columns, width in ((1024, 2816), (1536, 4096), (2048, 5632)):
        for tokens in (1, 64, 256):
            if linears:
                for rows in (columns, 2 * width, width):
                    members = (rows // 2, rows // 2) if rows == 2 * width else (rows,)
                    group = "gate_up" if rows == 2 * width else "o"
                    gpu = LinearPoint(group, members, columns, tokens, 4, 32)
                    add("gpu", gpu, 3 * plain_us(gpu))
                    npu = structs.replace(gpu, form="matmul_nbits")
                    add("npu", npu, plain_us(npu))
            if blocks:
                for own in (width, width // 2, width // 4):
                    for form in ("ffn", "ffn_k_chunked"):
                        point = block_point(own, tokens, columns=columns, form=form)
                        add("npu", point, block_us(point))
    return made


def times_of(profile: Profile, part: str) -> dict[LinearPoint, float]:
    return {
        key.point: record.median_us for key, record in profile.of_kind(LinearKey) if key.processor == part
    }


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.fit(mixed_profile())


def test_linears_are_predicted_as_if_there_were_no_blocks(predictor):
    without = Predictor.fit(mixed_profile(blocks=False))
    for model in CANDIDATES["npu"]:
        fitted = []
        for profile in (mixed_profile(), mixed_profile(blocks=False)):
            times = times_of(profile, "npu")
            plain = {point: time_us for point, time_us in times.items() if not point.is_ffn}
            assert plain
            fitted.append(TimeModel.fit(model, times))
        both, alone = fitted
        plain_kinds = [kind for kind, *_ in both.kinds if not kind.is_ffn]
        assert plain_kinds == [kind for kind, *_ in alone.kinds]
        for rows in (512, 3000, 9000):
            point = LinearPoint("o", (rows,), 1024, 64, 4, 32, form="matmul_nbits")
            # Samples are drawn in another order, which moves them by a few percent.
            assert both.predict(point).us == pytest.approx(alone.predict(point).us, rel=0.05)
    assert without.processors["npu"].fit.scores


def test_neither_is_predicted_from_the_other():
    plain = LinearPoint("o", (512,), 1024, 64, 4, 32, form="matmul_nbits")
    with pytest.raises(ProfileError, match="feed-forward network"):
        Predictor.fit(mixed_profile(blocks=False)).predict_us(block_point(512, 64), "npu")
    fitted = Predictor.fit(mixed_profile())
    with pytest.raises(ProfileError, match="feed-forward network"):
        fitted.predict_us(block_point(512, 64), "gpu")
    # A kind of block that was not measured is like the other blocks, and said to be unknown.
    other = structs.replace(block_point(512, 64, form="ffn_int8"), integer_inputs=True)
    assert not fitted.predict_us(other, "npu").known
    assert Kind.of(other).is_ffn
    only = Predictor.fit(mixed_profile(linears=False))
    with pytest.raises(ProfileError, match="linear layer"):
        only.predict_us(plain, "npu")


@pytest.mark.parametrize("model", CANDIDATES["npu"])
@pytest.mark.parametrize("form", ["ffn", "ffn_k_chunked"])
def test_between_measured_widths_time_rises_with_width(model, form):
    times = times_of(mixed_profile(), "npu")
    fitted = TimeModel.fit(model, times)
    for tokens in (1, 64, 256):
        for columns, whole in ((1024, 2816), (2048, 5632)):
            points = [
                block_point(width, tokens, columns=columns, form=form) for width in range(64, whole + 64, 64)
            ]
            found = [fitted.predict(point).us for point in points]
            assert found == sorted(found)
            assert found[-1] > 1.5 * found[len(found) // 4]
            # From a quarter of the width on it lies between measured widths.
            measured = [(time_us, block_us(point)) for time_us, point in zip(found, points, strict=True)]
            if model.name != "tree":  # its times stand still within a leaf
                for time_us, exact_us in measured[len(measured) // 4 :]:
                    assert time_us == pytest.approx(exact_us, rel=0.15)


def test_scores_and_regret_hold_with_blocks_among_the_linears(predictor):
    scores = {entry.model: entry for entry in predictor.processors["npu"].fit.scores}
    assert {"stage_linear", "tree"} == set(scores)
    npu, gpu = times_of(mixed_profile(), "npu"), times_of(mixed_profile(), "gpu")
    decisions = [found for found in choices("npu", npu, gpu) if any(p and p.is_ffn for p, _ in found)]
    # One for each width and length: which form.
    assert len(decisions) == 3 * 3 * 3
    assert all({point.form for point, _ in found} == {"ffn", "ffn_k_chunked"} for found in decisions)
    assert scores["stage_linear"].median_error < 0.1
    assert scores["stage_linear"].samples == len(npu)


def test_a_lone_block_shape_is_left_out_of_the_cross_validation():
    profile = mixed_profile(blocks=False)
    lone = block_point(512, 64)
    profile.add(Record(LinearKey("npu", lone, "code"), (70.0,), taken_s=1.0))
    times = times_of(profile, "npu")
    for model in CANDIDATES["npu"]:
        assert set(held_out_predictions(model, times)) == set(times) - {lone}
    scores = Predictor.fit(profile).processors["npu"].fit.scores
    assert {entry.samples for entry in scores} == {len(times) - 1}


def test_blocks_are_worth_measuring_like_their_linears():
    profile = mixed_profile(blocks=False)
    shape = ModelSize(1024, 2816, 2, 16, 4, 4096, True, 64, 2048).shape("shape")
    work = block_points([shape], BlockNpu())
    tasks = [linear_bench.Task("x", (LinearKey("npu", found.point, "code"),), list, 0.1) for found in work]
    # Nothing is known of any block.
    assert len(by_worth(profile, tasks)) == len(tasks)


# -- showing -----------------------------------------------------------------------------------------


def test_blocks_have_tables_of_their_own(predictor):
    summary = summarize(mixed_profile(), accuracy=False)
    tables = {section.title: section for section in sections(summary)}
    [title] = [name for name in tables if name.startswith("Feed-forward networks")]
    assert title == "Feed-forward networks, NPU, int4 block 32, weights from memory"
    table = tables[title]
    assert table.columns[:3] == ("group", "outputs x width x inputs", "form")
    assert {row[:3] for row in table.rows} == {
        ("ffn", f"{columns} x {width} x {columns}", form)
        for columns, width in ((1024, 2816), (1536, 4096), (2048, 5632))
        for form in ("ffn", "ffn k chunked")
    }
    everything = {section.title: section for section in sections(summary, everything=True)}
    assert len(everything[title].rows) == 3 * len(table.rows)
    for name, section in tables.items():
        if name.startswith("Linear layers"):
            assert "ffn" not in {row[0] for row in section.rows}
    assert "5632 x 2048" in profile_page(summary)


def test_pictures_of_linears_leave_blocks_out():
    pytest.importorskip("matplotlib")

    def drawn(profile: Profile, name: str) -> bytes:
        file = io.BytesIO()
        figure = PLOTS[name][1](summarize(profile, accuracy=False))
        if figure is not None:
            figure.savefig(file, format="raw")
        return file.getvalue()

    # The same samples, so that the pictures must be the same.
    both, plain = (
        mixed_profile(),
        Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0}),
    )
    for key, record in both.of_kind(LinearKey):
        if not key.point.is_ffn:
            plain.add(record)
    for name in ("stages", "order", "gpu"):
        assert drawn(both, name) == drawn(plain, name)


def test_a_block_is_described_by_its_width():
    key = LinearKey("npu", block_point(2816, 64), "code")
    assert describe(key) == "npu, ffn, 1024 x 2816 x 1024, 64 tokens, int4 block 32, ffn"


def test_held_out_points_include_blocks():
    points = held_out(summarize(mixed_profile()))
    assert {found.point.is_ffn for found in points if found.processor == "npu"} == {True, False}
