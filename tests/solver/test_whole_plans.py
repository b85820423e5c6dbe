"""Plans of whole models: never worse than one part alone, hand-overs where they are, forms that pay, soon."""

import itertools
import statistics
from dataclasses import replace

import pytest

from heterollm.kernels.npu import STANDARD_LENGTHS
from heterollm.model.known import ModelSize
from heterollm.solver import Budget, CachedCosts, NpuLimits, Objective, Solver
from heterollm.solver.candidates import candidates
from heterollm.solver.costs import Overheads, Slowdown
from heterollm.solver.options import evaluate

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
WIDE = ModelSize(4096, 14336, 32, 32, 8, 128256, False, 128, 2048).shape("Llama-3-8B")


def alone_us(solver, tokens, is_on_gpu):
    """Time of the groups with one part alone, the best of its ways."""
    total_us = 0.0
    for spec in solver.kinds[0].specs:
        items = [
            evaluate(spec, tokens, placement, solver.costs)
            for placement in candidates(spec, tokens, solver.limits, splits=[spec.member_rows])
        ]
        total_us += min(
            item.time_us
            for item in items
            if not item.is_split and is_on_gpu == (not item.placement.npu_lengths)
        )
    return total_us


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("costs", ["costs", "proportional"])
def test_with_what_the_npu_holds_no_length_is_slower_than_one_part_alone(made, costs, seed):
    """Slices are chosen for all lengths together, and yet none loses by it."""
    solver = Solver(made.model(), made.limits(), getattr(made, costs)(seed), chunk_length=256)
    slices = solver.slices()
    for tokens in (1, 2, 32, 33, 65, 128, 129, 200, 256):
        own_us = sum(choice.chosen.time_us for choice in solver.length(tokens, slices).choices)
        best_us = min(alone_us(solver, tokens, is_on_gpu) for is_on_gpu in (True, False))
        assert own_us <= best_us * (1 + 1e-12)
    # A budget may take the NPU away, but never the GPU.
    solver = replace(solver, budget=Budget(100_000))
    for tokens in (1, 32, 129):
        chain = solver.length(tokens, solver.slices())
        own_us = sum(choice.chosen.time_us for choice in chain.choices)
        assert own_us <= alone_us(solver, tokens, True) * (1 + 1e-12)


def test_hand_overs_are_paid_where_the_npu_takes_part_and_nowhere_else(made):
    """A chain on the GPU pays none; each group with a part on the NPU pays for the way there and back."""
    overheads = Overheads(hand_over_us=7.0, refill_us=11.0, map_us=1.0)

    class Costs(made.costs):
        def gpu_us(self, spec, member_rows, tokens):
            return 100.0

        def npu_us(self, spec, member_rows, length, form):
            return 50.0 if spec.group in fast else 10_000.0

        def between_us(self, spec, tokens):
            return 3.0

    costs = Costs(0, overheads=overheads, slowdown=Slowdown())
    for fast in ((), ("o",), ("o", "gate_up"), ("qkv", "o", "gate_up", "down")):
        for layers, tokens in itertools.product((1, 3), (1, 32)):
            specs = made.model(layers)
            whole_only = {spec.group: [spec.member_rows] for spec in specs}
            solver = Solver(specs, made.limits(), costs, Objective(margin_fraction=0.0))
            chain = solver.length(tokens, whole_only)
            on_npu = {choice.spec.group for choice in chain.choices if choice.chosen.npu_us}
            assert on_npu == set(fast)
            paid_us = len(fast) * (7.0 + 11.0 + 2 * 1.0)
            expected_us = layers * (4 * 3.0 + 50.0 * len(fast) + 100.0 * (4 - len(fast)) + paid_us)
            assert chain.time_us == pytest.approx(expected_us)


class Rates:
    """A phone's rates, roughly; long rows are slow on the NPU, unless they are summed from pieces."""

    overheads = Overheads(hand_over_us=8.0, refill_us=75.0)

    def gpu_us(self, spec, member_rows, tokens):
        return 5.0 + sum(member_rows) * spec.columns * max(0.52 / 43e3, 2 * tokens / 1.2e6)

    def npu_us(self, spec, member_rows, length, form):
        slower = 3.5 if spec.columns > 4096 and form != "k_chunked" else 1.0
        return 110.0 + slower * sum(member_rows) * spec.columns * max(1 / 30.7e3, 2 * length / 5.6e6)

    def slowdown(self, spec, tokens, form="", length=0):
        return Slowdown()

    def between_us(self, spec, tokens):
        return 10.0 + tokens


def test_a_form_that_is_fast_changes_the_plan():
    """Down in pieces of 4096 inputs: the NPU takes most of it, and prompts are a fifth faster (facts)."""
    layers = [replace(spec, layer=layer) for layer in range(2) for spec in WIDE.layer]

    def solver(*forms):
        def legal(spec, length):
            return forms if spec.columns > 4096 else ("matmul_nbits",)

        limits = NpuLimits(STANDARD_LENGTHS, 256, legal)
        return Solver((*layers, WIDE.head), limits, Rates())

    plain, both = (solver(*forms) for forms in (("matmul_nbits",), ("matmul_nbits", "k_chunked")))
    for tokens in (64, 256, 300):
        without, chain = plain.length(tokens), both.length(tokens)
        assert chain.time_us * 1.2 < without.time_us
        down = {choice.spec.group: choice.chosen.placement for choice in chain.choices}["down"]
        assert down.form == "k_chunked"
        share = sum(down.npu_rows) * min(tokens, sum(down.npu_lengths)) / (4096 * tokens)
        assert share > 0.7
    assert both.plan(device="d", precision="w4a16").placement("prefill", 256, layers[3]).form == "k_chunked"


def test_a_whole_model_takes_some_million_calls_and_another_length_some_thousand(calls_of):
    """Of functions: a second for the model and milliseconds for another length, on the machine of CI."""
    layers = [replace(spec, layer=layer) for layer in range(WIDE.layers) for spec in WIDE.layer]
    limits = NpuLimits(STANDARD_LENGTHS, 256, lambda spec, length: ("matmul_nbits",))
    solver = Solver((*layers, WIDE.head), limits, Rates())
    assert calls_of(lambda: solver.plan(device="d", precision="w4a16")) < 2_500_000
    slices = solver.slices({1: 100.0, 256: 1.0})
    lengths = (2, 45, 135, 300, 525, 777, 1023)
    remembered = replace(solver, costs=CachedCosts(solver.costs))
    calls = [calls_of(lambda tokens=tokens: remembered.length(tokens, slices)) for tokens in lengths]
    assert statistics.median(calls) < 3000
