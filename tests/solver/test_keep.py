"""Rules that share one keep ratio out over heads, on made-up heads."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import OptionError
from heterollm.solver.sparse.keep import FLOOR, LEFT, HeadNeeds, KeepRule, keep_ratios

MASSES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


def made_up(layers: int, heads: int, seed: int) -> HeadNeeds:
    draw = np.random.default_rng(seed)
    # From heads that attend to few keys to heads that attend to all.
    spread = draw.uniform(0.02, 1, (layers, heads, 1))
    needed = np.sort(draw.uniform(0, 1, (layers, heads, len(MASSES))) * spread)
    return HeadNeeds(
        MASSES,
        tuple(tuple(map(tuple, layer)) for layer in needed.tolist()),
        tuple(map(tuple, draw.normal(0.02, 0.05, (layers, heads)).tolist())),
        tuple(draw.normal(0.1, 0.2, layers).tolist()),
    )


NEEDS = st.builds(made_up, st.integers(2, 40), st.integers(1, 16), st.integers(0, 99))
KEEPS = st.floats(0.01, 1)


@given(NEEDS, KEEPS, st.sampled_from(get_args(KeepRule)))
def test_the_mean_is_the_global_ratio(needs: HeadNeeds, keep: float, rule: str) -> None:
    found = np.array(keep_ratios(needs, keep, rule))
    assert found.shape == np.array(needs.needed).shape[:2]
    assert found.min() >= 0
    assert found.max() <= 1
    if rule == "importance_literal":
        # What is cut off at 1 is not shared out.
        assert found.mean() <= keep + 1e-9
        assert found.max() == 1 or found.mean() == pytest.approx(keep)
        return
    assert found.mean() == pytest.approx(keep, rel=1e-6)
    assert found.min() >= FLOOR * keep - 1e-9


@given(NEEDS, KEEPS)
def test_the_first_layer_is_dense_where_that_leaves_enough(needs: HeadNeeds, keep: float) -> None:
    found = np.array(keep_ratios(needs, keep, "mass"))
    layers = len(found)
    assert (found[0] == found[0, 0]).all()
    assert found[1:].mean() >= LEFT * keep - 1e-9
    if keep * layers - 1 >= LEFT * keep * (layers - 1):
        assert found[0, 0] == 1
    else:
        assert found[0, 0] < 1


@given(NEEDS, KEEPS, st.floats(1, 2), st.sampled_from(get_args(KeepRule)))
def test_no_head_loses_keys_where_the_ratio_rises(
    needs: HeadNeeds, keep: float, factor: float, rule: str
) -> None:
    less, more = (np.array(keep_ratios(needs, ratio, rule)) for ratio in (keep, min(1.0, factor * keep)))
    assert (more >= less - 1e-6).all()


@given(NEEDS, KEEPS, st.sampled_from(get_args(KeepRule)), st.randoms(use_true_random=False))
def test_heads_in_another_order_keep_their_ratios(
    needs: HeadNeeds, keep: float, rule: str, order: object
) -> None:
    places = list(range(len(needs.needed[0])))
    order.shuffle(places)  # type: ignore[attr-defined]
    assert needs.importance is not None
    shuffled = HeadNeeds(
        MASSES,
        tuple(tuple(layer[place] for place in places) for layer in needs.needed),
        tuple(tuple(layer[place] for place in places) for layer in needs.importance),
        needs.layer_importance,
    )
    found = np.array(keep_ratios(needs, keep, rule))
    np.testing.assert_allclose(np.array(keep_ratios(shuffled, keep, rule)), found[:, places], atol=1e-6)


def test_heads_that_need_more_keys_keep_more() -> None:
    narrow, wide = (tuple(np.linspace(0.01, top, len(MASSES))) for top in (0.05, 0.6))
    layers = ((narrow, wide),) * 20
    first, second = keep_ratios(HeadNeeds(MASSES, layers), 0.2)[1]
    assert first == pytest.approx(0.1)  # the floor
    assert second > 0.2
    # Above the floor both hold the same mass.
    first, second = keep_ratios(HeadNeeds(MASSES, layers), 0.5)[1]
    held = np.interp(first, (0, *narrow, 1), (0, *MASSES, 1))
    assert held == pytest.approx(np.interp(second, (0, *wide, 1), (0, *MASSES, 1)))


def test_equation_3_is_clamped_and_proportional() -> None:
    importance = ((1e-3, 2e-3, 50.0, 70.0), (-1.0, 0.0, 1e-3, 2e-3))
    needs = HeadNeeds(MASSES, ((MASSES,) * 4,) * 2, importance, (0.1, 0.2))
    products = np.array([1e-4, 2e-4, 1e-3, 1e-3, 0, 0, 2e-4, 4e-4])
    literal = np.ravel(keep_ratios(needs, 0.2, "importance_literal"))
    np.testing.assert_allclose(literal, 0.2 * 8 * products / products.sum())
    floored = np.ravel(keep_ratios(needs, 0.2, "importance"))
    np.testing.assert_allclose(floored[[0, 4, 5]], 0.1)
    assert floored[7] / floored[2] == pytest.approx(0.4)


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.1, float("nan")])
def test_ratios_out_of_range_are_refused(keep: float) -> None:
    with pytest.raises(OptionError, match="keep ratio"):
        keep_ratios(made_up(2, 2, 0), keep)


def test_rules_of_importance_need_importances() -> None:
    needs = HeadNeeds(MASSES, ((MASSES,),))
    with pytest.raises(OptionError, match="importances") as raised:
        keep_ratios(needs, 0.2, "importance")
    assert "--head-importance" in raised.value.fix
    assert keep_ratios(needs, 0.2) == ((0.2,),)
