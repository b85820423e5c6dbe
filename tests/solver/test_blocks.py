"""Feed-forward networks as blocks: placements, prices, and the chain with two ways through the network."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import decode, encode

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import WeightFormat, ffn_spec
from heterollm.solver import NpuLimits, Objective, Solver, describe
from heterollm.solver.candidates import aligned_splits, candidates
from heterollm.solver.chain import solve_chain
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.ffn import ffn_groups, ffn_shard, split_alignment
from heterollm.solver.objective import Power
from heterollm.solver.options import evaluate
from heterollm.solver.placements import FfnPlacement, Placement, RowsPlacement

quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 10**6)
lengths = st.one_of(st.sampled_from([1, 32, 64, 128]), st.integers(1, 300))


def block_of(made, wide=512, hidden=256, weight=None):
    """Return a block with its two groups."""
    options = {} if weight is None else {"weight": weight}
    gate_up = made.spec("gate_up", (wide, wide), hidden, **options)
    down = made.spec("down", (hidden,), wide, **options)
    return ffn_spec(gate_up, down), gate_up, down


# -- placements -------------------------------------------------------------------------------------------


def test_candidates_of_a_block_are_cuts_along_its_width_and_all_of_it(made):
    block, _, _ = block_of(made)
    limits = made.limits((1, 32, 64), forms=("a", "b"))
    found = list(candidates(block, 40, limits))
    assert len(found) == len(set(found))
    assert {item.npu_rows for item in found} == {(width, width) for width in range(64, 513, 64)}
    # Padded, or as a pipe; never a sequence cut, and never the GPU alone.
    assert {item.npu_lengths for item in found} == {(64,), (32, 32)}
    assert {item.form for item in found} == {"a", "b"}
    assert {item.kind(block, 40) for item in found} == {"block", "npu"}
    for item in found:
        item.check(block, 40)
        assert "block" in describe(item, block, 40)
    assert list(candidates(block, 40, None)) == []


@pytest.mark.parametrize(
    ("weight", "alignment", "expected"),
    [
        (WeightFormat(16), 1, 64),
        (WeightFormat(16), 256, 256),
        (WeightFormat(4, 32), 1, 64),
        (WeightFormat(4, 64), 1, 128),
        (WeightFormat(4, 128), 32, 256),
        (WeightFormat(4, 128), 192, 768),
    ],
)
def test_cuts_lie_on_all_alignments(made, weight, alignment, expected):
    block, gate_up, _ = block_of(made, wide=1536, weight=weight)
    assert split_alignment(block, alignment) == expected
    assert split_alignment(gate_up, alignment) == alignment
    widths = [rows[0] for rows in aligned_splits(block, alignment)]
    assert widths == list(range(expected, 1536, expected))


def test_forms_are_those_of_the_slice(made):
    """Such as pieces, which only a width above some limit has."""
    block, _, _ = block_of(made, wide=256)
    seen = []

    def forms(spec, length):
        seen.append((spec.member_rows, spec.then.columns))
        return ("plain", "pieces") if spec.then.columns > 128 else ("plain",)

    found = {(item.npu_rows[0], item.form) for item in candidates(block, 32, NpuLimits((32,), 64, forms))}
    assert found == {(64, "plain"), (128, "plain")} | set(itertools.product((192, 256), ("plain", "pieces")))
    assert set(seen) == {((width, width), width) for width in (64, 128, 192, 256)}


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (RowsPlacement(), "placed by its width"),
        (RowsPlacement((64, 64), (32,)), "placed by its width"),
        (FfnPlacement(0, (32,)), "not within 1 to 512"),
        (FfnPlacement(576, (32,)), "not within 1 to 512"),
        (FfnPlacement(64, (16,)), "an ffn must cover all tokens"),
        (FfnPlacement(512, (16,)), "an ffn must cover all tokens"),
        (FfnPlacement(64, (32, 32)), "would have no token"),
    ],
)
def test_what_no_block_is(made, placement, said):
    block, _, _ = block_of(made)
    with pytest.raises(PlanError, match=said):
        placement.check(block, 32)


def test_a_block_without_a_gate(made):
    """Placements name one member, and do not fit blocks with a gate."""
    gated, _, down = block_of(made)
    block = ffn_spec(made.spec("gate_up", (512,), 256), down)
    found = list(candidates(block, 32, made.limits((1, 32, 64))))
    assert {item.npu_rows for item in found} == {(width,) for width in range(64, 513, 64)}
    for item in found:
        item.check(block, 32)
        assert decode(encode(item), type=Placement) == item
        with pytest.raises(PlanError, match="has a gate"):
            item.check(gated, 32)
    assert b"gated" not in encode(FfnPlacement(64, (32,)))
    with pytest.raises(PlanError, match="has no gate"):
        FfnPlacement(64, (32,)).check(block, 32)


def test_a_block_of_two_formats_is_none(made):
    gate_up = made.spec("gate_up", (128, 128), 64, weight=WeightFormat(4, 32))
    specs = (gate_up, made.spec("down", (64,), 128), made.spec("head", (64,), layer=-1))
    solver = Solver(specs, made.limits(), made.block_costs(0), level="block")
    assert solver.kinds[0].ffn is None
    assert len(solver.length(32).choices) == 2


# -- prices -----------------------------------------------------------------------------------------------


@quickly
@given(seeds, st.sampled_from([1, 32, 40, 96]))
def test_prices_are_those_of_a_simulation(made, seed, tokens):
    block, gate_up, down = block_of(made, wide=256)
    limits, costs = made.limits((1, 32, 128)), made.block_costs(seed)
    slowdown, overheads = costs.slowdown(block, tokens), costs.overheads
    begin_us = overheads.hand_over_us + overheads.map_us
    for placement in candidates(block, tokens, limits):
        width = placement.npu_rows[0]
        npu_us = sum(costs.npu_us(block, (width, width), n, "plain") for n in placement.npu_lengths)
        gpu_end, npu_end = 0.0, begin_us + npu_us
        if width < 256:
            _, narrow = ffn_groups(ffn_shard(block, 256 - width))
            assert (narrow.group, narrow.columns, narrow.member_rows) == ("down", 256 - width, (256,))
            gpu_us = costs.gpu_us(gate_up, (256 - width,) * 2, tokens)
            gpu_us += costs.between_us(narrow, tokens) + costs.gpu_us(narrow, down.member_rows, tokens)
            gpu_end, npu_end = made.simulate(gpu_us, npu_us, slowdown, begin_us)
        item = evaluate(block, tokens, placement, costs)
        # One hand-over and one join.
        joined = npu_end + overheads.map_us + overheads.refill_us
        assert item.time_us == item.cost == pytest.approx(max(gpu_end, joined))
        assert (item.gpu_us, item.npu_us) == pytest.approx((gpu_end, npu_end - begin_us))
        assert item.is_split == (width < 256)


# -- the chain, against every combination -----------------------------------------------------------------


def small_case(made, seed):
    draw = random.Random(seed)
    block, gate_up, down = block_of(made, wide=draw.choice([192, 256]), hidden=128)
    specs = [made.spec("o", (128,), 128), gate_up, down]
    overheads = Overheads(draw.uniform(0, 60), draw.uniform(0, 200), draw.uniform(0, 30))
    costs = made.block_costs(
        seed, overheads=overheads, missing=draw.choice([0.0, 0.3]), high=draw.choice([300.0, 1000.0])
    )
    objective = Objective(
        energy_weight=draw.choice([0.0, 0.0, 0.5, 1.0]),
        power=Power(1.0, draw.uniform(0.5, 4), draw.uniform(0.5, 4)),
        gpu_share=draw.choice([1.0, 1.0, 0.6, 0.2]),
        margin_fraction=draw.choice([0.0, 0.05, 0.3]),
        forbidden=draw.choice([(), (), (), ("npu",)]),
    )
    tokens = draw.choice([1, 32, 40])
    return specs, draw.randint(1, 4), tokens, made.limits((1, 32), 64), costs, objective, block


def priced(case, spec):
    """Return all that may compute a group or block, caps and margins aside."""
    _, _, tokens, limits, costs, objective, _ = case
    found = (
        evaluate(spec, tokens, placement, costs, objective)
        for placement in candidates(spec, tokens, limits)
        if objective.allows_processors(placement, spec, tokens)
    )
    return [item for item in found if item is not None]


def within_cap(items, objective, *, exception):
    kept = [item for item in items if item.gpu_us <= objective.gpu_share * item.time_us]
    if kept or not exception or not items:
        return kept, True
    return [min(items, key=lambda item: item.gpu_us / item.time_us)], False


def beats(item, whole, objective):
    return not item.is_split or item.cost <= (1 - objective.margin_fraction) * whole


def whole_of(items):
    return min((item.cost for item in items if not item.is_split), default=math.inf)


def every_way(case):
    """Yield what the network costs in each way that may be taken, and whether that keeps the cap."""
    (_, gate_up, down), _, tokens, _, costs, objective, block = case
    activation_us = costs.between_us(down, tokens)
    activation = objective.cost(activation_us, activation_us, 0.0)
    groups = [within_cap(priced(case, spec), objective, exception=True) for spec in (gate_up, down)]
    wholes = [whole_of(items) for items, _ in groups]
    for first, second in itertools.product(groups[0][0], groups[1][0]):
        if beats(first, wholes[0], objective) and beats(second, wholes[1], objective):
            yield first.cost + activation + second.cost, groups[0][1] and groups[1][1]
    blocks, _ = within_cap(priced(case, block), objective, exception=False)
    bar = min(sum(wholes) + activation, whole_of(blocks))
    for item in blocks:
        if beats(item, bar, objective):
            yield item.cost, True


def cost_of(case, chain):
    """Return what the network costs in a chain, and whether it is a block."""
    _, _, tokens, _, costs, objective, _ = case
    network = [choice for choice in chain.choices if choice.spec.group != "o"]
    if len(network) == 1:
        return network[0].chosen.cost, True
    activation_us = costs.between_us(network[1].spec, tokens)
    return sum(choice.chosen.cost for choice in network) + objective.cost(
        activation_us, activation_us, 0.0
    ), False


SEEDS = range(150)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_way_through_the_network_is_cheaper(made, seed):
    case = small_case(made, seed)
    specs, layers, tokens, limits, costs, objective, block = case
    chain = solve_chain(specs, layers, tokens, limits, costs, objective, ffn=block)
    ways = list(every_way(case))
    keeping = [cost for cost, keeps in ways if keeps]
    own, _ = cost_of(case, chain)
    assert own == pytest.approx(min(keeping or [cost for cost, _ in ways]))
    # The rest of the chain is as without a block.
    tensor = solve_chain(specs, layers, tokens, limits, costs, objective)
    assert chain.choices[0] == tensor.choices[0]
    if not keeping or objective.gpu_share == 1.0:
        assert own <= cost_of(case, tensor)[0] * (1 + 1e-12)
        if not objective.energy_weight:
            assert chain.time_us <= tensor.time_us * (1 + 1e-12)


def test_the_cases_above_have_every_outcome(made):
    seen = set()
    for seed in SEEDS:
        case = small_case(made, seed)
        specs, layers, tokens, limits, costs, objective, block = case
        chain = solve_chain(specs, layers, tokens, limits, costs, objective, ffn=block)
        kinds = [
            choice.chosen.placement.kind(choice.spec, tokens)
            for choice in chain.choices
            if choice.spec.group != "o"
        ]
        seen |= {"apart"} if len(kinds) == 2 else {f"as {kinds[0]}"}
        if len(kinds) == 2 and not objective.forbidden:
            block_cost = min((item.cost for item in priced(case, block)), default=math.inf)
            seen |= {"held back"} if block_cost < cost_of(case, chain)[0] else set()
    assert seen == {"apart", "as block", "as npu", "held back"}


def test_the_other_way_is_named(made):
    for seed in SEEDS:
        specs, layers, tokens, limits, costs, objective, block = small_case(made, seed)
        chain = solve_chain(specs, layers, tokens, limits, costs, objective, ffn=block)
        groups = [choice.spec.group for choice in chain.choices]
        other = [choice.spec.group for choice in chain.rejected_path]
        assert (groups, other) in (
            (["o", "ffn"], ["gate_up", "down"]),
            (["o", "gate_up", "down"], ["ffn"]),
            (["o", "gate_up", "down"], []),
        )
        for choice in (*chain.choices, *chain.rejected_path):
            assert choice.chosen not in choice.others


def test_time_is_that_of_the_operators_in_a_row(made):
    for seed in range(40):
        specs, layers, tokens, limits, costs, objective, block = small_case(made, seed)
        chain = solve_chain(specs, layers, tokens, limits, costs, objective, ffn=block)
        expected = sum(choice.chosen.time_us for choice in chain.choices)
        expected += sum(costs.between_us(spec, tokens) for spec in specs[:2])
        if len(chain.choices) == 3:
            expected += costs.between_us(specs[2], tokens)
        assert chain.time_us == pytest.approx(layers * expected)


# -- what is chosen ---------------------------------------------------------------------------------------


@quickly
@given(seeds, lengths, st.floats(0.0, 0.3))
def test_never_worse_than_level_tensor(made, seed, tokens, margin):
    costs = (made.proportional_blocks if seed % 2 else made.block_costs)(seed)
    block, tensor = (
        Solver(made.model(), made.limits(), costs, Objective(margin_fraction=margin), level=level)
        for level in ("block", "tensor")
    )
    assert block.length(tokens).time_us <= tensor.length(tokens).time_us * (1 + 1e-12)
    assert made.head_choice(block, 1) == made.head_choice(tensor, 1)


def test_one_join_where_two_row_cuts_pay_two(made):
    """Equal parts that both cuts share evenly: the dearer a hand-over is, the sooner the block wins."""

    class Costs(made.proportional_blocks):
        def _draw(self, *what):
            return 100.0

    def groups(hand_over_us, refill_us):
        overheads = Overheads(hand_over_us=hand_over_us, refill_us=refill_us)
        costs = Costs(0, overheads=overheads, slowdown=Slowdown())
        solver = Solver(made.model(), made.limits(), costs, level="block")
        chain = solver.length(64)
        return [choice.spec.group for choice in chain.choices], [
            choice.chosen.is_split for choice in chain.choices
        ]

    found, split = groups(40.0, 40.0)
    assert found == ["qkv", "o", "ffn"]
    assert split[-1]


def test_parts_of_unlike_ratios_are_placed_apart(made):
    """The NPU is 20 times faster at gate and up and slower at down: one ratio for both loses."""

    class Costs(made.proportional_blocks):
        def gpu_us(self, spec, member_rows, tokens):
            return sum(member_rows) * spec.columns * tokens / 1e4

        def npu_us(self, spec, member_rows, length, form):
            slower = 2.0 if spec.group == "down" else 0.05
            own_us = slower * sum(member_rows) * spec.columns * length / 1e4
            if spec.then is not None:
                own_us += 2.0 * member_rows[0] * spec.then.rows * length / 1e4
            return own_us

    costs = Costs(0, overheads=Overheads(), slowdown=Slowdown())
    [chain] = Solver(made.model(), made.limits(), costs, level="block").length(64).chains
    assert [choice.spec.group for choice in chain.choices] == ["qkv", "o", "gate_up", "down"]
    assert [choice.spec.group for choice in chain.rejected_path] == ["ffn"]


class Mirror:
    """Costs of a block that are sums of its operators on either part, and the same with parts swapped."""

    overheads = Overheads()

    def __init__(self, seed, *, swapped):
        draw = random.Random(seed)
        self.swapped = swapped
        self.speeds = {
            (part, group): draw.uniform(0.2, 2.0) for part in "ab" for group in ("o", "gate_up", "down")
        }
        self.own_slowdown = draw.uniform(1.0, 1.5), draw.uniform(1.0, 1.5)

    def linear_us(self, part, group, rows, columns, tokens):
        return sum(rows) * columns * (20 + tokens) / 1e4 / self.speeds[part, group]

    def shard_us(self, part, spec, rows, tokens):
        if spec.then is None:
            return self.linear_us(part, spec.group, rows, spec.columns, tokens)
        own_us = self.linear_us(part, "gate_up", rows, spec.columns, tokens)
        return own_us + self.linear_us(part, "down", spec.then.member_rows, rows[0], tokens)

    def gpu_us(self, spec, rows, tokens):
        return self.shard_us("b" if self.swapped else "a", spec, rows, tokens)

    def npu_us(self, spec, rows, length, form):
        return self.shard_us("a" if self.swapped else "b", spec, rows, length)

    def slowdown(self, spec, tokens, form="", length=0):
        first, second = self.own_slowdown
        return Slowdown(second, first) if self.swapped else Slowdown(first, second)

    def between_us(self, spec, tokens):
        return 0.0


@quickly
@given(seeds, st.sampled_from([0.0, 0.05]))
def test_swapped_parts_give_the_mirrored_plan(made, seed, margin):
    """Where a block is cut, the other part has the rest of its width."""
    specs = (
        made.spec("gate_up", (320, 320), 256),
        made.spec("down", (256,), 320),
        made.spec("head", (64,), layer=-1),
    )
    one, other = (
        Solver(
            specs,
            made.limits((1, 32)),
            Mirror(seed, swapped=swapped),
            Objective(margin_fraction=margin),
            level="block",
        ).length(32)
        for swapped in (False, True)
    )
    assert one.time_us == pytest.approx(other.time_us)
    splits = [
        [choice.chosen.placement.npu_rows[0] for choice in chain.choices if choice.spec.group == "ffn"]
        for chain in (one, other)
    ]
    if splits[0] and splits[1] and one.choices[0].chosen.is_split:
        assert splits[0][0] + splits[1][0] == 320


def test_no_level_is_refused_by_name(made):
    with pytest.raises(OptionError, match="no level 'row'"):
        Solver(made.model(), made.limits(), made.costs(0), level="row")
