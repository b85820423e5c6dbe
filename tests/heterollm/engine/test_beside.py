"""Decode passes beside a prompt: the bits of both one after the other, and errors of one of them alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults import failing_graphs
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.base import GraphError, KernelError, silent
from heterollm.engine import USUAL_GAPS, Engine, PromptTask, Scheduler, Session
from heterollm.engine.beside import Beside, PassBeside
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.engine.windows import Spare
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.sim import Simulation
from heterollm.llm import LLM
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.solver import ChunkSchedule, Plan, level_plan
from heterollm.text import GenerationOptions, NoTokenizer, TokenSequence

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


@pytest.fixture
def equal_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(spare: Spare, *_: object) -> None:
        spare.rest_s = SPARE_S

    monkeypatch.setattr(Spare, "learn", learn)
    monkeypatch.setattr(Spare, "learn_alone", learn)


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 200, count).astype(np.int32)


@pytest.fixture
def load(host_llm: Load, equal_windows: None, half_rows_plan: Callable[..., Plan]) -> Load:
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
        Session.append_beside(self.sessions, self.ids, logits)
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
        expected = llm.on_engine_thread(lambda ids=ids: np.array(Session.decode_together(answers.forks, ids)))
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
        assert between == ({"wait"} if llm.device.gpu.traits.coherent else set())  # maps wait for the queue
        assert window.spare.shared


def test_a_window_takes_what_the_graphs_leave() -> None:
    spare, shared = Spare(shared=False), Spare(shared=True)
    for one in (spare, shared):
        one.learn_alone(1.0)
        assert one.likely_s == 1.0
    assert (spare.seconds, shared.seconds) == (1.0, 0.0)
    for _ in range(4):
        spare.learn(1.0, 0.9, False)
        shared.learn(1.0, 0.1, True)
    assert 0.0 < shared.seconds == shared.likely_s < spare.seconds < 1.0
    for _ in range(40):
        spare.learn(1.0, 0.9, True)
        shared.learn(1.0, 0.1, False)
    assert (spare.seconds, shared.seconds) == (1.0, 0.0)


def test_passes_that_delay_the_graphs_as_long_as_they_take_are_no_gain() -> None:
    """So it is where both processors are one core; but the windows are looked at again."""
    spare = Spare(shared=False)
    spare.learn_alone(1.0)
    spare.learn(1.2, 1.0, True)
    assert spare.seconds > 1.0
    for _ in range(8):
        spare.learn(1.9, 1.0, True)
    assert spare.seconds == spare.likely_s == 0.0
    for _ in range(8):
        spare.learn(1.1, 1.0, True)
    assert spare.seconds > 1.0


def test_chunks_in_flight(checkpoint: Any, host_llm: Load, load: Load) -> None:
    """Passes run beside them, too, and recurrent state goes from chunk to chunk."""
    folder = checkpoint("lfm2")
    plan = structs.replace(load(folder).plan, schedule=ChunkSchedule("out_of_order", 2, ()))
    llm = host_llm(folder, plan=plan, context=CONTEXT)
    answers = Answers(llm)
    assert np.array_equal(read(llm, answers), alone(llm))
    assert answers.begun == len(answers.logits) > 1
    check_bits(llm, answers)


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


class Task(PromptTask):
    """An answer of a scheduler, and the times of its tokens.

    Args:
        answer: The answer.
        session: An empty session.
        now_s: The clock.
        put: Called behind each token.
    """

    def __init__(
        self,
        answer: TokenSequence,
        session: Session,
        now_s: Callable[[], float],
        put: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__("default", [answer], reproducible=False)
        self.times_s: list[float] = []
        self.errors: list[str] = []
        self._session, self._now_s, self._put = session, now_s, put

    is_slow = False

    def take_session(self) -> Session:
        return self._session

    def copy_session(self) -> Session:
        raise AssertionError

    def put(self, _number: int, steps: Sequence[Any], _seconds: float, /) -> None:
        self.times_s += [self._now_s()] * len(steps)
        self._put(len(self.times_s))

    def fail(self, error: Exception, /) -> None:
        self.errors.append(str(error))

    def read(self, _seconds: float, /) -> None:
        pass

    def close(self) -> None:
        pass


THREAD: Any = SimpleNamespace(background=[], submit=lambda call: call(), run=lambda call: call())


@pytest.fixture
def beside_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the rows of each pass beside a prompt."""
    found: list[int] = []
    accept = Scheduler.accept_beside

    def accept_and_count(scheduler: Scheduler, logits: np.ndarray) -> None:
        found.append(len(logits))
        accept(scheduler, logits)

    monkeypatch.setattr(Scheduler, "accept_beside", accept_and_count)
    return found


def test_answers_do_not_depend_on_prompts_beside_them(
    checkpoint: Any, load: Load, beside_passes: list[int]
) -> None:
    """Whatever ends in the middle of a chunk: an answer, one that is cancelled, or another prompt."""
    llm = load(checkpoint("lfm2"))
    gpu, now_s = llm.device.gpu, llm.device.now_s
    lengths, limits = (*LENGTHS, 500, 200), (60, 20, 60, 3, 3)
    given = [drawn(length, number).tolist() for number, length in enumerate(lengths)]

    def work() -> list[Task]:
        scheduler = Scheduler(THREAD, now_s, llm._engine.rows, gpu=gpu)

        def put(count: int) -> None:
            if count == 8:
                scheduler.add(tasks[3])
                scheduler.add(tasks[4])
            tasks[2].cancelled |= count == 14
            tasks[4].cancelled |= count == 16

        tasks: list[Task] = []
        for number, (ids, limit) in enumerate(zip(given, limits, strict=True)):
            answer = llm.prepare(ids, temperature=0, max_new_tokens=limit, ignore_eos=True)
            tasks.append(Task(answer, llm.session(), now_s, put if number == 0 else lambda _: None))
        for task in tasks[:3]:
            scheduler.add(task)
        while scheduler.step():
            pass
        return tasks

    tasks = llm.on_engine_thread(work)
    assert not any(task.errors for task in tasks)
    assert len(beside_passes) > 2
    assert {1, 2, 3} >= set(beside_passes) > {1}
    for task, ids, limit in zip(tasks, given, limits, strict=True):
        result = task.answers[0].result
        if result is None:
            assert task is tasks[4]  # its prompt was not read
            continue
        alone = llm.generate(ids, temperature=0, max_new_tokens=limit, ignore_eos=True)
        assert list(result.token_ids) == list(alone.token_ids[: len(result.token_ids)])
        assert result.stop_reason == ("cancelled" if task.cancelled else "length")
    assert tasks[2].cancelled


@pytest.mark.parametrize("draft", [False, True])
def test_passes_beside_a_prompt_check_guesses(
    draft: bool, bundled_model: Path, load: Load, beside_passes: list[int]
) -> None:
    """Those of a draft have turns; beside a prompt its answers get single tokens."""
    speculative = bundled_model if draft else "lookup"
    llm = load(bundled_model, speculative=speculative, guesses=2)
    texts = ("x = [1, 2, 3, 4]\ny = [1, 2, 3, 4]\n" * 4, "def add(a, b):\n" * 6)
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
    plain = [llm.generate(text, session=llm.session(), speculate=False, **options) for text in texts]

    def work() -> list[Task]:
        scheduler = Scheduler(THREAD, llm.device.now_s, llm._engine.rows, gpu=llm.device.gpu)
        prompt = llm.prepare(drawn(500, 1).tolist(), temperature=0, max_new_tokens=1)
        last = Task(prompt, llm.session(), llm.device.now_s)

        def put(count: int) -> None:
            if count >= 8 and last not in added:
                added.append(last)
                scheduler.add(last)

        added: list[Task] = []
        answers = [llm.prepare(llm.tokenizer.encode(text), **options) for text in texts]
        tasks = [Task(answer, llm.session(), llm.device.now_s, put) for answer in answers]
        for task in tasks:
            scheduler.add(task)
        while scheduler.step():
            pass
        return tasks

    tasks = llm.on_engine_thread(work)
    assert not any(task.errors for task in tasks)
    assert [task.answers[0].result.token_ids for task in tasks] == [one.token_ids for one in plain]
    assert beside_passes
    assert (max(beside_passes) > len(texts)) is not draft


@pytest.mark.parametrize("level", ["layer", "gpu"])
def test_a_prompt_under_load_on_a_simulated_phone(level: Any, beside_passes: list[int]) -> None:
    """The prompt and the answers both gain, and no answer waits longer than its limit."""
    config = find_model("llama-3.2-1b").config
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(numerics=False))
    specs = op_specs(config, "w4a16", 128, True)
    standard, now_s = device.standard_lengths, device.now_s
    plan = level_plan(
        level, specs, device=device.name, precision="w4a16", standard_lengths=standard, chunk_length=256
    )
    engine = Engine(device, shape_only_weights(config, specs), plan, CONTEXT, silent)

    def begun(tokens: int) -> Task:
        asked = GenerationOptions(ignore_eos=True)
        ids, tokenizer = drawn(tokens, 1), NoTokenizer(Path(), frozenset())
        answer = TokenSequence(tokenizer, ids, asked, context=CONTEXT, clock=now_s)
        return Task(answer, Session(engine, THREAD, engine.vocab_size), now_s)

    found = []
    for beside in (False, True):
        scheduler = Scheduler(THREAD, now_s, engine.rows, gpu=device.gpu, beside=beside)
        answers = [begun(100) for _ in range(4)]
        for task in answers:
            scheduler.add(task)
        for _ in range(4):  # the first prompt compiles, and then windows are learnt
            while any(len(task.times_s) < 30 for task in answers):
                scheduler.step()
            prompt, begin_s = begun(500), now_s()
            gap_s = np.diff(answers[0].times_s)[-5:].mean()
            scheduler.add(prompt)
            while not prompt.times_s:
                scheduler.step()
            prompt.cancelled = True
            first_s = prompt.times_s[0]
            gaps_s = np.diff([at for at in answers[0].times_s if at >= begin_s - 2 * gap_s and at <= first_s])
            for task in answers:
                task.times_s = task.times_s[-1:]
        found.append((first_s - begin_s, len(gaps_s), gaps_s.max() / gap_s))
    (turns_s, turns, turns_gap), (beside_s, passes, beside_gap) = found
    if level == "gpu":
        assert beside_s == pytest.approx(turns_s, rel=0.1)
        assert not beside_passes
    else:
        assert beside_s < 0.97 * turns_s
        assert passes >= 1.5 * turns
    layer_gap = turns_s / gap_s / 32
    assert max(turns_gap, beside_gap) < USUAL_GAPS + layer_gap + 0.2
