"""Experts on both processors: exact against every placement, and the paper's rules as baselines."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from heterollm.base import PlanError
from heterollm.solver.costs import Slowdown, joint_time_us
from heterollm.solver.experts.placements import ExpertGroup, ExpertsPlacement
from heterollm.solver.experts.prices import ExpertPrices, estimate_experts
from heterollm.solver.experts.search import EXHAUSTED, LayerExperts, place_experts

EXPERT_BYTES = 1000
TOKENS, CHOSEN = 256, 2


def random_case(seed, experts, capacities, chunks=8, most=None, chosen=CHOSEN):
    """Loads of experts of random popularity, and random prices; at most so many experts in a graph."""
    draw = np.random.default_rng(seed)
    popularity = draw.dirichlet(np.full(experts, (0.3, 1.0, 5.0)[seed % 3]))
    each = [0.7 * popularity + 0.3 * draw.dirichlet(np.ones(experts)) for _ in range(chunks)]
    loads = np.stack([draw.multinomial(chosen * TOKENS, own / own.sum()) for own in each])
    launch, expert, row = draw.uniform(20, 300), draw.uniform(5, 60), draw.uniform(0.1, 1.5)
    rows = np.arange(chosen * TOKENS + 1)
    prices = ExpertPrices(
        lambda size, capacity: launch + size * (expert + row * capacity),
        np.where(rows > 0, draw.uniform(5, 80) + draw.uniform(0.2, 3) * rows, 0.0),
        capacities,
        EXPERT_BYTES,
        row_bytes=1,
        most_weight_bytes=None if most is None else most * EXPERT_BYTES,
        gpu_base_us=draw.uniform(0, 50),
        hand_over_us=draw.uniform(0, 200),
        slowdown=Slowdown(draw.uniform(1, 1.3), draw.uniform(1, 1.3)),
    )
    return loads, prices


def partitions(items):
    """Yield all partitions of a list into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def mean_us(groups, loads, prices):
    """The mean time of groups ``(experts, capacity)``, chunk by chunk and expert by expert."""
    npu_us = sum(prices.npu_us(len(experts), capacity) for experts, capacity in groups)
    npu_us += prices.hand_over_us if groups else 0
    capacities = {expert: capacity for experts, capacity in groups for expert in experts}
    total = 0.0
    for load in loads:
        left = [max(0, count - capacities.get(expert, 0)) for expert, count in enumerate(load)]
        gpu_us = sum(prices.gpu_us[rows] for rows in left)
        total += prices.gpu_base_us
        total += max(joint_time_us(gpu_us, npu_us, prices.slowdown)) if groups else gpu_us
    return total / len(loads)


def every_placement(experts, prices, most):
    for count in range(experts + 1):
        for held in itertools.combinations(range(experts), count):
            for groups in partitions(list(held)):
                if all(len(own) <= most for own in groups):
                    for capacities in itertools.product(prices.capacities, repeat=len(groups)):
                        yield list(zip(groups, capacities, strict=True))


def graph_bytes(groups, prices):
    return sum(prices.graph_bytes(len(experts), capacity) for experts, capacity in groups)


@pytest.mark.parametrize("seed", range(12))
def test_small_layers_are_solved_exactly(seed):
    most = 1 + seed % 4
    loads, prices = random_case(seed, 4, (32, 64, 128, 256), chunks=3, most=most)
    costs = [
        (graph_bytes(groups, prices), mean_us(groups, loads, prices))
        for groups in every_placement(4, prices, most)
    ]
    for budget in (None, 0, 1500, 2200, 3500):
        (found,) = place_experts([loads], prices, budget)
        exact_us = min(cost for size, cost in costs if budget is None or size <= budget)
        seen = estimate_experts(found, loads, prices)
        assert found.predicted_us == pytest.approx(exact_us)
        assert seen.time_us == pytest.approx(exact_us)
        assert budget is None or seen.graph_bytes <= budget
        assert all(len(group.experts) <= most for group in found.groups)


def test_larger_layers_are_near_the_optimum(monkeypatch):
    gaps = []
    for seed in range(12):
        loads, prices = random_case(seed, 6, (32, 64, 128, 256), most=(2, 4, None)[seed % 3])
        monkeypatch.setattr("heterollm.solver.experts.search.EXHAUSTED", 10**6)
        exact_us = LayerExperts(loads, prices).costs.min()
        monkeypatch.setattr("heterollm.solver.experts.search.EXHAUSTED", 0)
        gaps.append(LayerExperts(loads, prices).best().predicted_us / exact_us - 1)
    assert min(gaps) > -1e-9
    assert sum(gap < 1e-9 for gap in gaps) >= 10
    assert max(gaps) < 0.05


def test_a_budget_goes_to_the_layers_that_gain_most():
    cases = [random_case(seed, 3, (64, 256), chunks=3) for seed in range(3)]
    prices = cases[1][1]
    loads = [own for own, _ in cases]
    layers = [
        [
            (graph_bytes(groups, prices), mean_us(groups, own, prices))
            for groups in every_placement(3, prices, 3)
        ]
        for own in loads
    ]
    for budget in (0, 2500, 5000, 20_000):
        found = place_experts(loads, prices, budget)
        exact_us = min(
            sum(cost for _, cost in chosen)
            for chosen in itertools.product(*layers)
            if sum(size for size, _ in chosen) <= budget
        )
        assert sum(own.predicted_us for own in found) == pytest.approx(exact_us)


def test_large_models_keep_to_budget_and_limit():
    cases = [random_case(seed, 128, (32, 64, 128, 256), most=8, chosen=8) for seed in range(3)]
    loads, prices = [own for own, _ in cases], cases[0][1]
    free = place_experts(loads, prices)
    needed = [estimate_experts(one, own, prices) for one, own in zip(free, loads, strict=True)]
    whole = sum(one.graph_bytes for one in needed)
    held = place_experts(loads, prices, whole // 2)
    seen = [estimate_experts(one, own, prices) for one, own in zip(held, loads, strict=True)]
    assert 0 < sum(one.graph_bytes for one in seen) <= whole // 2
    assert sum(one.time_us for one in seen) > sum(one.time_us for one in needed)
    assert max(len(group.experts) for one in held for group in one.groups) <= 8
    alone = [estimate_experts(ExpertsPlacement(), own, prices).time_us for own in loads]
    assert all(one.time_us <= gpu for one, gpu in zip(seen, alone, strict=True))


def test_the_mean_load_would_choose_worse():
    """Two experts take turns: each is busy in half of the chunks, so that no chunk looks like the mean."""
    loads = np.array([[128, 0, 0, 0], [0, 128, 0, 0]] * 4)
    gpu_us = 1.0 * np.arange(129)
    prices = ExpertPrices(lambda size, capacity: 10.0 + size * 0.1 * capacity, gpu_us, (64, 128), 1)
    mean = np.broadcast_to(loads.mean(axis=0).astype(int), loads.shape)
    (by_mean,), (found,) = place_experts([mean], prices), place_experts([loads], prices)
    assert (
        estimate_experts(found, loads, prices).time_us
        < 0.6 * estimate_experts(by_mean, loads, prices).time_us
    )


def test_padding_holds_all_calibrated_loads():
    for seed in range(6):
        loads, prices = random_case(seed, 8, (32, 128, 512))
        (found,) = place_experts([loads], prices, overflow="pad")
        seen = estimate_experts(found, loads, prices)
        assert (found.overflow, seen.overflow_share) == ("pad", 0.0)
        assert seen.time_us == pytest.approx(found.predicted_us)


def test_the_npu_takes_nothing_that_it_cannot_run_or_does_not_gain():
    loads, prices = random_case(1, 8, (32, 64))
    for npu_us in (lambda *_: math.inf, lambda *_: 1e9):
        dear = ExpertPrices(npu_us, prices.gpu_us, (32, 64), EXPERT_BYTES)
        (found,) = place_experts([loads], dear)
        assert found.groups == ()
    none_fits = ExpertPrices(prices.npu_us, prices.gpu_us, (32, 64), EXPERT_BYTES, most_weight_bytes=999)
    assert place_experts([loads], none_fits)[0].groups == ()


def test_equal_inputs_give_equal_placements():
    loads, prices = random_case(5, 16, (32, 64, 128))
    assert place_experts([loads] * 2, prices, 9000) == place_experts([loads.copy()] * 2, prices, 9000)


def test_costs_of_tokens_beyond_a_capacity():
    loads = np.array([[40, 8, 0], [32, 8, 8]])
    prices = ExpertPrices(lambda size, capacity: 1.0 * size * capacity, 2.0 * np.arange(49), (32,), 10, 3)
    groups = (ExpertGroup((0, 2), 32),)
    to_gpu = estimate_experts(ExpertsPlacement(groups), loads, prices)
    dropped = estimate_experts(ExpertsPlacement(groups, "drop"), loads, prices)
    assert (to_gpu.npu_us, to_gpu.gpu_us, dropped.gpu_us) == (64.0, 24.0, 16.0)
    assert to_gpu.overflow_share == dropped.overflow_share == 8 / 96
    assert to_gpu.padding_share == 1 - 72 / 128
    assert to_gpu.graph_bytes == 2 * (10 + 32 * 3)


def test_a_placement_goes_through_json_and_is_checked():
    placement = ExpertsPlacement((ExpertGroup((3, 0), 64), ExpertGroup((1,), 32)), "drop")
    text = msgspec.json.encode(placement)
    assert b'"type":"experts"' in text
    assert msgspec.json.decode(text, type=ExpertsPlacement) == placement
    assert placement.capacities(4) == (64, 32, 0, 64)
    with pytest.raises(PlanError, match=r"Expert 3 .* 3 of the layer"):
        placement.capacities(3)
    for groups, message in (
        ((ExpertGroup((1, 1), 32),), "Expert 1 is given twice"),
        ((ExpertGroup((1,), 32), ExpertGroup((1,), 64)), "Expert 1 is given twice"),
        ((ExpertGroup((), 32),), "no experts"),
    ):
        with pytest.raises(PlanError, match=message):
            ExpertsPlacement(groups).capacities(4)


def test_loads_without_times_are_refused():
    loads, prices = random_case(0, 4, (32,))
    for wrong in (loads[:0], loads + TOKENS * CHOSEN, loads[0], -1 - loads):
        with pytest.raises(PlanError, match=r"Loads of experts .* need chunks"):
            LayerExperts(wrong, prices)
    assert EXHAUSTED >= 4**4  # small layers above are solved by trying all
