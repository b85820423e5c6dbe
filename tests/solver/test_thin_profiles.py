"""Plans from profiles of a few points: what they predict is what happens, and no worse than one part alone.

The devices are laws (a fixed cost, and the time of reading or of computing, whichever is longer), their
profiles what a quick run of two models measures: whole groups and halves of them, at 1, 64 and 256 tokens on
the GPU and at 1 and 256 on the NPU, with the noise of a busy machine.
"""

import functools
import random

import pytest
from msgspec import structs

from heterollm.model.known import ModelSize
from heterollm.profiler.predict import Predictor
from heterollm.profiler.predict.predictor import ProcessorFit, ProcessorPredictor
from heterollm.profiler.predict.time_model import TimeModel
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record
from heterollm.profiler.work import rest_rows, split_rows
from heterollm.solver import Objective, ProfileCosts, Solver, limits_of
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.options import evaluate

TINY = ModelSize(256, 768, 4, 4, 2, 2048, True, 64, 2048).shape("tiny")
WIDE = ModelSize(2048, 5632, 1, 32, 4, 1024, False, 64, 2048).shape("wide")
LENGTHS = [1, 32, 64, 128, 256, 512]


class Law:
    """Times of both parts as functions of what a slice is; ``Costs`` without hand-overs or neighbours."""

    overheads = Overheads()

    def __init__(self, seed):
        draw = random.Random(seed)
        self.floors = {"gpu": draw.uniform(2, 20), "npu": draw.uniform(5, 60)}
        self.read = {"gpu": draw.uniform(1e4, 4e4), "npu": draw.uniform(5e3, 4e4)}
        self.compute = {"gpu": draw.uniform(4e4, 2e5), "npu": draw.uniform(4e4, 4e5)}
        self.array = draw.choice([1, 32])

    def us(self, part, rows, columns, tokens):
        weights = rows * columns
        padded = self.array * -(-tokens // self.array) if part == "npu" else tokens
        return self.floors[part] + max(weights / self.read[part], weights * padded / self.compute[part])

    def gpu_us(self, spec, member_rows, tokens):
        return self.us("gpu", sum(member_rows), spec.columns, tokens)

    def npu_us(self, spec, member_rows, length, form):
        return self.us("npu", sum(member_rows), spec.columns, length)

    def slowdown(self, spec, tokens, form="", length=0):
        return Slowdown()

    def between_us(self, spec, tokens):
        return 0.0


def thin_profile(law, seed):
    """Return what a quick run measures."""
    draw = random.Random(f"{seed} noise")
    made = Profile(
        {
            "device": "made",
            "time": "real",
            "npu": "an NPU",
            "cache_bytes": 0,
            "npu_standard_lengths": LENGTHS,
            "npu_row_alignment": 64,
        }
    )

    def add(part, spec, rows, tokens, form=""):
        point = LinearPoint.of(spec, tokens, member_rows=rows, form=form)
        time_us = law.us(part, sum(rows), spec.columns, tokens)
        samples = tuple(time_us * draw.uniform(0.96, 1.04) for _ in range(5))
        made.add(Record(LinearKey(part, point, "code"), samples, taken_s=1.0))

    for shape in (TINY, WIDE):
        for spec in shape.specs:
            half = split_rows(spec.member_rows, 0.5, 64)
            for tokens in (1,) if spec.group == "head" else (1, 64, 256):
                add("gpu", spec, spec.member_rows, tokens)
                add("gpu", spec, rest_rows(spec.member_rows, half), tokens)
                if tokens != 64:
                    add("npu", spec, spec.member_rows, tokens, "matmul_nbits")
                    add("npu", spec, half, tokens, "matmul_nbits")
    return made


def with_a_tree(predictor):
    """Return a predictor whose NPU is a tree, which two lengths mislead most."""
    held = predictor.processors["npu"]
    times = {point: prediction.us for point, prediction in held.measured.items()}
    tree = ProcessorFit(TimeModel.fit(Tree, times), held.fit.scores)
    parts = {**predictor.processors, "npu": ProcessorPredictor(tree, held.measured)}
    return Predictor(parts, predictor.layers)


def true_us(law, chain, tokens):
    """Return what a solved pass takes."""
    prices = [evaluate(choice.spec, tokens, choice.chosen.placement, law) for choice in chain.choices]
    return sum(item.time_us for item in prices)


@functools.cache
def fitted(seed):
    profile = thin_profile(Law(seed), seed)
    return profile, Predictor.fit(profile)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["the best model", "a tree"])
def test_the_plan_of_a_thin_profile_takes_what_it_says(seed, model):
    law = Law(seed)
    profile, predictor = fitted(seed)
    if model == "a tree":
        predictor = with_a_tree(predictor)
    costs = ProfileCosts(profile, WIDE, predictor=predictor)
    solver = Solver((*WIDE.layer, WIDE.head), limits_of(profile), costs, Objective(), chunk_length=256)
    for tokens in (1, 64, 200, 256):
        chain = solver.length(tokens)
        found_us = true_us(law, chain, tokens)
        assert chain.time_us >= found_us / 1.2, tokens
        if tokens in (1, 256):
            # At 64 and 200 tokens of the NPU nothing was measured: it may do better than was expected.
            assert chain.time_us == pytest.approx(found_us, rel=0.15)
        alone = [
            sum(law.gpu_us(spec, spec.member_rows, tokens) for spec in WIDE.layer),
            sum(law.npu_us(spec, spec.member_rows, _padded(tokens), "") for spec in WIDE.layer),
        ]
        assert found_us <= 1.05 * min(alone)


def _padded(tokens):
    return next(length for length in LENGTHS if length >= tokens)


def test_the_law_above_misleads_a_tree_that_has_no_bounds():
    """Else the test above would show nothing."""
    seed = next(seed for seed in range(6) if Law(seed).array == 1)
    law, predictor = Law(seed), with_a_tree(fitted(seed)[1])
    spec = WIDE.layer[2]
    point = LinearPoint.of(spec, 16, form="matmul_nbits")
    truth = law.us("npu", spec.rows, spec.columns, 16)
    held = predictor.processors["npu"]
    assert held.fit.model.predict(point).us < 0.6 * truth
    assert held.predict(point).us == pytest.approx(truth, rel=0.2)
    assert held.predict(structs.replace(point, tokens=256)).source == "measured"
