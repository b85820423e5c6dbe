"""Decode passes beside a prompt: the bits of both one after the other, and errors of one of them alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import failing_graphs
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.base import GraphError, KernelError
from heterollm.engine import Session
from heterollm.engine.beside import Beside, PassBeside
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.engine.windows import Spare
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.solver import Plan

CHUNK, CONTEXT = 64, 1088
LENGTHS = (300, 70, 33)
"""Of the prompts of the running answers; one leaves a window's first pages behind."""

PROMPT = 150
"""Two whole chunks and a shorter one."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"kv_bits": 8},
    "lfm2": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "gemma3_text": {"kv_bits": 8, "precision": "w4a8"},
    "gpt_oss": {},
}
SLOW = ("qwen3_5_text", "gemma3_text", "gpt_oss")

Load = Callable[..., LLM]

SPARE_S = 1e-3
"""Time of a window, from the second use of its operator on."""


@pytest.fixture(autouse=True)
def equal_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(spare: Spare, *_: object) -> None:
        spare.seconds = SPARE_S

    monkeypatch.setattr(Spare, "learn", learn)


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, count).astype(np.int32)


@pytest.fixture
def load(host_llm: Load, half_rows_plan: Callable[..., Plan]) -> Load:
    """Return a function that loads a model whose decode passes are on the GPU.

    The NPU has all linears of prompts, or half of their rows.
    """

    def made(folder: Path, level: str = "layer", **options: Any) -> LLM:
        options = {"context": CONTEXT, **options}
        first = host_llm(folder, plan="gpu" if level == "rows" else level, **options)
        plan = structs.replace(first.plan, chunk_length=CHUNK)
        if level == "rows":
            halves = half_rows_plan(first, CHUNK)
            prompts = [entry for entry in halves.entries if entry.phase == "prefill"]
            decode = [entry for entry in first.plan.entries if entry.phase == "decode"]
            plan = structs.replace(halves, entries=(*prompts, *decode), slices=())
        return host_llm(folder, plan=plan, **options)

    return made


def next_ids(logits: np.ndarray) -> list[int]:
    return [int(row[:200].argmax()) for row in logits]


class Answers:
    """A source of passes of running sessions, which keeps their logits.

    Args:
        llm: The model.
        count: Sessions.
        pass_s: Time that a pass is said to take.
    """

    def __init__(self, llm: LLM, count: int = len(LENGTHS), pass_s: float = 3 * SPARE_S) -> None:
        self.sessions = [llm.session() for _ in LENGTHS[:count]]
        for number, (session, length) in enumerate(zip(self.sessions, LENGTHS, strict=False)):
            session.prefill(drawn(length, number))
        self.forks = [session.fork() for session in self.sessions]
        self.ids = drawn(count, 5).tolist()
        self.logits: list[np.ndarray] = []
        self.errors: list[BaseException] = []
        self.pass_s, self.is_due, self.begun = pass_s, False, 0
        self.breaks_at: int | None = None

    def begin_beside(self, _left_s: float) -> PassBeside | None:
        found = Session.begin_beside(self.sessions, self.ids)
        if found is not None:
            self.begun += 1
            found.seconds = self.pass_s
            if self.begun == self.breaks_at:
                found.run = self._break
        return found

    def accept_beside(self, logits: np.ndarray) -> None:
        Session.append_beside(self.sessions, self.ids)
        self.logits.append(logits.copy())
        self.ids = next_ids(logits)

    def fail_beside(self, error: BaseException) -> None:
        self.errors.append(error)

    def _break(self, _calls: object) -> None:
        raise KernelError("The kernel is broken.")


def read(llm: LLM, answers: Answers, *, pauses: Sequence[int] = (), prompt: int = PROMPT) -> np.ndarray:
    """Return the logits behind a prompt beside these answers and behind a token after it."""
    session, asked = llm.session(), 0

    def wanted(_part: float) -> bool:
        nonlocal asked
        asked += 1
        return asked in pauses

    def work() -> np.ndarray:
        beside = Beside(llm.device.gpu, answers)
        for _ in session.prefill_in_turns(drawn(prompt, 9), wanted, beside):
            assert not beside.runs
            llm.session().prefill(drawn(40, 8))
        assert not beside.runs
        return session.last_logits.copy()

    return np.array([llm.on_engine_thread(work), session.decode(7)])


def alone(llm: LLM, prompt: int = PROMPT) -> np.ndarray:
    session = llm.session()
    return np.array([session.prefill(drawn(prompt, 9)), session.decode(7)])


def check_bits(llm: LLM, answers: Answers) -> None:
    """Compare the passes of answers with the same passes without a prompt."""
    ids = drawn(len(answers.forks), 5).tolist()
    for found in answers.logits:
        expected = llm.on_engine_thread(lambda ids=ids: Session.decode_together(answers.forks, ids).copy())
        assert np.array_equal(found, expected)
        ids = next_ids(expected)
    for one, other in zip(answers.sessions, answers.forks, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert np.array_equal(one.decode(3), other.decode(3))


@pytest.mark.parametrize("level", ["layer", "rows"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES]
)
def test_both_have_the_bits_of_turns(family: str, level: str, checkpoint: Any, load: Load) -> None:
    """Passes of several sessions or of one, across chunks, and around a pause in which others run."""
    llm = load(checkpoint(family), level, **FAMILIES[family])
    expected = alone(llm)
    for count, windows, pauses in ((3, 1, ()), (3, 5, ()), (1, 2, (2,)), (3, 4, (1, 4))):
        answers = Answers(llm, count, windows * SPARE_S)
        assert np.array_equal(read(llm, answers, pauses=pauses), expected)
        assert answers.begun == len(answers.logits) > 1
        check_bits(llm, answers)


def test_every_graph_has_its_window(checkpoint: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a pass are enqueued behind the chunk's, and before the host waits for these."""
    monkeypatch.setenv(CHECK_VARIABLE, "5")
    llm = load(checkpoint("llama"), "rows")
    answers = Answers(llm)
    answers.is_due = True
    assert np.array_equal(read(llm, answers), alone(llm))
    compiled = next(
        own for (phase, length, _), own in llm._engine._passes.compiled.items() if length == CHUNK
    )
    assert compiled.windows is not None
    steps = compiled.steps
    graphs = [at for at, step in enumerate(steps) if step.action == "graph"]
    assert [window.behind - 1 for window in compiled.windows] == graphs
    for window, graph in zip(compiled.windows, graphs, strict=True):
        between = {step.action for step in steps[window.index : graph]}
        assert between == {"wait"}
        assert window.spare.shared


def test_passes_that_wait_for_the_npu_have_turns(
    checkpoint: Any, host_llm: Load, half_rows_plan: Callable[..., Plan]
) -> None:
    folder = checkpoint("llama")
    plan = half_rows_plan(host_llm(folder, plan="gpu", context=CONTEXT), CHUNK)
    llm = host_llm(folder, plan=plan, context=CONTEXT)
    answers = Answers(llm)
    assert np.array_equal(read(llm, answers), alone(llm))
    assert not answers.logits


def test_a_prompt_on_the_gpu_alone_has_no_pass_beside_it(checkpoint: Any, host_llm: Load) -> None:
    llm = host_llm(checkpoint("llama"), plan="gpu", context=CONTEXT)
    answers = Answers(llm)
    read(llm, answers)
    assert not answers.begun


def test_an_error_of_a_pass_is_its_own(checkpoint: Any, load: Load) -> None:
    """The chunk begins again, and computes the same."""
    llm = load(checkpoint("lfm2"))
    answers = Answers(llm)
    answers.breaks_at = 1
    assert np.array_equal(read(llm, answers), alone(llm))
    assert [str(error) for error in answers.errors] == ["The kernel is broken."]
    check_bits(llm, answers)


@pytest.mark.parametrize("allow_fallback", [False, True])
def test_an_error_of_the_prompt_is_its_own(
    allow_fallback: bool, checkpoint: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ends as it would without; with a fallback the GPU then reads the prompt."""
    fails = failing_graphs(monkeypatch)
    llm = load(checkpoint("llama"), allow_fallback=allow_fallback)
    expected, answers = alone(llm), Answers(llm, pass_s=1.0)
    begin = answers.begin_beside

    def begin_and_fail(left_s: float) -> PassBeside | None:
        if answers.begun:
            fails.set()
        return begin(left_s)

    monkeypatch.setattr(answers, "begin_beside", begin_and_fail)
    answers.is_due = True
    if allow_fallback:
        assert sqnr_db(read(llm, answers), expected) > LOGITS_SQNR_DB["fp32"]
        assert len(llm.failures) == 1
    else:
        with pytest.raises(GraphError):
            read(llm, answers)
    assert not answers.errors
    assert answers.begun == len(answers.logits) >= 1
    fails.clear()
    check_bits(llm, answers)
