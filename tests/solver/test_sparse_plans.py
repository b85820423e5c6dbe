"""Dense or sparse attention by predicted times: where it pays, in which order, and what predictions count."""

import itertools
import math
import random

import pytest

from heterollm.solver import (
    AttentionHeads,
    PlannedAttention,
    SparseAttention,
    break_even,
    level_plan,
    plan_attention,
    score_keys,
)
from heterollm.solver.costs import Slowdown
from heterollm.solver.predict import PredictedPass
from heterollm.solver.sparse.attention import DENSE_ATTENTION
from heterollm.solver.sparse.attention_times import attention_times, with_attention_time
from heterollm.solver.sparse.costs import SparseTimes

CONTEXT = 4096
UNDISTURBED = Slowdown()
CHUNK = 1024
LAYERS = 3


class FakeCosts:
    """Times that grow with the pairs of tokens and keys; launches and codes have a floor."""

    def __init__(self, launch_us=20.0, seed=None, follows_graphs=True, slowdown=UNDISTURBED):
        draw = random.Random(f"{seed}")
        self.rates = [1.0] * 5 if seed is None else [draw.uniform(0.2, 2.0) for _ in range(5)]
        self.launch_us = launch_us
        self.hand_over_us = 5.0
        self.follows_graphs = follows_graphs
        self.slowdown = slowdown

    def dense_us(self, tokens, keys):
        return 4e-3 * self.rates[0] * tokens * keys

    def sparse(self, tokens, keys):
        pairs = tokens * keys
        return SparseTimes(
            quantise_us=10.0 + 1e-2 * (tokens + keys),
            scores_us={
                heads: self.launch_us * (1 + heads) + 5e-5 * self.rates[1] * heads * pairs
                for heads in (1, 2, 4)
            },
            estimate_us=4e-4 * self.rates[2] * pairs,
            select_us=1e-4 * self.rates[3] * pairs,
            attend_us=(5.0, 1e-3 * self.rates[4] * pairs),
        )


def heads(keep=0.2, exponents=(8, 8, 8, 8), windows=(0,) * LAYERS):
    dense = (1.0,) * 8
    return AttentionHeads((dense, *((keep,) * 8,) * (LAYERS - 1)), (exponents,) * LAYERS, windows)


def plan(made, attention):
    found = level_plan(
        "gpu", made.model(), device="d", precision="w4a16", standard_lengths=(), chunk_length=CHUNK
    )
    return found.with_technique(PlannedAttention(tuple(attention)))


def planned(costs, own=None, **options):
    return plan_attention(own or heads(), costs, context=CONTEXT, chunk_length=CHUNK, **options)


def corners(entry):
    """Tokens and keys at the ends of an entry's ranges, as far as a session can have them."""
    for tokens, keys in itertools.product(entry.lengths, entry.keys):
        if keys >= tokens:
            yield tokens, keys


@pytest.mark.parametrize("seed", range(12))
def test_sparse_attention_is_predicted_to_gain_at_each_end_of_its_ranges(seed):
    costs = FakeCosts(launch_us=random.Random(seed).uniform(5, 200), seed=seed)
    for entry in planned(costs, estimators=(("npu",), ("gpu",), ("npu", "gpu"))[seed % 3]):
        assert isinstance(entry.placement, SparseAttention)
        for tokens, keys in corners(entry):
            own = attention_times(entry.placement, costs, tokens, keys, score_keys(CONTEXT))
            assert own.time_us < 0.9 * costs.dense_us(tokens, keys)


def test_short_sessions_stay_dense_and_long_ones_become_sparse(made):
    """With slow launches the break-even is far; then it comes nearer, and none is left for a slow NPU."""
    firsts = []
    for launch_us in (5.0, 200.0, 1000.0):
        found = plan(made, planned(FakeCosts(launch_us), estimators=("npu",)))
        attention = found.technique(PlannedAttention)
        placed = {keys: attention.of(CHUNK, keys, 1) for keys in score_keys(CONTEXT) if keys >= CHUNK}
        kinds = [placement != DENSE_ATTENTION for placement in placed.values()]
        assert kinds == sorted(kinds), "sparse from one length on"
        firsts.append(min((keys for keys, own in placed.items() if own != DENSE_ATTENTION), default=math.inf))
    assert firsts == sorted(firsts)
    assert firsts[0] < firsts[-1]
    assert planned(FakeCosts(1e5), estimators=("npu",)) == ()


def test_layers_that_keep_all_keys_or_see_a_window_stay_dense():
    attention = planned(FakeCosts(5.0), heads(windows=(0, 2048, 0)))
    assert attention
    assert all(entry.layers[0] > 0 for entry in attention)
    assert all(entry.keys[1] <= 2048 for entry in attention if entry.layers[0] == 1)
    assert any(entry.keys[1] == CONTEXT for entry in attention if entry.layers[0] == 2)


def test_layers_with_equal_heads_share_entries():
    attention = planned(FakeCosts(5.0))
    assert {entry.layers for entry in attention} == {(1, LAYERS - 1)}
    cases = [(entry.lengths, entry.keys) for entry in attention]
    assert len(cases) == len(set(cases))


def test_the_pipeline_gains_by_fusing_and_by_order():
    """Launches cost much and heads keep differently."""
    costs, keep = FakeCosts(400.0), tuple(0.05 + 0.1 * (head // 2) for head in range(8))
    costs.rates[3:] = 0.2, 0.2
    own = AttentionHeads((keep,), ((7, 8, 7, 8),), (0,))
    times = []
    for pipeline in ("heads", "fused", "ordered"):
        found = planned(costs, own, pipeline=pipeline)
        (placement,) = {
            entry.placement for entry in found if entry.keys[1] == CONTEXT and entry.lengths[1] == CHUNK
        }
        times.append(placement.predicted_us)
        sizes = [len(unit) for unit in placement.units]
        assert sizes == ([1] * 4 if pipeline == "heads" else sizes)
    assert times[0] > times[1] > times[2]


def test_each_case_has_the_faster_estimator():
    """Where both gain, the one with the shorter time is taken."""
    costs = FakeCosts(100.0)
    alone = {one: planned(costs, estimators=(one,)) for one in ("npu", "gpu")}
    both = planned(costs)
    assert {entry.placement.estimator for entry in both} == {"npu", "gpu"}
    for tokens, keys in itertools.product((64, 256, 600, CHUNK), score_keys(CONTEXT)):
        found = [
            entry.placement.predicted_us
            for entries in (*alone.values(), both)
            for entry in entries
            if entry.serves(tokens, keys, 1) and entry.lengths[1] == tokens and entry.keys[1] == keys
        ]
        if found:
            assert found[-1] == min(found)


def test_processors_that_slow_each_other_down_take_longer():
    placement = SparseAttention((0.2,) * 8, ((0, 1), (2, 3)), (8, 8))
    alone, beside = (
        attention_times(placement, FakeCosts(slowdown=own), CHUNK, CONTEXT, score_keys(CONTEXT)).time_us
        for own in (UNDISTURBED, Slowdown(1.5, 1.2))
    )
    own = FakeCosts().sparse(CHUNK, CONTEXT)
    gpu_us, npu_us = 2 * (own.select_us + own.attention_us(0.2)), own.scores_us[2]
    both_us = min(1.2 * npu_us, 1.5 * gpu_us)
    gained_us = both_us * (1 / 1.2 + 1 / 1.5 - 1)
    assert beside == pytest.approx(own.quantise_us + 5.0 + 2 * (npu_us + gpu_us) - gained_us)
    assert alone < beside


def test_mapped_memory_has_no_overlap():
    """There the GPU begins when all graphs have run."""
    placement = SparseAttention((0.2,) * 8, ((0, 1), (2, 3)), (8, 8))
    apart, overlapped = (
        attention_times(placement, FakeCosts(follows_graphs=follows), CHUNK, CONTEXT, score_keys(CONTEXT))
        for follows in (False, True)
    )
    assert apart.npu_us == overlapped.npu_us
    own = FakeCosts().sparse(CHUNK, CONTEXT)
    gpu_us = 4 * (own.select_us + own.attention_us(0.2))
    fixed_us = own.quantise_us + 5.0
    assert apart.time_us == pytest.approx(fixed_us + apart.npu_us + gpu_us)
    assert overlapped.time_us == pytest.approx(fixed_us + max(apart.npu_us, apart.npu_us / 2 + gpu_us))


def test_graphs_count_at_their_padded_size():
    placement = SparseAttention((0.2,) * 8, ((0, 1), (2, 3)), (8, 8))
    standard, costs = score_keys(CONTEXT), FakeCosts()
    odd, whole = (
        attention_times(placement, costs, tokens, keys, standard)
        for tokens, keys in ((600, 2500), (1024, 3072))
    )
    assert odd.npu_us == whole.npu_us
    assert odd.time_us < whole.time_us


def test_predictions_count_attention_by_the_session(made):
    costs = FakeCosts(5.0)
    found = plan(made, planned(costs))
    dense = PredictedPass("prefill", CHUNK, (), None, 1e6)
    short, long = (
        with_attention_time(dense, found.technique(PlannedAttention), costs, keys)
        for keys in (CHUNK, CONTEXT)
    )
    assert long.time_us < dense.time_us
    assert long.scores_us > 0
    assert long.npu_us == long.scores_us
    rows = {row.keys: row for row in break_even(found, costs, LAYERS, CONTEXT)}
    for keys, own in ((CHUNK, short), (CONTEXT, long)):
        row = rows[keys]
        assert row.planned_us - row.dense_us == pytest.approx(own.time_us - dense.time_us)
        assert row.sparse_layers in (0, LAYERS - 1)
    assert with_attention_time(dense, PlannedAttention(), costs, CONTEXT) is dense
