"""Experts on the NPU on ``host``: the logits of the GPU alone, whatever tokens choose and groups hold."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

import heterollm
from heterollm.base import EngineError, GraphError, PlanError
from heterollm.engine.builder import PassBuilder
from heterollm.engine.memory import memory_need
from heterollm.engine.slot_check import CHECK_VARIABLE, SlotCheck
from heterollm.engine.slots import pool_sizes
from heterollm.kernels.formats import linear, linear_errors
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu.opencl_devices import MEMORY_VARIABLE
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.operators.gated_activation import exact_gated_activation
from heterollm.llm import LLM
from heterollm.model import ModelWeights
from heterollm.solver import ChunkSchedule, ExpertGroup, ExpertsEntry, ExpertsPlacement, Plan, PlannedExperts

CHUNK = 64
CONTEXT = 256
EXPERTS = 12
"""Of the family qwen3_moe; each token chooses three."""
OPTIONS: dict[str, Any] = {"context": CONTEXT}

Groups = tuple[tuple[tuple[int, ...], int], ...]
"""Experts and capacity of each group."""

SOME: Groups = (((7, 2, 0), 32), ((4,), 1), ((9, 11), 64))
ALL: Groups = ((tuple(range(EXPERTS)), 64),)
"""All experts, each with room for a whole chunk."""


def placement(groups: Groups, **options: Any) -> ExpertsPlacement:
    return ExpertsPlacement(tuple(ExpertGroup(*group) for group in groups), **options)


def with_experts(plan: Plan, *groups: Groups, layers: int = 2, **options: Any) -> Plan:
    """Return the plan with groups for each layer; the last ones are those of all further layers."""
    entries = tuple(
        ExpertsEntry((1, CHUNK), (layer, layer), placement(groups[min(layer, len(groups) - 1)], **options))
        for layer in range(layers)
    )
    return structs.replace(plan.with_technique(PlannedExperts(entries)), chunk_length=CHUNK)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", kv_bits=32, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def load(folder: Path, host_llm: Callable[..., LLM], on_gpu: LLM) -> Callable[..., LLM]:
    """Return a function that loads the model with some groups of experts on the NPU."""

    def make(*groups: Groups, drops: bool = False, **options: Any) -> LLM:
        plan = with_experts(on_gpu.plan, *groups, overflow="drop" if drops else "gpu")
        return host_llm(folder, **{"plan": plan, **OPTIONS, **options})

    return make


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return logits of prompts, of chunks, of tokens behind, and after truncate, fork and reset."""
    session, rows = llm.session(), []
    for length in (1, 33, 150):
        session.reset()
        rows.append(session.prefill(ids[:length], all_logits=True))
        rows.append(session.decode(ids[length])[np.newaxis])
    session.truncate(40)
    rows.append(session.prefill(ids[40:71], all_logits=True))
    fork = session.fork()
    session.decode(7)
    rows.append(fork.prefill(ids[71:73], all_logits=True))
    return np.concatenate(rows)


def same(actual: np.ndarray, expected: np.ndarray) -> bool:
    return sqnr_db(actual, expected) >= LOGITS_SQNR_DB["fp32"]


def test_groups_at_any_capacity_give_the_logits_of_the_gpu(
    load: Callable[..., LLM], on_gpu: LLM, token_ids: Callable[[int], list[int]]
) -> None:
    """Overflow in each group, several groups, a layer without, one with all experts on the NPU, chunks."""
    ids = token_ids(160)
    expected = answers(on_gpu, ids)
    for groups in ((SOME, ()), ((((5, 3), 32),), ALL)):
        llm = load(*groups)
        graphs = [step for step in llm.steps("prefill", 50) if step.processor == "npu"]
        assert [step.layer for step in graphs] == [layer for layer, own in enumerate(groups) for _ in own]
        assert not any(step.processor == "npu" for step in llm.steps("decode", 1))
        found = answers(llm, ids)
        assert same(found, expected)
        np.testing.assert_array_equal(answers(llm, ids), found)


def random_groups(generator: np.random.Generator) -> Groups:
    """Return groups of some experts, each with any capacity."""
    some = generator.permutation(EXPERTS)[: generator.integers(1, EXPERTS + 1)].tolist()
    cuts = sorted(generator.choice(len(some), generator.integers(0, min(3, len(some)))).tolist())
    bounds = [0, *(cut for cut in dict.fromkeys(cuts) if cut), len(some)]
    return tuple(
        (tuple(some[first:stop]), int(generator.choice([1, 32, 64])))
        for first, stop in itertools.pairwise(bounds)
    )


@pytest.mark.parametrize("router", ["of the checkpoint", "of equal logits"])
def test_random_groups_for_each_length(
    router: str,
    folder: Path,
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each length has other groups. With equal logits all tokens choose the first experts."""
    if router == "of equal logits":
        monkeypatch.setattr(ModelWeights, "router", lambda *_: np.zeros((EXPERTS, 128), np.float32))
    on_gpu, ids = host_llm(folder, plan="gpu", **OPTIONS), token_ids(CHUNK)
    expected = on_gpu.session().prefill(ids, all_logits=True)
    generator = np.random.default_rng(5)
    lengths = (1, 2, 3, 7, 31, 32, 33, 50, 63, 64)
    entries = tuple(
        ExpertsEntry(
            (length, length),
            (layer, layer),
            placement(random_groups(generator), overflow=("gpu", "pad")[layer]),
        )
        for length in lengths
        for layer in (0, 1)
    )
    plan = structs.replace(on_gpu.plan.with_technique(PlannedExperts(entries)), chunk_length=CHUNK)
    llm, seen = host_llm(folder, plan=plan, **OPTIONS), set()
    for length in lengths:
        found = llm.session().prefill(ids[:length], all_logits=True)
        assert same(found, expected[:length]), length
        steps = llm.steps("prefill", length)
        seen |= {len([step for step in steps if step.processor == "npu"]), *(step.tokens for step in steps)}
    assert {2, 3, 4} <= seen


def test_shared_experts_and_float_weights(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    """The output of the experts is added to that of a network that all tokens share."""
    folder, ids = checkpoint("granitemoeshared"), token_ids(90)
    on_gpu = host_llm(folder, plan="gpu", precision="fp16")
    expected = on_gpu.session().prefill(ids, all_logits=True)
    plan = with_experts(on_gpu.plan, (((1, 0), 32), ((5,), 1)))
    found = host_llm(folder, plan=plan, precision="fp16").session().prefill(ids, all_logits=True)
    assert same(found, expected)


def test_w4a8_rounds_on_both_processors(
    folder: Path, host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    ids = token_ids(60)
    options: dict[str, Any] = {"precision": "w4a8", **OPTIONS}
    on_gpu = host_llm(folder, plan="gpu", **options)
    expected = on_gpu.session().prefill(ids, all_logits=True)
    found = host_llm(folder, plan=with_experts(on_gpu.plan, SOME), **options).session()
    # A sum in another order rounds a few inputs to another code, and a router near a tie chooses otherwise.
    within = [sqnr_db(*rows) for rows in zip(found.prefill(ids, all_logits=True), expected, strict=True)]
    assert np.median(within) > 45


# -- what is dropped, and what is counted ----------------------------------------------------------------


def slot_of(llm: LLM, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return what a slot of the last pass holds."""
    engine, found = llm._engine, np.empty(shape, dtype)
    memory = engine.private[name] if name in engine.private else engine.pool[name]
    llm.on_engine_thread(lambda: engine.device.gpu.copy(found, memory.buffer))
    return found


@pytest.mark.parametrize("drops", [False, True])
def test_a_layer_is_that_of_its_experts(
    drops: bool,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
) -> None:
    """The output of a layer in float64; pairs beyond a capacity are dropped if they are the least salient."""
    folder, count = checkpoint("qwen3_moe", num_hidden_layers=1), 64
    base = host_llm(folder, plan="gpu", **OPTIONS).plan
    plan = with_experts(
        base, (((0, 1, 2), 1), ((3, 4, 5, 6), 32)), layers=1, overflow="drop" if drops else "gpu"
    )
    llm = host_llm(folder, plan=plan, **OPTIONS)
    llm.on_engine_thread(llm._engine.reset_counts)
    # One token again and again overflows the experts that it chooses.
    llm.session().prefill([*token_ids(24), *[7] * 40])
    x = slot_of(llm, "linear_input", np.float32, (count, 128)).astype(np.float64)
    chosen = slot_of(llm, "expert_chosen", np.int32, (count, 3))
    shares = slot_of(llm, "expert_weights", np.float32, (count, 3)).astype(np.float64)
    gates = llm._weights.expert_members(0, ("gate", "up"))
    downs = llm._weights.expert_members(0, ("down",))
    capacities = placement((((0, 1, 2), 1), ((3, 4, 5, 6), 32))).capacities(EXPERTS)
    given = slot_of(llm, "attention_output", np.float32, (count, 160)).astype(np.float64)
    output = linear(given, llm._weights.linear(0, "o")) + llm._weights.bias(0, "o")
    norms = np.square(output).sum(axis=1)
    if drops:
        saliency = slot_of(llm, "expert_saliency", np.float32, (count,))
        np.testing.assert_allclose(saliency, norms, rtol=1e-5)
    exact, lost, on_npu = np.zeros((count, 128)), 0, 0
    for expert, capacity in enumerate(capacities):
        pairs = np.argwhere(chosen == expert)
        on_npu += min(len(pairs), capacity)
        if capacity:
            lost += max(0, len(pairs) - capacity)
            pairs = pairs[np.argsort(-norms[pairs[:, 0]])[:capacity]] if drops else pairs
        for token, slot in pairs:
            gate, up = (linear(x[token : token + 1], [gates[2 * expert + place]]) for place in (0, 1))
            out = linear(exact_gated_activation(gate, up), [downs[expert]])
            exact[token] += shares[token, slot] * out[0]
    assert lost > 40
    actual = slot_of(llm, "expert_output", np.float32, (count, 128))
    assert linear_errors(actual, exact).nmse <= 1e-10
    (found,) = llm.on_engine_thread(lambda: llm._engine.expert_pairs)
    assert (found.pairs, found.on_npu) == (3 * count, on_npu)
    assert (found.overflow, found.dropped) == ((0, lost) if drops else (lost, 0))
    (note,) = (text for text in llm.notes if "choices of experts" in text)
    assert f"NPU computed {on_npu / (3 * count):.1%} of the {3 * count} choices" in note
    assert ("were dropped" in note) == drops


def test_dropping_with_room_for_all_drops_nothing(
    load: Callable[..., LLM], on_gpu: LLM, token_ids: Callable[[int], list[int]]
) -> None:
    ids = token_ids(150)
    llm = load(ALL, drops=True)
    found = llm.session().prefill(ids, all_logits=True)
    assert same(found, on_gpu.session().prefill(ids, all_logits=True))
    counted = llm.on_engine_thread(lambda: llm._engine.expert_pairs)
    assert {(own.overflow, own.dropped) for own in counted} == {(0, 0)}


@pytest.mark.parametrize("drops", [False, True])
def test_rows_past_the_tokens_of_an_expert_may_hold_anything(
    drops: bool, load: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    ids, llm = token_ids(50), load(SOME, ALL, drops=drops)
    session = llm.session()
    expected = session.prefill(ids, all_logits=True)

    def poison() -> None:
        engine = llm._engine
        for name in ("expert_npu_input", "expert_npu_output"):
            slot = engine.pool[name].array
            slot.fill(0xFF)
            assert np.isnan(slot[: slot.nbytes // 4 * 4].view(np.float32)).all()
        for name in ("expert_rows", "expert_gate_up", "expert_activated"):
            memory = engine.private[name]
            engine.device.gpu.copy(memory.buffer, np.full(memory.size_bytes, 0xFF, np.uint8))

    session.reset()
    llm.on_engine_thread(poison)
    np.testing.assert_array_equal(session.prefill(ids, all_logits=True), expected)


@pytest.mark.parametrize("drops", [False, True])
def test_chunks_in_flight_give_the_logits_of_one_after_the_other(
    drops: bool,
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    ids, chunk = token_ids(120), 32
    llm = load(SOME, ALL, drops=drops)
    plan = structs.replace(llm.plan, chunk_length=chunk)
    flown = structs.replace(plan, schedule=ChunkSchedule("out_of_order", 3, ()))
    found, expected = (load(SOME, ALL, drops=drops, plan=own) for own in (flown, plan))
    for length in (2 * chunk, 3 * chunk + 7):
        logits = (one.session().prefill(ids[:length]) for one in (found, expected))
        np.testing.assert_array_equal(*logits)
    graphs = [step.lane for step in found.steps("prefill", 3 * chunk) if step.action == "graph"]
    assert set(graphs) == {0, 1, 2}
    counts = [one.on_engine_thread(lambda one=one: one._engine.expert_pairs) for one in (found, expected)]
    assert counts[0] == counts[1]


# -- order of the steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "sync", "drops"),
    [
        *(("host", "event", True), ("mapped", "event", False)),
        pytest.param("svm", "flag", True, marks=pytest.mark.slow),
    ],
)
def test_the_check_of_slots_passes_under_delays(
    memory: str,
    sync: str,
    drops: bool,
    load: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = token_ids(100)
    expected = load(SOME, ALL, drops=drops).session().prefill(ids, all_logits=True)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    llm = load(SOME, ALL, drops=drops, sync=sync)
    np.testing.assert_array_equal(llm.session().prefill(ids, all_logits=True), expected)


def test_every_wait_and_mark_is_needed(load: Callable[..., LLM]) -> None:
    llm = load(SOME, ALL, sync="event")
    check = llm.on_engine_thread(lambda: SlotCheck(llm.device.gpu, 1))
    steps = list(llm.steps("prefill", 20))
    del steps[max(place for place, step in enumerate(steps) if step.operator == "sum of experts") + 1 :]
    check.checked(steps, {}, "the pass")
    marks, waits = (
        [place for place, step in enumerate(steps) if step.action == action and step.operator == "experts"]
        for action in ("mark", "wait")
    )
    assert len(marks) == len(waits) == llm.config.layers
    told = r"npu step '\d\.experts [^']*' may run "
    for place in waits:
        with pytest.raises(EngineError, match=told):
            check.checked([*steps[:place], *steps[place + 1 :]], {}, "the pass")
    for place in marks:
        swapped = list(steps)
        swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
        with pytest.raises(EngineError, match=told):
            check.checked(swapped, {}, "the pass")
    # Another reader of the first layer's rows, behind the mark that the second layer's graphs wait for.
    (first, *_) = (place for place, step in enumerate(steps) if step.operator == "sum of experts")
    late = [*steps[: marks[1] + 1], steps[first], *steps[marks[1] + 1 :]]
    with pytest.raises(EngineError, match=r"may run while kernel '0\.sum of experts' still uses expert_npu"):
        check.checked(late, {}, "the pass")


def test_a_missing_wait_is_refused(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setattr(PassBuilder, "wait", lambda *_: None)
    with pytest.raises(EngineError, match=r"npu step '0\.experts 7, 2, 0 capacity 32' may run before"):
        load(SOME)


@pytest.mark.usefixtures("shards_meet")
def test_both_processors_work_at_once(
    load: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    llm = load((((7, 2, 0), 32),), trace=True, sync="event")
    llm.take_trace()
    llm.session().prefill(token_ids(50))
    trace = llm.take_trace()
    slack_ns = 2000 * trace.clock_uncertainty_us
    for layer in range(llm.config.layers):
        own = [span for span in trace.spans if span.layer == layer and span.operator == "experts"]
        (graph,) = (span for span in own if span.track == "npu")
        assert graph.category == "linear"
        kernels = [span for span in own if span.track == "gpu"]
        assert len(kernels) == 2
        for kernel in kernels:
            assert graph.begin_ns - slack_ns <= kernel.begin_ns < kernel.end_ns <= graph.end_ns + slack_ns


def test_the_memory_of_a_driver_that_maps_in_the_queue(
    load: Callable[..., LLM],
    on_gpu: LLM,
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Maps come before the GPU's rows, or they would wait for its products."""
    monkeypatch.setenv(MEMORY_VARIABLE, "mapped")
    monkeypatch.setattr("heterollm.kernels.gpu.runtime.queue_for_maps", lambda *_: None)
    llm, ids = load(SOME), token_ids(64)
    own = [step.action for step in llm.steps("prefill", 64) if step.name == "0.experts"]
    maps = ["acquire_to_read", "acquire"]
    assert own == ["mark", "wait", *maps, "kernel", "kernel", "flush", *["graph"] * 3, "release", "release"]
    found = llm.session().prefill(ids, all_logits=True)
    assert same(found, on_gpu.session().prefill(ids, all_logits=True))


def test_passes_share_graphs_and_bindings(load: Callable[..., LLM]) -> None:
    llm = load(SOME)
    runs = [
        {step.run for step in llm.steps("prefill", length) if step.action == "graph"} for length in (20, 60)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) == len(SOME) * llm.config.layers


def test_running_a_pass_makes_no_lasting_object(
    load: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    session, prompt = load(SOME).session(), np.array(token_ids(CHUNK), np.int32)

    def prefill() -> None:
        for _ in range(3):
            session._position = 0
            session.prefill_in_place(prompt)

    session._thread.run(prefill)
    gc.collect()
    ours = [tracemalloc.Filter(True, str(Path(heterollm.__file__).parent / "*"))]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        session._thread.run(prefill)
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    assert sum(difference.size_diff for difference in after.compare_to(before, "lineno")) < 2048


# -- failures, refusals and memory -----------------------------------------------------------------------


IN_THE_THIRD_CHUNK = 2 * 2 * len(SOME) + 4


@pytest.mark.parametrize(
    ("run", "drops", "since"),
    [(2, False, 0), (IN_THE_THIRD_CHUNK, False, 2 * CHUNK), (IN_THE_THIRD_CHUNK, True, 0)],
)
def test_the_gpu_goes_on_where_the_npu_fails(
    run: int,
    drops: bool,
    since: int,
    load: Callable[..., LLM],
    on_gpu: LLM,
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first chunk of a prompt, or in the third, after chunks that dropped tokens or did not."""
    state, bind = {"left": 10**9}, SessionGraph.bind

    def bind_to_break(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run_or_fail() -> None:
            state["left"] -= 1
            if not state["left"]:
                raise GraphError("The graph of experts failed while running: the device is gone")
            call()

        return run_or_fail

    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)
    ids, options = token_ids(150), {"max_new_tokens": 8, "ignore_eos": True}
    expected = on_gpu.generate(ids, **options).token_ids  # type: ignore[arg-type]
    llm = load(SOME, drops=drops, allow_fallback=True)
    state["left"] = run
    assert llm.generate(ids, **options).token_ids == expected  # type: ignore[arg-type]
    (note,) = llm.failures
    assert f"since token {since}," in note
    assert not any(step.processor == "npu" for step in llm.steps("prefill", CHUNK))
    assert llm.generate(ids, **options).token_ids == expected  # type: ignore[arg-type]


def test_experts_of_another_mixture_are_refused(load: Callable[..., LLM]) -> None:
    for groups in ((((0, EXPERTS), 32),), (((0, 1), 32), ((1,), 32))):
        with pytest.raises(PlanError, match="given twice, or is not among the 12 of the layer"):
            load(groups)


def test_experts_with_biases_are_refused(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    folder = checkpoint("gpt_oss")
    plan = with_experts(host_llm(folder, plan="gpu", **OPTIONS).plan, (((0, 1), 32),))
    with pytest.raises(PlanError, match="whose biases, bounds or lack of a gate no graph has"):
        host_llm(folder, plan=plan, **OPTIONS).session().prefill([1, 2, 3])


def test_the_need_of_memory_counts_rows_and_graphs(load: Callable[..., LLM], on_gpu: LLM) -> None:
    config, specs = on_gpu.config, on_gpu._weights.specs
    plans = [with_experts(on_gpu.plan, groups) for groups in ((), (((3, 4), 32),), SOME)]
    sizes = [pool_sizes(config, specs, plan, 4, CONTEXT) for plan in plans]
    assert [own.get("expert_npu_input") for own in sizes] == [None, *(rows * 128 * 4 for rows in (64, 225))]
    assert sizes[2]["expert_npu_output"] == sizes[2]["expert_npu_input"]
    needs = [
        memory_need(config, specs, plan, CONTEXT, own, np.dtype(np.float32))
        for plan, own in zip(plans, sizes, strict=True)
    ]
    one = on_gpu._weights.experts[0]
    expert_bytes = one.weight_bytes() // EXPERTS
    assert [need.npu_graphs for need in needs] == [count * 2 * expert_bytes for count in (0, 2, 6)]
    lanes = 2  # of chunks, and of passes of several sessions
    assert needs[2].slots - needs[1].slots == lanes * 2 * (225 - 64) * 128 * 4
    assert needs[0].gpu_weights == needs[2].gpu_weights


USABLE, REASON, _ = qnn_available(emulator=True)


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
@pytest.mark.parametrize(
    ("layers", "groups"),
    [(1, (((3, 0), 32),)), pytest.param(2, SOME, marks=pytest.mark.slow)],
)
def test_the_emulator_computes_experts(
    layers: int,
    groups: Groups,
    checkpoint: Callable[..., Path],
    token_ids: Callable[[int], list[int]],
) -> None:
    """Real graphs of QNN, end to end, in half floats; rows beyond the capacities are the GPU's."""
    folder = checkpoint("qwen3_moe", num_hidden_layers=layers, vocab_size=512)
    ids = [index % 512 for index in token_ids(64)]
    options: dict[str, Any] = {"device": "emulator", "context": 128, "allow_slow": True}
    with LLM.load(folder, plan="gpu", **options) as on_gpu:
        expected, plan = on_gpu.session().prefill(ids, all_logits=True), on_gpu.plan
    with LLM.load(folder, plan=with_experts(plan, groups, layers=layers), **options) as llm:
        found = llm.session().prefill(ids, all_logits=True)
        (pairs, *_) = llm.on_engine_thread(lambda: llm._engine.expert_pairs)
    assert pairs.on_npu
    # A router near a tie may choose otherwise for inputs that differ by their rounding.
    within = [sqnr_db(*rows) for rows in zip(found, expected, strict=True)]
    assert np.median(within) >= LOGITS_SQNR_DB["fp16"]
