"""Memory that host and GPU share by maps, or as shared virtual memory: the ways of a real GPU."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from named_gpu import SeparateMemory, separate_memory

from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import MemoryKind
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.gpu.maps import READER, queue_for_maps
from heterollm.llm import LLM
from heterollm.solver import Plan, level_plan, model_shape
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

pytestmark = pytest.mark.cpu

# The level layer runs the graphs of npu, and the first tokens of a group are an NPU's whole group.
PLANS = (
    "gpu",
    "layer",
    "rows",
    *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("npu", "sequence")),
)


def cut_plan(name: str, llm: LLM) -> Plan:
    """Return a plan that cuts every group along rows, or every longer pass along the sequence."""
    specs = llm._weights.specs
    entries = []
    for spec in specs:
        rows = tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
        for phase in ("prefill", "decode"):
            layers = (spec.layer, spec.layer)
            if name == "sequence":
                placement = RowsPlacement(spec.member_rows, (32,))
                entries.append(PlanEntry(phase, (33, 128), layers, spec.group, placement))
                continue
            for low, high in ((1, 1), (2, 32), (33, 64), (65, 128)):
                entries.append(
                    PlanEntry(phase, (low, high), layers, spec.group, RowsPlacement(rows, (high,)))
                )
    rest = level_plan(
        "gpu", specs, device="host", precision="w4a16", standard_lengths=(), chunk_length=128
    ).entries
    return Plan(name, "host", "w4a16", model_shape(specs), 128, (*entries, *rest))


def logits(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return logits of prompts, of chunks, of decode after a fork, and of another session."""
    session = llm.session()
    rows = [*session.prefill(ids[:70], all_logits=True), session.decode(ids[70])]
    fork = session.fork()
    rows += [*session.decode(ids[71:74]), fork.decode(ids[75])]
    session.truncate(33)
    rows.append(session.prefill(ids[33:40]))
    session.reset()
    rows += [session.prefill(ids[:200]), session.decode(ids[200])]
    return np.stack(rows)


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> str | Plan:
    if request.param in ("gpu", "npu", "layer"):
        return request.param
    with LLM.load(checkpoint("llama"), device="host", plan="gpu") as llm:
        return cut_plan(request.param, llm)


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> list[SeparateMemory]:
    """Give every mapped array of the devices opened from now on a memory of its own."""
    return separate_memory(monkeypatch)


def choose(monkeypatch: pytest.MonkeyPatch, kind: MemoryKind) -> None:
    """Open devices with a kind of shared memory from now on."""
    monkeypatch.setattr("heterollm.loading.open_device", functools.partial(open_device, shared_memory=kind))


@pytest.fixture(params=[False, True], ids=["maps wait", "maps beside kernels"])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether drivers map beside kernels."""

    def queue(context: cl.Context, device: cl.Device, *_: object) -> cl.CommandQueue | None:
        return cl.CommandQueue(context, device) if request.param else None

    monkeypatch.setattr("heterollm.kernels.gpu.runtime.queue_for_maps", queue)
    return request.param


@pytest.fixture
def incoherent(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, "mapped")


@pytest.mark.parametrize("kind", ["mapped", "svm"])
def test_no_kind_of_memory_changes_a_logit(
    kind: MemoryKind,
    plan: str | Plan,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = token_ids(201)
    choose(monkeypatch, "host")
    expected = logits(host_llm(checkpoint("llama"), plan=plan), ids)
    choose(monkeypatch, kind)
    llm = host_llm(checkpoint("llama"), plan=plan)
    assert llm.device.gpu.shared_memory == kind
    pool = llm._engine.pool
    assert {pool[name].coherent for name in pool} == {kind == "svm"}
    assert all(isinstance(pool[name].buffer, cl.SVM) for name in pool) == (kind == "svm")
    np.testing.assert_array_equal(logits(llm, ids), expected)


def test_the_host_touches_memory_only_while_it_holds_it(
    plan: str | Plan,
    beside: bool,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    request: pytest.FixtureRequest,
) -> None:
    ids = token_ids(201)
    expected = logits(host_llm(checkpoint("llama"), plan=plan), ids)
    request.getfixturevalue("incoherent")
    made = request.getfixturevalue("separate")
    llm = host_llm(checkpoint("llama"), plan=plan)
    np.testing.assert_array_equal(logits(llm, ids), expected)
    pool = llm._engine.pool
    held = {name for name in pool if pool[name]._mapped is not None}
    assert held <= {"logits"}
    used_by_npu = pool["linear_input"].transfers > 0
    assert used_by_npu == (plan != "gpu")
    assert len(made) >= len(pool)


def test_the_parts_of_a_row_cut_start_together(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], incoherent: None, beside: bool
) -> None:
    """Where maps wait for the queue, they come before the GPU's part, else behind it and behind the wait."""
    folder = checkpoint("llama")
    llm = host_llm(folder, plan=cut_plan("rows", host_llm(folder, plan="gpu")))
    steps = [step for step in llm.steps("prefill", 64) if step.name == "0.qkv"]
    maps = [
        ("acquire_to_read", f"linear_input[0:{64 * 192 * 4}]"),
        ("acquire", f"npu_output[0:{64 * 64 * 4}]"),
    ]
    shard = [("kernel", "linear_input", "gpu_output"), ("flush",)]
    wait = [("wait",)]
    assert [(step.action, *map(str, (*step.reads, *step.writes))) for step in steps[1:6]] == (
        shard + wait + maps if beside else wait + maps + shard
    )
    assert [step.action for step in steps[6:]] == ["graph", "release", "release"]


def test_maps_beside_kernels_are_used_only_where_the_driver_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that reads a buffer must still run when the buffer is mapped."""
    runtime = open_device("host", shared_memory="mapped").gpu
    mapped = cl.enqueue_map_buffer

    def waiting(queue: cl.CommandQueue, *arguments: object, **options: object) -> object:
        runtime.queue.finish()
        return mapped(queue, *arguments, **options)

    monkeypatch.setattr("heterollm.kernels.gpu.maps.LONGEST_COUNT", 1 << 15)
    monkeypatch.setattr(cl, "enqueue_map_buffer", waiting)
    kernel = runtime.kernel_of_source(READER, "read_for_long")
    assert queue_for_maps(runtime.context, runtime._device, runtime.queue, kernel) is None
    # A driver that refuses leaves maps where they were, too.
    monkeypatch.setattr(cl, "enqueue_map_buffer", raising)
    assert queue_for_maps(runtime.context, runtime._device, runtime.queue, kernel) is None
    runtime.finish()


def raising(*_arguments: object, **_options: object) -> None:
    raise cl.Error("clEnqueueMapBuffer failed: INVALID_OPERATION")


def test_memory_is_mapped_behind_its_own_unmap(incoherent: None, beside: bool) -> None:
    memory = open_device("host", shared_memory="mapped").gpu.shared((1024,), np.float32)
    assert (memory._map_queue is not None) == beside
    for value in range(8):
        memory.acquire()
        assert memory.array[0] == max(0, value - 1)
        memory.array[:] = value
        memory.release()
