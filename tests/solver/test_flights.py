"""Plans for chunks in flight: predicted faster than chunks one by one, and within the NPU's memory."""

import functools

import pytest
from msgspec import structs

from heterollm.solver import Budget, Plan, Solver, plan_flights, predict_prompt
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
    def plans(seed, level="block", limit=None, attention_us=40.0, overheads=made.free):
        costs_at = functools.partial(Attention, seed, attention_us, overheads)
        budget = Budget(limit, copies_by_length=True)
        solver = Solver(
            made.model(), made.limits(), costs_at(0), budget=budget, chunk_length=128, level=level
        )
        plan, slices = solver.solve(device="d", precision="fp16")
        return solver, plan, plan_flights(solver, plan, slices, 4, PROMPTS, costs_at)

    return plans


@pytest.mark.parametrize("level", ["tensor", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_in_flight_are_predicted_faster(planned, seed, level):
    solver, _, flown = planned(seed, level)
    assert flown.schedule is not None
    lengths = [length for _, length in flown.chunks(1000)]
    alone = structs.replace(flown.schedule, in_flight=1)
    found, other = (predict_prompt(one, lengths, solver.layers) for one in (flown.schedule, alone))
    assert found.time_us < other.time_us
    assert found.npu_idle_us < other.npu_idle_us
    assert all(entry.lengths == (flown.chunk_length,) * 2 for entry in flown.schedule.entries)
    assert Plan.from_json(flown.to_json()) == flown
    # A chunk in flight computes each operator once, whatever a single chunk does.
    operators = flown.of_flights.operators("prefill", flown.chunk_length, solver.layer)
    assert [spec.group for spec, _ in operators] in (["qkv", "o", "gate_up", "down"], ["qkv", "o", "ffn"])


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_graphs_of_chunks_in_flight_keep_the_budget(planned, fraction):
    solver, plan, _ = planned(0)
    limit = int(fraction * plan.npu_bytes(solver.specs, copies_by_length=True))
    _, plan, flown = planned(0, limit=limit)
    assert flown.npu_bytes(solver.specs, copies_by_length=True) <= limit
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
