"""Calls into the OpenCL driver in the token loop, counted at the binding: maps, copies, waits, launches."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import MemoryKind
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.npu import LinearRanges
from heterollm.llm import LLM
from heterollm.solver import Plan

BLOCKING = ("map", "copy", "wait", "finish")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of all models that are loaded from now on."""
    found: Counter[str] = Counter()

    def counted(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def call(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, call)

    for method, name in (
        ("enqueue_map_buffer", "map"),
        ("enqueue_copy", "copy"),
        ("enqueue_nd_range_kernel", "kernel"),
        ("enqueue_marker", "marker"),
    ):
        counted(cl, method, name)
    counted(cl.MemoryMap, "release", "unmap")
    counted(cl.Event, "wait", "wait")
    counted(cl.CommandQueue, "finish", "finish")
    counted(cl.CommandQueue, "flush", "flush")
    return found


@pytest.fixture
def load(
    host_llm: Callable[..., LLM], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    def loaded(kind: MemoryKind, plan: str | Plan, **options: Any) -> LLM:
        opened = functools.partial(open_device, shared_memory=kind)
        monkeypatch.setattr("heterollm.loading.open_device", opened)
        return host_llm(checkpoint("llama"), plan=plan, **options)

    return loaded


@pytest.fixture(scope="module")
def half_rows_of_llama(checkpoint: Callable[..., Path], half_rows_plan: Callable[..., Plan]) -> Plan:
    with LLM.load(checkpoint("llama"), device="host", plan="gpu") as llm:
        return half_rows_plan(llm)


def count(llm: LLM, calls: Counter[str], tokens: int) -> tuple[Counter[str], int]:
    """Return the calls of a pass whose kernels and graphs are compiled, and the number of its splits."""
    session = llm.session()
    session.prefill(list(range(1, 41)))

    def once() -> None:
        session.truncate(40)
        if tokens == 1:
            session.decode(7)
        else:
            session.truncate(0)
            session.prefill(list(range(1, tokens + 1)))

    once()
    calls.clear()
    once()
    steps = llm.steps("decode" if tokens == 1 else "prefill", tokens)
    return +calls, sum(step.action == "graph" for step in steps)


@pytest.mark.parametrize("kind", ["svm", "host"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_pass_on_the_gpu_alone_waits_only_for_its_end(
    tokens: int,
    kind: MemoryKind,
    load: Callable[..., LLM],
    calls: Counter[str],
) -> None:
    """Neither a map nor a copy, and no blocking call but the wait for the logits."""
    found, graphs = count(load(kind, "gpu"), calls, tokens)
    assert graphs == 0
    assert {name: found[name] for name in (*BLOCKING, "unmap")} == {
        "map": 0,
        "copy": 0,
        "wait": 0,
        "finish": 1,
        "unmap": 0,
    }


@pytest.mark.parametrize("sync", ["event", "poll", "flag"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_split_in_shared_virtual_memory_has_one_wait_at_most(
    tokens: int,
    sync: str,
    load: Callable[..., LLM],
    half_rows_of_llama: Plan,
    calls: Counter[str],
) -> None:
    """The driver's wait with ``event``; none with a poll, of which the pass's end has one more."""
    found, splits = count(load("svm", half_rows_of_llama, sync=sync), calls, tokens)
    assert splits == 9
    assert (found["map"], found["unmap"], found["copy"]) == (0, 0, 0)
    assert found["finish"] == 1
    assert found["wait"] == (splits if sync == "event" else 0)


@pytest.mark.parametrize("beside", [False, True])
def test_a_split_of_mapped_memory_maps_its_input_and_its_output(
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[..., LLM],
    half_rows_of_llama: Plan,
    calls: Counter[str],
) -> None:
    """And the pass its tokens, step and logits; a queue for maps costs no further call."""
    monkeypatch.setattr(
        "heterollm.kernels.gpu.runtime.queue_for_maps",
        lambda context, device, *_: cl.CommandQueue(context, device) if beside else None,
    )
    found, splits = count(load("mapped", half_rows_of_llama, sync="event"), calls, 1)
    assert (found["map"], found["unmap"]) == (2 * splits + 3, 2 * splits + 3)
    assert (found["wait"], found["finish"], found["copy"]) == (splits, 1, 0)


@pytest.mark.parametrize("tokens", [1, 40])
def test_codes_of_integer_graphs_need_no_further_call(
    tokens: int,
    load: Callable[..., LLM],
    host_llm: Callable[..., LLM],
    checkpoint: Callable[..., Path],
    half_rows_plan: Callable[..., Plan],
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels write, read and count them: no map, no copy and no wait more than float graphs have."""
    plain = host_llm(checkpoint("llama"), plan="gpu", scales="stepped")
    entries = []
    for entry in half_rows_plan(plain).entries:
        placed = entry.placement
        if entry.group != "head":
            lengths = tuple(max(32, length) for length in placed.npu_lengths)
            placed = structs.replace(placed, npu_lengths=lengths, form="integer")
        entries.append(structs.replace(entry, placement=placed))
    plan = structs.replace(half_rows_plan(plain), entries=tuple(entries))
    ranges = {(spec.layer, spec.group): LinearRanges(4.0) for spec in plain._weights.specs}
    monkeypatch.setattr("heterollm.loading.calibrated_ranges", lambda *_: ranges)
    monkeypatch.setattr(Plan, "has_integer_forms", False)  # else a calibration must be named
    llm = load("svm", plan, sync="event", scales="stepped")
    found, splits = count(llm, calls, tokens)
    assert splits == 9
    assert (found["map"], found["unmap"], found["copy"]) == (0, 0, 0)
    assert (found["finish"], found["wait"]) == (1, splits)
    graphs = [step for step in llm.steps("decode", 1) if step.action == "graph"]
    assert sum(step.label.endswith("as integer") for step in graphs) == splits - 1
