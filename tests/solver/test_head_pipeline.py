"""The pipeline over heads: Johnson's order against every order, and the paper's greedy search beside it."""

import itertools
import math
import random
import statistics

import pytest

from heterollm.solver.sparse.head_pipeline import (
    PipelineUnit,
    fused_heads,
    greedy_order,
    johnson_order,
    plan_pipeline,
    three_lanes_us,
    two_lanes_us,
)

# shadowAttn, section 3.4: a launch of 1, 2 or 4 heads takes 2, 3 or 4 ms.
PUBLISHED_US = {1: 2000.0, 2: 3000.0, 4: 4000.0}


def units_of(seed, most=7):
    """Units of fused heads with random times, of which some do not matter and some decide."""
    draw = random.Random(seed)
    head, units = 0, []
    scale = [draw.choice((0.1, 1.0, 10.0)) for _ in range(3)]
    for _ in range(draw.randint(1, most)):
        size = draw.choice((1, 1, 2, 4))
        times = [tuple(own * draw.uniform(0, 100) for _ in range(size)) for own in scale[1:]]
        heads = tuple(range(head, head + size))
        units.append(PipelineUnit(heads, 8, scale[0] * draw.uniform(0, 100), *times))
        head += size
    return units


def best_us(units, time_us):
    return min(map(time_us, itertools.permutations(units)))


def shortest_us(units):
    """Time of the shortest order of single heads in three lanes, by all that could be shorter."""
    best = math.inf

    def visit(left, npu_us, select_us, attend_us):
        nonlocal best
        if not left:
            best = min(best, attend_us)
        elif attend_us + sum(unit.attend_us[0] for unit in left) < best:
            for unit in left:
                npu = npu_us + unit.npu_us
                select = max(npu, select_us) + unit.select_us[0]
                attend = max(select, attend_us) + unit.attend_us[0]
                visit([other for other in left if other is not unit], npu, select, attend)

    visit(units, 0.0, 0.0, 0.0)
    return best


def of_one_head(seed):
    """Up to seven heads, each alone."""
    draw = random.Random(seed)
    scale = [draw.choice((0.3, 1.0, 3.0)) for _ in range(3)]
    return [
        PipelineUnit(
            (head,), 8, scale[0] * draw.random(), (scale[1] * draw.random(),), (scale[2] * draw.random(),)
        )
        for head in range(draw.randint(2, 7))
    ]


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_johnsons_order_is_as_short_as_the_shortest(first):
    for seed in range(first, first + 20):
        units = units_of(seed, most=6)
        assert two_lanes_us(johnson_order(units)) == pytest.approx(best_us(units, two_lanes_us), rel=1e-12)


def test_the_greedy_search_is_near_the_shortest_order_of_three_lanes():
    """Layers of up to 7 heads with lanes of any lengths: it loses 11 % in the mean, 56 % at most."""
    losses = []
    for seed in range(200):
        units = of_one_head(seed)
        losses.append(three_lanes_us(greedy_order(units)) / shortest_us(units) - 1.0)
    assert min(losses) >= -1e-12
    assert statistics.mean(losses) < 0.12
    assert max(losses) < 0.60


def test_both_brute_forces_agree():
    for seed in range(20):
        units = of_one_head(seed)[:5]
        assert shortest_us(units) == pytest.approx(best_us(units, three_lanes_us), rel=1e-12)


def test_the_greedy_search_orders_heads_within_a_unit():
    """Both heads wait for one launch: the short selection before the long attention goes first."""
    unit = PipelineUnit((0, 1), 8, 10.0, (9.0, 1.0), (1.0, 8.0))
    (ordered,) = greedy_order([unit])
    assert ordered.heads == (1, 0)
    assert three_lanes_us([ordered]) == 10.0 + 1.0 + 9.0 + 1.0
    assert three_lanes_us([unit]) == 10.0 + 9.0 + 1.0 + 8.0


@pytest.mark.parametrize("seed", range(20))
def test_units_hold_each_head_once_and_share_an_exponent(seed):
    draw = random.Random(seed)
    exponents = tuple(draw.choice((6, 7, 8)) for _ in range(draw.randint(1, 32)))
    for most in (1, 2, 4):
        units = fused_heads(exponents, most)
        assert sorted(itertools.chain(*units)) == list(range(len(exponents)))
        for unit in units:
            assert len(unit) in (1, 2, 4)
            assert len(unit) <= most
            assert len({exponents[head] for head in unit}) == 1
        # No two units could be one.
        alone = [exponents[unit[0]] for unit in units if len(unit) < most]
        sizes = [(exponents[unit[0]], len(unit)) for unit in units if len(unit) < most]
        assert len(set(sizes)) == len(alone)


def test_heads_are_fused_where_launches_decide_and_apart_where_the_gpu_waits_for_the_first():
    launches = plan_pipeline([8] * 8, PUBLISHED_US.__getitem__, [1.0] * 8, [1.0] * 8)
    assert [len(unit.heads) for unit in launches.units] == [4, 4]
    # Scores cost little, attention much: the GPU begins sooner behind a small unit.
    waits = plan_pipeline([8, 8], {1: 50.0, 2: 90.0}.__getitem__, [10.0] * 2, [500.0] * 2)
    assert [len(unit.heads) for unit in waits.units] == [1, 1]
    assert waits.time_us == 50.0 + 2 * 510.0


@pytest.mark.parametrize("seed", range(30))
def test_a_planned_pipeline_is_no_slower_than_without_fusing_or_order(seed):
    draw = random.Random(seed)
    count = draw.choice((2, 8, 32))
    exponents = [draw.choice((7, 8, 9)) for _ in range(count)]
    select, attend = ([draw.uniform(1, 2000) for _ in range(count)] for _ in range(2))

    def planned(**options):
        return plan_pipeline(exponents, PUBLISHED_US.__getitem__, select, attend, **options).time_us

    best_us = planned()
    gpu_us = sum(select) + sum(attend)
    assert best_us >= max(gpu_us, PUBLISHED_US[4] * count / 4)
    for options in ({"most_fused": (1,)}, {"ordered": False}, {"most_fused": (1,), "ordered": False}):
        assert best_us <= planned(**options)
