"""Attention on the NPU or on the GPU by predicted times: where it pays, what counts, and what files hold."""

import itertools
import random

import numpy as np
import pytest

from heterollm.kernels.npu import AttentionShard, graph_tensors
from heterollm.kernels.ops import GraphMemory
from heterollm.solver import (
    NpuAttention,
    Plan,
    PlannedAttention,
    break_even,
    level_plan,
    plan_npu_attention,
    score_keys,
    score_tokens,
)
from heterollm.solver.predict import PredictedPass
from heterollm.solver.sparse.attention import DENSE_ATTENTION, AttentionEntry
from heterollm.solver.sparse.attention_times import npu_attention_us, with_attention_time

CONTEXT, CHUNK, LAYERS = 4096, 1024, 3
ANY = (None,) * LAYERS


class FakeCosts:
    """Times that grow with the pairs of tokens and keys; a graph has a floor."""

    def __init__(self, gpu=4e-3, npu=1e-3, floor_us=200.0):
        self.gpu, self.npu, self.floor_us = gpu, npu, floor_us

    def dense_us(self, tokens, keys):
        return 5.0 + self.gpu * tokens * keys

    def on_npu_us(self, tokens, keys):
        return self.floor_us + self.npu * tokens * keys


def planned(costs, limits=ANY, **options):
    return plan_npu_attention(limits, costs, context=CONTEXT, chunk_length=CHUNK, **options)


def with_attention(made, entries):
    found = level_plan(
        "gpu", made.model(), device="d", precision="w4a16", standard_lengths=(), chunk_length=CHUNK
    )
    return found.with_technique(PlannedAttention(tuple(entries)))


def test_the_npu_attends_where_it_is_faster_and_the_gpu_elsewhere():
    costs = FakeCosts()
    record = PlannedAttention(planned(costs))
    standard = score_keys(CONTEXT)
    assert isinstance(record.of(CHUNK, CONTEXT, 1), NpuAttention)
    assert record.of(64, 256, 1) == DENSE_ATTENTION  # the floor of a graph
    kinds = set()
    lengths = (1, 31, 64, 200, 513, 700, 1023, 1024)
    for tokens, keys in itertools.product(lengths, (1100, 2048, 4000, 4096)):
        placement = record.of(tokens, keys, 2)
        kinds.add(type(placement))
        if isinstance(placement, NpuAttention):
            assert npu_attention_us(costs, tokens, keys, standard) < costs.dense_us(tokens, keys)
        elif tokens > 32:  # the other end of its range has more padding
            assert npu_attention_us(costs, tokens, keys, standard) > 0.5 * costs.dense_us(tokens, keys)
    assert len(kinds) == 2
    # A faster GPU takes all, a faster NPU more.
    assert planned(FakeCosts(gpu=1e-3)) == ()
    more = PlannedAttention(planned(FakeCosts(npu=1e-4, floor_us=20.0)))
    assert isinstance(more.of(64, 512, 1), NpuAttention)


@pytest.mark.parametrize("seed", range(20))
def test_every_corner_of_an_entry_gains(seed):
    draw = random.Random(seed)
    costs = FakeCosts(10 ** draw.uniform(-4, -2), 10 ** draw.uniform(-4, -2), draw.uniform(0, 2000))
    for entry in planned(costs):
        for tokens, keys in itertools.product(entry.lengths, entry.keys):
            if keys >= tokens:
                own_us = npu_attention_us(costs, tokens, keys, score_keys(CONTEXT))
                assert own_us < 0.9 * costs.dense_us(tokens, keys)


def test_layers_keep_the_gpu_where_they_do_not_see_all_keys():
    record = PlannedAttention(planned(FakeCosts(), (None, 0, 2048)))
    on_npu = {
        keys: [isinstance(record.of(CHUNK, keys, layer), NpuAttention) for layer in range(LAYERS)]
        for keys in (2048, 2049, 4096)
    }
    assert on_npu == {2048: [True, False, True], 2049: [True, False, False], 4096: [True, False, False]}


def test_short_passes_can_be_left_out():
    entries = planned(FakeCosts(), least=513)
    assert {entry.lengths[0] for entry in entries} >= {513}
    assert PlannedAttention(entries).of(512, 4096, 0) == DENSE_ATTENTION
    assert {tokens for tokens, _ in PlannedAttention(entries).npu_graphs(CONTEXT)} == {1024}


def test_predictions_and_explanations_count_it(made):
    costs = FakeCosts()
    plan = with_attention(made, planned(costs))
    before = PredictedPass("prefill", CHUNK, (), None, 1e6)
    after = with_attention_time(before, plan.technique(PlannedAttention), costs, CONTEXT)
    on_npu_us = npu_attention_us(costs, CHUNK, CONTEXT, score_keys(CONTEXT))
    gained_us = LAYERS * (costs.dense_us(CHUNK, CONTEXT) - on_npu_us)
    assert after.time_us == pytest.approx(before.time_us - gained_us)
    assert after.npu_us == pytest.approx(LAYERS * on_npu_us)
    rows = {one.keys: one for one in break_even(plan, costs, LAYERS, CONTEXT)}
    last = rows[CONTEXT]
    assert (last.npu_layers, last.sparse_layers, last.estimators) == (LAYERS, 0, ())
    assert last.planned_us == pytest.approx(last.dense_us - gained_us)
    assert rows[256].npu_layers == 0


def test_graphs_are_those_that_passes_run_and_their_memory_is_counted(made):
    record = PlannedAttention(planned(FakeCosts()))
    graphs = set(record.npu_graphs(CONTEXT))
    for tokens, keys in itertools.product(range(1, CHUNK + 1, 33), (300, 777, 2048, 3000, 4096)):
        if keys >= tokens and record.of(tokens, keys, 0) != DENSE_ATTENTION:
            padded = next(own for own in score_keys(CONTEXT) if own >= keys)
            assert (score_tokens(tokens), padded) in graphs
    specs = made.model()
    members = {spec.group: spec for spec in specs if spec.layer == 0}
    columns, cached = members["o"].columns, members["qkv"].members[1].rows
    dim = next(size for size in (16, 8, 4) if columns % size == cached % size == 0)
    memory = GraphMemory(True, 2, False, False)
    sizes = {}
    for tokens, keys in graphs:
        shard = AttentionShard(columns // dim, cached // dim, keys, dim)
        edges = graph_tensors(shard, tokens, np.dtype(np.float16))
        sizes[tokens, keys] = edges.size_bytes + shard.weight_bytes
    assert record.npu_bytes(specs, memory) == sum(sizes.values())
    longest = max(size for (tokens, _), size in sizes.items() if tokens == CHUNK)
    assert record.npu_bytes(specs, memory, CHUNK - 1) == longest
    assert record.npu_bytes(specs, GraphMemory(True, 0, False, False)) == 0


def test_files_hold_it_and_plans_without_it_have_the_gpu(made, tmp_path):
    plan = with_attention(made, planned(FakeCosts()))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert '"type": "npu"' in (tmp_path / "plan.json").read_text("utf-8")
    bare = with_attention(made, ())
    bare.save(tmp_path / "bare.json")
    assert Plan.load(tmp_path / "bare.json").technique(PlannedAttention).of(9, 9, 0) == DENSE_ATTENTION


def test_it_uses_the_npu_and_changes_no_values(made):
    entry = AttentionEntry((1, CHUNK), (1, CONTEXT), (0, 0), NpuAttention())
    plan = with_attention(made, (entry,))
    assert plan.uses_npu
    assert not plan.changes_values
    assert not plan.without_npu().uses_npu
    assert CONTEXT in plan.technique(PlannedAttention).borders(CONTEXT)
