"""Failures of the NPU part and of hand-overs: a clear error, or the GPU goes on from the same KV cache."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heterollm.engine.runner
import heterollm.engine.waits
from heterollm.base import EngineError, FenceError, GraphError, HeteroLLMError
from heterollm.engine.splits import SplitEmitter
from heterollm.kernels.npu import HostNpu
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.sync import WaitLimits
from heterollm.kernels.sync.faults import Gate
from heterollm.llm import LLM
from heterollm.solver import Plan

PROMPT = 300
NEW = 24
CHUNK = 128


class Npu:
    """Counts the graph runs of all models, and raises from a chosen one on."""

    def __init__(self) -> None:
        self.runs = 0
        self.fails_at: int | None = None

    def run(self, call: Callable[[], None]) -> None:
        self.runs += 1
        if self.fails_at is not None and self.runs >= self.fails_at:
            raise GraphError("The graph of down of layer 1 failed while running: the device is gone")
        call()


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    state, bind = Npu(), SessionGraph.bind

    def bind_to_break(graph: SessionGraph, x: Any, y: Any) -> Callable[[], None]:
        call = bind(graph, x, y)
        return lambda: state.run(call)

    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)
    return state


@pytest.fixture(scope="module")
def gpu_only(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def plan(gpu_only: LLM, half_rows_plan: Callable[..., Plan]) -> Plan:
    return half_rows_plan(gpu_only, CHUNK)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(2).integers(1, 2048, PROMPT).tolist()


@pytest.fixture(scope="module")
def expected(gpu_only: LLM, prompt: list[int]) -> tuple[int, ...]:
    return gpu_only.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids


@pytest.fixture
def load(bundled_model: Path, host_llm: Callable[..., LLM], plan: Plan) -> Callable[..., LLM]:
    return lambda **options: host_llm(bundled_model, **{"plan": plan, **options})


def runs_of(npu: Npu, call: Callable[[], object]) -> int:
    before = npu.runs
    call()
    return npu.runs - before


# Layers and groups that are cut: 4 layers of 4 groups, and the head where it is read.
WHEN = {
    "in the first chunk": (5, 0),
    "in the second chunk": (16 + 3, CHUNK),
    "in the head after the prompt": (3 * 16 + 1, 2 * CHUNK),
    "in the first token": (3 * 16 + 1 + 4, PROMPT),
    "in the tenth token": (3 * 16 + 1 + 9 * 17 + 11, PROMPT + 9),
}


@pytest.mark.parametrize("sync", ["auto", pytest.param("poll", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", WHEN)
def test_the_gpu_goes_on_from_the_same_cache(
    when: str,
    sync: str,
    npu: Npu,
    load: Callable[..., LLM],
    prompt: list[int],
    expected: tuple[int, ...],
) -> None:
    llm = load(allow_fallback=True, sync=sync)
    runs, token = WHEN[when]
    npu.fails_at = npu.runs + runs
    session = llm.session()
    result = llm.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
    assert result.token_ids == expected
    assert session.position == PROMPT + NEW - 1
    assert npu.runs == npu.fails_at
    (note,) = llm.failures
    assert f"since token {token}," in note
    assert "the device is gone" in note
    assert note in llm.notes
    # Later answers are the GPU's as well, and nothing asks the NPU again.
    assert llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids == expected
    assert npu.runs == npu.fails_at
    assert llm.failures == (note,)


@pytest.mark.parametrize("when", WHEN)
def test_without_leave_it_is_an_error_and_the_session_stays_usable(
    when: str, npu: Npu, load: Callable[..., LLM], prompt: list[int], expected: tuple[int, ...]
) -> None:
    llm = load()
    runs, token = WHEN[when]
    npu.fails_at = npu.runs + runs
    session = llm.session()
    with pytest.raises(GraphError, match="the device is gone"):
        llm.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
    # What was not finished does not count: neither a chunk of a prompt nor a token.
    assert session.position == (token if token >= PROMPT else 0)
    assert llm.failures == ()
    npu.fails_at = None
    result = llm.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
    assert result.token_ids == expected


def test_all_logits_survive_a_failure(
    npu: Npu, load: Callable[..., LLM], gpu_only: LLM, prompt: list[int]
) -> None:
    """A chunk whose logits were read in part is computed again as a whole."""
    wanted = gpu_only.session().prefill(prompt, all_logits=True)
    llm = load(allow_fallback=True)
    # Two of the four heads of the second chunk are through.
    npu.fails_at = npu.runs + 16 + 4 + 16 + 3
    actual = llm.session().prefill(prompt, all_logits=True)
    assert f"since token {CHUNK}," in llm.failures[0]
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-2 * np.abs(wanted).max())
    np.testing.assert_array_equal(actual.argmax(1), wanted.argmax(1))


def test_a_second_failure_is_an_error(load: Callable[..., LLM], prompt: list[int], npu: Npu) -> None:
    llm = load(allow_fallback=True)
    npu.fails_at = npu.runs + 1
    llm.session().prefill(prompt)
    with pytest.raises(FenceError, match="again"):
        llm._thread.run(lambda: llm._engine._fall_back(FenceError("again"), 3))


# -- graphs that do not build, memory that runs out ---------------------------------------------------------


def test_a_graph_that_does_not_build_leaves_the_model_to_the_gpu(
    load: Callable[..., LLM], prompt: list[int], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise GraphError("The graph does not compile.")

    monkeypatch.setattr(HostNpu, "_open", refuse)
    with pytest.raises(GraphError, match="does not compile"):
        load()
    llm = load(allow_fallback=True)
    assert "since token 0" in llm.failures[0]
    assert llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids == expected


@pytest.mark.parametrize("allow", [False, True])
def test_memory_that_runs_out_while_a_pass_is_compiled(
    allow: bool,
    load: Callable[..., LLM],
    prompt: list[int],
    gpu_only: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = load(allow_fallback=allow)
    session = llm.session()
    session.prefill(prompt[:20])
    original = SplitEmitter.linear

    def run_out(emitter: SplitEmitter, steps: Any, here: Any, linear: Any) -> Any:
        if steps.tokens == 33 and here.placement.npu_lengths:
            raise MemoryError
        return original(emitter, steps, here, linear)

    monkeypatch.setattr(SplitEmitter, "linear", run_out)
    if allow:
        actual = session.prefill(prompt[20:53])
        assert actual.argmax() == gpu_only.session().prefill(prompt[:53]).argmax()
        assert "since token 20," in llm.failures[0]
        assert "memory ran out" in llm.failures[0]
        return
    with pytest.raises(EngineError, match="prefill pass of 33 tokens failed: memory ran out"):
        session.prefill(prompt[20:53])
    assert session.position == 20
    monkeypatch.undo()
    assert session.prefill(prompt[20:53]).argmax() == gpu_only.session().prefill(prompt[:53]).argmax()


# -- signals that never come --------------------------------------------------------------------------------


@pytest.fixture
def load_impatient(
    load: Callable[..., LLM], gpu_only: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    def load_impatient(**options: object) -> LLM:
        # The driver compiles a kernel at its first launch, which may take longer than the short limit.
        for patient in (gpu_only, load(**options)):
            session = patient.session()
            session.prefill(prompt[:100])
            session.decode(prompt[100])
            patient.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
        limits = WaitLimits(spin_us=500.0, timeout_s=0.3)
        monkeypatch.setattr(heterollm.engine.waits, "LIMITS", limits)
        return load(**options)

    return load_impatient


def close_gate(llm: LLM) -> Gate:
    def close() -> Gate:
        gate = Gate(llm.device.gpu)
        # The kernel may be compiled at its first launch.
        gate.close()
        gate.open()
        llm.device.gpu.finish()
        gate.close()
        return gate

    return llm._thread.run(close)


@pytest.mark.parametrize("sync", ["poll", "flag", "sleep_flag"])
@pytest.mark.parametrize("allow", [False, True])
def test_a_signal_that_does_not_come_is_an_error_and_not_a_hang(
    allow: bool,
    sync: str,
    load_impatient: Callable[..., LLM],
    prompt: list[int],
    expected: tuple[int, ...],
) -> None:
    llm = load_impatient(sync=sync, allow_fallback=allow)
    session = llm.session()
    session.prefill(prompt[:100])
    gate = close_gate(llm)
    opener = threading.Timer(1.0, gate.open)
    opener.start()
    begin = time.monotonic()
    if allow:
        # The GPU comes back, and computes alone.
        session.decode(prompt[100])
        assert "got no signal" in llm.failures[0]
    else:
        with pytest.raises(FenceError, match="got no signal"):
            session.decode(prompt[100])
        assert session.position == 100
        session.decode(prompt[100])
    assert time.monotonic() - begin < 20
    opener.join()
    result = llm.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
    assert result.token_ids == expected


@pytest.mark.parametrize("allow", [False, True])
def test_a_gpu_that_does_not_come_back_ends_the_model_but_not_the_program(
    allow: bool,
    load_impatient: Callable[..., LLM],
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = load_impatient(sync="poll", allow_fallback=allow)
    monkeypatch.setattr(heterollm.engine.runner, "DRAIN_LIMITS", WaitLimits(spin_us=0.0, timeout_s=0.2))
    session = llm.session()
    session.prefill(prompt[:100])
    gate = close_gate(llm)
    try:
        with pytest.raises(FenceError, match="got no signal"):
            session.decode(1)
        assert session.position == 100
        assert llm.failures == ()
        for call in (lambda: session.decode(1), lambda: session.prefill([1, 2])):
            with pytest.raises(EngineError, match="does not finish") as caught:
                call()
            assert "Load the model again" in caught.value.fix
    finally:
        gate.open()
    assert isinstance(caught.value, HeteroLLMError)
