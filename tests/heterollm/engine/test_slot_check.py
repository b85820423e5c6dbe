"""The debug mode of the slots: right orders pass under delays in both parts, wrong ones are caught."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import EngineError, OptionError
from heterollm.engine import glue
from heterollm.engine.builder import PassBuilder
from heterollm.engine.slot_check import CHECK_VARIABLE, SlotCheck
from heterollm.engine.step import Buffer, Step
from heterollm.kernels.gpu.opencl_devices import MEMORY_VARIABLE
from heterollm.kernels.npu import host as npu_host
from heterollm.kernels.npu.graphs import write_graph
from heterollm.llm import LLM
from heterollm.solver import Placement, Plan, model_shape
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

KINDS = ("npu", "row", "sequence", "hybrid")
LENGTHS = (40, 1)
CASES = [
    *((kind, "event") for kind in KINDS),
    ("row", "flag"),
    *(pytest.param("row", sync, marks=pytest.mark.slow) for sync in ("finish", "operator")),
]


def cut(kind: str, spec: Any, tokens: int) -> Placement:
    rows = tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
    high = next(length for length in (1, 32, 64, 128) if length >= tokens)
    if kind == "row" and tokens > 32:
        return RowsPlacement(rows, (32, 32))
    if kind in ("row", "hybrid"):
        return RowsPlacement(rows, (high,))
    if kind == "sequence" and tokens > 32:
        return RowsPlacement(spec.member_rows, (32,))
    return RowsPlacement(spec.member_rows, (high,))


@pytest.fixture(scope="module")
def plans(checkpoint: Callable[..., Path]) -> Callable[[str, str], Plan]:
    with LLM.load(checkpoint("llama"), device="host", plan="gpu") as llm:
        specs = llm._weights.specs

    def make(kind: str, precision: str = "w4a16") -> Plan:
        entries = tuple(
            PlanEntry(phase, (tokens, tokens), (spec.layer, spec.layer), spec.group, cut(kind, spec, tokens))
            for phase in ("prefill", "decode")
            for tokens in range(1, 65)
            for spec in specs
        )
        return Plan(kind, "host", precision, model_shape(specs), 64, entries)

    return make


@pytest.fixture
def load(checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda **options: host_llm(checkpoint("llama"), **options)


@pytest.fixture
def checking(
    monkeypatch: pytest.MonkeyPatch, delay_graph: Callable[[Path, int], None]
) -> Callable[[int], None]:
    """Return a function that turns the mode on, and delays graphs as well, both by a seed."""

    def turn_on(seed: int) -> None:
        monkeypatch.setenv(CHECK_VARIABLE, str(seed))
        random = np.random.default_rng(seed)

        def write_late(*arguments: Any, **options: Any) -> Path:
            path = write_graph(*arguments, **options)
            if random.random() < 0.5:
                delay_graph(path, int(random.integers(5, 60)))
            return path

        monkeypatch.setattr(npu_host, "write_graph", write_late)

    return turn_on


def logits(llm: LLM, ids: list[int]) -> np.ndarray:
    session = llm.session()
    rows = [*session.prefill(ids[:40], all_logits=True), *map(session.decode, ids[40:44])]
    return np.stack([*rows, *session.decode(ids[44:47])])


def late_writes(llm: LLM) -> int:
    """Return how many kernels of delays the passes of :func:`logits` have."""
    passes = [
        step for length in LENGTHS for step in llm.steps("decode" if length == 1 else "prefill", length)
    ]
    return sum(part.operator == "late write" for step in passes for part in (step.merged or (step,)))


@pytest.mark.parametrize(("kind", "sync"), CASES)
def test_right_orders_pass_and_delays_change_no_logit(
    kind: str,
    sync: str,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    checking: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag is checked on slots in shared virtual memory, as a GPU would have them."""
    ids = token_ids(47)
    plain = load(plan=plans(kind), sync=sync)
    expected = logits(plain, ids)
    assert late_writes(plain) == 0
    checking(KINDS.index(kind) + 1)
    if sync == "flag":
        monkeypatch.setenv(MEMORY_VARIABLE, "svm")
    llm = load(plan=plans(kind), sync=sync)
    np.testing.assert_array_equal(logits(llm, ids), expected)
    assert late_writes(llm) >= 2


@pytest.mark.parametrize("kind", ["row", pytest.param("sequence", marks=pytest.mark.slow)])
def test_rounded_inputs_pass_too(
    kind: str,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    checking: Callable[[int], None],
) -> None:
    ids = token_ids(47)
    options = {"plan": plans(kind, "w4a8"), "precision": "w4a8"}
    expected = logits(load(**options), ids)
    checking(5)
    np.testing.assert_array_equal(logits(load(**options), ids), expected)


# -- wrong orders --------------------------------------------------------------------------------------------


@pytest.fixture
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes in which nothing waits for a signal."""
    monkeypatch.setattr(PassBuilder, "wait", lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_wait_is_refused(
    kind: str,
    without_waits: None,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    told = r"npu step '0\.qkv [^']*' may run before kernel '0\.norm' has written linear_input"
    with pytest.raises(EngineError, match=told):
        load(plan=plans(kind), sync="event")


def test_delays_alone_show_a_missing_wait(
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Without the proof, the answers tell: some kernel comes after the graph that reads its output."""
    ids = token_ids(47)
    expected = logits(load(plan=plans("npu"), sync="event"), ids)
    request.getfixturevalue("without_waits")
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    monkeypatch.setattr("heterollm.engine.slot_check._follow", lambda *_: None)
    actual = logits(load(plan=plans("npu"), sync="event"), ids)
    assert not np.array_equal(actual, expected)


@pytest.fixture
def course(plans: Callable[..., Plan], load: Callable[..., LLM]) -> tuple[Callable[..., Any], list[Step]]:
    """A function that checks steps, and those of a real pass with row cuts."""
    llm = load(plan=plans("row"), sync="event")
    check = llm.on_engine_thread(lambda: SlotCheck(llm.device.gpu, 1))
    return lambda steps: check.checked(steps, {}, "the pass"), list(llm.steps("prefill", 20))


def places(steps: list[Step], action: str) -> list[int]:
    return [place for place, step in enumerate(steps) if step.action == action]


def test_every_wait_is_needed(course: tuple[Callable[..., Any], list[Step]]) -> None:
    check, steps = course
    check(steps)
    waits = places(steps, "wait")
    assert len(waits) == 9
    for place in waits:
        with pytest.raises(EngineError, match="may run"):
            check([*steps[:place], *steps[place + 1 :]])


def test_a_signal_that_is_sent_too_early_is_caught(course: tuple[Callable[..., Any], list[Step]]) -> None:
    check, steps = course
    marks = places(steps, "mark")
    assert len(marks) == 9
    for place in marks:
        swapped = list(steps)
        swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
        with pytest.raises(EngineError, match="may run"):
            check(swapped)


def test_a_slot_that_is_written_while_it_is_read_is_caught(
    course: tuple[Callable[..., Any], list[Step]],
) -> None:
    """A graph may not write over what a kernel before it may still read."""
    check, steps = course
    first, second = places(steps, "graph")[:2]
    reader = next(place for place in range(first, second) if steps[place].operator == "rope")
    # Another reader of the first graph's output, behind the signal that the second graph waits for.
    mark = next(place for place in range(reader, second) if steps[place].action == "mark")
    late = [*steps[: mark + 1], steps[reader], *steps[mark + 1 :]]
    told = r"npu step '0\.o [^']*' may run while kernel '0\.rope' still uses npu_output"
    with pytest.raises(EngineError, match=told):
        check(late)


def test_a_slot_that_nothing_has_written_is_not_read(
    course: tuple[Callable[..., Any], list[Step]],
) -> None:
    check, steps = course
    assert steps[0].operator == "embedding"
    with pytest.raises(EngineError, match=r"'0\.norm' reads what nothing has written in residual"):
        check(steps[1:])
    (first, *_) = (place for place, step in enumerate(steps) if step.operator == "qkv")
    with pytest.raises(EngineError, match="reads what nothing has written in linear_input"):
        check(steps[first:])


def test_an_operator_that_the_registry_lacks_is_refused(
    course: tuple[Callable[..., Any], list[Step]],
) -> None:
    check, steps = course
    with pytest.raises(EngineError, match="names an operator that kernels/operators lacks: nrom"):
        check([steps[0], replace(steps[1], operator="nrom"), *steps[2:]])


# -- steps that do not tell the truth -----------------------------------------------------------------------

LIES: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str]] = {
    "leaves out what it reads": (lambda _: (), "does not say that it touches gpu_output"),
    "reads more than its kernel": (
        lambda value: (value.a, value.b, Buffer("activated")) if value else (),
        "says that it touches, and has no argument of, activated",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_step_that_says_another_thing_than_its_kernel_does_is_refused(
    lie: str, load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, told = LIES[lie]
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    monkeypatch.setattr(glue, "segments_of", segments)
    with pytest.raises(EngineError, match=told):
        load(plan="gpu")


@pytest.mark.parametrize("text", ["yes", "-1", "1.5", "²"])
def test_a_seed_that_is_no_number_is_refused(
    text: str, load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, text)
    with pytest.raises(OptionError, match=CHECK_VARIABLE):
        load(plan="npu")


@pytest.mark.parametrize("text", ["", "0"])
def test_the_mode_is_off_otherwise(
    text: str, load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, text)
    llm = load(plan="npu")
    assert late_writes(llm) == 0
