"""Rows and lengths that the NPU holds under a budget for graphs, against every set of both."""

import itertools
import math
import random
from dataclasses import replace

import pytest

import heterollm.solver.solve as solve
from heterollm.base import PlanError
from heterollm.kernels.ops import GraphMemory
from heterollm.solver import Budget, Objective, Solver
from heterollm.solver.candidates import few_leading_lengths_for, few_lengths_for
from heterollm.solver.options import Option
from heterollm.solver.packing import FfnPacking, GroupPacking, pack
from heterollm.solver.placements import FfnPlacement, RowsPlacement

LENGTHS = (1, 32, 64)
PASSES = (1, 20, 70, 128)
ROWS = ((64,), (128,), (256,))


def option(rows, lengths, cost, is_split):
    return Option(RowsPlacement(rows, lengths), cost, 1.0, 1.0, cost, is_split, 1.0)


def made_group(made, draw, name, margin, *, with_gpu=True, layers=2):
    """A group whose passes run on the GPU, or at any cover of them with any rows, at random costs."""
    spec = made.spec(name, (256,))
    options = {}
    for tokens in PASSES:
        found = [option((), (), draw.uniform(50, 150), False)] if with_gpu else []
        for rows in ROWS:
            for cover in few_lengths_for(tokens, LENGTHS):
                if rows == (256,):
                    found.append(option(rows, cover, draw.uniform(20, 150), False))
                elif draw.random() < 0.8:
                    found.append(option(rows, cover, draw.uniform(20, 150), True))
            leading = few_leading_lengths_for(tokens, LENGTHS) if rows == (256,) else ()
            found += [option(rows, lead, draw.uniform(20, 150), True) for lead in leading]
        options[tokens] = found
    weights = {tokens: draw.choice([0.5, 1.0, 3.0]) for tokens in PASSES}
    return GroupPacking(spec, layers, options, weights, Objective(margin_fraction=margin))


def every_set():
    """Every set that the search covers: slices for prompts, and one for single tokens."""
    prompts = [length for length in LENGTHS if length > 1]
    subsets = [own for count in (1, 2) for own in itertools.combinations(prompts, count)]
    slices = [(rows, own) for rows in ROWS for own in subsets]
    pairs = [pair for pair in itertools.combinations(slices, 2) if pair[0][0] != pair[1][0]]
    singles = [(), *(((rows, (1,)),) for rows in ROWS)]
    for held in [(), *((own,) for own in slices), *pairs]:
        for single in singles:
            yield (*held, *single)


def usable(options, held):
    """Return the options that graphs of a set can run."""
    graphs = {(rows, length) for rows, lengths in held for length in lengths}
    return [
        item
        for item in options
        if all((item.placement.npu_rows, length) in graphs for length in item.placement.npu_lengths)
    ]


def taken(items, margin, whole_cost=math.inf):
    """Return the cost that a pass takes, and that on one processor, by the rule of the chain."""
    whole = min((item.cost for item in items if not item.is_split), default=math.inf)
    split = min((item.cost for item in items if item.is_split), default=math.inf)
    return (split if split <= min(whole, whole_cost) * (1 - margin) else whole), whole


def size_of(group, held, budget):
    """Return the bytes of a set's graphs, written out."""
    total = 0
    for rows, lengths in held:
        weights = group.spec.slice_bytes(rows)
        outputs = sum(rows) if group.spec.then is None else group.spec.then.rows
        for length in lengths:
            total += weights + length * (group.spec.columns + outputs) * budget.memory.activation_bytes
    return group.layers * total


def cost_of(group, held):
    margin = group.objective.margin_fraction
    return group.layers * sum(
        group.weights[tokens] * taken(usable(items, held), margin)[0]
        for tokens, items in group.options.items()
    )


def as_set(slices):
    return tuple(slices.items())


@pytest.mark.parametrize("seed", range(40))
def test_no_set_of_rows_and_lengths_is_cheaper(made, seed):
    draw = random.Random(seed)
    margin = draw.choice([0.0, 0.1])
    groups = [made_group(made, draw, name, margin) for name in ("o", "down")]
    one = groups[0].spec.slice_bytes((64,))
    budget = Budget(draw.randint(0, 30) * one, GraphMemory(True, draw.choice([0, 2])))
    best = []
    for group in groups:
        sets = [(size_of(group, held, budget), cost_of(group, held)) for held in every_set()]
        best.append([(size, cost) for size, cost in sets if size <= budget.npu_bytes])
    least = min(
        first[1] + second[1]
        for first, second in itertools.product(*best)
        if first[0] + second[0] <= budget.npu_bytes
    )
    slices = pack([group.frontier(budget) for group in groups], budget)
    held = [as_set(slices[group.spec.group]) for group in groups]
    own = sum(size_of(group, one, budget) for group, one in zip(groups, held, strict=True))
    cost = sum(cost_of(group, one) for group, one in zip(groups, held, strict=True))
    assert own <= budget.npu_bytes
    assert cost == pytest.approx(least, rel=1e-9)
    # Equal inputs give equal slices.
    assert pack([group.frontier(budget) for group in groups], budget) == slices


@pytest.mark.parametrize("seed", range(6))
def test_no_set_of_an_ffn_with_two_paths_is_cheaper(made, seed):
    """Few passes and rows, so that the search combines all sets that matter."""
    draw = random.Random(seed)
    margin, passes = draw.choice([0.0, 0.1]), (1, 70)
    gate_up, down = (made_group(made, draw, name, margin) for name in ("gate_up", "down"))
    ffn = made_group(made, draw, "ffn", margin, with_gpu=False)
    then = made.spec("down", (256,), columns=256)
    as_ffn = {
        tokens: [
            Option(
                FfnPlacement(item.placement.npu_rows[0], item.placement.npu_lengths),
                item.time_us + 60,
                1.0,
                1.0,
                item.cost + 60,
                item.is_split,
                1.0,
            )
            for item in items
        ]
        for tokens, items in ffn.options.items()
    }
    spec = replace(ffn.spec, members=(*ffn.spec.members, *ffn.spec.members), then=then)
    ffn = replace(ffn, spec=spec, options=as_ffn)

    def few(group):
        wide = {(64,), (256,), (64, 64), (256, 256), ()}
        options = {
            tokens: [item for item in group.options[tokens] if item.placement.npu_rows in wide]
            for tokens in passes
        }
        return replace(group, options=options, weights=gate_up.weights)

    gate_up, down, ffn = few(gate_up), few(down), few(ffn)
    packing = FfnPacking(gate_up, down, ffn, dict.fromkeys(passes, 5.0))
    budget = Budget(
        draw.randint(4, 30) * gate_up.spec.slice_bytes((64,)), GraphMemory(True, draw.choice([0, 2]))
    )

    def cost(held):
        total = 0.0
        for tokens in passes:
            (first, first_whole), (second, second_whole) = (
                taken(usable(group.options[tokens], own), margin)
                for group, own in zip((gate_up, down), held, strict=False)
            )
            own, _ = taken(usable(ffn.options[tokens], held[2]), margin, first_whole + 5.0 + second_whole)
            total += gate_up.weights[tokens] * min(first + 5.0 + second, own)
        return gate_up.layers * total

    narrow = [held for held in every_set() if all(rows != (128,) for rows, _ in held) and len(held) < 3]
    doubled = [tuple((rows * 2, lengths) for rows, lengths in held) for held in narrow]
    groups = gate_up, down, ffn

    def affordable(group, sets):
        sized = ((size_of(group, held, budget), held) for held in sets)
        return [(size, held) for size, held in sized if size <= budget.npu_bytes]

    least = math.inf
    for first, second in itertools.product(affordable(gate_up, narrow), affordable(down, narrow)):
        if first[0] + second[0] > budget.npu_bytes or len(first[1]) + len(second[1]) > 3:
            continue
        for third in affordable(ffn, doubled):
            if first[0] + second[0] + third[0] <= budget.npu_bytes and len(third[1]) < 2:
                least = min(least, cost((first[1], second[1], third[1])))
    slices = pack([packing.frontier(budget)], budget)
    held = [as_set(slices[group.spec.group]) for group in groups]
    assert (
        sum(size_of(group, own, budget) for group, own in zip(groups, held, strict=True)) <= budget.npu_bytes
    )
    assert cost(held) <= least * (1 + 1e-9)


def test_one_length_serves_shorter_passes_by_padding_and_longer_ones_as_chunks(made):
    """Memory for one length: passes of 20 tokens are padded to it, those of 128 run as two of it."""
    spec = made.spec("o", (256,))
    costs = {(32,): 10.0, (64,): 14.0, (32, 32): 20.0, (64, 64): 28.0, (32,) * 4: 60.0}
    options = {
        tokens: [
            option((), (), 100.0, False),
            *(option((256,), cover, cost, False) for cover, cost in costs.items() if sum(cover) >= tokens),
        ]
        for tokens in (20, 64, 128)
    }
    group = GroupPacking(spec, 1, options, dict.fromkeys(options, 1.0), Objective())
    one = spec.slice_bytes((256,))
    assert pack([group.frontier(Budget(one, GraphMemory(True)))], Budget(one, GraphMemory(True))) == {
        "o": {(256,): (64,)}
    }
    both = Budget(2 * one, GraphMemory(True))
    assert pack([group.frontier(both)], both) == {"o": {(256,): (32, 64)}}


def test_inputs_and_outputs_count(made):
    spec = made.spec("o", (256,))
    options = {64: [option((), (), 100.0, False), option((256,), (64,), 10.0, False)]}
    group = GroupPacking(spec, 3, options, {64: 1.0}, Objective())
    need = 3 * (spec.slice_bytes((256,)) + 64 * (64 + 256) * 2)
    for size, held in ((need - 1, {}), (need, {(256,): (64,)})):
        budget = Budget(size, GraphMemory(True, 2))
        assert pack([group.frontier(budget)], budget) == {"o": held}


def test_a_group_that_only_the_npu_runs_needs_its_memory(made):
    spec = made.spec("o", (256,))
    group = GroupPacking(spec, 1, {64: [option((256,), (64,), 10.0, False)]}, {64: 1.0}, Objective())
    budget = Budget(spec.slice_bytes((256,)) - 1, GraphMemory(True))
    with pytest.raises(PlanError, match="does not hold what only the NPU"):
        pack([group.frontier(budget)], budget)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 96, 100, 300, 1024])
def test_sequences_with_few_lengths_cover_the_pass(tokens):
    covers = list(few_lengths_for(tokens, (1, 32, 64, 256)))
    assert len(covers) == len(set(covers)) > 0
    for cover in covers:
        assert sum(cover[:-1]) < tokens <= sum(cover)
        assert tokens == 1 or 1 not in cover
    for lead in few_leading_lengths_for(tokens, (1, 32, 64, 256)):
        assert sum(lead) < tokens


@pytest.mark.parametrize(("seed", "part"), [(3, 0.3), (1, 1.5), (7, 2.0), (5, 0.7)])
def test_rows_that_are_refined_under_the_budget_alone_lose_little(made, seed, part, monkeypatch):
    """Where rough graphs are far over the budget, only decode is refined before it counts."""
    specs = made.model(hidden=2048, keys=512, wide=6144, vocabulary=4096)
    budget = Budget(int(part * sum(spec.weight_bytes() for spec in specs)), GraphMemory(True, 2))
    solver = Solver(
        specs, made.limits(), made.proportional(seed), budget=budget, chunk_length=256, head_rows=1
    )
    passes = (1, 20, 32, 64, 100, 128, 192, 256)
    times = []
    for factor in (solve.FAR_OVER, math.inf):
        monkeypatch.setattr(solve, "FAR_OVER", factor)
        slices = solver.slices()
        times.append([solver.length(tokens, slices).time_us for tokens in passes])
    ratios = [own / refined for own, refined in zip(*times, strict=True)]
    assert sum(ratios) / len(ratios) < 1.02, ratios


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("activation_bytes", [0, 2])
def test_a_whole_plan_keeps_the_budget_with_inputs_and_outputs(made, seed, activation_bytes):
    specs = made.model()
    free = Solver(specs, made.limits(), made.proportional(seed), chunk_length=256)
    memory = GraphMemory(copies_by_length=True, activation_bytes=activation_bytes)
    most = free.plan(device="d", precision="fp16").npu_bytes(specs, memory)
    times = []
    for part in (0.2, 0.5, 1.5):
        budget = Budget(int(part * most), memory)
        solver = replace(free, budget=budget)
        plan, slices = solver.solve(device="d", precision="fp16")
        assert plan.uses_npu
        assert plan.npu_bytes(specs, memory) <= budget.npu_bytes
        assert solver.solve(device="d", precision="fp16") == (plan, slices)
        times.append(sum(solver.length(tokens, slices).time_us for tokens in (1, 64, 256)))
    assert times[0] >= times[1] >= times[2]
