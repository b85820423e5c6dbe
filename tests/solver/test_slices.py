"""What the NPU holds: within the budget, as cheap as can be, and more slices only where they pay."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import OptionError
from heterollm.kernels.ops import GraphMemory
from heterollm.solver import Budget, Objective, Solver, pass_weights
from heterollm.solver.slice_sets import SliceCost
from heterollm.solver.slices import GroupCosts, choose_slices

quickly = settings(max_examples=80, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 10**6)


def resident_bytes(plan, specs, copies_by_length):
    """Bytes of all slices that some entry of a plan runs."""
    total = 0
    for spec in specs:
        used = {
            (entry.placement.npu_rows, length if copies_by_length else 0)
            for entry in plan.entries
            if entry.group == spec.group and entry.layers[0] <= spec.layer <= entry.layers[1]
            for length in entry.placement.npu_lengths
        }
        total += sum(spec.weight.weight_bytes(sum(rows), spec.columns) for rows, _ in used)
    return total


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    seeds,
    st.one_of(st.just(0), st.integers(0, 3_000_000)),
    st.booleans(),
    st.sampled_from([None, {1: 1.0}, {70: 3.0, 300: 1.0}]),
)
def test_the_budget_is_never_exceeded(made, seed, npu_bytes, copies_by_length, weights):
    specs, budget = made.model(), Budget(npu_bytes, GraphMemory(copies_by_length))
    costs = (made.costs if seed % 2 else made.proportional)(seed)
    solver = Solver(specs, made.limits((1, 32, 64)), costs, budget=budget, chunk_length=96)
    plan = solver.plan(device="d", precision="fp16", weights=weights)
    assert resident_bytes(plan, specs, copies_by_length) <= npu_bytes
    assert plan.uses_npu or npu_bytes < 1_000_000
    # Nor at lengths that the plan does not name.
    slices = solver.slices(weights)
    used = {}
    for tokens in range(1, 97, 5):
        for choice in solver.length(tokens, slices).choices:
            own = choice.chosen.placement
            used.setdefault(choice.spec.group, set()).update(
                (own.npu_rows, length if copies_by_length else 0) for length in own.npu_lengths
            )
    per_group = {spec.group: spec for spec in solver.kinds[0].specs}
    assert npu_bytes >= solver.kinds[0].count * sum(
        per_group[group].weight.weight_bytes(sum(rows), per_group[group].columns)
        for group, pairs in used.items()
        for rows, _ in pairs
    )


# -- against every set of slices --------------------------------------------------------------------------


def small_tables(made, seed):
    draw = random.Random(seed)
    lengths = [1, 64, 128][: draw.choice([2, 3])]
    weights = {length: draw.choice([0.0, 0.5, 1.0, 3.0]) for length in lengths}
    weights[1] = weights[1] or 1.0
    limited, margin = draw.choice([False, True]), draw.choice([0.0, 0.1])
    groups = []
    for group in ("o", "down"):
        spec = made.spec(group, (256,))
        costs = {}
        for length in lengths:
            costs[length] = {(): SliceCost(whole=draw.uniform(50, 150))}
            for rows in (64, 128, 192, 256):
                whole = draw.uniform(20, 150) if rows == 256 else math.inf
                costs[length][(rows,)] = SliceCost(whole, draw.uniform(20, 150))
        groups.append(GroupCosts(spec, draw.choice([1, 3]), costs, weights, margin))
    size = groups[0].spec.weight.weight_bytes(1, 64)
    budget = draw.choice([0, draw.randint(64, 3000) * size]) if limited else None
    return groups, Budget(budget)


def cost_and_bytes(group, held):
    """Return the cost and the bytes of a set of slices, written out from the definition.

    At each length the best cut is taken if it beats the best placement on one processor by the margin. A cut
    that would not beat the best such placement of *any* set by the margin counts a millionth more than that.
    Each slice after the first must make all passes one percent cheaper.
    """
    total = 0.0
    for length, table in group.costs.items():
        if not group.weights[length]:
            continue
        whole = min(table[rows].whole for rows in ((), *held))
        split = min((table[rows].split for rows in held), default=math.inf)
        best_whole, factor = min(item.whole for item in table.values()), 1 - group.margin_fraction
        cost = whole
        if split <= whole * factor:
            cost = split if split <= best_whole * factor else max(split, best_whole * (1 + 1e-6))
        total += group.weights[length] * cost
    size = sum(group.spec.weight.weight_bytes(sum(rows), 64) for rows in held)
    return group.layers * total * (1 + 0.01 * max(0, len(held) - 1)), group.layers * size


@pytest.mark.parametrize("seed", range(120))
def test_no_set_of_slices_is_cheaper(made, seed):
    groups, budget = small_tables(made, seed)
    sizes = [(64,), (128,), (192,), (256,)]
    sets = [held for count in range(4) for held in itertools.combinations(sizes, count)]

    def both(choice):
        found = [cost_and_bytes(*pair) for pair in zip(groups, choice, strict=True)]
        return sum(cost for cost, _ in found), sum(size for _, size in found)

    every = [both(choice) for choice in itertools.product(sets, repeat=2)]
    slices = choose_slices(groups, budget)
    cost, size = both([tuple(slices[group.spec.group]) for group in groups])
    limit = math.inf if budget.npu_bytes is None else budget.npu_bytes
    assert size <= limit
    assert cost == pytest.approx(min(cost for cost, size in every if size <= limit), rel=1e-9)


def two_lengths(made, second_us):
    """A group whose two lengths have a best slice each; the second length's own costs ``second_us``."""
    costs = {
        1: {(): SliceCost(300.0), (64,): SliceCost(split=100.0), (128,): SliceCost(split=200.0)},
        64: {(): SliceCost(300.0), (64,): SliceCost(split=100.0), (128,): SliceCost(split=second_us)},
    }
    return GroupCosts(made.spec("o", (256,)), 1, costs, {1: 1.0, 64: 1.0})


def test_a_further_slice_only_where_it_pays(made):
    assert set(choose_slices([two_lengths(made, 99.0)], Budget())["o"]) == {(64,)}
    assert set(choose_slices([two_lengths(made, 90.0)], Budget())["o"]) == {(64,), (128,)}
    # A length that hardly ever comes is not worth one.
    rare = replace(two_lengths(made, 90.0), weights={1: 1.0, 64: 0.01})
    assert set(choose_slices([rare], Budget())["o"]) == {(64,)}


def test_one_slice_can_be_the_compromise_of_many_lengths(made):
    """No length's own best, but better than two slices that are."""
    costs = {
        1: {
            (): SliceCost(300.0),
            (64,): SliceCost(split=100.0),
            (128,): SliceCost(split=100.4),
            (192,): SliceCost(split=150.0),
        },
        64: {
            (): SliceCost(300.0),
            (64,): SliceCost(split=150.0),
            (128,): SliceCost(split=100.4),
            (192,): SliceCost(split=100.0),
        },
    }
    group = GroupCosts(made.spec("o", (256,)), 1, costs, {1: 1.0, 64: 1.0})
    assert set(choose_slices([group], Budget())["o"]) == {(128,)}


def test_under_a_budget_a_cut_is_measured_against_what_is_held(made):
    """The whole group on the NPU would be nearly as good as the cut, but does not fit."""
    costs = {1: {(): SliceCost(300.0), (64,): SliceCost(split=98.0), (256,): SliceCost(whole=100.0)}}
    group = GroupCosts(made.spec("o", (256,)), 1, costs, {1: 1.0}, margin_fraction=0.05)
    small = Budget(group.spec.weight.weight_bytes(64, 64))
    assert set(choose_slices([group], small)["o"]) == {(64,)}
    # Where it fits, the other processor is not kept busy for two percent.
    assert set(choose_slices([group], Budget())["o"]) == {(256,)}


@pytest.mark.parametrize("seed", range(3))
def test_a_length_without_a_copy_is_not_run(made, seed):
    """A budget for copies at one token has none left for prompts, which the slices would serve as well."""

    def solver(npu_bytes):
        budget = Budget(npu_bytes, GraphMemory(True))
        return Solver(made.model(), made.limits(), made.proportional(seed), budget=budget, chunk_length=64)

    slices, specs = solver(10**9).slices({1: 1.0}), made.model()
    size = sum(
        spec.weight.weight_bytes(sum(rows), spec.columns) for spec in specs for rows in slices[spec.group]
    )
    plan = solver(size).plan(device="d", precision="fp16", weights={1: 1.0})
    assert plan.uses_npu
    assert resident_bytes(plan, specs, copies_by_length=True) <= size
    free = Solver(made.model(), made.limits(), made.proportional(seed), chunk_length=64)
    plan = free.plan(device="d", precision="fp16", weights={1: 1.0})
    assert resident_bytes(plan, specs, copies_by_length=True) > size


# -- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 32, 128])
@pytest.mark.parametrize("seed", range(3))
def test_weights_on_one_length_choose_its_best_slices(made, tokens, seed):
    solver = Solver(
        made.model(), made.limits(), made.proportional(seed), Objective(margin_fraction=0.0), chunk_length=128
    )
    slices = solver.slices({tokens: 5.0})
    for choice in solver.length(tokens).choices:
        assert set(slices[choice.spec.group]) == {choice.chosen.placement.npu_rows} - {()}
    assert solver.length(tokens, slices).time_us == pytest.approx(solver.length(tokens).time_us)


def test_weights_change_the_slices(made):
    solver = Solver(made.model(), made.limits(), made.proportional(1), chunk_length=128)
    assert solver.slices({1: 1.0}) != solver.slices({128: 1.0})
    # By default both are served.
    for tokens in (1, 128):
        assert solver.length(tokens, solver.slices()).time_us <= 1.05 * solver.length(tokens).time_us


def test_long_prompts_count_by_their_chunks(made):
    assert pass_weights({1: 7.0, 300: 1.0, 2500: 2.0}, 1024) == {1: 7.0, 300: 1.0, 1024: 4.0, 452: 2.0}
    assert pass_weights({256: 1.0, 512: 3.0}, 256) == {256: 7.0}
    with pytest.raises(OptionError):
        pass_weights({0: 1.0}, 256)
    solver = Solver(made.model(), made.limits(), made.proportional(1), chunk_length=128)
    assert solver.slices({1280: 1.0}) == solver.slices({128: 10.0})
    # A prompt is followed by one row of the head.
    on_both = Solver(made.model(), made.limits(), made.proportional(0), chunk_length=128)
    assert on_both.slices({128: 1.0})["head"] == on_both.slices({1: 1.0})["head"] != {}
