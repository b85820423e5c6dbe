"""Several chunks of a prompt at once give the numbers of one after the other, in whatever order they run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from heterollm.llm import LLM
from heterollm.solver import ChunkSchedule, GroupTimes, Plan

CHUNK = 32
GROUPS = ("qkv", "o", "gate_up", "down")
EVEN = tuple(GroupTimes(group, 1.0, 0.01, 1.0, 3.0) for group in GROUPS)


def in_flight(plan: Plan, count: int, times: tuple[GroupTimes, ...] = EVEN) -> Plan:
    return structs.replace(plan, schedule=ChunkSchedule("out_of_order", count, times))


def in_chunks(plan: Plan) -> Plan:
    """Return a plan in chunks of 32 tokens."""
    entries = tuple(
        structs.replace(entry, lengths=(entry.lengths[0], min(entry.lengths[1], CHUNK)))
        for entry in plan.entries
        if entry.lengths[0] <= CHUNK
    )
    return structs.replace(plan, chunk_length=CHUNK, entries=entries, slices=())


@pytest.fixture(scope="module", params=["llama-layer", "mistral-layer", "llama-rows"])
def plan(request, checkpoint: Callable[..., Path], half_rows_plan: Callable[..., Plan]) -> tuple[Path, Plan]:
    family, _, level = request.param.partition("-")
    folder = checkpoint(family)
    with LLM.load(folder, device="host", plan="layer" if level == "layer" else "gpu") as llm:
        return folder, in_chunks(llm.plan if level == "layer" else half_rows_plan(llm))


@pytest.fixture(scope="module")
def one_by_one(plan: tuple[Path, Plan]) -> Iterator[LLM]:
    with LLM.load(plan[0], device="host", plan=plan[1]) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(7).integers(0, 2048, 300).tolist()


def answers(llm: LLM, ids: list[int], length: int) -> np.ndarray:
    """Return the logits behind a prompt, a second one in the same session, and three tokens."""
    session = llm.session()
    found = [session.prefill(ids[:length]), session.prefill(ids[length : length + 70])]
    return np.stack([*found, *map(session.decode, ids[:3])])


@pytest.mark.parametrize("count", [2, 3])
def test_every_length_gives_the_same_logits(
    plan: tuple[Path, Plan], one_by_one: LLM, host_llm: Callable[..., LLM], ids: list[int], count: int
) -> None:
    llm = host_llm(plan[0], plan=in_flight(plan[1], count))
    for length in (1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1, 4 * CHUNK + 5):
        assert np.array_equal(answers(llm, ids, length), answers(one_by_one, ids, length))
