"""Splits against the error of their prediction: made-up noise on devices whose times are known."""

import math
import random
from dataclasses import replace

import pytest

from heterollm.model.known import ModelSize
from heterollm.profiler.predict import Predictor
from heterollm.profiler.records import FenceKey, LinearKey, LinearPoint, Profile, Record
from heterollm.profiler.work import rest_rows, split_rows
from heterollm.report.plan import _reason
from heterollm.solver import Objective, ProfileCosts, Solver, limits_of
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.options import evaluate
from heterollm.solver.placements import RejectedOption

SHAPE = ModelSize(1024, 2816, 1, 16, 4, 1024, False, 64, 2048).shape("made")
LENGTHS = [1, 64, 256]
SYNC_US = 5.0


class Law:
    """A GPU, and an NPU that takes ``slower`` times as long; a decoded token waits for its weights."""

    overheads = Overheads(hand_over_us=SYNC_US)

    def __init__(self, slower):
        self.slower = slower

    def gpu_us(self, spec, member_rows, tokens):
        return sum(member_rows) * spec.columns * (tokens + 24) / 1e6

    def npu_us(self, spec, member_rows, length, form):
        return self.slower * self.gpu_us(spec, member_rows, length)

    def slowdown(self, spec, tokens, form="", length=0):
        return Slowdown()

    def between_us(self, spec, tokens):
        return 0.0


def profiled(law, sigma, seed, time_kind="real"):
    """Return a profile of a law; ``sigma`` is the standard deviation of each sample's logarithm."""
    draw = random.Random(f"{seed}")
    description = {"device": "made", "time": time_kind, "npu": "an NPU", "cache_bytes": 0}
    made = Profile(description | {"npu_standard_lengths": LENGTHS, "npu_row_alignment": 64})

    def add(key, time_us):
        samples = tuple(time_us * math.exp(draw.gauss(0.0, sigma)) for _ in range(7))
        made.add(Record(key, samples, taken_s=1.0))

    for spec in SHAPE.specs:
        whole = spec.member_rows
        shares = [split_rows(whole, share, 64) for share in (0.125, 0.25, 0.5, 0.75, 0.875)]
        for tokens in (1,) if spec.group == "head" else LENGTHS:
            for rows in {whole, *(rest_rows(whole, own) for own in shares)}:
                point = LinearPoint.of(spec, tokens, member_rows=rows)
                add(LinearKey("gpu", point, "code"), law.gpu_us(spec, rows, tokens))
            for rows in {whole, *shares} - {tuple(0 for _ in whole)}:
                point = LinearPoint.of(spec, tokens, member_rows=rows, form="matmul_nbits")
                add(LinearKey("npu", point, "code"), law.npu_us(spec, rows, tokens, ""))
    add(FenceKey("poll", 300), SYNC_US)
    return made


def solver_of(profile):
    costs = ProfileCosts(profile, SHAPE, predictor=Predictor.fit(profile))
    goal = Objective(errors=costs.errors)
    return Solver((*SHAPE.layer, SHAPE.head), limits_of(profile), costs, goal, chunk_length=256)


def gains(solver, law, tokens):
    """Yield, for each group: whether it is split, its true gain over the GPU, and the stated error."""
    for choice in solver.length(tokens).choices:
        spec, option = choice.spec, choice.chosen
        alone_us = law.gpu_us(spec, spec.member_rows, tokens)
        truth_us = evaluate(spec, tokens, option.placement, law).time_us
        yield option.is_split, 1.0 - truth_us / alone_us, option.error_us / alone_us


@pytest.mark.parametrize("tokens", LENGTHS)
def test_clean_times_and_large_gains_are_split(tokens):
    for slower, sigma in ((1.0, 0.0), (9.0, 0.0), (1.0, 0.1), (1.0, 0.2)):
        law = Law(slower)
        found = list(gains(solver_of(profiled(law, sigma, 1)), law, tokens))
        # The small groups of a token gain less than a sync takes.
        split = [is_split for is_split, *_ in found]
        assert any(split), (slower, sigma)
        assert all(split) or tokens == 1 or slower > 1.0, (slower, sigma)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("seed", range(6))
def test_gains_below_the_error_are_not_taken(tokens, seed):
    """By a few percent, with times that are uncertain by a tenth; without errors such splits are taken."""
    law = Law(12.0)
    solver = solver_of(profiled(law, 0.15, seed))
    careless = replace(solver, objective=Objective())
    assert any(is_split for is_split, *_ in gains(careless, law, 256))
    for is_split, *_ in gains(solver, law, tokens):
        assert not is_split


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("slower", [1.0, 3.0, 8.0])
def test_no_split_is_slower_in_truth_than_the_gpu_by_more_than_its_error(slower, sigma):
    law, splits = Law(slower), 0
    for seed in range(4):
        solver = solver_of(profiled(law, sigma, seed))
        for tokens in LENGTHS:
            for is_split, gain, error in gains(solver, law, tokens):
                splits += is_split
                assert gain >= -error
                assert not is_split or gain > -0.01 - sigma / 4
    assert splits or slower > 1.0


def test_modelled_times_are_exact():
    law = Law(12.0)
    for kind in ("simulated", "emulated"):
        solver = solver_of(profiled(law, 0.15, 0, kind))
        assert solver.objective.errors is None
        assert all(error == 0.0 for _, _, error in gains(solver, law, 256))


def test_the_explanation_says_why_a_split_was_not_taken():
    law = Law(12.0)
    solver = solver_of(profiled(law, 0.15, 0))
    plan = solver.plan(device="made", precision="w4a16")
    rejected = [
        (entry.placement.predicted_us, other)
        for entry in plan.entries
        if entry.group == "gate_up" and entry.lengths[0] <= 256 <= entry.lengths[1]
        for other in entry.placement.rejected
        if other.error_us
    ]
    assert rejected
    for chosen_us, other in rejected:
        assert other.error_us > chosen_us - other.predicted_us
    words = _reason(RejectedOption("row: NPU 64 of 640 rows at 256", 92.0, error_us=11.0), 100.0)
    assert words == (
        "row: NPU 64 of 640 rows at 256: 92 us (-8%, less than the error of its prediction, 11%)"
    )
