"""Experts: the kernels choose, order, multiply and add up as NumPy does, whatever the tokens choose."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError, OptionError
from heterollm.kernels.formats import linear_errors, random_weight, reference
from heterollm.kernels.gpu import (
    COUNTED_PAIRS,
    ExpertLists,
    ExpertShape,
    GlueKernels,
    GpuLinear,
    GroupedLinear,
    MergedLaunch,
    OpenClRuntime,
    RoundedInputs,
    Segments,
    ShapeClass,
    TakenRows,
    Variant,
    code_bytes,
    default_parameters,
    merge_launches,
    packed_bytes,
    with_numbers,
)
from heterollm.kernels.gpu.rounding import rounding_launch
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.work import grouped_work
from heterollm.kernels.operators.data import GUARD, GuardedOutput, fill_slot, run_launches
from heterollm.kernels.operators.experts import GpuExperts, MixtureCase, SaliencyCase
from heterollm.kernels.operators.gated_activation import activate, exact_gated_activation
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.ops import GateClip, Member, OpSpec, Routing, WeightFormat

STYLES = ["vector", "simt"]
TYPES = [np.float32, np.float16]
OWN = [("vector", np.float32), ("simt", np.float16)]
PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""
LENGTHS = (1, 2, 3, 7, 31, 33, 100, 257)
ROUTINGS = (
    Routing(8, 2),
    Routing(128, 8),
    Routing(5, 5, normalized=False, scale=0.5),
    Routing(60, 4, "sigmoid", biased=True, scale=2.5),
    Routing(64, 6, normalized=False, biased=True),
    Routing(16, 2, "sparsemixer", normalized=False, jitter=0.01),
    Routing(7, 3, "sparsemixer", normalized=False, jitter=0.3),
    Routing(1, 1),
    Routing(64, 6, "sigmoid", biased=True, scale=2.5, groups=8, kept_groups=3),
    Routing(60, 4, normalized=False, groups=5, kept_groups=2),
)


# -- oracles ------------------------------------------------------------------------------------------------


def scores_of(logits, routing):
    exact = logits.astype(np.float64)
    if routing.scoring == "sigmoid":
        return 1 / (1 + np.exp(-exact))
    if routing.scoring == "sparsemixer":
        return exact
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def weights_of(logits, chosen, routing):
    """The weights of the chosen experts, in float64."""
    if routing.scoring == "sparsemixer":
        found = np.empty(chosen.shape)
        for row, own in enumerate(chosen):
            left = logits[row].astype(np.float64)
            for slot, expert in enumerate(own):
                top = left.max()
                factor = np.maximum(np.abs(logits[row].astype(np.float64)), top)
                with np.errstate(divide="ignore", invalid="ignore"):
                    far = (top - logits[row]) / factor > 2 * routing.jitter
                found[row, slot] = 1 / np.exp(np.where(far, -np.inf, left) - top).sum()
                left[expert] = -np.inf
    else:
        found = np.take_along_axis(scores_of(logits, routing), chosen, axis=1)
        if routing.normalized:
            found /= found.sum(axis=1, keepdims=True)
    return found * routing.scale


DROPPED = np.iinfo(np.int32).min


def order_of(chosen, experts, taken=None, saliency=None):
    """Source of each position, position of each pair, and the positions of each expert that are the GPU's.

    With a saliency an expert with more tokens than rows takes those of the largest, in the order of saliency.
    """
    flat = chosen.reshape(-1)
    pairs = np.argsort(flat, kind="stable")
    position = np.empty(len(flat), np.int32)
    position[pairs] = np.arange(len(flat))
    starts = np.searchsorted(flat[pairs], np.arange(experts + 1))
    own = []
    for expert in range(experts):
        count, row = (0, 0) if taken is None else taken[expert]
        first, stop = starts[expert], starts[expert + 1]
        skipped, of_expert = min(count, stop - first), pairs[first:stop]
        if saliency is not None and count:
            if count < stop - first:
                of_expert = of_expert[np.argsort(-saliency[of_expert // chosen.shape[1]], kind="stable")]
            position[of_expert[skipped:]] = DROPPED
        position[of_expert[:skipped]] = [-1 - row - index for index in range(skipped)]
        if saliency is not None and count:
            skipped = stop - first
        own.append((first + skipped, stop))
    source = np.full(len(flat), -1)
    for first, stop in own:
        source[first:stop] = pairs[first:stop] // chosen.shape[1]
    return source, position, own


def covered(places, experts):
    """The positions that each expert's places cover, in order of the places."""
    found = [[] for _ in range(experts)]
    for expert, first, count, _ in places:
        if expert >= 0:
            assert count > 0
            found[expert] += range(first, first + count)
    return found


# -- data ---------------------------------------------------------------------------------------------------


def choices(generator, kind, tokens, routing):
    """Choices of experts for each token."""
    experts, k = routing.experts, routing.chosen
    if kind == "one set":  # all tokens choose the same experts; all others are empty
        return np.tile(generator.permutation(experts)[:k], (tokens, 1)).astype(np.int32)
    if kind == "first and last":
        return np.tile(np.r_[np.arange(k - 1), experts - 1], (tokens, 1)).astype(np.int32)
    skew = generator.exponential(size=experts) if kind == "skewed" else np.zeros(experts)
    return np.argsort(-generator.gumbel(size=(tokens, experts)) - 3 * skew, axis=1)[:, :k].astype(np.int32)


KINDS = ("even", "skewed", "one set", "first and last")


def upload_lists(runtime, shape, chosen, weights=None):
    """Lists with choices, and garbage elsewhere."""
    sizes = ExpertLists.sizes(shape)
    garbage = {name: fill_slot(runtime, np.full(size, GUARD, np.uint8)) for name, size in sizes.items()}
    lists = ExpertLists(**garbage)
    lists = replace(lists, chosen=fill_slot(runtime, chosen))
    return lists if weights is None else replace(lists, weights=fill_slot(runtime, weights))


def taken_rows(runtime, table, rows=1, saliency=None):
    """Rows that another processor takes, by a table; counts of the second of two layers."""
    counts = fill_slot(runtime, np.zeros(2 * COUNTED_PAIRS, np.int32))
    by = None if saliency is None else fill_slot(runtime, saliency)
    return TakenRows(fill_slot(runtime, table), rows, counts, COUNTED_PAIRS, by)


def ints(slot):
    return slot.read().reshape(-1).view(np.int32)


@pytest.fixture
def make(runtime):
    return lambda style, dtype=np.float32: GpuExperts(runtime, dtype, dtype, style=style)


# -- choice -------------------------------------------------------------------------------------------------


def routed(runtime, experts, logits, routing, bias=None, shift=None, factors=None):
    """What the kernel chooses for logits that garbage follows, and the weights."""
    shape = ExpertShape(routing, len(logits))
    behind = np.full((3, routing.experts), np.nan, np.float32)
    slot = fill_slot(runtime, np.concatenate([logits, behind]))
    chosen = GuardedOutput(runtime, (shape.tokens, routing.chosen), np.int32)
    weights = GuardedOutput(runtime, (shape.tokens, routing.chosen), np.float32)
    lists = ExpertLists.allocate(runtime, shape)
    lists = replace(lists, chosen=chosen.slot, weights=weights.slot)
    added = {
        name: runtime.upload(values)
        for name, values in (("bias", bias), ("shift", shift), ("factors", factors))
        if values is not None
    }
    run_launches(runtime, [experts.route(slot, lists, shape=shape, **added)])
    return chosen.read(), weights.read()


def of_kept_groups(choice, routing):
    """What experts are chosen by, in groups with the best two, or without a bias the best one."""
    groups = choice.reshape(len(choice), routing.groups, -1)
    if routing.groups == 1:
        return choice
    best = np.sort(groups, axis=2)[:, :, -2 if routing.biased else -1 :].sum(axis=2)
    kept = np.argsort(-best, axis=1, kind="stable")[:, : routing.kept_groups]
    found = np.full_like(groups, -np.inf)
    rows = np.arange(len(choice))[:, None]
    found[rows, kept] = groups[rows, kept]
    return found.reshape(choice.shape)


def check_choice(logits, routing, bias, chosen, weights):
    choice = logits if bias is None else scores_of(logits, routing) + bias
    choice = of_kept_groups(choice, routing)
    right = np.argsort(-choice, axis=1, kind="stable")[:, : routing.chosen]
    if bias is None:  # the choice is by the logits as they are
        np.testing.assert_array_equal(chosen, right)
    else:
        assert all(len(set(row)) == routing.chosen for row in chosen.tolist())
        found, best = (np.take_along_axis(choice, ids, axis=1) for ids in (chosen, right))
        np.testing.assert_allclose(found, best, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, weights_of(logits, chosen, routing), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_the_largest_scores_are_chosen(runtime, make, style, routing):
    experts = make(style)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(
        seed=st.integers(0, 1 << 20), tokens=st.sampled_from(LENGTHS), spread=st.sampled_from([0.1, 1, 30])
    )
    def holds(seed, tokens, spread):
        generator = np.random.default_rng(seed)
        logits = (spread * generator.standard_normal((tokens, routing.experts))).astype(np.float32)
        bias = generator.uniform(-1, 1, routing.experts).astype(np.float32) if routing.biased else None
        check_choice(logits, routing, bias, *routed(runtime, experts, logits, routing, bias))

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_a_shift_is_added_to_the_logits(runtime, make, style):
    generator = np.random.default_rng(4)
    for routing in ROUTINGS:
        logits = generator.standard_normal((40, routing.experts)).astype(np.float32)
        shift = generator.standard_normal(routing.experts).astype(np.float32)
        if routing.biased:
            with pytest.raises(KernelError, match="no shift"):
                routed(runtime, make(style), logits, routing, shift, shift)
            continue
        found = routed(runtime, make(style), logits, routing, shift=shift)
        check_choice(logits + shift, routing, None, *found)


@pytest.mark.parametrize("style", STYLES)
def test_a_factor_of_each_expert_is_on_its_normalised_weight(runtime, make, style):
    for routing in ROUTINGS:
        generator = np.random.default_rng(routing.experts)
        logits = generator.standard_normal((33, routing.experts)).astype(np.float32)
        factors, bias = generator.uniform(0.5, 2, (2, routing.experts)).astype(np.float32)
        bias = bias if routing.biased else None
        chosen, weights = routed(runtime, make(style), logits, routing, bias, factors=factors)
        expected = weights_of(logits, chosen, routing) * factors[chosen]
        np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("style", STYLES)
def test_of_equal_logits_the_first_experts_are_chosen(runtime, make, style):
    for routing in ROUTINGS:
        if not routing.biased:
            generator = np.random.default_rng(routing.experts)
            logits = generator.integers(-1, 2, (40, routing.experts)).astype(np.float32)
            logits[0] = -0.0
            logits[0, ::2] = 0.0
            logits[1] = -7.0
            chosen, weights = routed(runtime, make(style), logits, routing)
            check_choice(logits, routing, None, chosen, weights)
            assert chosen[0].tolist() == list(range(routing.chosen))


@pytest.mark.parametrize("style", STYLES)
def test_any_logits_choose_different_experts_that_exist(runtime, make, style):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, 1.0, -3e38, 3e38], np.float32)
    for routing in ROUTINGS:
        logits = np.random.default_rng(1).choice(values, (50, routing.experts))
        logits[0] = np.nan
        logits[1] = -np.inf
        bias = np.zeros(routing.experts, np.float32) if routing.biased else None
        chosen, _ = routed(runtime, make(style), logits, routing, bias)
        assert chosen.min() >= 0
        assert chosen.max() < routing.experts
        assert all(len(set(row)) == routing.chosen for row in chosen.tolist())


# -- order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_pairs_lie_in_the_order_of_experts_and_tokens(runtime, make, style, kind):
    experts = make(style)
    generator = np.random.default_rng(3)
    # The kernel is built for each number of rows that a work-group takes.
    many = ((1, 3, 33, 257), (2, 7, 31, 100))
    lengths = many if kind == "even" and style == "vector" else ((1, 33), (7, 100))
    for routing, tokens in (
        (routing, tokens)
        for routing, own in zip((Routing(128, 8), Routing(7, 3)), lengths, strict=True)
        for tokens in own
    ):
        chosen = choices(generator, kind, tokens, routing)
        some = generator.integers(0, 40, (routing.experts, 2)).astype(np.int32)
        # Half of the saliencies are equal to another's, and NaN is no reason to give a row twice.
        ties = generator.integers(0, max(1, tokens // 2), tokens).astype(np.float32)
        ties[tokens // 2] = np.nan if kind == "skewed" else np.inf
        for taken, saliency in (
            *((None, None), (some, None), (some, ties)),
            *((some, np.zeros_like(ties)), (np.full_like(some, tokens), ties)),
        ):
            shape = ExpertShape(routing, tokens)
            outputs = {
                "source": GuardedOutput(runtime, (shape.pairs,), np.int32),
                "position": GuardedOutput(runtime, (shape.pairs,), np.int32),
                "places": GuardedOutput(runtime, (shape.places, 4), np.int32),
            }
            lists = upload_lists(runtime, shape, chosen)
            lists = replace(lists, **{name: out.slot for name, out in outputs.items()})
            given_rows = None if taken is None else taken_rows(runtime, taken, saliency=saliency)
            run_launches(runtime, [experts.sort(lists, shape=shape, taken=given_rows)] * 2)
            by = None if saliency is None else np.nan_to_num(saliency, nan=np.inf)
            source, position, own = order_of(chosen, routing.experts, taken, by)
            np.testing.assert_array_equal(np.maximum(outputs["source"].read(), -1), source)
            np.testing.assert_array_equal(outputs["position"].read(), position)
            places = outputs["places"].read()
            assert places[:, 2].max() <= shape.step
            assert covered(places, routing.experts) == [list(range(*span)) for span in own]
            if given_rows is not None:
                loads = np.bincount(chosen.reshape(-1), minlength=routing.experts)
                held = np.minimum(loads, taken[:, 0])
                beyond = (loads - held)[taken[:, 0] > 0].sum()
                expected = (shape.pairs, held.sum(), *((beyond, 0) if saliency is None else (0, beyond)))
                # The first layer's counts are another's, and two passes add up.
                assert ints(given_rows.counts).tolist() == [0] * COUNTED_PAIRS + [2 * own for own in expected]


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_the_saliency_of_a_token_is_the_squared_norm_of_its_output(make, style, dtype):
    for tokens, hidden, split, join, biased in itertools.product(
        (1, 7), (16, 52, 2048), (0, 8, 13), ("concatenate", "sum"), (False, True)
    ):
        case = SaliencyCase(tokens, hidden, split, join, biased=biased)
        actual, exact = check_case(case, make(style, dtype), np.random.default_rng(hidden))["saliency"]
        np.testing.assert_allclose(actual, exact, rtol=2e-3 if dtype == np.float16 else 2e-6)


def most_places(shape):
    """The most steps that any counts of rows give which sum to the pairs, by search."""
    tokens, pairs = shape.tokens, shape.pairs
    most = {0: 0}
    for _ in range(shape.routing.experts):
        most_next = {}
        for used, count in most.items():
            for rows in range(min(tokens, pairs - used) + 1):
                steps = count + -(-rows // shape.step)
                most_next[used + rows] = max(most_next.get(used + rows, 0), steps)
        most = most_next
    return most[pairs]


def test_no_routing_needs_more_places_and_one_needs_all():
    for experts, k, tokens in itertools.product((1, 2, 3, 5, 8), (1, 2, 3), (1, 2, 3, 5, 8, 9, 17, 24)):
        if k <= experts:
            shape = ExpertShape(Routing(experts, k), tokens)
            assert shape.places == most_places(shape), shape


def test_a_work_group_takes_the_rows_that_an_expert_has_on_average():
    sizes = [ExpertShape(Routing(128, 8), m).step for m in (1, 8, 32, 64, 128, 256, 512, 1024, 4096)]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    for experts in range(1, 200):
        assert {ExpertShape(Routing(experts, k), 1).step for k in range(1, experts + 1)} == {1}


# -- rows ---------------------------------------------------------------------------------------------------


def taken_of(position, x, others):
    """The rows that another processor takes, and which of its rows they are."""
    right, filled = np.zeros_like(others), np.zeros(len(others), bool)
    for pair, at in enumerate(position):
        if DROPPED < at < 0:
            right[-1 - at] = x[pair * len(x) // len(position)]
            filled[-1 - at] = True
    return right, filled


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_rows_are_gathered_and_added_up(runtime, make, style, dtype):
    experts = make(style, dtype)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.sampled_from([1, 7, 33, 100]),
        columns=st.sampled_from([16, 48, 80, 256, 2064]),
        routing=st.sampled_from([Routing(128, 8), Routing(7, 3), Routing(3, 1)]),
        taken=st.integers(0, 9),
        adds=st.booleans(),
        drops=st.booleans(),
        weighs=st.booleans(),
    )
    def holds(seed, tokens, columns, routing, taken, adds, drops, weighs):
        # Weights are on the inputs of the only expert of a token.
        weighs = weighs and routing.chosen == 1
        generator = np.random.default_rng(seed)
        shape = ExpertShape(routing, tokens)
        chosen = choices(generator, "skewed", tokens, routing)
        weights = generator.uniform(0.1, 1, chosen.shape).astype(np.float32)
        lists = upload_lists(runtime, shape, chosen, weights)
        # Each expert has room for so many rows in the other processor's output.
        table = np.array([(taken, taken * expert) for expert in range(routing.experts)], np.int32)
        x = generator.standard_normal((tokens, columns)).astype(dtype)
        behind = np.full((2, columns), np.nan, dtype)
        gathered = GuardedOutput(runtime, (shape.pairs, columns), dtype)
        others = GuardedOutput(runtime, (max(1, taken * routing.experts), columns), dtype)
        saliency = generator.permutation(tokens).astype(np.float32) if drops else None
        given = taken_rows(runtime, table, taken * routing.experts, saliency)
        x_slot = fill_slot(runtime, np.concatenate([x, behind]))
        sizes = {"shape": shape, "columns": columns}
        launches = [
            experts.sort(lists, shape=shape, taken=given),
            experts.gather_taken(x_slot, others.slot, lists, given, **sizes, weighs=weighs),
            experts.gather(x_slot, gathered.slot, lists, **sizes, weighs=weighs),
        ]
        run_launches(runtime, launches)
        if weighs:
            x, weights = (x * weights).astype(dtype), np.ones_like(weights)
        source, position, own = order_of(chosen, routing.experts, table, saliency)
        theirs = others.read()
        rows_of = (gathered.read(), x[source], source >= 0), (theirs, *taken_of(position, x, theirs))
        for actual, right, computed in rows_of:
            np.testing.assert_array_equal(actual[computed], right[computed])
            assert np.all(actual[~computed].view(np.uint8) == GUARD)

        # Rows that no processor computed are NaN.
        y = np.full((shape.pairs + 2, columns), np.nan, dtype)
        other = np.full((max(1, taken * routing.experts), columns), np.nan, dtype)
        rows = generator.standard_normal((*chosen.shape, columns)).astype(dtype)
        for at, row in zip(position, rows.reshape(-1, columns), strict=True):
            if at == DROPPED:
                row[:] = 0
            elif at < 0:
                other[-1 - at] = row
            else:
                y[at] = row
        assert np.isfinite(y[: shape.pairs]).all(axis=1).sum() == sum(stop - first for first, stop in own)
        held = generator.standard_normal((tokens, columns)).astype(dtype)
        out = GuardedOutput(runtime, held.shape, dtype, held)
        combine = experts.combine(
            *(fill_slot(runtime, y), lists, out.slot),
            shape=shape,
            columns=columns,
            other=fill_slot(runtime, other),
            taken=given,
            adds=adds,
            weighed=weighs,
        )
        run_launches(runtime, [combine])
        exact = np.einsum("tk,tkc->tc", weights.astype(np.float64), rows.astype(np.float64))
        actual = out.read()
        scale = 2e-3 if dtype == np.float16 else 2e-6
        np.testing.assert_allclose(actual, exact + held if adds else exact, rtol=scale, atol=4 * scale)

    holds()


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_codes_are_gathered_with_their_scales(runtime, make, style, weighs):
    routing, tokens, columns, block = Routing(6, 1 if weighs else 2), 9, 96, 32
    shape = ExpertShape(routing, tokens)
    generator = np.random.default_rng(5)
    chosen = choices(generator, "even", tokens, routing)
    weights = generator.uniform(0.1, 1, chosen.shape).astype(np.float32)
    lists = upload_lists(runtime, shape, chosen, weights)
    x = generator.standard_normal((tokens, columns)).astype(np.float32)

    def codes_for(rows):
        sizes = code_bytes(rows, columns, block)
        slots = [fill_slot(runtime, np.full(size, GUARD, np.uint8)) for size in sizes]
        return RoundedInputs(*slots, 4, block)

    source, target, right = codes_for(tokens), codes_for(shape.pairs), codes_for(shape.pairs)
    order, _, _ = order_of(chosen, routing.experts)
    experts, options = make(style), {"columns": columns, "half": False, "variant": Variant(style)}
    slot = fill_slot(runtime, x)
    launches = [
        rounding_launch(runtime, slot, source, tokens=tokens, **options),
        rounding_launch(runtime, fill_slot(runtime, x[order]), right, tokens=shape.pairs, **options),
        experts.sort(lists, shape=shape),
        experts.gather(
            slot, slot, lists, shape=shape, columns=columns, codes=(source, target), weighs=weighs
        ),
    ]
    run_launches(runtime, launches)
    np.testing.assert_array_equal(target.codes.read(), right.codes.read())
    found, expected = (
        own.blocks.read().reshape(-1).view(np.float32).reshape(-1, columns // block, 2).copy()
        for own in (target, right)
    )
    expected[: shape.pairs, :, 0] *= weights[order] if weighs else 1
    np.testing.assert_array_equal(found, expected)


# -- products -----------------------------------------------------------------------------------------------


class Layer:
    """A layer of random experts, on the device and exactly."""

    def __init__(self, runtime, dtype, weight, routing, *, hidden=64, width=96, rounds=False, seed=0):
        generator = np.random.default_rng(seed)
        count = routing.experts
        gates = [[random_weight(generator, width, hidden, weight) for _ in range(2)] for _ in range(count)]
        self.downs = [random_weight(generator, hidden, width, weight) for _ in range(count)]
        self.gates, self.routing, self.dtype, self.rounds = gates, routing, dtype, rounds
        self.runtime, self.hidden, self.width, self.format = runtime, hidden, width, weight
        options = {"activation_dtype": dtype, "integer_inputs": rounds, "experts": count}
        self.gate_up = GroupedLinear.pack(runtime, list(itertools.chain(*gates)), **options)
        self.down = GroupedLinear.pack(runtime, self.downs, **options)

    def product(self, linear, members, shape, style, chosen, taken=None, seed=1):
        """The rows of one grouped launch, the exact rows, and which of them the launch computes."""
        generator = np.random.default_rng(seed)
        lists = upload_lists(self.runtime, shape, chosen)
        table = None if taken is None else taken_rows(self.runtime, taken)
        experts = GpuExperts(self.runtime, self.dtype, self.dtype, style="vector")
        _, _, own = order_of(chosen, self.routing.experts, taken)
        x = generator.standard_normal((shape.pairs, linear.columns)).astype(self.dtype)
        slot = fill_slot(self.runtime, np.concatenate([x, np.full((2, x.shape[1]), np.nan, self.dtype)]))
        out = GuardedOutput(self.runtime, (shape.pairs, sum(linear.member_rows)), self.dtype)
        launches = [
            experts.sort(lists, shape=shape, taken=table),
            linear.launch(slot, out.slot, lists, shape=shape, style=style, label="test"),
        ]
        run_launches(self.runtime, launches)
        seen = reference.round_inputs(x, self.format.block) if self.rounds else x
        exact = np.zeros((shape.pairs, sum(linear.member_rows)))
        computed = np.zeros(shape.pairs, bool)
        for (first, stop), weights in zip(own, members, strict=True):
            exact[first:stop] = reference.linear(seen[first:stop], weights)
            computed[first:stop] = True
        return out.read(), exact, computed

    def exact(self, x, chosen, weights):
        """The output of the layer in float64."""
        out = np.zeros((len(x), self.hidden))
        for token, own in enumerate(chosen):
            for slot, expert in enumerate(own):
                seen = x[token : token + 1]
                if self.rounds:
                    seen = reference.round_inputs(seen, self.format.block)
                gate, up = (reference.linear(seen, [weight]) for weight in self.gates[expert])
                active = exact_gated_activation(gate, up, "silu")
                if self.rounds:
                    active = reference.round_inputs(active.astype(self.dtype), self.format.block)
                out[token] += weights[token, slot] * reference.linear(active, [self.downs[expert]])[0]
        return out


FORMATS = {
    "w4a16": (WeightFormat(4, 32), False),
    "w4a16 asymmetric": (WeightFormat(4, 16, symmetric=False), False),
    "w4a8": (WeightFormat(4, 32), True),
    "w8a16": (WeightFormat(8, 32), False),
    "f16": (WeightFormat(16), False),
    "f32": (WeightFormat(32), False),
}
HALVES = [("vector", "f16")]


@pytest.mark.parametrize(
    ("name", "style", "dtype"),
    [
        # The type of activations changes the loads of inputs alone: all formats have that of their devices.
        pytest.param(
            *(name, style, dtype),
            marks=[pytest.mark.slow] * ((style, dtype) not in OWN and (style, name) not in HALVES),
        )
        for name, style, dtype in itertools.product(FORMATS, STYLES, TYPES)
    ]
    + [(name, "matrix", np.float32) for name in list(FORMATS)[:4]],
)
def test_each_row_meets_the_weights_of_its_expert(runtime, within_gate, style, dtype, name):
    weight, rounds = FORMATS[name]
    # Both together have work-groups of each number of rows but 16.
    for routing in (Routing(3, 2), Routing(11, 2)) if weight == WeightFormat(4, 32) else (Routing(5, 2),):
        layer = Layer(runtime, dtype, weight, routing, rounds=rounds)
        both = ((layer.gate_up, layer.gates), (layer.down, [[weight] for weight in layer.downs]))
        generator = np.random.default_rng(2)
        for tokens, kind in zip(LENGTHS, itertools.cycle(KINDS)):
            shape = ExpertShape(routing, tokens)
            chosen = choices(generator, kind, tokens, routing)
            taken = None
            if tokens % 2:
                counts = generator.integers(0, 1 + tokens // 2, routing.experts)
                taken = np.stack([counts, np.zeros_like(counts)], axis=1).astype(np.int32)
            for linear, members in both if tokens < 100 else both[:1]:
                actual, exact, computed = layer.product(linear, members, shape, style, chosen, taken)
                if computed.any():
                    within_gate((actual[computed], exact[computed]), shape, kind)
                assert np.all(actual[~computed].view(np.uint8) == GUARD)


@pytest.mark.parametrize("style", [*STYLES, "matrix"])
def test_many_experts_and_wide_rows(runtime, within_gate, style):
    routing = Routing(128, 8)
    layer = Layer(runtime, np.float32, WeightFormat(4, 64), routing, hidden=192, width=64)
    generator = np.random.default_rng(4)
    for tokens, kind in ((1, "even"), (5, "skewed"), (33, "one set"), (100, "even")):
        shape = ExpertShape(routing, tokens)
        chosen = choices(generator, kind, tokens, routing)
        actual, exact, _ = layer.product(layer.gate_up, layer.gates, shape, style, chosen)
        within_gate((actual, exact), shape, kind)


@pytest.mark.parametrize("style", [*STYLES, "matrix"])
def test_weights_in_several_buffers_give_the_same_bits(runtime, style, monkeypatch):
    routing, generator = Routing(5, 2), np.random.default_rng(6)
    whole = Layer(runtime, np.float32, WeightFormat(4, 32), routing)
    tile_bytes = 64 * 64 // 2  # of the 64 inputs of 64 rows
    traits = replace(runtime.traits, max_buffer_bytes=9 * tile_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "traits", traits)
        parts = Layer(runtime, np.float32, WeightFormat(4, 32), routing)
    # Four tiles of an expert stay together, so that two experts share a buffer.
    assert [piece.tiles for piece in parts.gate_up._pieces] == [8, 8, 4]
    for tokens in (1, 40):
        shape, chosen = ExpertShape(routing, tokens), choices(generator, "even", tokens, routing)
        (actual, _, _), (right, _, _) = (
            layer.product(layer.gate_up, layer.gates, shape, style, chosen) for layer in (parts, whole)
        )
        np.testing.assert_array_equal(actual, right)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "weight", [WeightFormat(4, 32), WeightFormat(8, 16, symmetric=False), WeightFormat(32)]
)
def test_slots_of_some_experts_give_the_same_bits(runtime, make, style, weight, monkeypatch):
    """Two rounds through three slots in two buffers, filled in another order, and filled again."""
    routing, rows, columns, tokens = Routing(5, 2), (96, 96), 64, 40
    generator, options = np.random.default_rng(8), {"activation_dtype": np.float32}
    members = [random_weight(generator, count, columns, weight) for _ in range(5) for count in rows]
    whole = GroupedLinear.pack(runtime, members, experts=5, **options)
    with monkeypatch.context() as patch:
        most = 2 * packed_bytes(weight, rows, columns)
        patch.setattr(runtime, "traits", replace(runtime.traits, max_buffer_bytes=most))
        some = GroupedLinear.reserve(runtime, rows, columns, weight, slots=3, **options)
    assert len(some._pieces) == 2
    assert some.size_bytes == 3 * packed_bytes(weight, rows, columns)
    shape, chosen = ExpertShape(routing, tokens), choices(generator, "even", tokens, routing)
    lists, experts = upload_lists(runtime, shape, chosen), make(style)
    x = fill_slot(runtime, generator.standard_normal((shape.pairs, columns)).astype(np.float32))
    outputs = [fill_slot(runtime, np.full((shape.pairs, sum(rows)), np.nan, np.float32)) for _ in range(2)]
    keywords = {"shape": shape, "style": style, "label": "experts"}
    run_launches(runtime, [experts.sort(lists, shape=shape)])
    run_launches(runtime, [whole.launch(x, outputs[0], lists, **keywords)])
    rounds = ((4, 0, 2), (3, 1))
    table = np.full((len(rounds), 5), -1, np.int32)
    for number, own in enumerate(rounds):
        table[number, own] = range(len(own))
    slots = fill_slot(runtime, table)
    for number, own in enumerate(rounds):
        for slot, expert in enumerate(own):
            some.fill(slot, members[2 * expert : 2 * expert + 2])
        launches = [
            experts.place_in_slots(lists, slots, number, shape=shape),
            some.launch(x, outputs[1], lists, **keywords),
        ]
        run_launches(runtime, launches)
    np.testing.assert_array_equal(*(output.read() for output in outputs))


@pytest.mark.parametrize(
    ("name", "dtype"), [("w4a16", np.float32), ("w4a8", np.float32), ("f16", np.float16)]
)
@pytest.mark.parametrize("style", STYLES)
def test_a_whole_layer_is_that_of_its_experts(runtime, within_gate, make, style, name, dtype):
    weight, rounds = FORMATS[name]
    routing, hidden, width = Routing(6, 2, scale=1.5), 64, 96
    layer = Layer(runtime, dtype, weight, routing, hidden=hidden, width=width, rounds=rounds)
    experts, glue = make(style, dtype), GlueKernels(runtime, dtype, dtype, style=style)
    generator = np.random.default_rng(7)
    router = generator.standard_normal((routing.experts, hidden)).astype(np.float32)
    gate = GpuLinear.pack(runtime, [router], activation_dtype=dtype)
    for tokens in (1, 7, 33):
        shape = ExpertShape(routing, tokens)
        x = generator.standard_normal((tokens, hidden)).astype(dtype)
        lists = ExpertLists.allocate(runtime, shape)
        chosen, weights = (GuardedOutput(runtime, (tokens, 2), kind) for kind in (np.int32, np.float32))
        lists = replace(lists, chosen=chosen.slot, weights=weights.slot)
        slots = {
            columns: fill_slot(runtime, np.full((shape.pairs + 1, columns), np.nan, dtype))
            for columns in (hidden, width, 2 * width)
        }
        rows, active, both = slots[hidden], slots[width], slots[2 * width]
        logits = fill_slot(runtime, np.full((tokens, routing.experts), np.nan, np.float32))
        out = GuardedOutput(runtime, (tokens, hidden), dtype)
        given_x = fill_slot(runtime, x)
        grouped = {"shape": shape, "style": style, "label": "test"}
        members = Segments(both, both, (width, width), (0, 0))
        launches = [
            gate.launch(given_x, logits, tokens=tokens, output_dtype=np.float32, style=style, label="router"),
            experts.route(logits, lists, shape=shape),
            experts.sort(lists, shape=shape),
            experts.gather(given_x, rows, lists, shape=shape, columns=hidden),
            layer.gate_up.launch(rows, both, lists, **grouped),
            activate(glue, members, active, tokens=shape.pairs, intermediate=width),
            layer.down.launch(active, rows, lists, **grouped),
            experts.combine(rows, lists, out.slot, shape=shape, columns=hidden),
        ]
        run_launches(runtime, launches)
        separate = out.read()
        if style == "vector" and tokens == 1 and runtime.merges_launches:  # such passes are merged
            (merged,) = merge_launches(runtime, launches)
            assert isinstance(merged, MergedLaunch)
            run_launches(runtime, [merged])
            np.testing.assert_array_equal(out.read(), separate)
        scores = x.astype(np.float64) @ router.T.astype(np.float64)
        right = np.argsort(-scores, axis=1)[:, :2]
        np.testing.assert_array_equal(chosen.read(), right)
        exact = layer.exact(x, right, weights_of(scores, right, routing))
        errors = linear_errors(separate, exact)
        # Sums in float differ in single codes of the activations.
        gate_of = {"w4a16": 1e-10, "w4a8": 1e-5, "f16": 4e-6}[name]
        assert errors.nmse <= gate_of, (tokens, errors)


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_clipped_experts_with_biases(runtime, style, dtype):
    kernels = GlueKernels(runtime, dtype, dtype, style=style)
    for tokens in (1, 33):
        case = MixtureCase(Routing(6, 2), tokens, clip=GateClip(0.7, 1.702))
        numbers = check_case(case, kernels, np.random.default_rng(3))["sum"]
        assert linear_errors(*numbers).within("fp16" if dtype == np.float16 else "fp32")


@pytest.mark.parametrize(
    ("tokens", "rounds", "numbers"),
    [
        (2, False, {"image": 1}),
        (30, False, {"token_step": 2, "items": 2}),
        (30, True, {"token_step": 4, "image": 1}),
        (257, False, {"token_step": 16, "item_tokens": 4, "depth_inputs": 32}),
        (257, True, {"token_step": 16, "item_tokens": 4, "image": 1}),
    ],
)
def test_tuned_kernels_take_the_rows_of_a_place(runtime, within_gate, tokens, rounds, numbers):
    routing, weight = Routing(11, 2), WeightFormat(4, 32)
    layer, shape = Layer(runtime, np.float32, weight, routing, rounds=rounds), ExpertShape(routing, tokens)
    kind = ShapeClass.of(weight, integer_inputs=rounds, half=False, tokens=shape.step)
    variant = Variant("simt", parameters=with_numbers(default_parameters("simt", kind), numbers))
    assert variant.parameters.token_step < shape.step or "image" in numbers
    chosen = choices(np.random.default_rng(8), "skewed", tokens, routing)
    actual, exact, _ = layer.product(layer.gate_up, layer.gates, shape, variant, chosen)
    within_gate((actual, exact), shape)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_driver_that_mixes_experts_up_is_found_before_its_kernels_are_used(
    runtime, within_gate, monkeypatch, rounds
):
    """The kernels for this device take the weights of the first expert for all, the plain ones do not."""
    opened = OpenClRuntime(runtime._device)
    opened.traits = replace(opened.traits, has_matrix=False)
    opened.tests_kernels = True
    offset = "(place.x - first_expert) * expert_tiles"

    def wrong(files):
        source = read_sources(files)
        assert "linear.h" not in files or offset in source
        return "#ifdef PLAIN\n#define OWN 1\n#else\n#define OWN 0\n#endif\n" + source.replace(
            offset, f"OWN * {offset}"
        )

    monkeypatch.setattr("heterollm.kernels.gpu.programs.read_sources", wrong)
    routing = Routing(5, 2)
    layer = Layer(opened, np.float32, WeightFormat(4, 32), routing, rounds=rounds)
    for tokens in (1, 33):
        chosen = choices(np.random.default_rng(9), "even", tokens, routing)
        shape = ExpertShape(routing, tokens)
        actual, exact, _ = layer.product(layer.gate_up, layer.gates, shape, None, chosen)
        within_gate((actual, exact), shape)
    (note,) = opened.variants.notes
    assert "experts' linear int4 block 32" in note
    assert "wrong numbers" in note


# -- simulated time -----------------------------------------------------------------------------------------


def test_the_work_of_experts_counts_the_weights_that_are_chosen():
    weight, routing = WeightFormat(4, 32), Routing(8, 2)
    one = weight.weight_bytes(96, 64)
    first = grouped_work(weight, 96, 64, routing, 1, 8, 4, 4)
    # One token reads the weights of its experts alone; many read all.
    assert (first.read_bytes, first.flops) == (pytest.approx(2 * one + 2 * 64 * 4), 2 * 2 * 96 * 64)
    many = grouped_work(weight, 96, 64, routing, 300, 8, 4, 4)
    assert many.read_bytes == pytest.approx(8 * one + 600 * 64 * 4)
    assert (many.written_bytes, many.weights) == (600 * 96 * 4, 8 * 96 * 64)
    # Buffers with some of the experts share the work.
    parts = [grouped_work(weight, 96, 64, routing, 3, count, 4, 4) for count in (3, 5)]
    whole = grouped_work(weight, 96, 64, routing, 3, 8, 4, 4)
    assert sum(part.flops for part in parts) == pytest.approx(whole.flops)
    assert sum(part.read_bytes for part in parts) == pytest.approx(whole.read_bytes)
    # Of m choices of 2 experts each, an expert is left out with probability (3/4)^m.
    draws = np.random.default_rng(10).permuted(np.tile(np.arange(8), (4000, 3, 1)), axis=2)[..., :2]
    assert np.mean([len(set(draw.ravel())) for draw in draws]) == pytest.approx(routing.touched(3), rel=0.01)


def test_a_layer_of_experts_counts_all_weights_and_the_work_of_the_chosen():
    weight, routing = WeightFormat(4, 32), Routing(8, 2)
    down = OpSpec("down", 0, (Member("down", 64),), 96, weight, "activated", "delta")
    members = (Member("gate", 96), Member("up", 96))
    one = OpSpec("ffn", 0, members, 64, weight, "x", "delta", join="sum", then=down)
    layer = replace(one, group="experts", experts=routing)
    assert layer.weight_bytes() == 8 * one.weight_bytes()
    assert layer.flops(5) == 2 * one.flops(5)
    assert layer.read_bytes(1) == pytest.approx(2 * one.weight_bytes())
    assert one.read_bytes(7) == one.weight_bytes()


# -- refusals -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(runtime, make):
    shape, experts = ExpertShape(Routing(4, 2), 3), make("simt")
    lists = ExpertLists.allocate(runtime, shape)
    logits = runtime.shared((3, 4), np.float32)
    with pytest.raises(KernelError, match="a biased routing, and no other, has a bias"):
        experts.route(logits, lists, shape=shape, bias=logits)
    with pytest.raises(KernelError, match="experts' chosen slot has 24 bytes, 32 are needed"):
        experts.route(runtime.shared((9, 9), np.float32), lists, shape=ExpertShape(Routing(4, 2), 4))
    with pytest.raises(KernelError, match="not copied in units of 16"):
        experts.gather(logits, runtime.shared((9, 9), np.float32), lists, shape=shape, columns=2)
    given = taken_rows(runtime, np.zeros((4, 2), np.int32), rows=20)
    with pytest.raises(KernelError, match="rows that another processor takes slot has 32 bytes, 40"):
        experts.sort(
            ExpertLists.allocate(runtime, ExpertShape(Routing(5, 2), 3)),
            shape=ExpertShape(Routing(5, 2), 3),
            taken=given,
        )
    with pytest.raises(KernelError, match="counts of pairs slot has 32 bytes, 36"):
        experts.sort(lists, shape=shape, taken=replace(given, place=5))
    with pytest.raises(KernelError, match="gathering for the NPU output slot has 48 bytes, 320"):
        experts.gather_taken(logits, logits, lists, given, shape=shape, columns=4)
    layer = Layer(runtime, np.float32, WeightFormat(32), Routing(4, 2))
    with pytest.raises(KernelError, match="4 experts have weights, not 5"):
        layer.down.launch(logits, logits, lists, shape=ExpertShape(Routing(5, 2), 3), label="test")
    weights = [np.zeros((rows, 32), np.float32) for rows in (96, 64, 64)]
    with pytest.raises(KernelError, match=r"Members with \[64, 96\] rows are not those of 3 equal experts"):
        GroupedLinear.pack(runtime, weights, activation_dtype=np.float32, experts=3)
    with pytest.raises(KernelError, match="0 tokens"):
        ExpertShape(Routing(4, 2), 0)
    for wrong in ({"chosen": 5}, {"chosen": 0}, {"chosen": 2, "scoring": "sparsemixer"}):
        with pytest.raises(OptionError, match="No token can choose"):
            Routing(4, **wrong)
