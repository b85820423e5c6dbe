"""The pipeline over heads: Johnson's order against every order."""

import itertools
import random

import pytest

from heterollm.solver.sparse.head_pipeline import (
    PipelineUnit,
    fused_heads,
    johnson_order,
    plan_pipeline,
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


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_johnsons_order_is_as_short_as_the_shortest(first):
    for seed in range(first, first + 20):
        units = units_of(seed, most=6)
        assert two_lanes_us(johnson_order(units)) == pytest.approx(best_us(units, two_lanes_us), rel=1e-12)


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
