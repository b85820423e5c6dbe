"""Attention in plans: read back as written, the first entry decides, and what cannot run is refused."""

import itertools
import json

import pytest
from msgspec import structs

from heterollm.base import PlanError
from heterollm.kernels.npu import TILE_OF_INTEGERS
from heterollm.solver import (
    Plan,
    PlannedAttention,
    SparseAttention,
    check_plan,
    level_plan,
    score_keys,
)
from heterollm.solver.sparse.attention import DENSE_ATTENTION, AttentionEntry, DenseAttention

SPARSE = SparseAttention(
    keep=(0.2, 0.3, 0.1, 0.2, 0.2, 0.2), units=((2, 0), (1,)), exponents=(7, 9), estimator="gpu"
)


def attention(plan):
    return plan.technique(PlannedAttention)


def entry(placement=SPARSE, **changes):
    ranges = {"lengths": (1, 64), "keys": (100, 512), "layers": (1, 1)} | changes
    return AttentionEntry(**ranges, placement=placement)


@pytest.fixture
def plan(made):
    plan = level_plan(
        "gpu", made.model(), device="d", precision="w4a16", standard_lengths=(), chunk_length=64
    )
    return plan.with_technique(PlannedAttention((entry(),)))


def check(plan, made, heads=(6, 3)):
    check_plan(plan, made.model(), None, longest=512, head_rows=1, heads=heads)


def test_a_plan_with_attention_is_read_as_it_was_written(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_file_without_attention_is_dense(plan):
    data = json.loads(plan.to_json())
    del data["attention"]
    read = Plan.from_json(json.dumps(data))
    assert attention(read).entries == ()
    assert "attention" not in json.loads(read.to_json())
    assert attention(read).of(64, 512, 1) == DENSE_ATTENTION


def test_the_first_entry_that_covers_a_case_decides(plan):
    for tokens, keys, layer, sparse in ((64, 512, 1, True), (1, 100, 1, True), (65, 512, 1, False)):
        assert (attention(plan).of(tokens, keys, layer) == SPARSE) is sparse
    assert attention(plan).of(64, 99, 1) == attention(plan).of(64, 512, 0) == DENSE_ATTENTION
    first = plan.with_technique(
        PlannedAttention((entry(DenseAttention(1.0), keys=(100, 200)), *attention(plan).entries))
    )
    assert attention(first).of(8, 200, 1) == DenseAttention(1.0)
    assert attention(first).of(8, 201, 1) == SPARSE


def test_sparse_attention_uses_the_npu_where_it_estimates_and_goes_with_it(plan):
    assert not plan.uses_npu
    npu = plan.with_technique(PlannedAttention((entry(structs.replace(SPARSE, estimator="npu")),)))
    assert npu.uses_npu
    assert attention(npu.without_npu()).entries == ()
    assert attention(plan.without_npu()).entries == attention(plan).entries


def test_a_plan_that_fits_the_model_passes(plan, made):
    check(plan, made)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": (0.2,)}, "ratios of 1 query heads, and the model has 6"),
        ({"units": ((0, 1), (1,))}, "do not hold each of 3 key heads once"),
        ({"units": ((0, 1),), "exponents": (1,)}, "do not hold each of 3 key heads once"),
        ({"units": ((0, 1, 2),), "exponents": (1,)}, "units of 3 key heads"),
        ({"exponents": (1,)}, "1 exponents of 2 units"),
        ({"estimator": "npu"}, "needs an NPU"),
    ],
)
def test_sparse_attention_of_another_model_is_refused(plan, made, changes, message):
    edited = plan.with_technique(PlannedAttention((entry(structs.replace(SPARSE, **changes)),)))
    with pytest.raises(PlanError, match=message):
        check(edited, made)


def test_layers_beyond_the_model_are_refused(plan, made):
    last = max(spec.layer for spec in made.model())
    with pytest.raises(PlanError, match=f"layer {last} is the last"):
        check(plan.with_technique(PlannedAttention((entry(layers=(0, last + 1)),))), made)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("keys",), [3, 2]),
        (("lengths",), [0, 64]),
        (("placement", "keep"), [0.0]),
        (("placement", "keep"), [1.1]),
        (("placement", "buckets"), 3),
        (("placement", "estimator"), "cpu"),
        (("placement", "type"), "block"),
    ],
)
def test_files_with_values_out_of_range_are_refused(plan, path, value):
    data = json.loads(plan.to_json())
    target = data["attention"][0]
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("context", [1, 64, 100, 256, 257, 1000, 4096, 8192, 131072])
def test_standard_keys_hold_the_context_and_pad_at_most_a_third(context):
    keys = score_keys(context)
    tile = TILE_OF_INTEGERS["static_int8"]
    assert list(keys) == sorted(set(keys))
    assert all(one % tile == 0 for one in keys)
    assert context <= keys[-1] < context + tile
    assert all(after <= 1.5 * before for before, after in itertools.pairwise(keys))
