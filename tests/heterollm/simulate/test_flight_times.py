"""Predicted times of chunks in flight, against the simulated clock that ran them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from heterollm.model import find_model
from heterollm.simulate import SimulationRequest, simulate
from heterollm.solver import ChunkSchedule, predict_prompt

TOLERANCE = 0.04
HEAD = ("head", "final norm")


def ratio(found, schedule: ChunkSchedule) -> float:
    """Return the predicted time of a prompt's layers over the simulated one."""
    chunks = [length for _, length in found.plan.chunks(found.prefill.tokens)]
    predicted = predict_prompt(schedule, chunks, {"": find_model(found.model).config.layers})
    head_us = sum(span.end_us - span.begin_us for span in found.prefill.spans if span.name in HEAD)
    return predicted.time_us / (found.prefill.elapsed_us - head_us)


def without_slowdown(schedule: ChunkSchedule) -> ChunkSchedule:
    times = [replace(one, gpu_slowdown=1.0, npu_slowdown=1.0) for one in schedule.times]
    return replace(schedule, times=tuple(times))


@pytest.mark.parametrize(
    ("model", "soc"),
    [
        ("qwen1.5-1.8b", "snapdragon-8gen3"),
        ("qwen1.5-1.8b", "snapdragon-8gen3-paper"),
        ("phi-2", "snapdragon-8gen3"),
    ],
)
def test_predicted_chunks_in_flight_take_as_long_on_the_simulated_clock(model, soc):
    request = SimulationRequest(
        model, soc=soc, prompt=1024, decode=0, level="layer", techniques=("llm.npu",), plan_for="prompt"
    )
    found = simulate(request)
    schedule = found.plan.schedule
    assert schedule is not None
    assert schedule.in_flight > 1
    assert ratio(found, schedule) == pytest.approx(1.0, abs=TOLERANCE)
    if (model, soc) == ("qwen1.5-1.8b", "snapdragon-8gen3"):
        # Attention takes longest there, and graphs of other chunks slow it.
        assert ratio(found, without_slowdown(schedule)) < ratio(found, schedule) - 0.01
