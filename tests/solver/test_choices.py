"""What is chosen: never worse than one part, by a margin, always the same, mirrored, within the options."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import OptionError, PlanError
from heterollm.profiler.records import CopyKey, Record
from heterollm.solver import Budget, Objective, Solver
from heterollm.solver.candidates import candidates
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.objective import Power
from heterollm.solver.options import evaluate
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.profile_overheads import overheads_of

quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 10**6)
lengths = st.one_of(st.sampled_from([1, 32, 64, 128]), st.integers(1, 300))


def total_us(solver, tokens, items):
    """Time of all layers with one item a group."""
    between_us = sum(solver.costs.between_us(spec, tokens) for spec in solver.kinds[0].specs)
    return solver.kinds[0].count * (between_us + sum(item.time_us for item in items))


def priced(solver, spec, tokens):
    found = (
        evaluate(spec, tokens, placement, solver.costs, solver.objective)
        for placement in candidates(spec, tokens, solver.limits)
    )
    return [item for item in found if item is not None]


@quickly
@given(seeds, lengths, st.floats(0.0, 0.3))
def test_never_worse_than_one_part(made, seed, tokens, margin):
    solver = Solver(made.model(), made.limits(), made.costs(seed), Objective(margin_fraction=margin))
    chain = solver.length(tokens)
    by_group = [
        [item for item in priced(solver, spec, tokens) if not item.is_split] for spec in solver.kinds[0].specs
    ]
    for items in itertools.product(*by_group):
        assert chain.time_us <= total_us(solver, tokens, items) * (1 + 1e-12)


@quickly
@given(seeds, lengths, st.floats(0.0, 0.5))
def test_a_cut_gains_its_margin(made, seed, tokens, margin):
    solver = Solver(made.model(), made.limits(), made.costs(seed), Objective(margin_fraction=margin))
    splits = 0
    for choice in solver.length(tokens).choices:
        whole = [item for item in priced(solver, choice.spec, tokens) if not item.is_split]
        if choice.chosen.is_split:
            splits += 1
            assert choice.chosen.cost <= (1 - margin) * min(item.cost for item in whole)
    if margin == 0.0 and tokens == 32:
        assert splits


def test_a_cut_below_the_margin_is_not_taken(made):
    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 100.0 if sum(member_rows) == spec.rows else 90.0

        def npu_us(self, spec, member_rows, length, form):
            return 1000.0 if sum(member_rows) == spec.rows else 95.0

    def kind(margin, refill_us):
        costs = Costs(0, overheads=Overheads(refill_us=refill_us), slowdown=Slowdown())
        solver = Solver(made.model(), made.limits((32,)), costs, Objective(margin_fraction=margin))
        return {choice.chosen.placement.kind(choice.spec, 32) for choice in solver.length(32).choices}

    assert kind(0.04, 0.0) == {"row"}
    assert kind(0.06, 0.0) == {"gpu"}
    # The NPU ends last: what the next operator waits for an empty queue eats the gain.
    assert kind(0.04, 2.0) == {"gpu"}


def test_a_wait_for_the_whole_queue_delays_the_gpus_part_too(made):
    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 1.0 * sum(member_rows)

        def npu_us(self, spec, member_rows, length, form):
            return 100.0

    spec, rows = made.spec("o", (128,)), (64,)
    split = RowsPlacement(rows, (32,))
    ways = {"hand_over_us": 50.0, "refill_us": 7.0, "return_us": 30.0}

    def time_us(**changed):
        costs = Costs(0, overheads=Overheads(**{**ways, **changed}), slowdown=Slowdown())
        return evaluate(spec, 32, split, costs).time_us

    # The GPU's 64 us hide behind the hand-over and the NPU either way; the copy back is behind both.
    assert time_us() == 50.0 + 100.0 + 30.0 + 7.0
    assert time_us(empties_queue=True) == time_us()
    # A GPU's part that takes longer than the NPU's begins with it in an empty queue, not before it.
    long = evaluate(
        made.spec("o", (512,)),
        32,
        RowsPlacement((64,), (32,)),
        Costs(0, overheads=Overheads(**ways, empties_queue=True), slowdown=Slowdown()),
    )
    assert long.time_us == 50.0 + 7.0 + (512.0 - 64.0) + 30.0 + 7.0
    # The NPU alone waits as it did.
    alone = RowsPlacement((128,), (32,))
    costs = [
        Costs(0, overheads=Overheads(**ways, empties_queue=empty), slowdown=Slowdown())
        for empty in (False, True)
    ]
    assert [evaluate(spec, 32, alone, one).time_us for one in costs] == [187.0, 187.0]


def test_mapping_is_priced_by_size_and_delays_the_gpu(sample_profile, made):
    """From a profile of mapped memory; one of coherent memory has no such price."""
    times_us = {("acquire", 8192): 30.0, ("release", 8192): 10.0}
    times_us |= {("acquire", 8192 + 10**6): 130.0, ("release", 8192 + 10**6): 110.0}

    def overheads(coherent):
        profile = sample_profile(coherent=coherent, activation_dtype="float16")
        for (method, size), time_us in times_us.items():
            profile.add(Record(CopyKey(method, size), (time_us,), taken_s=1e9))
        return overheads_of(profile)

    assert overheads(True).mapping_us(10**6) == 0.0
    assert not overheads(True).empties_queue
    mapped = overheads(False)
    assert mapped.empties_queue
    # Two buffers of 20 us, less the time of 8192 bytes, and 0.1 us for a thousand bytes.
    assert mapped.mapping_us(0) == pytest.approx(2 * (20.0 - 0.8192))
    assert mapped.mapping_us(10**6) - mapped.mapping_us(0) == pytest.approx(200.0)

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 1000.0

        def npu_us(self, spec, member_rows, length, form):
            return 700.0

    spec, split = made.spec("o", (128,), columns=64), RowsPlacement((64,), (32,))
    own = Overheads(map_us=mapped.map_us, map_us_per_value=mapped.map_us_per_value, empties_queue=True)
    map_us = own.mapping_us(32 * (64 + 64))
    found = evaluate(spec, 32, split, Costs(0, overheads=own, slowdown=Slowdown()))
    assert found.time_us == pytest.approx(map_us + 1000.0)
    alone = evaluate(spec, 32, RowsPlacement((128,), (32,)), Costs(0, overheads=own, slowdown=Slowdown()))
    assert alone.time_us == pytest.approx(2 * own.mapping_us(32 * (64 + 128)) + 700.0)


PLAN_IN_A_PROCESS = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("made", sys.argv[1])
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
from heterollm.kernels.ops import GraphMemory
from heterollm.solver.slices import Budget
from heterollm.solver.solve import Solver
for seed in range(4):
    costs = made.RandomCosts(seed)
    budget = Budget(100_000, GraphMemory(bool(seed % 2)))
    limits = made.make_limits(forms=("a", "b"))
    solver = Solver(made.make_model(), limits, costs, budget=budget, chunk_length=160)
    print(hashlib.sha256(solver.plan(device="d", precision="fp16").to_json().encode()).hexdigest())
"""


def test_equal_inputs_give_equal_plans_in_every_process(tmp_path):
    outputs = []
    for hash_seed in ("0", "1", "77"):
        command = [sys.executable, "-c", PLAN_IN_A_PROCESS, str(Path(__file__).with_name("conftest.py"))]
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=variables, check=True
        )
        outputs.append(done.stdout)
    assert len(outputs[0].split()) == 4
    assert len(set(outputs)) == 1


class Swapped:
    """The costs of a device whose parts change names."""

    def __init__(self, costs):
        self.costs, self.overheads = costs, costs.overheads

    def gpu_us(self, spec, member_rows, tokens):
        return self.costs.npu_us(spec, member_rows, tokens, "plain")

    def npu_us(self, spec, member_rows, length, form):
        return self.costs.gpu_us(spec, member_rows, length)

    def slowdown(self, spec, tokens, form="", length=0):
        found = self.costs.slowdown(spec, tokens)
        return Slowdown(found.npu, found.gpu)

    def between_us(self, spec, tokens):
        return self.costs.between_us(spec, tokens)


@quickly
@given(seeds, st.sampled_from([0.0, 0.05]))
def test_swapped_parts_give_the_mirrored_plan(made, seed, margin):
    """A mirror of row cuts: who computed all computes nothing, who had r of n rows has n - r.

    Sequence cuts have no mirror, for only the NPU needs standard lengths: the pass is as long as the shortest
    graph of several tokens, where there are none. Members of one group have equally many rows, a multiple of
    the alignment, so that the rest of a cut is itself a cut. Handing over costs nothing, for only one part is
    told when to begin.
    """
    specs = tuple(made.spec(group, rows) for group, rows in (("o", (512,)), ("gate_up", (320, 320))))
    specs = (*specs, made.spec("head", (64,), layer=-1))
    objective = Objective(margin_fraction=margin)
    costs = made.proportional if seed % 2 else made.costs
    costs = costs(seed, overheads=Overheads())
    one, other = (
        Solver(specs, made.limits((1, 32)), held, objective).length(32) for held in (costs, Swapped(costs))
    )
    assert one.time_us == pytest.approx(other.time_us)
    for first, second in zip(one.choices, other.choices, strict=True):
        rows = first.chosen.placement.npu_rows or (0,) * len(first.spec.members)
        mirrored = second.chosen.placement.npu_rows or (0,) * len(first.spec.members)
        assert tuple(map(sum, zip(rows, mirrored, strict=True))) == first.spec.member_rows
        assert first.chosen.is_split == second.chosen.is_split


# -- options ----------------------------------------------------------------------------------------------


@quickly
@given(seeds, lengths, st.floats(0.05, 1.0))
def test_the_cap_on_the_gpu_is_kept_or_the_nearest_is_taken(made, seed, tokens, share):
    costs = made.costs(seed, missing=0.7)
    solver = Solver(made.model(), made.limits(), costs, Objective(gpu_share=share))
    for choice in solver.length(tokens).choices:
        shares = [item.gpu_us / item.time_us for item in priced(solver, choice.spec, tokens)]
        own = choice.chosen.gpu_us / choice.chosen.time_us
        assert own <= share or own == min(shares)


def test_the_cap_moves_the_choice(made):
    costs = made.proportional(3, overheads=Overheads(), slowdown=Slowdown())
    shares = []
    for share in (1.0, 0.5, 0.05):
        solver = Solver(made.model(), made.limits(), costs, Objective(gpu_share=share))
        chosen = [choice.chosen for choice in solver.length(64).choices]
        shares.append(sum(item.gpu_us for item in chosen) / sum(item.time_us for item in chosen))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    assert shares[-1] <= 0.05


def energy_uj(solver, chain):
    """Energy of all layers, idle time in front of an empty queue included."""
    chosen = [choice.chosen for choice in chain.choices]
    power = solver.objective.power
    return solver.kinds[0].count * sum(
        power.energy_uj(item.time_us, item.gpu_us, item.npu_us) for item in chosen
    )


@quickly
@given(seeds, lengths)
def test_more_weight_on_energy_never_takes_more_energy(made, seed, tokens):
    """Without a margin: with one, the cuts that may be taken depend on the weight."""
    draw = random.Random(seed)
    power = Power(draw.uniform(0.1, 3), draw.uniform(0.1, 8), draw.uniform(0.1, 8))
    costs = made.costs(seed)
    energies, times = [], []
    for weight in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        objective = Objective(weight, power, margin_fraction=0.0)
        solver = Solver(made.model(), made.limits(), costs, objective)
        chain = solver.length(tokens)
        energies.append(energy_uj(solver, chain))
        times.append(chain.time_us)
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(energies))
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(times))


def test_energy_can_move_the_choice(made):
    costs = made.proportional(3, overheads=Overheads(), slowdown=Slowdown())
    chosen = []
    for weight in (0.0, 1.0):
        objective = Objective(weight, Power(0.1, 10.0, 0.2))
        chain = Solver(made.model(), made.limits(), costs, objective).length(64)
        chosen.append([choice.chosen.placement.kind(choice.spec, 64) for choice in chain.choices])
    assert "row" in chosen[0]
    assert chosen[1] == ["npu"] * 4


@pytest.mark.parametrize("forbidden", ["gpu", "npu"])
@pytest.mark.parametrize("standard_lengths", [(1, 20, 32), (1, 20), (48,)])
@pytest.mark.parametrize("seed", range(2))
def test_a_forbidden_part_has_nothing(made, forbidden, standard_lengths, seed):
    objective = Objective(forbidden=(forbidden,))
    solver = Solver(
        made.model(), made.limits(standard_lengths), made.costs(seed), objective, chunk_length=150
    )
    plan = solver.plan(device="d", precision="fp16")
    for phase, tokens, spec in itertools.product(("prefill", "decode"), range(1, 151), solver.specs):
        if spec.group == "head" and tokens > solver.head_rows:
            continue
        placement = plan.placement(phase, tokens, spec)
        if forbidden == "npu":
            assert placement.kind(spec, tokens) == "gpu"
        else:
            assert placement.kind(spec, tokens) == "npu"


def test_nobody_can(made):
    with pytest.raises(PlanError, match=r"No processor can compute qkv at 7 tokens"):
        Solver(made.model(), None, made.costs(0), Objective(forbidden=("gpu",))).length(7)
    solver = Solver(made.model(), made.limits(), made.costs(0), Objective(forbidden=("gpu",)), Budget(100))
    with pytest.raises(PlanError, match=r"budget of 100 bytes"):
        solver.plan(device="d", precision="fp16")


NAN = float("nan")
POWER = Power(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"energy_weight": 0.5},
        {"energy_weight": -0.1, "power": POWER},
        {"energy_weight": 1.1, "power": POWER},
        {"energy_weight": NAN, "power": POWER},
        {"energy_weight": 0.5, "power": Power(0.0, 0.0, 0.0)},
        {"energy_weight": 0.5, "power": Power(1.0, NAN, 0.0)},
        {"energy_weight": 0.5, "power": Power(1.0, -1.0, 0.0)},
        {"gpu_share": 0.0},
        {"gpu_share": 1.5},
        {"gpu_share": NAN},
        {"margin_fraction": 1.0},
        {"margin_fraction": -0.01},
        {"margin_fraction": NAN},
        {"forbidden": ("cpu",)},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError) as caught:
        Objective(**options)
    assert caught.value.fix


def test_bad_sizes_are_refused(made):
    with pytest.raises(OptionError):
        Budget(-1)
    for options in ({"chunk_length": 0}, {"head_rows": 0}):
        with pytest.raises(OptionError):
            Solver(made.model(), made.limits(), made.costs(0), **options)
    solver = Solver(made.model(), made.limits(), made.costs(0))
    with pytest.raises(OptionError):
        solver.length(0)
    for weights in ({1: -1.0}, {1: NAN}, {1: float("inf")}, {0: 1.0}, {-5: 1.0}):
        with pytest.raises(OptionError):
            solver.slices(weights)


def test_without_an_npu_all_is_on_the_gpu(made):
    plan = Solver(made.model(), None, made.costs(0)).plan(device="d", precision="fp16")
    assert not plan.uses_npu
    assert {entry.placement.npu_rows for entry in plan.entries} == {RowsPlacement().npu_rows}
