"""Failures of the NPU part and of hand-overs: a clear error, or the GPU goes on from the same KV cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Gate

import heterollm.engine.waits
from heterollm.base import EngineError, FenceError, GraphError, HeteroLLMError
from heterollm.engine.splits import SplitEmitter
from heterollm.kernels.gpu import HostClock, OpenClRuntime
from heterollm.kernels.npu import HostNpu
from heterollm.kernels.npu.session import HeldSession, SessionGraph
from heterollm.kernels.sync import WaitLimits
from heterollm.llm import LLM
from heterollm.solver import Plan

PROMPT = 300
NEW = 24
CHUNK = 128


class Npu:
    """Counts graph runs, and raises from a chosen one on, or closes all graphs before one."""

    def __init__(self) -> None:
        self.runs = 0
        self.fails_at: int | None = None
        self.closes_at: int | None = None
        self.held: set[HeldSession] = set()

    def run(self, call: Callable[[], None]) -> None:
        self.runs += 1
        if self.fails_at is not None and self.runs >= self.fails_at:
            raise GraphError("The graph of down of layer 1 failed while running: the device is gone")
        if self.runs == self.closes_at:
            for held in self.held:
                held._open_again = self.refused
                held.close()
        call()

    def refused(self) -> None:
        raise GraphError("QNN refuses the context")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    state, bind = Npu(), SessionGraph.bind

    def bind_to_break(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)
        state.held.add(graph._held)
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


def test_the_gpu_goes_on_where_a_closed_graph_does_not_open_again(
    npu: Npu, load: Callable[..., LLM], prompt: list[int], expected: tuple[int, ...]
) -> None:
    """As where an NPU's address space is too small for all contexts, and QNN refuses one that was closed."""
    llm = load(allow_fallback=True)
    npu.closes_at = npu.runs + WHEN["in the tenth token"][0]
    assert llm.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids == expected
    assert npu.runs == npu.closes_at
    (note,) = llm.failures
    assert "QNN refuses the context" in note
    assert note in llm.notes


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


class Patience:
    """The host's clock; once the gate is closed a wait's first sleep takes an hour and no real time.

    Later sleeps open the gate, so that the wait for the failed pass ends, unless the GPU is lost.
    """

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.gpu_is_lost = False
        self._ahead_ns = 0

    def clock(self) -> HostClock:
        own = HostClock.of_this_thread()

        def sleep(seconds: float) -> None:
            if self.gate is None:
                own.sleep_s(seconds)
            elif self._ahead_ns and not self.gpu_is_lost:
                self.gate.open()
                own.sleep_s(seconds)
            else:
                self._ahead_ns += 3600 * 10**9

        return HostClock(lambda: own.now_ns() + self._ahead_ns, sleep, own.yield_lock, own.overshoot_us)

    def close_gate(self, llm: LLM) -> Gate:
        def close() -> Gate:
            gate = Gate(llm.device.gpu)
            # The kernel may be compiled at its first launch. Each launch stands for some seconds at most.
            gate.close()
            gate.open()
            llm.device.gpu.finish()
            for _ in range(20):
                gate.close()
            return gate

        self.gate = llm._thread.run(close)
        return self.gate


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    made = Patience()
    monkeypatch.setattr(OpenClRuntime, "host_clock", made.clock)
    monkeypatch.setattr(heterollm.engine.waits, "LIMITS", WaitLimits(spin_us=500.0, timeout_s=600.0))
    return made


@pytest.mark.parametrize("sync", ["poll", "flag", "sleep_flag"])
@pytest.mark.parametrize("allow", [False, True])
def test_a_signal_that_does_not_come_is_an_error_and_not_a_hang(
    allow: bool,
    sync: str,
    load: Callable[..., LLM],
    patience: Patience,
    prompt: list[int],
    expected: tuple[int, ...],
) -> None:
    llm = load(sync=sync, allow_fallback=allow)
    session = llm.session()
    session.prefill(prompt[:100])
    patience.close_gate(llm)
    if allow:
        # The GPU comes back, and computes alone.
        session.decode(prompt[100])
        assert "got no signal" in llm.failures[0]
    else:
        with pytest.raises(FenceError, match="got no signal"):
            session.decode(prompt[100])
        assert session.position == 100
        session.decode(prompt[100])
    result = llm.generate(prompt, session=session, max_new_tokens=NEW, ignore_eos=True)
    assert result.token_ids == expected


@pytest.mark.parametrize("allow", [False, True])
def test_a_gpu_that_does_not_come_back_ends_the_model_but_not_the_program(
    allow: bool,
    load: Callable[..., LLM],
    patience: Patience,
    prompt: list[int],
) -> None:
    llm = load(sync="poll", allow_fallback=allow)
    session = llm.session()
    session.prefill(prompt[:100])
    gate = patience.close_gate(llm)
    patience.gpu_is_lost = True
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
