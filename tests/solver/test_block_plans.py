"""Whole plans with blocks: every length legal, as JSON, within the budget, and not worse than without."""

import itertools
import json
import math
import random
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from heterollm.base import PlanError
from heterollm.kernels.npu import FfnShape, LinearShape
from heterollm.kernels.ops import GraphMemory, Phase, ffn_spec, ffn_specs
from heterollm.solver import Budget, NpuLimits, Plan, Solver, check_plan
from heterollm.solver.ffn_slices import FeedForwardCosts
from heterollm.solver.placements import FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.slice_sets import SliceCost
from heterollm.solver.slices import GroupCosts, choose_slices

seeds = st.integers(0, 10**6)


@dataclass
class FakeNpu:
    """What checking a plan asks of an NPU backend."""

    standard_lengths: tuple[int, ...] = (1, 32, 64, 128)
    row_alignment: int = 64
    widest_plain: int = 10**9
    name: str = "the NPU"
    addressable_bytes: int | None = None

    def forms(self, shape, length):
        if isinstance(shape, LinearShape):
            return ("plain",)
        return ("ffn",) if shape.width <= self.widest_plain else ("pieces",)


def limits_of(npu):
    def forms(spec, length):
        if spec.then is None:
            return npu.forms(LinearShape(spec.weight, spec.columns), length)
        return npu.forms(FfnShape(spec.weight, spec.columns, spec.then.columns, "silu"), length)

    return NpuLimits(npu.standard_lengths, npu.row_alignment, forms)


def placed(plan, phase, tokens, specs):
    """Return who computes each group or block of the first layer and the head."""
    own = [spec for spec in specs if spec.layer <= 0]
    return {spec.group: (spec, found) for spec, found in plan.operators(phase, tokens, own, rows=tokens)}


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_covers_every_length_legally(made, seed):
    draw = random.Random(seed)
    npu = FakeNpu(row_alignment=draw.choice([32, 64, 128]), widest_plain=draw.choice([10**9, 200]))
    specs, chunk = made.model(3), draw.choice([40, 97, 160])
    costs = (made.proportional_blocks if seed % 2 else made.block_costs)(seed)
    solver = Solver(specs, limits_of(npu), costs, chunk_length=chunk, head_rows=7, level="block")
    plan = solver.plan(device="d", precision="fp16")
    assert plan.level == "block"
    assert plan.has_ffn
    check_plan(plan, specs, npu, longest=chunk, head_rows=7)
    assert Plan.from_json(plan.to_json()) == plan
    ways = set()
    for phase, tokens in itertools.product(get_args(Phase), range(1, chunk + 1)):
        found = placed(plan, phase, tokens, specs)
        ways.add("ffn" in found)
        for spec, placement in found.values():
            if spec.group != "head" or tokens <= 7:
                placement.check(spec, tokens)
        # Never both: what is not looked at is not there.
        groups = [
            entry.group
            for entry in plan.entries
            if entry.phase == phase and entry.lengths[0] <= tokens <= entry.lengths[1]
        ]
        assert ("ffn" in groups) != ("gate_up" in groups)
        assert len(groups) == len(set(groups))
    assert True in ways
    for entry in plan.entries:
        assert entry.placement.predicted_us > 0
        assert len({other.description for other in entry.placement.rejected}) == len(entry.placement.rejected)
    slice_lengths = [entry for entry in plan.entries if entry.group == "ffn"]
    assert all(entry.placement.rejected[0].description.startswith("apart: ") for entry in slice_lengths)


def test_without_forms_of_blocks_a_plan_is_level_tensors(made):
    for seed in range(4):
        costs = made.block_costs(seed)
        limits = made.limits(ffn_forms=())
        tensor, block = (
            Solver(made.model(), limits, costs, chunk_length=96, level=level).plan(
                device="d", precision="fp16"
            )
            for level in ("tensor", "block")
        )
        assert structs.replace(block, level="tensor") == tensor
        # Nor does level tensor see what is offered.
        offered = Solver(made.model(), made.limits(), costs, chunk_length=96)
        assert offered.plan(device="d", precision="fp16") == tensor


# -- JSON and checks --------------------------------------------------------------------------------------


def plan_with(made, placement, lengths=(1, 64)):
    """Return a plan of one layer whose block is placed so, and its specs."""
    specs = made.model(1)
    entries = [PlanEntry(phase, lengths, (0, 0), "ffn", placement) for phase in get_args(Phase)]
    for phase, spec in itertools.product(get_args(Phase), specs):
        if spec.group not in ("gate_up", "down"):
            entries.append(PlanEntry(phase, (1, 64), (spec.layer, spec.layer), spec.group, RowsPlacement()))
    return Plan("block", "d", "fp16", "shape", 64, tuple(entries)), specs


def test_a_block_decides_where_its_entry_does(made):
    plan, specs = plan_with(made, FfnPlacement(128, (64,), "ffn"))
    assert plan.uses_npu
    assert placed(plan, "prefill", 40, specs)["ffn"][1].npu_rows == (128, 128)
    assert not {"gate_up", "down"} & set(placed(plan, "prefill", 40, specs))
    check_plan(plan, specs, FakeNpu(), longest=64, head_rows=1)
    # Where it does not, its groups need entries.
    plan, specs = plan_with(made, FfnPlacement(128, (32,), "ffn"), lengths=(1, 32))
    with pytest.raises(PlanError, match="no entry for gate_up of layer 0, prefill of 33"):
        check_plan(plan, specs, FakeNpu(), longest=64, head_rows=1)


@pytest.mark.parametrize(
    ("placement", "npu", "said"),
    [
        (FfnPlacement(128, (64,), "ffn"), None, "needs an NPU"),
        (FfnPlacement(128, (64,), "ffn"), FakeNpu((1, 32)), "no graphs of 64 tokens"),
        (FfnPlacement(96, (64,), "ffn"), FakeNpu(row_alignment=32), "a split after 96 of 512 rows"),
        (FfnPlacement(128, (64,), "pieces"), FakeNpu(), "in form 'pieces' at 64 tokens"),
        (FfnPlacement(128, (64,), "ffn"), FakeNpu(widest_plain=64), "Legal forms: pieces"),
        (FfnPlacement(512, (64,), "plain"), FakeNpu(), "Legal forms: ffn"),
        (FfnPlacement(128, (32,), "ffn"), FakeNpu(), "must cover all tokens"),
    ],
)
def test_what_a_device_cannot_run_is_refused(made, placement, npu, said):
    plan, specs = plan_with(made, placement)
    with pytest.raises(PlanError, match=said):
        check_plan(plan, specs, npu, longest=64, head_rows=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"npu_rows": [128, 128]},
        {"type": "rows"},
        {"type": "shadow"},
        {"type": None},
        {"width": 0},
        {"width": [128]},
        {"width": 128.0},
        {"npu_lengths": 64},
        {"npu_lengths": [0]},
        {"then": "down"},
    ],
)
def test_json_of_no_block_is_refused(made, changes):
    plan, _ = plan_with(made, FfnPlacement(128, (64,), "ffn"))
    data = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(data)) == plan
    assert data["entries"][0]["group"] == "ffn"
    data["entries"][0]["placement"] |= changes
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.from_json(json.dumps(data))


def test_json_that_places_experts_is_refused(made):
    plan, _ = plan_with(made, FfnPlacement(128, (64,), "ffn"))
    data = json.loads(plan.to_json())
    data["entries"] += [{**data["entries"][-1], "group": "experts"}]
    with pytest.raises(PlanError, match="it places experts like a linear layer"):
        Plan.from_json(json.dumps(data))


# -- slices -----------------------------------------------------------------------------------------------

ROWS = [(64,), (128,), (192,), (256,)]


def small_tables(made, seed):
    """Return a network with three lengths and three or four slices of each group, and a budget."""
    draw = random.Random(seed)
    lengths = [1, 64, 128]
    weights = {length: draw.choice([0.0, 0.5, 1.0, 3.0]) for length in lengths}
    weights[1] = weights[1] or 1.0
    margin, layers = draw.choice([0.0, 0.1]), draw.choice([1, 3])
    gate_up = made.spec("gate_up", (256, 256), 128)
    down = made.spec("down", (128,), 256)
    block = ffn_spec(gate_up, down)
    groups = []
    for spec in (gate_up, down, block):
        costs = {}
        for length in lengths:
            own = costs[length] = {}
            if spec is not block:
                own[()] = SliceCost(whole=draw.uniform(50, 150))
            high = 250 if spec is block else 150
            for (width,) in ROWS[draw.randint(0, 1) :]:
                rows = (width,) * len(spec.members)
                whole = draw.uniform(20, high) if width == 256 else math.inf
                own[rows] = SliceCost(whole, draw.uniform(20, high))
        groups.append(GroupCosts(spec, layers, costs, weights, margin))
    activation = {length: draw.uniform(0, 20) for length in lengths}
    budget = draw.choice([None, 0, draw.randint(10**4, 10**6)])
    return FeedForwardCosts(*groups, activation), Budget(budget)


NONE = SliceCost()
FURTHER_SLICE = 0.01
"""A further slice must gain one percent."""


def best_of(group, table, held):
    """Return the cost of the cheapest whole placement and of the cheapest cut."""
    options = [table.get(rows, NONE) for rows in [(), *held]]
    return min(item.whole for item in options), min(item.split for item in options)


def counted(split, whole, margin):
    """Return what a cut counts: no less than the best whole placement, unless it gains the margin."""
    return split if split <= (1 - margin) * whole or whole == math.inf else max(split, whole)


def weighted_sum(network, sets):
    """Return cost and bytes of a network with some slices, as its docstrings say."""
    groups = network.gate_up, network.down, network.ffn
    margin, layers = network.ffn.margin_fraction, network.ffn.layers
    total, ffn_groups = 0.0, [0.0, 0.0]
    for length, weight in network.gate_up.weights.items():
        if not weight:
            continue
        found = [best_of(group, group.costs[length], held) for group, held in zip(groups, sets, strict=True)]
        is_cut = [split <= (1 - margin) * whole for whole, split in found[:2]]
        pair = [split if cut else whole for cut, (whole, split) in zip(is_cut, found, strict=False)]
        pair_cost = sum(pair) + network.activation[length]
        whole_pair = sum(whole for whole, _ in found[:2]) + network.activation[length]
        whole, split = found[2]
        takes_split = split <= (1 - margin) * min(whole_pair, whole) and split < whole
        as_block = split if takes_split else whole
        wholes = [min(item.whole for item in group.costs[length].values()) for group in groups]
        if as_block < pair_cost:
            best = min(wholes[0] + network.activation[length] + wholes[1], wholes[2])
            total += weight * (counted(as_block, best, margin) if takes_split else as_block)
            continue
        total += weight * network.activation[length]
        for place, cost in enumerate(pair):
            own = counted(cost, wholes[place], margin) if is_cut[place] else cost
            total += weight * own
            ffn_groups[place] += weight * own
    alone = not sets[0] and not sets[1]
    total *= 1 + FURTHER_SLICE * max(0, len(sets[2]) - alone)
    total += sum(
        FURTHER_SLICE * max(0, len(held) - 1) * cost for held, cost in zip(sets[:2], ffn_groups, strict=True)
    )
    size = sum(
        layers * group.spec.slice_bytes(rows)
        for group, held in zip(groups, sets, strict=True)
        for rows in held
    )
    return layers * total, size


def sets_of(group):
    every = sorted(set().union(*group.costs.values()) - {()})
    return [held for count in range(4) for held in itertools.combinations(every, count)]


@pytest.mark.parametrize("seed", range(40))
def test_no_slices_of_a_network_are_cheaper(made, seed):
    network, budget = small_tables(made, seed)
    groups = network.gate_up, network.down, network.ffn
    best = math.inf
    for sets in itertools.product(*map(sets_of, groups)):
        cost, size = weighted_sum(network, sets)
        if budget.holds(size):
            best = min(best, cost)
    slices = choose_slices([network], budget)
    chosen = [tuple(slices[group.spec.group]) for group in groups]
    cost, size = weighted_sum(network, chosen)
    assert cost == pytest.approx(best, rel=1e-5)
    assert budget.holds(size)


def test_the_networks_above_hold_every_mixture(made):
    seen = set()
    for seed in range(40):
        slices = choose_slices([small_tables(made, seed)[0]], small_tables(made, seed)[1])
        seen.add((bool(slices["gate_up"] or slices["down"]), bool(slices["ffn"])))
    assert seen == set(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("seed", range(12))
def test_with_many_slices_it_is_near_the_best_and_never_worse_than_without_blocks(made, seed, monkeypatch):
    """Where not all triples are tried."""
    network, budget = small_tables(made, seed)
    groups = network.gate_up, network.down, network.ffn
    exact = [tuple(choose_slices([network], budget)[group.spec.group]) for group in groups]
    monkeypatch.setattr("heterollm.solver.ffn_slices.ALL_TRIPLES", 0)
    found = [tuple(choose_slices([network], budget)[group.spec.group]) for group in groups]
    cost, size = weighted_sum(network, found)
    assert budget.holds(size)
    assert cost <= 1.05 * weighted_sum(network, exact)[0]
    ffn_groups = choose_slices([network.gate_up, network.down], budget)
    without = [tuple(ffn_groups["gate_up"]), tuple(ffn_groups["down"]), ()]
    assert cost <= weighted_sum(network, without)[0] * (1 + 1e-12)


def resident_bytes(plan, specs, copies_by_length):
    """Bytes of all slices that some entry of a plan runs."""
    total = 0
    for spec in (*specs, *ffn_specs(specs)):
        used = {
            (entry.placement.npu_rows, length if copies_by_length else 0)
            for entry in plan.entries
            if entry.group == spec.group and entry.layers[0] <= spec.layer <= entry.layers[1]
            for length in entry.placement.npu_lengths
        }
        total += sum(spec.slice_bytes(rows) for rows, _ in used)
    return total


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    seeds, st.integers(0, 4_000_000), st.booleans(), st.sampled_from([None, {1: 1.0}, {70: 3.0, 300: 1.0}])
)
def test_the_budget_is_never_exceeded(made, seed, npu_bytes, copies_by_length, weights):
    specs, budget = made.model(), Budget(npu_bytes, GraphMemory(copies_by_length))
    costs = (made.block_costs if seed % 2 else made.proportional_blocks)(seed)
    solver = Solver(specs, made.limits((1, 32, 64)), costs, budget=budget, chunk_length=96, level="block")
    plan = solver.plan(device="d", precision="fp16", weights=weights)
    assert resident_bytes(plan, specs, copies_by_length) <= npu_bytes
    # Nor at lengths that the plan does not name.
    slices, used = solver.slices(weights), {}
    for tokens in range(1, 97, 5):
        for choice in solver.length(tokens, slices).choices:
            own = choice.chosen.placement
            assert set(own.npu_lengths) <= set(slices[choice.spec.group].get(own.npu_rows, ()))
            used.setdefault(choice.spec.group, set()).update(
                (own.npu_rows, length if copies_by_length else 0) for length in own.npu_lengths
            )
    by_group = {spec.group: spec for spec in (*solver.kinds[0].specs, solver.kinds[0].ffn)}
    assert npu_bytes >= solver.kinds[0].count * sum(
        by_group[group].slice_bytes(rows) for group, pairs in used.items() for rows, _ in pairs
    )


def test_a_block_wins_and_is_held_within_a_budget(made):
    """The cases above use blocks, too."""
    used = 0
    for seed in range(20):
        budget = Budget(1_500_000, GraphMemory(bool(seed % 2)))
        costs = made.proportional_blocks(seed)
        solver = Solver(
            made.model(), made.limits((1, 32, 64)), costs, budget=budget, chunk_length=96, level="block"
        )
        used += solver.plan(device="d", precision="fp16").has_ffn
    assert used >= 3


def test_decode_and_prompts_may_go_different_ways(made):
    """A block that is fast at one token only is run there, and the two groups elsewhere."""

    class Costs(made.proportional_blocks):
        def npu_us(self, spec, member_rows, length, form):
            if spec.then is None:
                return super().npu_us(spec, member_rows, length, form) / (1.0 if length == 1 else 4.0)
            return 1.0 if length == 1 else 1e9

    costs = Costs(3, overheads=made.free)
    solver = Solver(made.model(), made.limits(), costs, chunk_length=128, level="block")
    plan = solver.plan(device="d", precision="fp16")
    assert {entry.lengths for entry in plan.entries if entry.group == "ffn"} == {(1, 1)}
    assert {entry.lengths[0] for entry in plan.entries if entry.group == "gate_up"} >= {2}
