"""Several chunks of a prompt at once give the numbers of one after the other, in whatever order they run."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from heterollm.base import GraphError
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.npu.session import SessionGraph
from heterollm.llm import LLM
from heterollm.solver import ChunkSchedule, GroupTimes, Plan

CHUNK = 32
GROUPS = ("qkv", "o", "gate_up", "down")
LENGTHS = (1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK, 4 * CHUNK + 5)


def schedule(count: int, times_us: tuple[float, ...] = (1.0, 0.01, 1.0, 3.0) * 4) -> ChunkSchedule:
    """Return a schedule with four times for each group of linears."""
    times = (GroupTimes(group, *times_us[4 * i : 4 * i + 4]) for i, group in enumerate(GROUPS))
    return ChunkSchedule("out_of_order", count, tuple(times))


def in_chunks(plan: Plan) -> Plan:
    """Return a plan in chunks of 32 tokens."""
    entries = tuple(
        structs.replace(entry, lengths=(entry.lengths[0], min(entry.lengths[1], CHUNK)))
        for entry in plan.entries
        if entry.lengths[0] <= CHUNK
    )
    return structs.replace(plan, chunk_length=CHUNK, entries=entries, slices=())


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(7).integers(0, 2048, 300).tolist()


def answers(llm: LLM, ids: list[int], length: int) -> np.ndarray:
    """Return the logits behind a prompt, behind a second one in the same session, and of three tokens."""
    session = llm.session()
    found = [session.prefill(ids[:length]), session.prefill(ids[length : length + 70])]
    return np.stack([*found, *map(session.decode, ids[:3])])


@pytest.fixture(scope="module", params=["llama-layer", "mistral-rows", "lfm2-rows", "qwen3_5_text-rows"])
def planned(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], half_rows_plan: Callable[..., Plan]
) -> tuple[Path, Plan]:
    family, _, level = request.param.partition("-")
    folder = checkpoint(family)
    with LLM.load(folder, device="host", plan="layer" if level == "layer" else "gpu", kv_bits=32) as llm:
        return folder, in_chunks(llm.plan if level == "layer" else half_rows_plan(llm))


@pytest.fixture(scope="module")
def expected(planned: tuple[Path, Plan], ids: list[int]) -> Iterator[dict[int, np.ndarray]]:
    """Return the answers of chunks one after the other."""
    with LLM.load(planned[0], device="host", plan=planned[1], kv_bits=32) as llm:
        yield {length: answers(llm, ids, length) for length in LENGTHS}


def test_every_length_gives_the_logits_of_one_chunk_after_the_other(
    planned: tuple[Path, Plan], expected: dict[int, np.ndarray], host_llm: Callable[..., LLM], ids: list[int]
) -> None:
    llm = host_llm(planned[0], plan=structs.replace(planned[1], schedule=schedule(3)))
    for length, logits in expected.items():
        assert np.array_equal(answers(llm, ids, length), logits)
    # A pass with all logits runs chunk after chunk, and the head takes several rows at once.
    every = llm.session().prefill(ids[: 3 * CHUNK], all_logits=True)
    assert np.allclose(every[-1], expected[3 * CHUNK][0], atol=1e-5)


@pytest.mark.parametrize("planned", ["mistral-rows"], indirect=True)
def test_the_buffers_of_chunks_are_apart(
    planned: tuple[Path, Plan],
    expected: dict[int, np.ndarray],
    host_llm: Callable[..., LLM],
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    llm = host_llm(planned[0], plan=structs.replace(planned[1], schedule=schedule(2)))
    assert np.array_equal(answers(llm, ids, 3 * CHUNK), expected[3 * CHUNK])


@pytest.mark.parametrize("planned", ["llama-layer", "mistral-rows"], indirect=True)
def test_chunks_alternate_where_a_processor_would_wait(
    planned: tuple[Path, Plan], host_llm: Callable[..., LLM]
) -> None:
    llm = host_llm(planned[0], plan=structs.replace(planned[1], schedule=schedule(3)))
    steps = llm.steps("prefill", 3 * CHUNK)
    graphs = [step.lane for step in steps if step.action == "graph"]
    assert set(graphs) == {0, 1, 2}
    assert graphs != sorted(graphs)
    for lane in (1, 2):
        attention = next(i for i, s in enumerate(steps) if (s.lane, s.operator) == (lane, "attention"))
        stored = [s.lane for s in steps[:attention] if (s.layer, s.operator) == (0, "rope")]
        assert set(range(lane + 1)) <= set(stored)


def test_without_the_npu_chunks_run_one_by_one(
    planned: tuple[Path, Plan], host_llm: Callable[..., LLM], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the flight in which the NPU failed, and later prompts of the session."""
    bind, runs = SessionGraph.bind, Counter({"left": 10**6})

    def bind_to_break(graph: SessionGraph, inputs: object, outputs: object) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            runs["left"] -= 1
            if runs["left"] == 0:
                raise GraphError("The device is gone.")
            call()

        return run

    expected = answers(host_llm(planned[0], plan="gpu"), ids, 4 * CHUNK + 5)
    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)
    plan = structs.replace(planned[1], schedule=schedule(2))
    llm = host_llm(planned[0], plan=plan, allow_fallback=True)
    runs["left"] = 8  # loading has run some
    assert np.allclose(answers(llm, ids, 4 * CHUNK + 5), expected, atol=1e-3)
    assert runs["left"] == 0
    assert any("computes alone since token 0" in note for note in llm.notes)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(times=st.lists(st.floats(0.0, 1e4), min_size=16, max_size=16))
def test_every_order_gives_the_same_logits(
    every_order: Callable[..., np.ndarray], times: list[float]
) -> None:
    found, wanted = every_order(tuple(times))
    assert np.array_equal(found, wanted)


@pytest.fixture(scope="module")
def every_order(bundled_model: Path, ids: list[int]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    with LLM.load(bundled_model, device="host", plan="layer") as llm:
        plan = in_chunks(llm.plan)
    prompt = [one % 1000 for one in ids[: 4 * CHUNK - 3]]
    with LLM.load(bundled_model, device="host", plan=plan) as llm:
        wanted = llm.session().prefill(prompt)

    def run(times: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
        own = structs.replace(plan, schedule=schedule(4, times))
        with LLM.load(bundled_model, device="host", plan=own) as llm:
            return llm.session().prefill(prompt), wanted

    return run
