"""Passes of one token: what is taken is what makes a layer shortest, submissions included."""

import itertools
import random
from dataclasses import replace

import pytest

from heterollm.kernels.ops import ffn_specs
from heterollm.kernels.sim import SimulatedClock
from heterollm.kernels.sim.jobs import ClockCosts, SimulatedJob
from heterollm.solver import Objective, Solver
from heterollm.solver.chain import solve_chain
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.options import Option, all_options, evaluate
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.submissions import LayerGroup, chain_costs, layer_us, solve_layer, submits_singly

KERNELS = {"qkv": 1, "o": 3, "gate_up": 1, "down": 1, "head": 1}
BUSY = Overheads(hand_over_us=0.0, refill_us=90.0, submit_us=15.0, merges_launches=False)
FREE = Objective(margin_fraction=0.0)
SEEDS = range(40)


def priced(gpu_us=0.0, npu_us=0.0):
    """Return a placement whose parts take so long; without an NPU's time it is the GPU's."""
    if not npu_us:
        return Option(GPU_ONLY, gpu_us, gpu_us, 0.0, gpu_us, False, gpu_us)
    placement = RowsPlacement(npu_rows=(64,), npu_lengths=(1,), form="plain")
    time_us = max(gpu_us, npu_us)
    return Option(placement, time_us, gpu_us, npu_us, time_us, gpu_us > 0, gpu_us)


def random_places(made, draw, low=1.0, high=200.0):
    """Return a layer's places with a few placements each."""
    places = []
    for group, kernels in list(KERNELS.items())[:-1]:
        items = [priced(draw.uniform(low, high))]
        items += [priced(draw.uniform(low, high), draw.uniform(low, high)) for _ in range(2)]
        items.append(priced(0.0, draw.uniform(low, high)))
        items.sort(key=lambda item: item.cost)
        before_us = [draw.choice([1.0, 5.0, 60.0]) for _ in range(kernels)]
        places.append(LayerGroup(made.spec(group, (128,)), before_us, items, 1))
    return places


def on_the_clock(places, chosen, layers, overheads):
    """Run layers on the simulated clock and return when each has ended: no traffic, no polls, no gaps."""
    hidden_share = 0.75 if overheads.hidden_us else 0.0
    costs = ClockCosts(
        overheads.submit_us,
        overheads.refill_us - overheads.submit_us,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        1.0 - hidden_share,
    )
    clock = SimulatedClock(costs, lambda *_: (1.0, 1.0))
    ends_us = []
    for _ in range(layers):
        for place, item in zip(places, chosen, strict=True):
            for number, before_us in enumerate(place.before_us):
                last = clock.submit(SimulatedJob(f"before {number}", before_us))
            if item.gpu_us:
                clock.submit(SimulatedJob("own", item.gpu_us))
            if item.npu_us:
                while not clock.is_done(last):
                    clock.poll_on()
                whole_us = item.npu_us + overheads.hidden_us
                fixed_us = overheads.hidden_us / hidden_share if hidden_share else 0.0
                clock.run_npu(SimulatedJob("graph", max(whole_us, fixed_us), fixed_us=fixed_us))
        queued = clock.last_job()
        end_us = clock.now_us
        if queued is not None:
            # Look ahead without waiting: the queue is in order and nothing slows it.
            end_us = max(end_us, queue_end_us(clock))
        ends_us.append(end_us)
    return ends_us


def queue_end_us(clock):
    """Return when the queue of a clock will be done, from the jobs in it."""
    end_us = 0.0
    for job in clock._queue:
        begin_us = (
            job.begin_us if job.begin_us < float("inf") else max(job.ready_us, end_us, clock._gpu_free_us)
        )
        end_us = begin_us + job.alone_us
    return end_us


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hidden_us", [0.0, 60.0])
def test_a_layer_takes_what_the_simulated_clock_says(made, seed, hidden_us, monkeypatch):
    monkeypatch.setattr("heterollm.solver.submissions.UNSURE_FRACTION", 0.0)
    draw = random.Random(seed)
    overheads = replace(BUSY, hand_over_us=-hidden_us, hidden_us=hidden_us)
    places = random_places(made, draw, low=90.0 if hidden_us else 1.0)
    chosen = [draw.choice(place.items) for place in places]
    ends_us = on_the_clock(places, chosen, 60, overheads)
    # Where the queue runs empty in some layers only, the mean of a few has a part of a refill in it.
    few = overheads.refill_us / 8
    assert layer_us(places, chosen, overheads) == pytest.approx((ends_us[59] - ends_us[19]) / 40, abs=few)
    steps_us = [after - before for before, after in itertools.pairwise(ends_us[30:])]
    if max(steps_us) - min(steps_us) < 1e-6:
        assert layer_us(places, chosen, overheads) == pytest.approx(steps_us[0], rel=1e-9)


def test_small_kernels_take_as_long_as_submitting_them(made):
    places = [LayerGroup(made.spec("o", (64,)), [1.0] * 3, [priced(1.0)], 1)]
    assert layer_us(places, [priced(1.0)], BUSY) == pytest.approx(4 * BUSY.submit_us, abs=BUSY.refill_us / 8)
    assert layer_us(places, [priced(500.0)], BUSY) == pytest.approx(503.0)


def test_a_short_kernel_before_a_long_one_empties_the_queue(made):
    """Their sum would keep the queue busy until the long one is submitted, but the short one does not."""
    spec = made.spec("o", (64,))
    before = LayerGroup(spec, [1.0, 59.0], [priced(200.0)], 1)
    behind = LayerGroup(spec, [1.0, 1.0], [priced(100.0, 80.0)], 1)
    even = replace(before, before_us=[30.0, 30.0])
    chosen = [group.items[0] for group in (before, behind)]
    short_us, even_us = (layer_us([first, behind], chosen, BUSY) for first in (before, even))
    assert short_us == pytest.approx(on_the_clock([before, behind], chosen, 30, BUSY)[-1] / 30, rel=0.05)
    assert short_us > even_us + BUSY.refill_us / 2


def test_a_whole_linear_layer_spares_the_kernel_behind_it(made):
    """A norm only between two whole layers; an operator behind a cut layer has a kernel of its own."""
    whole, cut, free = priced(100.0), priced(60.0, 60.0), replace(BUSY, submit_us=0.0, refill_us=0.0)
    specs = [made.spec(group, (64,)) for group in ("qkv", "o", "gate_up", "down")]
    places = [LayerGroup(spec, [7.0, 1.0], [whole, cut], 1) for spec in specs]
    ending = replace(free, endings=(("qkv", 0), ("gate_up", 0), ("down", 64), ("o", 65)))

    def spared_us(*chosen):
        return layer_us(places, chosen, free) - layer_us(places, chosen, ending)

    assert [spec.follows_norm for spec in specs] == [True, False, True, False]
    assert spared_us(whole, whole, whole, whole) == pytest.approx(3 * 7.0)
    assert spared_us(whole, whole, whole, cut) == pytest.approx(2 * 7.0)  # down is computed behind gate_up
    assert spared_us(whole, whole, cut, whole) == pytest.approx(7.0)
    assert spared_us(cut, cut, cut, cut) == 0.0


def test_a_cut_that_empties_the_queue_is_not_taken(made, monkeypatch):
    """Its own price is lower, but behind it the control thread is late with every kernel."""
    places = [
        LayerGroup(made.spec("qkv", (64,)), [1.0], [priced(10.0)], 1),
        LayerGroup(made.spec("o", (64,)), [2.0] * 3, [priced(10.0)], 1),
        LayerGroup(made.spec("gate_up", (64,)), [1.0], [priced(90.0, 70.0), priced(105.0)], 1),
        LayerGroup(made.spec("down", (64,)), [1.0], [priced(55.0)], 1),
    ]
    found = solve_layer(places, BUSY, FREE)
    assert [item.is_split for item in found.chosen] == [False] * 4
    # Where kernels cost nothing to submit and an empty queue nothing, it is.
    free = replace(BUSY, submit_us=0.0, refill_us=0.0)
    assert solve_layer(places, free, FREE).chosen[2].is_split


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_settled_on_is_the_best_of_all(made, seed):
    places = random_places(made, random.Random(seed))
    found = solve_layer(places, BUSY, FREE)
    every = itertools.product(*(place.items for place in places))
    best_us = min(layer_us(places, chosen, BUSY) for chosen in every)
    assert found.time_us == layer_us(places, found.chosen, BUSY)
    assert found.time_us <= 1.02 * best_us
    for number, place in enumerate(places):
        for item in place.items:
            beside = found.with_chain_cost(number, item)
            chosen = [*found.chosen[:number], item, *found.chosen[number + 1 :]]
            difference_us = layer_us(places, chosen, BUSY) - found.time_us
            assert beside.time_us - found.chosen[number].time_us == pytest.approx(difference_us)
            assert difference_us >= 0.0


def test_a_cut_must_beat_the_whole_by_the_margin(made):
    spec = made.spec("gate_up", (64,))
    places = [LayerGroup(spec, [1.0], [priced(990.0, 900.0), priced(1000.0)], 1)]
    assert solve_layer(places, BUSY, FREE).chosen[0].is_split
    assert not solve_layer(places, BUSY, Objective(margin_fraction=0.03)).chosen[0].is_split


def test_only_passes_of_one_token_whose_kernels_are_submitted_singly_count():
    assert submits_singly(1, BUSY)
    assert not submits_singly(2, BUSY)
    assert not submits_singly(1, replace(BUSY, merges_launches=True))
    assert not submits_singly(1, replace(BUSY, submit_us=float("inf")))


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_of_decode_is_no_slower_than_any_part_alone(made, seed):
    """What the NPU holds is chosen at the prices of the chain, so that what is best there is there."""
    draw = random.Random(seed)
    overheads = replace(BUSY, hand_over_us=draw.uniform(0, 20))
    costs = made.proportional(seed, overheads=overheads, slowdown=Slowdown(1.1, 1.1))
    specs, limits = made.model(layers=2), made.limits((1, 32))
    solver = Solver(specs, limits, costs, chunk_length=32)
    slices = solver.slices()
    chain = solver.length(1, slices)
    layer = solver.kinds[0].specs

    def alone_us(on_npu):
        places, chosen = [], []
        for spec in layer:
            items = [
                item
                for item in all_options(spec, 1, limits, costs, FREE, None, 1)
                if not item.is_split and bool(item.placement.npu_lengths) == on_npu
            ]
            places.append(LayerGroup.of(spec, items, costs))
            chosen.append(items[0])
        return layer_us(places, chosen, overheads)

    assert chain.time_us <= 2 * min(alone_us(True), alone_us(False)) * 1.001
    if any(choice.chosen.is_split for choice in chain.choices):
        assert all(
            choice.chosen.placement.npu_rows in {(), *slices[choice.spec.group]} for choice in chain.choices
        )


@pytest.mark.parametrize("seed", range(12))
def test_a_block_and_its_groups_are_priced_so_that_the_better_way_is_the_cheaper(made, seed):
    costs = made.proportional_blocks(seed, overheads=BUSY)
    specs, limits = made.model(layers=1)[:-1], made.limits((1, 32))
    block = ffn_specs(specs)[0]
    found = {spec.group: all_options(spec, 1, limits, costs, FREE, None, 1) for spec in (*specs, block)}
    priced_there = chain_costs(found, specs, block, costs, FREE)
    best = {group: min(item.cost for item in items) for group, items in priced_there.items()}
    chain = solve_chain(specs, 1, 1, limits, costs, FREE, ffn=block)
    ffn_groups = solve_chain(specs, 1, 1, limits, costs, FREE)
    takes_block = any(choice.spec.group == "ffn" for choice in chain.choices)
    assert chain.time_us <= ffn_groups.time_us
    pair = best["gate_up"] + costs.between_us(specs[-1], 1) + best["down"]
    assert takes_block == (best["ffn"] < pair)
    if takes_block:
        assert pair - best["ffn"] == pytest.approx(ffn_groups.time_us - chain.time_us)


def test_prices_in_a_chain_keep_every_candidate(made):
    costs = made.proportional(3, overheads=BUSY)
    specs, limits = made.model(layers=1)[:-1], made.limits((1, 32))
    found = {spec.group: all_options(spec, 1, limits, costs, FREE, None, 1) for spec in specs}
    priced_there = chain_costs(found, specs, None, costs, FREE)
    for group, items in found.items():
        assert [item.placement for item in priced_there[group]] == [item.placement for item in items]
    chain = solve_chain(specs, 1, 1, limits, costs, FREE)
    for choice in chain.choices:
        best = min(priced_there[choice.spec.group], key=lambda item: item.cost)
        assert best.placement == choice.chosen.placement
        assert choice.chosen == evaluate(choice.spec, 1, choice.chosen.placement, costs, FREE)
