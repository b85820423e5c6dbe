"""The debug mode of the slots: right orders pass under delays in both parts, wrong ones are caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import EngineError, OptionError
from heterollm.engine.placing import Placer
from heterollm.engine.slot_check import CHECK_VARIABLE, SlotCheck
from heterollm.kernels.gpu import Launch
from heterollm.kernels.npu import host as npu_host
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.sync.faults import delay_graph
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
def checking(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
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
    return sum(
        getattr(call, "label", "") == "late write"
        for compiled in llm._engine._passes.values()
        for call in compiled.calls
    )


@pytest.mark.parametrize(("kind", "sync"), CASES)
def test_right_orders_pass_and_delays_change_no_logit(
    kind: str,
    sync: str,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    checking: Callable[[int], None],
) -> None:
    ids = token_ids(47)
    plain = load(plan=plans(kind), sync=sync)
    expected = logits(plain, ids)
    assert late_writes(plain) == 0
    checking(KINDS.index(kind) + 1)
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


def without_waits(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a function that leaves out of a part's first calls whatever waits."""

    def start(placer: Placer, part: Any, launches: Any, **options: Any) -> list[Any]:
        return [
            call
            for call in original(placer, part, launches, **options)
            if getattr(call, "__name__", "") != "wait" and call is not part.hand_over()
        ]

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_wait_is_refused(
    kind: str, plans: Callable[..., Plan], load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    monkeypatch.setattr(Placer, "_start", without_waits(Placer._start))
    with pytest.raises(EngineError, match=r"0\.qkv may run before kernel 'norm' has written linear_input"):
        load(plan=plans(kind), sync="event")


def test_delays_alone_show_a_missing_wait(
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the proof, the answers tell: some kernel comes after the graph that reads its output."""
    ids = token_ids(47)
    expected = logits(load(plan=plans("npu"), sync="event"), ids)
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    monkeypatch.setattr(Placer, "_start", without_waits(Placer._start))
    monkeypatch.setattr(SlotCheck, "_follow", lambda *_: None)
    actual = logits(load(plan=plans("npu"), sync="event"), ids)
    assert not np.array_equal(actual, expected)


@pytest.fixture
def course(
    plans: Callable[..., Plan], load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> tuple[SlotCheck, list[Any], Any]:
    """A check, a real pass with a row cut of which it knows the graphs, and the pool."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    llm = load(plan=plans("row"), sync="event")
    engine = llm._engine
    compiled = llm._thread.run(lambda: engine._pass("prefill", 20, 0, engine.new_cache()))
    check = engine._compiler._check
    assert check is not None
    calls = [call for call in compiled.calls if getattr(call, "label", "") != "late write"]
    return check, calls, engine._compiler.pool


def places(calls: list[Any], wanted: Callable[[Any], bool]) -> list[int]:
    return [place for place, call in enumerate(calls) if wanted(call)]


def is_wait(call: Any) -> bool:
    return getattr(call, "__name__", "") == "wait"


def test_every_wait_is_needed(course: tuple[SlotCheck, list[Any], Any]) -> None:
    check, calls, pool = course
    check.checked(calls, pool, "as it is")
    waits = places(calls, is_wait)
    assert len(waits) == 8
    for place in waits:
        with pytest.raises(EngineError, match="may run"):
            check.checked([*calls[:place], *calls[place + 1 :]], pool, "without a wait")


def test_a_signal_that_is_sent_too_early_is_caught(course: tuple[SlotCheck, list[Any], Any]) -> None:
    check, calls, pool = course
    for place in places(calls, lambda call: getattr(call, "__name__", "") == "mark"):
        swapped = list(calls)
        swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
        with pytest.raises(EngineError, match="may run"):
            check.checked(swapped, pool, "signal before the kernel")


def test_a_slot_that_is_written_while_it_is_read_is_caught(
    course: tuple[SlotCheck, list[Any], Any],
) -> None:
    """A graph may not write over what a kernel before it may still read."""
    check, calls, pool = course
    first, second = places(calls, lambda call: id(call) in check._graphs)[:2]
    reader = next(
        place
        for place in range(first, second)
        if isinstance(calls[place], Launch) and calls[place].label.startswith("rope")
    )
    # Another reader of the first graph's output, behind the signal that the second graph waits for.
    mark = next(place for place in range(reader, second) if getattr(calls[place], "__name__", "") == "mark")
    late = [*calls[: mark + 1], calls[reader], *calls[mark + 1 :]]
    with pytest.raises(EngineError, match=r"of 0\.o may run while kernel 'rope' still uses npu_output"):
        check.checked(late, pool, "late reader")


def test_a_slot_that_nothing_has_written_is_not_read(course: tuple[SlotCheck, list[Any], Any]) -> None:
    check, calls, pool = course
    embedding = places(calls, lambda call: getattr(call, "label", "") == "embedding")
    gone = [call for place, call in enumerate(calls) if place != embedding[0]]
    # The norm updates the residual in place, so that what is missed first is the activation's input.
    activation = places(calls, lambda call: getattr(call, "label", "") == "0.qkv")[0]
    check.checked(gone, pool, "the norm writes the residual")
    with pytest.raises(EngineError, match="reads what nothing has written in linear_input"):
        check.checked(calls[activation:], pool, "begins in the middle")


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
    assert llm._engine._compiler._check is None
    assert late_writes(llm) == 0
