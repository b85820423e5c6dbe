"""The set of standard lengths for a histogram of prompts, and the chunks of a long prompt."""

import itertools
import random
from dataclasses import replace

import pytest

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import GraphMemory
from heterollm.solver import Budget, Solver, choose_lengths
from heterollm.solver.candidates import npu_lengths_for
from heterollm.solver.costs import Overheads
from heterollm.solver.flights.plan import shortened
from heterollm.solver.predict import predict_pass
from heterollm.solver.shorter_chunks import best_chunk, plan_chunks

AVAILABLE = (32, 64, 128, 256, 512)


def build_us(length):
    """The facts' graph builds: affine through 408 ms at 135 tokens and 2050 ms at 1000."""
    return (408 + (2050 - 408) * (length - 135) / (1000 - 135)) * 1e3


def padded_us(tokens, lengths):
    """An NPU alone whose time is a floor a graph and that of the tokens that it runs, padding included."""
    covers = npu_lengths_for(tokens, lengths)
    return min((100.0 * len(cover) + 10.0 * sum(cover) for cover in covers), default=float("inf"))


def total_us(histogram, lengths):
    return sum(weight * padded_us(tokens, lengths) for tokens, weight in histogram.items())


@pytest.mark.parametrize("seed", range(20))
def test_no_set_within_the_budget_is_faster(seed):
    draw = random.Random(seed)
    histogram = {draw.randint(1, 700): draw.uniform(0.1, 2) for _ in range(6)}
    budget_us = draw.uniform(0.4e6, 4e6)
    chosen = choose_lengths(histogram, AVAILABLE, build_us, padded_us, budget_us)
    assert sum(map(build_us, chosen)) <= budget_us
    assert chosen == tuple(sorted(chosen))
    for count in range(6):
        for other in itertools.combinations(AVAILABLE, count):
            if sum(map(build_us, other)) <= budget_us:
                assert total_us(histogram, chosen) <= total_us(histogram, other)


def test_lengths_follow_the_prompts():
    one_graph = build_us(512)
    assert choose_lengths({60: 1.0}, AVAILABLE, build_us, padded_us, one_graph) == (64,)
    assert choose_lengths({250: 1.0, 20: 0.01}, AVAILABLE, build_us, padded_us, one_graph)[-1] == 256
    # What nobody needs is not built, however large the budget.
    assert choose_lengths({60: 1.0, 128: 1.0}, AVAILABLE, build_us, padded_us, 1e9) == (64, 128)
    # A GPU that runs everything needs no graphs.
    assert choose_lengths({60: 1.0}, AVAILABLE, build_us, lambda tokens, lengths: 1.0, 0.0) == ()


def test_a_solver_says_how_long_passes_take(made):
    solver = Solver(made.model(), made.limits(), made.proportional(3))

    def time_us(tokens, lengths):
        limits = replace(solver.limits, standard_lengths=lengths)
        return replace(solver, limits=limits).length(tokens).time_us

    chosen = choose_lengths({1: 5.0, 60: 1.0, 128: 1.0}, (1, 64, 128), lambda length: 1.0, time_us, 2.0)
    assert len(chosen) <= 2
    sets = [held for count in range(3) for held in itertools.combinations((1, 64, 128), count)]
    weighted_sum = {held: 5 * time_us(1, held) + time_us(60, held) + time_us(128, held) for held in sets}
    assert weighted_sum[chosen] == min(weighted_sum.values())


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="no set"):
        choose_lengths({60: 1.0}, AVAILABLE, build_us, padded_us, 0.0)
    for histogram, lengths, budget_us in (
        ({60: 1.0}, range(1, 14), 1.0),
        ({0: 1.0}, AVAILABLE, 1.0),
        ({60: -1.0}, AVAILABLE, 1.0),
        ({60: float("nan")}, AVAILABLE, 1.0),
        ({60: 1.0}, (0, 32), 1.0),
        ({60: 1.0}, AVAILABLE, float("nan")),
        ({60: 1.0}, AVAILABLE, -1.0),
    ):
        with pytest.raises(OptionError):
            choose_lengths(histogram, lengths, build_us, padded_us, budget_us)


# -- chunks of a long prompt ------------------------------------------------------------------------------


def chunked(made, floor_us, penalty_us):
    """A solver, and costs by position: a floor for each pass, and more for each token past the 64th."""

    def costs_at(position):
        class Costs(made.costs):
            def gpu_us(self, spec, member_rows, tokens):
                return floor_us + tokens + penalty_us * max(0, tokens - 64)

            def between_us(self, spec, tokens):
                # Attention: all pairs of a token with one before it, however the prompt is cut.
                return tokens * position * 0.01 + tokens * tokens * 0.005

        return Costs(0, overheads=Overheads())

    return Solver(made.model(), None, costs_at(0), chunk_length=128), costs_at


@pytest.mark.parametrize(
    ("floor_us", "penalty_us", "best"), [(50.0, 0.0, 128), (50.0, 5.0, 64), (0.0, 0.0, 128)]
)
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_the_fastest_chunk_is_chosen(made, floor_us, penalty_us, best, tokens):
    """Attention does not decide, for it takes the same in all chunks; of equal chunks the longest wins."""
    solver, costs_at = chunked(made, floor_us, penalty_us)
    # Only the GPU: the NPU's lengths are what is offered.
    solver = replace(solver, limits=made.limits((1, 32, 64), forms=()))
    assert best_chunk(solver, {tokens: 1.0}, costs_at) == best
    # Prompts that hardly ever come decide nothing.
    assert best_chunk(solver, {tokens: 1.0, 65: 0.001}, costs_at) == best


@pytest.mark.parametrize("tokens", [1024, 1000])
def test_no_chunk_that_was_tried_is_faster_by_the_margin(made, tokens):
    for seed in range(3):
        solver = Solver(made.model(), made.limits((1, 32, 64)), made.costs(seed), chunk_length=128)
        prompts = {tokens: 1.0, 300: 2.0}

        def prompt_us(prompt, chunk, solver=solver):
            firsts = range(0, prompt, chunk)
            return sum(solver.length(min(chunk, prompt - first)).time_us for first in firsts)

        found = best_chunk(solver, prompts, lambda position, solver=solver: solver.costs)
        times = {
            chunk: sum(
                weight * prompt_us(prompt, chunk) / prompt_us(prompt, 128)
                for prompt, weight in prompts.items()
            )
            for chunk in (32, 64, 128)
        }
        bar = 0.9 * 3.0  # shorter chunks must be faster by a tenth
        assert times[found] == pytest.approx(min(times.values())) or (
            found == 128 and bar <= min(times.values())
        )
        assert found == 128 or times[found] < bar


@pytest.mark.parametrize("seed", [1, 2, 7, 9, 10, 11, 13])
def test_a_plan_with_shorter_chunks_is_the_fastest_of_both_slices_or_not_taken(made, seed, monkeypatch):
    """Under a budget for graphs, where slices for shorter chunks differ from those of the longest."""

    class Costs(made.costs):
        def between_us(self, spec, tokens):
            return super().between_us(spec, tokens) + (20_000.0 if tokens > 32 else 0.0)

    budget = Budget(300_000 * (1 + seed % 4), GraphMemory(True, 2))
    costs = Costs(seed, overheads=Overheads())
    solver = Solver(made.model(), made.limits((1, 32, 64)), costs, budget=budget, chunk_length=128)
    plan, slices = solver.solve(device="d", precision="fp16")
    prompts = {300: 1.0, 1000: 2.0}

    def total(one):
        return sum(
            weight
            * sum(predicted_us(one, tokens) for _, tokens in one.chunks(prompt))
            / sum(predicted_us(plan, tokens) for _, tokens in plan.chunks(prompt))
            for prompt, weight in prompts.items()
        )

    def predicted_us(one, tokens):
        return predict_pass(one, solver.specs, costs, "prefill", tokens, logits=False).time_us

    for chunk in (32, 64):
        monkeypatch.setattr("heterollm.solver.shorter_chunks.best_chunk", lambda *_, chunk=chunk: chunk)
        own, _ = replace(solver, chunk_length=chunk).solve(device="d", precision="fp16")
        given = shortened(plan, chunk)
        least = min(total(own), total(given))
        assert (least < 0.9 * 3.0) is (chunk == 32)
        found, _ = plan_chunks(solver, plan, slices, prompts, lambda _: costs)
        assert found in ((own, given) if least < 0.9 * 3.0 else (plan,))
        assert total(found) == pytest.approx(least if least < 0.9 * 3.0 else 3.0)
        assert found.npu_bytes(solver.specs, budget.memory) <= budget.npu_bytes


def test_chunks_of_no_prompt_are_refused(made):
    solver, costs_at = chunked(made, 1.0, 0.0)
    with pytest.raises(OptionError):
        best_chunk(solver, {0: 1.0}, costs_at)
    assert best_chunk(solver, {5: 1.0}, costs_at) == 128
