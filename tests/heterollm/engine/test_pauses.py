"""Prompts that pause between layers for other sessions: exact results, cancellation, and a failing NPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import GraphError
from heterollm.engine.pauses import find_pauses
from heterollm.engine.step import Buffer, Step
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu.session import SessionGraph
from heterollm.llm import LLM
from heterollm.solver import Plan

CHUNK = 64
PROMPT, OTHER = 100, 64
"""A whole chunk and a shorter one; the other prompt shares the compiled pass of the first chunk."""


@pytest.fixture(scope="module", params=["llama", "olmoe", "lfm2", "gemma4_text", "nemotron_h", "deepseek_v2"])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def llm(folder: Path, half_rows_plan: Callable[..., Plan]) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", context=256) as gpu:
        plan = half_rows_plan(gpu, CHUNK)
    with LLM.load(folder, device="host", plan=plan, context=256) as split:
        yield split


def make_ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, count).astype(np.int32)


def in_turns(llm: LLM, meanwhile: Callable[[], object]) -> tuple[np.ndarray, int]:
    """Return the logits behind a prompt and a token, and how often the prompt paused."""
    session, pauses = llm.session(), 0

    def prefill() -> None:
        nonlocal pauses
        for _ in session.prefill_in_turns(make_ids(PROMPT, 1), lambda _: True):
            pauses += 1
            meanwhile()

    llm.on_engine_thread(prefill)
    return session.decode(7), pauses


def test_a_prompt_that_pauses_at_every_layer_computes_the_same(llm: LLM) -> None:
    alone = llm.session()
    alone.prefill(make_ids(PROMPT, 1))
    expected, other = alone.decode(7), make_ids(OTHER, 2)
    undisturbed = llm.session().prefill(other)

    def meanwhile() -> None:
        session = llm.session()
        np.testing.assert_array_equal(session.prefill(other), undisturbed)
        session.decode(3)

    logits, pauses = in_turns(llm, meanwhile)
    np.testing.assert_array_equal(logits, expected)
    # Before the second chunk, and between the layers of each.
    assert pauses == 2 * llm.config.layers - 1


def test_a_prompt_that_is_dropped_in_a_pause_leaves_its_session_usable(llm: LLM) -> None:
    expected = llm.session().prefill(make_ids(OTHER, 2))
    session = llm.session()
    turns = session.prefill_in_turns(make_ids(PROMPT, 1), lambda _: True)
    llm.on_engine_thread(lambda: next(turns))
    llm.on_engine_thread(turns.close)
    assert session.position == 0
    np.testing.assert_array_equal(session.prefill(make_ids(OTHER, 2)), expected)


def test_a_chunk_starts_again_where_the_npu_failed_in_its_pause(
    checkpoint: Callable[..., Path],
    half_rows_plan: Callable[..., Plan],
    host_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kept values are of both processors, and the steps behind them would run the failed graphs."""
    bind, fails = SessionGraph.bind, []

    def bind_to_fail(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            if fails:
                raise GraphError("The device is gone.")
            call()

        return run

    monkeypatch.setattr(SessionGraph, "bind", bind_to_fail)
    gpu = host_llm(checkpoint("llama"), plan="gpu", context=256)
    llm = host_llm(checkpoint("llama"), plan=half_rows_plan(gpu, CHUNK), context=256, allow_fallback=True)

    def meanwhile() -> None:
        fails.append(True)
        llm.session().prefill(make_ids(OTHER, 2))

    logits, _ = in_turns(llm, meanwhile)
    alone = gpu.session()
    alone.prefill(make_ids(PROMPT, 1))
    assert sqnr_db(logits, alone.decode(7)) >= LOGITS_SQNR_DB["fp32"]
    assert len(llm.failures) == 1


SLOTS, BYTES = ("a", "b", "c"), 8
BUFFERS = st.builds(
    lambda name, ends: Buffer(name, *ends),
    st.sampled_from(SLOTS),
    st.sampled_from([(0, None), (0, 4), (4, 8), (4, None), (2, 6)]),
)


def make_steps(accesses: list[tuple[list[Buffer], list[Buffer]]]) -> list[Step]:
    """Return a step in a layer of its own for each list of reads and of writes."""
    fixed: dict[str, Any] = {"operator": "o", "tokens": 1, "processor": "gpu", "action": "kernel"}
    return [
        Step(layer=layer, label="o", reads=tuple(reads), writes=tuple(writes), run=lambda: None, **fixed)
        for layer, (reads, writes) in enumerate(accesses)
    ]


@given(st.lists(st.tuples(st.lists(BUFFERS, max_size=2), st.lists(BUFFERS, max_size=2)), max_size=12))
def test_what_later_steps_read_is_set_aside(accesses: list[tuple[list[Buffer], list[Buffer]]]) -> None:
    steps = make_steps(accesses)
    names: dict[Any, Buffer] = {slot: Buffer(slot) for slot in SLOTS}
    sizes = dict.fromkeys(SLOTS, BYTES)
    pauses = {pause.index: dict(pause.memories) for pause in find_pauses(steps, names, sizes)}
    assert list(pauses) == list(range(1, len(steps)))

    def run(paused: bool) -> list[bytes]:
        """Return what the steps read; they write a number made of that."""
        slots, seen = {slot: np.zeros(BYTES, np.uint8) for slot in SLOTS}, []
        for index, step in enumerate(steps):
            if paused and index:
                for slot in set(SLOTS).difference(pauses[index]):
                    slots[slot][:] = 99
            read = b"".join(slots[buffer.name][buffer.start : buffer.stop].tobytes() for buffer in step.reads)
            seen.append(read)
            for buffer in step.writes:
                slots[buffer.name][buffer.start : buffer.stop] = (index + sum(read)) % 90
        return seen

    assert run(paused=True) == run(paused=False)


def test_a_pause_leaves_out_what_is_written_before_it_is_read() -> None:
    a, b, c = map(Buffer, SLOTS)
    steps = make_steps([([], [a]), ([a], [b]), ([b, Buffer("c", 0, 4)], [a, c])])
    names: dict[Any, Buffer] = {slot: Buffer(slot) for slot in SLOTS}
    sizes = {"a": 1, "b": 2, "c": 3}
    found = [pause.memories for pause in find_pauses(steps, names, sizes)]
    assert found == [(("a", 1), ("c", 3)), (("b", 2), ("c", 3))]
