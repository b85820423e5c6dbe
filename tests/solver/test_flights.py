"""Plans for chunks in flight: predicted faster than chunks one by one, and within the NPU's memory."""

import functools

import pytest
from msgspec import structs

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import GraphMemory
from heterollm.solver import Budget, Plan, PlanRequest, Solver, kind_counts, plan_flights, predict_prompt
from heterollm.solver.costs import Overheads

PROMPTS = {96: 1.0, 300: 1.0, 1000: 1.0}


@pytest.fixture(scope="module")
def planned(made):
    """Return a function that gives a solver, its plan, and the plan with up to four chunks in flight."""

    class Attention(made.proportional_blocks):
        def __init__(self, seed, attention_us, overheads, position=0):
            super().__init__(seed, overheads=overheads)
            self.position, self.attention_us = position, attention_us

        def between_us(self, spec, tokens):
            own_us = self.attention_us * tokens * (1 + self.position / 128) / 32
            return super().between_us(spec, tokens) + (own_us if spec.group == "o" else 0.0)

    @functools.cache
    def plans(seed, level="block", limit=None, attention_us=40.0, overheads=made.free, in_flight=4):
        costs_at = functools.partial(Attention, seed, attention_us, overheads)
        budget = Budget(limit, GraphMemory(True))
        solver = Solver(
            made.model(), made.limits(), costs_at(0), budget=budget, chunk_length=128, level=level
        )
        plan, slices = solver.solve(device="d", precision="fp16")
        return solver, plan, plan_flights(solver, plan, slices, in_flight, PROMPTS, costs_at)

    return plans


@pytest.mark.parametrize("level", ["tensor", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_in_flight_are_predicted_faster(planned, seed, level):
    solver, _, flown = planned(seed, level)
    assert flown.schedule is not None
    lengths = [length for _, length in flown.chunks(1000)]
    alone = structs.replace(flown.schedule, in_flight=1)
    found, other = (
        predict_prompt(one, lengths, kind_counts(solver.specs)) for one in (flown.schedule, alone)
    )
    assert found.time_us < other.time_us
    assert found.npu_idle_us < other.npu_idle_us
    assert all(entry.lengths == (flown.chunk_length,) * 2 for entry in flown.schedule.entries)
    assert Plan.from_json(flown.to_json()) == flown
    # A chunk in flight computes each operator once, whatever a single chunk does.
    operators = flown.of_flights.operators("prefill", flown.chunk_length, solver.kinds[0].specs)
    assert [spec.group for spec, _ in operators] in (["qkv", "o", "gate_up", "down"], ["qkv", "o", "ffn"])


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_graphs_of_chunks_in_flight_keep_the_budget(planned, fraction):
    solver, plan, _ = planned(0)
    limit = int(fraction * plan.npu_bytes(solver.specs, GraphMemory(True)))
    _, plan, flown = planned(0, limit=limit)
    assert flown.npu_bytes(solver.specs, GraphMemory(True)) <= limit
    if not fraction:
        assert flown == plan


@pytest.mark.parametrize(
    "changed",
    [
        # The GPU's attention takes nearly all the time, or a change of the processor does.
        {"attention_us": 1e6},
        {"overheads": Overheads(1e5, 1e5)},
        # A wait for one chunk waits for the kernels of all.
        {"overheads": Overheads(empties_queue=True)},
    ],
)
def test_without_gain_a_plan_stays_as_it_is(planned, changed):
    _, plan, flown = planned(1, **changed)
    assert flown == plan


@pytest.mark.parametrize("seed", range(2))
def test_auto_takes_the_fewest_chunks_that_are_nearly_as_fast_as_more(planned, seed):
    def prompt_us(solver, flown):
        lengths = [length for _, length in flown.chunks(1000)]
        return predict_prompt(flown.schedule, lengths, kind_counts(solver.specs)).time_us

    solver, plan, flown = planned(seed, in_flight="auto")
    assert flown.lanes in (2, 4, 8, 16)
    assert flown == planned(seed, in_flight=flown.lanes)[2]
    fewer, _, half = planned(seed, in_flight=max(2, flown.lanes // 2))
    assert prompt_us(solver, flown) < prompt_us(fewer, half) * 1.001
    assert plan.schedule is None


@pytest.mark.parametrize("changed", [{"attention_us": 1e6}, {"overheads": Overheads(1e5, 1e5)}])
def test_auto_keeps_one_chunk_where_more_gain_nothing(planned, changed):
    _, plan, flown = planned(1, in_flight="auto", **changed)
    assert flown == plan


def test_a_plan_with_the_exact_policy_is_refused_when_it_is_read(planned):
    _, _, flown = planned(0)
    text = flown.to_json().replace('"out_of_order"', '"exact"')
    with pytest.raises(PlanError, match=r"schedule\.policy"):
        Plan.from_json(text)


@pytest.mark.parametrize("given", [0, 17, -1, "some", 2.5])
def test_other_numbers_of_chunks_are_refused(given):
    with pytest.raises(OptionError, match="cannot run at once"):
        PlanRequest(in_flight=given)
