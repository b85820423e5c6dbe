"""Every candidate is legal, every kind is offered, and a plan made of them covers every length."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.kernels.npu import STANDARD_LENGTHS, LinearShape
from heterollm.kernels.ops import Phase
from heterollm.profiler.work import split_rows
from heterollm.solver import NpuLimits, Objective, Plan, Solver, check_plan, describe, model_shape
from heterollm.solver.candidates import (
    MAX_SPLITS,
    aligned_splits,
    candidates,
    npu_lengths_for,
    sequence_lengths_for,
    splits_near,
)
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.options import group_options
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

KINDS = {"gpu", "npu", "pipe", "row", "row pipe", "hybrid", "sequence", "multi-sequence"}
quickly = settings(max_examples=150, deadline=None, derandomize=True, database=None)
rows = st.lists(st.integers(1, 700), min_size=1, max_size=3).map(tuple)
alignments = st.sampled_from([1, 32, 64, 256])
standard_lengths = st.one_of(
    st.sets(st.sampled_from(STANDARD_LENGTHS)), st.sets(st.integers(1, 300), max_size=5)
).map(lambda chosen: tuple(sorted(chosen)))


@dataclass
class FakeNpu:
    """What checking a plan asks of an NPU backend."""

    standard_lengths: tuple[int, ...]
    row_alignment: int
    name: str = "the NPU"
    addressable_bytes: int | None = None

    def forms(self, shape, length):
        # Like a form in tiles of tokens, which not every length has.
        return ("plain", "tiles") if length % 64 == 0 else () if length == 13 else ("plain",)


def limits_of(npu, spec):
    return NpuLimits(
        npu.standard_lengths,
        npu.row_alignment,
        lambda spec, length: npu.forms(LinearShape(spec.weight, spec.columns), length),
    )


def kind_of(placement, spec, tokens):
    """The paper's names, a pipe of several lengths told apart from a single one."""
    kind, several = placement.kind(spec, tokens), len(placement.npu_lengths) > 1
    names = {"npu": "pipe", "hybrid": "row pipe", "sequence": "multi-sequence"}
    return names[kind] if several else kind


@quickly
@given(rows, alignments, standard_lengths, st.integers(1, 1030))
def test_every_candidate_is_legal(made, member_rows, alignment, chosen, tokens):
    spec, npu = made.spec("qkv", member_rows), FakeNpu(chosen, alignment)
    seen = set()
    for placement in candidates(spec, tokens, limits_of(npu, spec)):
        assert placement not in seen
        seen.add(placement)
        placement.check(spec, tokens)
        assert describe(placement, spec, tokens)
        entries = tuple(
            PlanEntry(phase, (1, tokens), (0, 0), "qkv", RowsPlacement()) for phase in get_args(Phase)
        )
        own = PlanEntry("prefill", (tokens, tokens), (0, 0), "qkv", placement)
        plan = Plan("tensor", "d", "fp16", model_shape([spec]), tokens, (own, *entries))
        check_plan(plan, [spec], npu, longest=2048, head_rows=1)
    assert RowsPlacement() in seen


@quickly
@given(rows, alignments, standard_lengths, st.data())
def test_a_candidate_of_a_range_is_legal_in_all_of_it(made, member_rows, alignment, chosen, data):
    spec, npu = made.spec("o", member_rows), FakeNpu(chosen, alignment)
    high = data.draw(st.integers(1, 400))
    low = data.draw(st.integers(max(1, high - 60), high))
    for placement in candidates(spec, high, limits_of(npu, spec), shortest=low):
        for tokens in range(low, high + 1):
            placement.check(spec, tokens)


def test_every_kind_is_drawn(made):
    """And several positions of each kind of cut."""
    found = Counter()
    draw = random.Random(1)
    for _ in range(40):
        spec, npu = made.spec("gate_up", (1120, 1120)), FakeNpu(STANDARD_LENGTHS, 64)
        tokens = draw.choice([1, 32, 70, 300, 600, 1000])
        placement = draw.choice(list(candidates(spec, tokens, limits_of(npu, spec))))
        found[kind_of(placement, spec, tokens)] += 1
    spec = made.spec("o", (1120,))
    every = {
        kind_of(placement, spec, tokens)
        for tokens in (1, 32, 300)
        for placement in candidates(spec, tokens, limits_of(FakeNpu(STANDARD_LENGTHS, 64), spec))
    }
    assert every == KINDS
    assert len(found) >= 5


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_can_win(made, kind):
    """With times that favour it, each kind is what the solver takes."""
    spec_rows = (1024,)

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 1.0 if (sum(member_rows), tokens) in gpu_part else 1000.0

        def npu_us(self, spec, member_rows, length, form):
            return 1.0 if (member_rows, length) in npu_part else 1000.0

    specs = (made.spec("o", spec_rows), made.spec("head", (64,), layer=-1))
    limits = made.limits(STANDARD_LENGTHS)
    tokens = 600 if kind != "row" else 512
    options = [
        placement
        for placement in candidates(specs[0], tokens, limits)
        if kind_of(placement, specs[0], tokens) == kind
    ]
    favoured = options[len(options) // 2]
    npu_part = {(favoured.npu_rows, length) for length in favoured.npu_lengths}
    gpu_part = set()
    if not favoured.npu_lengths:
        gpu_part = {(1024, tokens)}
    elif favoured.npu_rows != spec_rows:
        gpu_part = {(1024 - favoured.npu_rows[0], tokens)}
    elif sum(favoured.npu_lengths) < tokens:
        gpu_part = {(1024, tokens - sum(favoured.npu_lengths))}
    solver = Solver(specs, limits, Costs(0, overheads=made.free))
    chosen = solver.length(tokens).choices[0].chosen.placement
    assert kind_of(chosen, specs[0], tokens) == kind


def test_the_papers_examples_are_offered():
    """300 = 256 + 44, 600 = 512 + 32 + 56, and the margins of NPU-pipe."""
    assert (256,) in sequence_lengths_for(300, STANDARD_LENGTHS, 300)
    assert (512, 32) in sequence_lengths_for(600, STANDARD_LENGTHS, 600)
    assert set(npu_lengths_for(600, STANDARD_LENGTHS)) == {(1024,), (512, 128), (512, 64, 32)}
    assert set(npu_lengths_for(525, STANDARD_LENGTHS)) == {(1024,), (512, 32)}
    assert set(npu_lengths_for(256, STANDARD_LENGTHS)) == {(256,)}
    assert set(npu_lengths_for(1030, STANDARD_LENGTHS)) == {(1024, 32)}
    assert list(npu_lengths_for(5, (1,))) == []
    assert list(npu_lengths_for(5, ())) == []


@quickly
@given(standard_lengths, st.integers(1, 1030))
def test_sums_of_standard_lengths_are_each_offered_once(chosen, tokens):
    offered = list(sequence_lengths_for(tokens, chosen, tokens))
    assert len({sum(lengths) for lengths in offered}) == len(offered) <= 1024
    assert all(0 < sum(lengths) < tokens for lengths in offered)


@pytest.mark.parametrize(("tokens", "step"), [(33, 32), (300, 32), (1024, 32), (1030, 64), (2048, 64)])
def test_every_multiple_of_the_shortest_length_that_counts_is_offered(tokens, step):
    """Pieces of less than a 32nd of the pass do not count."""
    offered = sequence_lengths_for(tokens, STANDARD_LENGTHS, tokens)
    assert {sum(lengths) for lengths in offered} == set(range(step, tokens, step))


@quickly
@given(rows, alignments)
def test_cuts_are_on_the_alignment_and_few(made, member_rows, alignment):
    spec = made.spec("qkv", member_rows)
    splits = aligned_splits(spec, alignment)
    assert splits == sorted(set(splits))
    assert len(splits) <= MAX_SPLITS
    for split in splits:
        assert any(split)
        assert split != member_rows
        assert all(
            rows % alignment == 0 or rows == whole for rows, whole in zip(split, member_rows, strict=True)
        )
    if max(member_rows) > alignment:
        assert splits


@quickly
@given(rows, alignments, st.integers(1, 20), st.integers(0, 10**6))
def test_cuts_beside_others_are_so_many_positions_away(made, member_rows, alignment, stride, seed):
    spec = made.spec("qkv", member_rows)
    draw = random.Random(seed)
    splits = aligned_splits(spec, alignment)
    held = draw.sample(splits, min(2, len(splits)))
    near = splits_near(spec, alignment, [*held, member_rows, ()], stride)
    assert near == sorted(set(near))
    assert set(held) <= set(near)
    assert member_rows not in near
    assert len(near) <= 3 * (len(held) + 2)
    longest = member_rows.index(max(member_rows))
    for rows in near:
        assert any(rows)
        assert all(own % alignment == 0 or own == whole for own, whole in zip(rows, member_rows, strict=True))
        steps = (own[longest] // alignment for own in (*held, member_rows, (0,) * len(member_rows)))
        assert any(abs(rows[longest] // alignment - step) in (0, stride) for step in steps)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [1, 128])
def test_wide_groups_are_cut_at_the_best_of_all_positions(made, seed, tokens):
    """Of 56 and 501 positions 24 are tried at first: the others come beside the best of them."""
    shapes = {"o": ((4096,), 4096), "gate_up": ((14336, 14336), 4096), "head": ((128256,), 4096)}
    specs = tuple(
        made.spec(group, rows, columns, -1 if group == "head" else 0)
        for group, (rows, columns) in shapes.items()
    )
    costs = made.proportional(seed, overheads=Overheads(), slowdown=Slowdown())
    solver = Solver(
        specs, made.limits((1, 128), 256), costs, Objective(margin_fraction=0.0), chunk_length=128
    )
    slices = solver.slices({tokens: 1.0})
    places = []
    for choice in (*solver.length(tokens, slices).choices, made.head_choice(solver, 1, slices)):
        spec, chosen = choice.spec, choice.chosen
        steps = max(spec.member_rows) // 256
        every = [split_rows(spec.member_rows, step / steps, 256) for step in range(1, steps + 1)]
        count = 1 if spec.group == "head" else tokens
        taken, _ = group_options(spec, count, solver.limits, costs, solver.objective, every)
        assert chosen.cost == pytest.approx(taken[0].cost)
        places.append(chosen.placement.npu_rows in aligned_splits(spec, 256) or not chosen.is_split)
    assert not all(places)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_covers_every_length_legally(made, seed):
    draw = random.Random(seed)
    chosen = tuple(sorted({1, *draw.sample([4, 20, 32, 48, 64, 100, 128, 256], draw.randint(1, 5))}))
    npu = FakeNpu(chosen, draw.choice([32, 64]))
    specs = made.model(3, keys=draw.choice([8, 64, 96]), wide=draw.choice([500, 512]))
    chunk, head_rows = draw.choice([5, 40, 97, 160, 256]), draw.choice([1, 7, 32, 64])
    costs = (made.costs if seed % 2 else made.proportional)(seed, missing=draw.choice([0.0, 0.3]))
    solver = Solver(specs, limits_of(npu, specs[0]), costs, chunk_length=chunk, head_rows=head_rows)
    plan = solver.plan(device="d", precision="fp16")
    check_plan(plan, specs, npu, longest=chunk, head_rows=head_rows)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.chunk_length == chunk
    assert plan.shape == model_shape(specs)
    for phase, spec in itertools.product(get_args(Phase), (*solver.kinds[0].specs, solver.head)):
        entries = [entry for entry in plan.entries if entry.phase == phase and entry.group == spec.group]
        # Ranges follow each other without a gap; neighbours differ, but short ones have their own entries.
        starts = [entry.lengths[0] for entry in entries]
        assert starts == [1, *(entry.lengths[1] + 1 for entry in entries[:-1])]
        assert entries[-1].lengths[1] == chunk
        for one, other in itertools.pairwise(entries):
            if one.lengths[1] < 32:
                continue
            assert (one.placement.npu_rows, one.placement.npu_lengths, one.placement.form) != (
                other.placement.npu_rows,
                other.placement.npu_lengths,
                other.placement.form,
            )
        last = min(head_rows, chunk) if spec.group == "head" else chunk
        for entry in entries:
            low, high = entry.lengths[0], min(entry.lengths[1], last)
            if low > last:
                continue
            assert plan.placement(phase, low, spec) is plan.placement(phase, high, spec) is entry.placement
            assert entry.placement.predicted_us > 0
            for tokens in range(low, high + 1):
                entry.placement.check(spec, tokens)


def test_a_plan_is_what_is_chosen_at_the_end_of_each_range(made):
    solver = Solver(made.model(), made.limits(), made.proportional(5), chunk_length=200)
    plan, slices = solver.plan(device="d", precision="fp16"), solver.slices()
    kinds = set()
    for tokens in (1, 32, 64, 96, 128, 160, 200):
        for choice in solver.length(tokens, slices).choices:
            own = plan.placement("prefill", tokens, choice.spec)
            assert own.npu_rows == choice.chosen.placement.npu_rows
            assert own.npu_lengths == choice.chosen.placement.npu_lengths
            assert plan.placement("decode", tokens, choice.spec) == own
            kinds.add(own.kind(choice.spec, tokens))
    assert len(kinds) > 1
    for rows in (1, 32):
        choice = made.head_choice(solver, rows, slices)
        assert plan.placement("decode", rows, choice.spec).npu_rows == choice.chosen.placement.npu_rows


def test_runners_up_are_named(made):
    solver = Solver(made.model(), made.limits(), made.proportional(5), chunk_length=64)
    plan = solver.plan(device="d", precision="fp16")
    for entry in plan.entries:
        assert entry.placement.rejected
        assert len({other.description for other in entry.placement.rejected}) == len(entry.placement.rejected)
