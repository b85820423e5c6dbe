"""The chain of groups is solved exactly, and one group's price is what a simulation of it says."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.solver import Objective
from heterollm.solver.candidates import candidates
from heterollm.solver.chain import solve_chain
from heterollm.solver.costs import Overheads, Slowdown, joint_time_us
from heterollm.solver.objective import Power
from heterollm.solver.options import evaluate, group_options
from heterollm.solver.placements import RowsPlacement

SEEDS = range(60)
quickly = settings(max_examples=200, deadline=None, derandomize=True, database=None)
times = st.floats(0.0, 1e4).map(lambda value: round(value, 3))
factors = st.floats(1.0, 3.0)


def run_layers(made, specs, chosen, layers, tokens, costs):
    """Run all layers one group after the other, the GPU's queue and the host's clock carried along."""
    queue_ends = host = 0.0
    overheads = costs.overheads
    begin_us = overheads.hand_over_us + overheads.map_us
    for spec, item in list(zip(specs, chosen, strict=True)) * layers:
        # The operators before the group join what the last one left; the final norm does so at the end.
        start = max(queue_ends, host) + costs.between_us(spec, tokens)
        placement, whole = item.placement, spec.member_rows
        npu_us = sum(costs.npu_us(spec, placement.npu_rows, n, "plain") for n in placement.npu_lengths)
        if placement.npu_rows and placement.npu_rows != whole:
            rest = tuple(all_ - own for all_, own in zip(whole, placement.npu_rows, strict=True))
            gpu_us = costs.gpu_us(spec, rest, tokens)
        else:
            left = tokens - sum(placement.npu_lengths)
            gpu_us = costs.gpu_us(spec, whole, left) if left > 0 else 0.0
        if not npu_us:
            queue_ends, host = start + gpu_us, 0.0
            continue
        slowdown = costs.slowdown(spec, tokens) if gpu_us else Slowdown()
        gpu_end, npu_end = (
            made.simulate(gpu_us, npu_us, slowdown, begin_us) if gpu_us else (0, begin_us + npu_us)
        )
        # The host learns of the NPU's end and submits what follows; the queue may be busy until then.
        queue_ends, host = start + gpu_end, start + npu_end + overheads.map_us + overheads.refill_us
    return max(queue_ends, host)


def small_case(made, seed):
    """Return a chain of 2 or 3 groups with 2 to 4 candidates each."""
    draw = random.Random(seed)
    names = draw.sample(["qkv", "o", "gate_up", "down"], draw.choice([2, 3]))
    specs = [made.spec(name, (128,) if name != "qkv" else (128, 32)) for name in names]
    limits = made.limits((1, 32), 64)
    # At 32 tokens: GPU, row cut, NPU; at 40 padded or sequence cuts.
    tokens = draw.choice([1, 32, 40])
    offered = {spec.group: [*draw.choice([[(64,)], []]), spec.member_rows] for spec in specs}
    if "qkv" in offered:
        offered["qkv"] = [(64, 0), (128, 32)]
    overheads = Overheads(draw.uniform(0, 100), draw.uniform(10, 400), draw.uniform(0, 50))
    costs = made.costs(seed, overheads=overheads, high=draw.choice([300.0, 1000.0]))
    objective = Objective(
        energy_weight=draw.choice([0.0, 0.0, 0.4, 1.0]),
        power=Power(1.0, draw.uniform(0.5, 4), draw.uniform(0.5, 4)),
        margin_fraction=draw.choice([0.0, 0.03, 0.2]),
    )
    return specs, draw.randint(1, 4), tokens, limits, costs, objective, offered


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_of_candidates_is_cheaper(made, seed):
    specs, layers, tokens, limits, costs, objective, offered = small_case(made, seed)
    chain = solve_chain(specs, layers, tokens, limits, costs, objective, offered)
    tried = [group_options(spec, tokens, limits, costs, objective, offered[spec.group])[0] for spec in specs]
    chosen = tuple(choice.chosen for choice in chain.choices)
    cheapest = min(sum(item.cost for item in items) for items in itertools.product(*tried))
    assert sum(item.cost for item in chosen) == pytest.approx(cheapest)
    assert chain.time_us == pytest.approx(run_layers(made, specs, chosen, layers, tokens, costs))
    if not objective.energy_weight:
        fastest = min(
            run_layers(made, specs, items, layers, tokens, costs) for items in itertools.product(*tried)
        )
        assert chain.time_us == pytest.approx(fastest)
    for choice in chain.choices:
        placements = {item.placement for item in (choice.chosen, *choice.others)}
        assert placements == set(candidates(choice.spec, tokens, limits, splits=offered[choice.spec.group]))


def waited_us(item, costs):
    """What the operator behind waits for the queue: all of the refill, a part of it, or nothing."""
    return item.time_us - max(
        item.gpu_us, item.npu_us + costs.overheads.hand_over_us + 2 * costs.overheads.map_us
    )


def test_the_cases_above_have_every_kind(made):
    """Queues that are left empty, nearly empty and busy are chosen, and cuts as well as whole groups."""
    seen = set()
    for seed in SEEDS:
        case = small_case(made, seed)
        costs = case[4]
        chosen = [choice.chosen for choice in solve_chain(*case).choices]
        for item in chosen:
            waited = waited_us(item, costs) if item.npu_us else 0.0
            part = waited / costs.overheads.refill_us
            state = "empty" if part > 1 - 1e-9 else "busy" if part < 1e-9 else "nearly empty"
            seen |= {state, ("cut", item.is_split)}
    assert seen == {"empty", "nearly empty", "busy", ("cut", True), ("cut", False)}


def test_the_refill_is_hidden_as_far_as_the_gpu_is_busy(made):
    """NPU until 90 us, 20 us until a kernel runs in an empty queue: at 110 us, or when the GPU ends."""

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return gpu_us

        def npu_us(self, spec, member_rows, length, form):
            return 90.0

    spec, costs = made.spec("o", (128,)), Costs(0, overheads=Overheads(refill_us=20.0), slowdown=Slowdown())
    for gpu_us, time_us in ((50.0, 110.0), (90.0, 110.0), (100.0, 110.0), (110.0, 110.0), (111.0, 111.0)):
        item = evaluate(spec, 32, RowsPlacement((64,), (32,), "plain"), costs)
        assert (item.time_us, item.gpu_us, item.npu_us) == (time_us, gpu_us, 90.0)


def test_a_queue_that_is_surely_busy_needs_no_refill(made):
    """The NPU until 100 us, two submissions of 3 us, and 2 us more as no prediction is exact."""

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return gpu_us

        def npu_us(self, spec, member_rows, length, form):
            return 100.0

    overheads = Overheads(refill_us=20.0, submit_us=3.0)
    spec, costs = made.spec("o", (128,)), Costs(0, overheads=overheads, slowdown=Slowdown())
    for gpu_us, time_us in ((90.0, 120.0), (107.0, 120.0), (109.0, 109.0), (119.0, 119.0)):
        item = evaluate(spec, 32, RowsPlacement((64,), (32,), "plain"), costs)
        assert (item.time_us, item.gpu_us) == (time_us, gpu_us)


def test_what_a_group_leaves_is_paid_behind_it(made):
    """By the next layer's first kernel, and behind the last layer by the final norm."""

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 100.0

        def npu_us(self, spec, member_rows, length, form):
            return 90.0

    spec, limits = made.spec("o", (128,)), made.limits((32,))
    for layers, refill_us, kind, time_us in (
        (1, 5.0, "npu", 95.0),
        (3, 5.0, "npu", 95.0),
        (3, 25.0, "gpu", 100.0),
    ):
        costs = Costs(0, overheads=Overheads(refill_us=refill_us))
        chain = solve_chain([spec], layers, 32, limits, costs, Objective(), {"o": [(128,)]})
        assert chain.choices[0].chosen.placement.kind(spec, 32) == kind
        assert chain.time_us == pytest.approx(layers * (time_us + costs.between_us(spec, 32)))


@quickly
@given(times, times, factors, factors, times)
def test_joint_time_is_that_of_a_simulation(made, gpu_us, npu_us, gpu_factor, npu_factor, begin_us):
    slowdown = Slowdown(gpu_factor, npu_factor)
    expected = made.simulate(gpu_us, npu_us, slowdown, begin_us)
    assert joint_time_us(gpu_us, npu_us, slowdown, begin_us) == pytest.approx(expected, abs=1e-6)


@quickly
@given(st.integers(0, 10**6), st.sampled_from([1, 32, 40, 96, 200]))
def test_prices_are_those_of_a_simulation(made, seed, tokens):
    spec, limits, costs = made.spec("gate_up", (192, 192)), made.limits((1, 32, 128)), made.costs(seed)
    slowdown, overheads = costs.slowdown(spec, tokens), costs.overheads
    begin_us = overheads.hand_over_us + overheads.map_us
    for placement in candidates(spec, tokens, limits):
        item = evaluate(spec, tokens, placement, costs)
        npu_us = sum(costs.npu_us(spec, placement.npu_rows, n, "plain") for n in placement.npu_lengths)
        covered = min(tokens, sum(placement.npu_lengths))
        if placement.npu_rows and placement.npu_rows != spec.member_rows:
            gpu_us = costs.gpu_us(spec, tuple(192 - rows for rows in placement.npu_rows), tokens)
        else:
            gpu_us = costs.gpu_us(spec, (192, 192), tokens - covered) if covered < tokens else 0.0
        if not npu_us:
            assert (item.time_us, item.gpu_us, item.npu_us) == (gpu_us, gpu_us, 0.0)
            assert (item.is_split, item.cost) == (False, gpu_us)
            continue
        assert item.is_split == bool(gpu_us)
        gpu_end, npu_end = (
            made.simulate(gpu_us, npu_us, slowdown, begin_us) if gpu_us else (0, begin_us + npu_us)
        )
        joined = npu_end + overheads.map_us + overheads.refill_us
        assert item.time_us == item.cost == pytest.approx(max(gpu_end, joined))
        assert item.gpu_us == pytest.approx(gpu_end)
        assert item.npu_us == pytest.approx(npu_end - begin_us)


def test_a_part_that_cannot_has_no_price(made):
    spec, costs = made.spec("o", (128,)), made.costs(0, missing=1.0)
    for rows, tokens in (((64,), 32), ((128,), 32), ((128,), 40)):
        assert evaluate(spec, tokens, RowsPlacement(rows, (32,)), costs) is None
    assert evaluate(spec, 32, RowsPlacement(), costs) is not None
