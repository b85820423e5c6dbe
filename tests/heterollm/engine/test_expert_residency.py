"""A memory budget of experts: the same bits at any budget, counts, memory, and files that change."""

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import CheckpointError, OptionError
from heterollm.engine import check_memory, expert_budget
from heterollm.engine.blocks.mixture import MixtureEmitter, MixtureOptions
from heterollm.engine.experts.residency import ExpertResidency
from heterollm.engine.memory import memory_need
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.ops import Routing
from heterollm.llm import LLM
from heterollm.model import ExpertReader, ModelWeights

GIB = 2**30
FAMILY = "qwen3_moe"
"""Twelve experts in each of two layers, of which a token chooses three."""

SLOT_GIB = (256 * 128 + 128 * 96) * 9 / 16 / GIB
"""Packed size of its experts of 96 rows, which take two tiles of 64."""


def slot_gib(llm: LLM) -> float:
    """Return the packed size of an expert of a model without a budget."""
    own = llm._engine._compiler._experts._layers[0]
    return (own.gate_up.size_bytes + own.down.size_bytes) / routing_of(llm).experts / GIB


def routing_of(llm: LLM) -> Routing:
    assert llm.config.mixture is not None
    return llm.config.mixture.routing


def answers(llm: LLM, ids: list[int]) -> Iterator[np.ndarray]:
    """Yield the logits of prompts of odd lengths, of tokens behind them, and of a fork."""
    for length in (1, 33):
        session = llm.session()
        yield session.prefill(ids[:length], all_logits=True)
        yield from (session.decode(token) for token in ids[length : length + 2])
    fork = session.fork()
    yield from (fork.decode(ids[0]), session.decode(ids[1]), fork.decode(ids[2]))
    yield session.decode(ids[3:6])


@pytest.fixture
def limited(checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    """Return a function that loads a mixture with a budget of some experts; of all by default."""

    def load(slots: int | None = None, slot: float = SLOT_GIB, **options: Any) -> LLM:
        folder = options.pop("folder", None) or checkpoint(options.pop("family", FAMILY))
        gib = None if slots is None else (slots + 0.5) * slot
        return host_llm(folder, **{"plan": "gpu", "experts_gib": gib, **options})

    return load


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(FAMILY, {}, id=FAMILY),
        *(
            pytest.param(family, options, marks=pytest.mark.slow, id=family)
            for family, options in [
                ("mixtral", {"precision": "fp16"}),
                ("granitemoeshared", {"precision": "w4a8"}),
                ("phimoe", {"symmetric": False}),
                ("gpt_oss", {}),
            ]
        ),
    ],
)
def test_any_budget_gives_the_bits_of_all_experts(
    family: str,
    options: dict[str, Any],
    limited: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
) -> None:
    """From the experts of one token to all but one, twice."""
    ids, whole = token_ids(40), limited(family=family, **options)
    routing, expected = routing_of(whole), list(answers(whole, ids))
    every = routing.experts * whole.config.layers
    for slots in (routing.chosen, routing.chosen + 2, every // 2, every - 1):
        llm = limited(slots, slot_gib(whole), family=family, **options)
        for _ in range(2):
            for own, other in zip(answers(llm, ids), expected, strict=True):
                np.testing.assert_array_equal(own, other)
        reads = llm.expert_reads
        assert reads is not None
        assert (reads.slots, reads.experts) == (slots, every)
        assert reads.resident_bytes == round(slots * slot_gib(whole) * GIB)


@pytest.mark.slow
def test_the_check_of_buffers_finds_no_early_read(
    limited: Callable[..., LLM], token_ids: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late kernels before those of several rounds."""
    ids = token_ids(8)
    expected = limited().session().prefill(ids)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    np.testing.assert_array_equal(limited(3).session().prefill(ids), expected)


def test_a_budget_for_all_experts_reads_none_later(limited: Callable[..., LLM]) -> None:
    llm = limited(24)
    assert llm.expert_reads is None
    assert not any(step.action == "read_weights" for step in llm.steps("prefill", 5))


def test_counts_are_those_of_the_experts_used_longest_ago(
    limited: Callable[..., LLM], token_ids: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits and misses of single tokens, against a list of the latest experts of both layers."""
    chosen: list[list[int]] = []
    begin = ExpertResidency._begin

    def recorded(self: Any, layer: int, memory: Any, found: np.ndarray, *rest: Any) -> None:
        begin(self, layer, memory, found, *rest)
        chosen.append([layer, *found.tolist()])

    monkeypatch.setattr(ExpertResidency, "_begin", recorded)
    llm = limited(8)
    chosen.clear()
    session = llm.session()
    for token in token_ids(30):
        session.decode(token)
    assert len(chosen) == 30 * llm.config.layers

    # The first of each layer are in memory at first, the very first ones for longest.
    latest = OrderedDict.fromkeys((layer, expert) for expert in reversed(range(4)) for layer in (1, 0))
    hits = misses = 0
    for layer, *experts in chosen:
        missing = [expert for expert in sorted(experts) if (layer, expert) not in latest]
        for expert in sorted(experts):
            if expert not in missing:
                latest.move_to_end((layer, expert))
        for expert in missing:
            latest.popitem(last=False)
            latest[layer, expert] = None
        hits, misses = hits + len(experts) - len(missing), misses + len(missing)
    reads = llm.expert_reads
    assert reads is not None
    assert min(hits, misses) > 0
    assert (reads.hits, reads.misses) == (hits, misses)
    spec = llm._weights.experts[0]
    assert reads.read_bytes == misses * spec.slice_bytes(spec.member_rows)
    assert f"{reads.slots} of {reads.experts} experts in " in str(reads)


def test_the_most_popular_experts_are_in_memory_first(limited: Callable[..., LLM]) -> None:
    llm = limited()
    specs, size = llm._weights.experts, slot_gib(llm)
    popular = {0: tuple(range(12)), 1: (50, *range(11))}
    budget = expert_budget(specs, 4.5 * size, popular)
    assert budget is not None
    assert budget.first == ((1, 0), (0, 11), (0, 10), (1, 11))
    first = expert_budget(specs, 4.5 * size, {})
    assert first is not None
    assert first.first == ((0, 0), (1, 0), (0, 1), (1, 1))


def test_what_cannot_have_a_budget_is_refused(
    limited: Callable[..., LLM], host_llm: Callable[..., LLM], bundled_model: Path
) -> None:
    with pytest.raises(OptionError, match="chooses 3 experts") as caught:
        limited(2)
    assert "--experts-gib" in str(caught.value.fix)
    with pytest.raises(OptionError, match="without experts"):
        host_llm(bundled_model, experts_gib=1)
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(OptionError, match="memory of experts"):
            host_llm(bundled_model, experts_gib=wrong)
    with pytest.raises(OptionError, match="no storage"):
        host_llm(bundled_model, device="sim:snapdragon-8gen3", experts_gib=1)


def test_need_of_memory_counts_the_budget(limited: Callable[..., LLM]) -> None:
    llm = limited()
    given = (llm.config, llm._weights.specs, llm.plan, 64, {}, np.dtype(np.float32))
    whole, some = memory_need(*given), memory_need(*given, experts_bytes=1000)
    every = sum(spec.weight_bytes() for spec in llm._weights.experts)
    assert whole.total - some.total == every - 1000
    check_memory(some, available=whole.total)
    assert replace(whole, gpu_weights=some.gpu_weights) == some


def test_a_load_reads_the_first_residents_and_those_of_its_warm_up(
    limited: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No load packs all experts: those in memory at once are as many as there are slots."""
    loaded: list[tuple[int, int]] = []
    read = ExpertReader.read

    def counted(self: ExpertReader, spec: Any, expert: int) -> Any:
        loaded.append((spec.layer, expert))
        return read(self, spec, expert)

    def refused(*_: object) -> None:
        raise AssertionError("all experts of a layer")

    monkeypatch.setattr(ExpertReader, "read", counted)
    monkeypatch.setattr(ModelWeights, "expert_members", refused)
    llm = limited(5)
    assert loaded[-5:] == [(0, 2), (1, 1), (0, 1), (1, 0), (0, 0)]
    loaded.clear()
    budget = expert_budget(llm._weights.experts, 5.5 * SLOT_GIB, {})
    plan = structs.replace(llm.plan, chunk_length=4)
    given = lambda *_: None, llm._engine._compiler.techniques, MixtureOptions(budget)
    llm.on_engine_thread(functools.partial(MixtureEmitter, llm.device, llm._weights, plan, *given))
    assert not loaded


@pytest.mark.parametrize("damage", ["cut", "written"])
@pytest.mark.parametrize("precision", ["w4a16", "fp16"])
def test_a_file_that_changes_is_an_error_and_no_crash(
    damage: str,
    precision: str,
    limited: Callable[..., LLM],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    token_ids: Callable[[int], list[int]],
) -> None:
    slot_gib = SLOT_GIB * (1 if precision == "w4a16" else 64 / 9)
    folder = shutil.copytree(checkpoint(FAMILY), tmp_path / "model")
    llm = limited(3, slot_gib, precision=precision, folder=folder)
    session = llm.session()
    session.prefill(token_ids(5))
    reader = llm._engine._compiler.residency._reader  # type: ignore[union-attr]
    (file,) = reader._streams
    size = file.path.stat().st_size
    content = file.path.read_bytes()
    try:
        if damage == "cut":
            os.truncate(file.path, size // 4)
        else:
            with file.path.open("r+b") as raw:
                raw.seek(size - 1)
                raw.write(b"\0")
        with pytest.raises(CheckpointError, match="changed while"):
            session.prefill(token_ids(40))
    finally:
        llm.close()
        file.path.write_bytes(content)


def test_reads_leave_nothing_behind(
    limited: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    llm, ids = limited(4), token_ids(30)
    session = llm.session()

    most = 0

    def decode() -> None:
        nonlocal most
        for token in ids:
            tracemalloc.reset_peak()
            begin, _ = tracemalloc.get_traced_memory()
            session.decode_in_place(token)
            most = max(most, tracemalloc.get_traced_memory()[1] - begin)

    for _ in range(2):
        llm.on_engine_thread(decode)
    gc.collect()
    tracemalloc.start(1)
    try:
        before, _ = tracemalloc.get_traced_memory()
        llm.on_engine_thread(decode)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Less than one number for each layer of each step.
    assert after - before < 24 * len(ids) * llm.config.layers
    # Not even for a moment an expert: its codes alone have more.
    assert 0 < most < 16 * 1024


def test_a_trace_and_the_steps_show_the_rounds(
    limited: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    llm = limited(3, trace=True)
    llm.take_trace()
    llm.session().prefill(token_ids(20))
    reads = [step for step in llm.steps("prefill", 20) if step.action == "read_weights"]
    # Twelve experts go through three slots in four rounds, in each of two layers.
    assert [step.label for step in reads[:4]] == [
        f"0.experts round {number}: reading into 3 slots" for number in range(4)
    ]
    assert len(reads) == 8
    spans = [span for span in llm.take_trace().spans if span.operator == "read_weights"]
    assert [span.layer for span in spans] == [0] * 4 + [1] * 4
    assert {span.category for span in spans} == {"wait"}


CHILD = """
import json, sys, threading
from heterollm.llm import LLM

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

most, done = 0, threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

import heterollm.engine.runner
before = anonymous()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
gib = json.loads(sys.argv[2])
with LLM.load(sys.argv[1], device="host", plan="gpu", context=64, experts_gib=gib) as llm:
    llm.session().prefill(list(range(16)))
    done.set()
    watcher.join()
    reads = llm.expert_reads
    print(json.dumps([most - before, None if reads is None else reads.resident_bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what is anonymous")
def test_a_load_never_has_the_memory_of_all_experts(checkpoint: Callable[..., Path]) -> None:
    """The largest anonymous memory of a process, with all experts and with a tenth of them."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 64, "num_hidden_layers": 2}
    folder = checkpoint(FAMILY, **sizes)

    def largest(gib: float | None) -> tuple[int, int | None]:
        command = [sys.executable, "-P", "-c", CHILD, str(folder), json.dumps(gib)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        first, second = json.loads(found.stdout)
        return first, second

    # Quantising weights and compiling programs would take more memory than the experts.
    largest(None)
    largest(0.01)
    (whole, _), (some, resident) = largest(None), largest(0.01)
    every = 2 * 64 * 3 * 512 * 1024 * 9 // 16
    assert resident is not None
    assert resident < every / 9
    assert whole - some > 0.8 * (every - resident)
