"""Sparse attention end to end on ``host``: against dense attention, by both estimators, without the NPU."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Gate
from gates import LOGITS_SQNR_DB
from msgspec import structs
from prompt_lengths import answers

import heterollm
from heterollm.base import CalibrationError, EngineError, GraphError, OptionError, PlanError, silent
from heterollm.calibration import calibrate, load_calibration
from heterollm.engine import HEAD_ROWS, Engine
from heterollm.engine.builder import PassBuilder
from heterollm.engine.memory import memory_need
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.engine.slots import pool_sizes
from heterollm.kernels.formats import BucketCount, ScoreScale
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import is_complete
from heterollm.kernels.gpu.opencl_devices import MEMORY_VARIABLE
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.npu.session import SessionGraph
from heterollm.llm import LLM
from heterollm.planning import calibrated_scales
from heterollm.solver import ChunkSchedule, Plan, PlannedAttention, SparseAttention
from heterollm.solver.sparse.attention import AttentionEntry

OPTIMISED = True
"""Long prompts take longer than compilers."""

CHUNK = 128
CONTEXT = 640
OPTIONS: dict[str, Any] = {"scales": "stepped", "context": CONTEXT}
UNITS = 3
"""Of four key heads: one unit has two."""


def units_of(scales: Sequence[ScoreScale]) -> tuple[tuple[int, ...], ...]:
    """Return units in an order that is not that of the heads, the first of two heads with one exponent."""
    heads = range(len(scales))
    fused = next(
        pair
        for pair in sorted(itertools.permutations(heads, 2), reverse=True)
        if scales[pair[0]].exponent == scales[pair[1]].exponent
    )
    return (fused, *((head,) for head in reversed(heads) if head not in fused))


@pytest.fixture(scope="module")
def file(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "calibration.json"
    calibrate(bundled_model, output=path, windows=2, gpu_threads=1)
    return path


@pytest.fixture(scope="module")
def dense(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu", kv_bits=32, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plans(dense: LLM, file: Path) -> Callable[..., Plan]:
    def make(
        estimator: str = "npu",
        keep: float = 0.25,
        *,
        lengths: tuple[int, int] = (1, CHUNK),
        keys: tuple[int, int] = (1, CONTEXT),
        buckets: BucketCount = 1,
        base: Plan = dense.plan,
    ) -> Plan:
        entries = []
        for layer, scales in calibrated_scales(file, buckets).items():
            units = units_of(scales)
            placement = SparseAttention(
                keep=(keep,) * dense.config.attention.heads,
                units=units,
                exponents=tuple(scales[unit[0]].exponent for unit in units),
                estimator=estimator,  # type: ignore[arg-type]
                buckets=buckets,
            )
            entries.append(AttentionEntry(lengths, keys, (layer, layer), placement))
        key = load_calibration(file).key
        plan = base.with_technique(PlannedAttention(tuple(entries)))
        return structs.replace(plan, chunk_length=CHUNK, calibration=key)

    return make


@pytest.fixture
def load(bundled_model: Path, file: Path, host_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda **options: host_llm(bundled_model, **{"calibration": file, **OPTIONS, **options})


@pytest.fixture(scope="module")
def ids(dense: LLM, bundled_model: Path) -> list[int]:
    text = (bundled_model / "held_out.txt").read_text("utf-8")
    return dense.tokenizer.encode(text[:6000])[:CONTEXT]


def test_a_plan_with_sparse_attention_refuses_a_cache_of_codes(load, plans) -> None:
    with pytest.raises(OptionError, match="no KV cache of 8 bits"):
        load(plan=plans(), kv_bits=8)


@pytest.mark.parametrize(("estimator", "level"), [("gpu", "layer"), ("npu", "layer"), ("npu", "gpu")])
def test_chunks_in_flight_give_the_logits_of_one_after_the_other(
    estimator: str,
    level: str,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    dense: LLM,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention is sparse from 200 keys on: the first chunk of a prompt is dense, and later ones are not."""
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    base = dense.plan if level == "gpu" else load(plan=level).plan
    plan = plans(estimator, keys=(200, CONTEXT), base=base)
    flown = structs.replace(plan, schedule=ChunkSchedule("out_of_order", 3, ()))

    def prompts(llm: LLM) -> np.ndarray:
        session, found = llm.session(), []
        for length in (2 * CHUNK, 2 * CHUNK + 5, 4 * CHUNK + 33):
            session.reset()
            found += [session.prefill(ids[:length]), session.prefill(ids[length - 9 : length + 20])]
        return np.stack(found)

    llm = load(plan=flown)
    np.testing.assert_array_equal(prompts(llm), prompts(load(plan=plan)))
    scores = {step.lane for step in llm.steps("prefill", 3 * CHUNK) if step.operator == "scores"}
    assert scores == {1, 2}


@pytest.mark.parametrize("estimator", ["gpu", "npu"])
def test_all_keys_are_dense_attention(
    estimator: str, plans: Callable[..., Plan], load: Callable[..., LLM], dense: LLM, ids: list[int]
) -> None:
    got = answers(load(plan=plans(estimator, 1.0)), ids)
    assert sqnr_db(got, answers(dense, ids)) > LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize("buckets", [1, pytest.param(5, marks=pytest.mark.slow), 9])
def test_both_estimators_give_the_same_bits(
    buckets: BucketCount,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    dense: LLM,
    ids: list[int],
) -> None:
    first, second = (
        answers(load(plan=plans(estimator, buckets=buckets)), ids) for estimator in ("gpu", "npu")
    )
    np.testing.assert_array_equal(first, second)
    # Few keys are not all keys, and the right few keys nearly are.
    assert 5 < sqnr_db(first, answers(dense, ids)) < 60


def test_a_second_run_and_a_second_session_give_the_same_bits(
    plans: Callable[..., Plan], load: Callable[..., LLM], ids: list[int]
) -> None:
    llm = load(plan=plans())
    first, again = llm.session(), llm.session()
    expected = first.prefill(ids[:300], all_logits=True)
    np.testing.assert_array_equal(again.prefill(ids[:300], all_logits=True), expected)
    first.reset()
    np.testing.assert_array_equal(first.prefill(ids[:300], all_logits=True), expected)


def test_what_lies_behind_a_session_is_never_read(
    plans: Callable[..., Plan], load: Callable[..., LLM], ids: list[int]
) -> None:
    """Keys and values behind the last token are those of a longer prompt before, which overflow."""
    llm = load(plan=plans())
    expected = llm.session().prefill(ids[:150], all_logits=True)
    session = llm.session()
    session.prefill(ids[:500])

    def spoil() -> None:
        for memory in llm._engine._compiler.states.memory.memories:
            llm.device.gpu.copy(memory.buffer, np.full(memory.size_bytes // 4, np.nan, np.float32))

    session.reset()
    llm.on_engine_thread(spoil)
    np.testing.assert_array_equal(session.prefill(ids[:150], all_logits=True), expected)


def test_the_plans_ranges_decide(
    plans: Callable[..., Plan], load: Callable[..., LLM], dense: LLM, ids: list[int]
) -> None:
    plan = plans(lengths=(64, CHUNK), keys=(150, 300))
    plan = plan.with_technique(PlannedAttention(plan.technique(PlannedAttention).entries[1:]))
    llm = load(plan=plan)
    session, exact = llm.session(), dense.session()
    places = {}
    for first, last in ((0, 128), (128, 168), (168, 240), (240, 305), (305, 400)):
        got, expected = session.prefill(ids[first:last]), exact.prefill(ids[first:last])
        places[first, last] = sqnr_db(got, expected)
    kept = [key for key in llm._engine.kept_passes if key[0] == "prefill"]
    assert ("prefill", 72, 256) in kept
    steps = {
        key: {step.layer for step in llm._engine._passes.compiled[key].steps if step.operator == "selection"}
        for key in kept
    }
    assert steps["prefill", 72, 256] == {1, 2, 3}
    assert {layers == set() for key, layers in steps.items() if key != ("prefill", 72, 256)} == {True}
    assert places[0, 128] > LOGITS_SQNR_DB["fp32"] > places[168, 240]


def test_rounded_outputs_are_those_of_dense_attention(
    plans: Callable[..., Plan], bundled_model: Path, host_llm: Callable[..., LLM], file: Path, ids: list[int]
) -> None:
    """At ``w4a8`` the last unit's kernel is followed by the rounding of all heads."""
    exact = host_llm(bundled_model, plan="gpu", precision="w4a8", context=CONTEXT)
    expected = exact.session().prefill(ids[:150], all_logits=True)
    scales = {1: calibrated_scales(file, 1)}

    def prefill(keep: float) -> np.ndarray:
        plan = plans(keep=keep, base=exact.plan)
        engine = Engine(exact.device, exact._weights, plan, CONTEXT, silent, techniques={"attention": scales})
        logits = np.empty_like(expected)
        engine.prefill(engine.new_cache(), 0, np.array(ids[:150], np.int32), "prefill", logits)
        return logits

    kept = {keep: exact.on_engine_thread(lambda keep=keep: prefill(keep)) for keep in (1.0, 0.2)}
    # A sum in another order rounds a few inputs to another code.
    assert sqnr_db(kept[1.0], expected) > 45 > sqnr_db(kept[0.2], expected)


# -- order of the steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "memory"),
    [("gpu", "host"), ("npu", "host"), ("npu", "mapped"), pytest.param("npu", "svm", marks=pytest.mark.slow)],
)
def test_the_check_of_slots_passes_under_delays(
    estimator: str,
    memory: str,
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = load(plan=plans(estimator)).session().prefill(ids[:300], all_logits=True)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    llm = load(plan=plans(estimator))
    np.testing.assert_array_equal(llm.session().prefill(ids[:300], all_logits=True), expected)


def test_a_missing_wait_is_refused(
    plans: Callable[..., Plan], load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setattr(PassBuilder, "wait", lambda *_: None)
    told = (
        r"npu step '0\.scores of key heads 3, 0' may run before kernel '0\.score codes' has written score_q"
    )
    with pytest.raises(EngineError, match=told):
        load(plan=plans())


@pytest.fixture
def units_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the GPU's work on each unit until the next unit's graph runs, and that graph until it has ended.

    So a trace shows the one within the other on a machine of any speed, unless the engine lets one wait for
    the other.
    """
    bind = SessionGraph.bind
    gates: list[Gate] = []
    held: list[Any] = []
    runs = itertools.count(1)

    def bind_to_meet(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            runtime = RUNTIMES[-1]
            if not gates:
                gates.append(Gate(runtime))
            if held:
                assert not is_complete(held.pop()), "the graph did not run before the GPU's work had ended"
                gates[0].open()
            call()
            runtime.finish()
            if next(runs) % UNITS:
                # Each kernel stands for some seconds at most: together they stand for a minute.
                for _ in range(20):
                    gates[0].close()
                held.append(gates[0]._launch())

        return run

    monkeypatch.setattr(SessionGraph, "bind", bind_to_meet)


RUNTIMES: list[Any] = []
"""The GPU of the model under test."""


@pytest.mark.usefixtures("units_meet")
def test_the_gpu_attends_to_a_unit_while_the_npu_estimates_the_next(
    plans: Callable[..., Plan], load: Callable[..., LLM], ids: list[int]
) -> None:
    plan = plans(lengths=(100, CHUNK))
    assert {len(entry.placement.units) for entry in plan.technique(PlannedAttention).entries} == {UNITS}
    llm = load(plan=plan, trace=True, sync="event")
    RUNTIMES.append(llm.device.gpu)
    llm.take_trace()
    llm.session().prefill(ids[:CHUNK])
    trace = llm.take_trace()
    slack_ns = 2000 * trace.clock_uncertainty_us
    for layer in range(llm.config.layers):
        own = [span for span in trace.spans if span.layer == layer]
        graphs = [span for span in own if span.track == "npu"]
        assert [(span.operator, span.category) for span in graphs] == [("scores", "attention")] * UNITS
        kernels = [
            span for span in own if span.track == "gpu" and span.operator in ("selection", "attention")
        ]
        assert [span.operator for span in kernels] == ["selection", "attention"] * UNITS
        for place, kernel in enumerate(kernels[: 2 * UNITS - 2]):
            graph = graphs[place // 2 + 1]
            assert graph.begin_ns - slack_ns <= kernel.begin_ns < kernel.end_ns <= graph.end_ns + slack_ns


def test_layers_share_graphs_and_their_bindings(plans: Callable[..., Plan], load: Callable[..., LLM]) -> None:
    llm = load(plan=plans(lengths=(33, CHUNK)))
    steps = [step for step in llm.steps("prefill", 100) if step.action == "graph"]
    assert len(steps) == UNITS * llm.config.layers
    places = {
        (sum(map(len, one.units[:place])), len(unit), exponent)
        for one in llm.plan.technique(PlannedAttention).sparse
        for place, (unit, exponent) in enumerate(zip(one.units, one.exponents, strict=True))
    }
    assert len({step.run for step in steps}) == len(places) < len(steps)


def test_running_a_pass_makes_no_lasting_object(
    plans: Callable[..., Plan], load: Callable[..., LLM], ids: list[int]
) -> None:
    llm = load(plan=plans())
    session = llm.session()
    prompt = np.array(ids[:CHUNK], np.int32)

    def prefill() -> None:
        for _ in range(3):
            session._position = 0
            session.prefill_in_place(prompt)

    llm.on_engine_thread(prefill)
    gc.collect()
    ours = [tracemalloc.Filter(True, str(Path(heterollm.__file__).parent / "*"))]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        llm.on_engine_thread(prefill)
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    assert sum(difference.size_diff for difference in after.compare_to(before, "lineno")) < 2048


# -- what is refused, and what goes on without the NPU -------------------------------------------------------


def test_without_its_calibration_a_plan_is_refused(
    plans: Callable[..., Plan], load: Callable[..., LLM], bundled_model: Path, file: Path, tmp_path: Path
) -> None:
    plan = plans()
    other = tmp_path / "other.json"
    found = load_calibration(file)
    structs.replace(found, text_key="other").save(other)
    for given in (None, other):
        with pytest.raises(PlanError, match="made with the calibration"):
            load(plan=plan, calibration=given)
    with pytest.raises(CalibrationError, match="other weights"):
        load(plan=plan, group_size=64)
    # As if the file were that of the plan.
    first = plan.technique(PlannedAttention).entries[0]
    exponents = tuple(exponent + 1 for exponent in first.placement.exponents)
    wrong = structs.replace(first, placement=structs.replace(first.placement, exponents=exponents))
    with pytest.raises(PlanError, match="Make the plan again") as caught:
        load(plan=plan.with_technique(PlannedAttention((wrong,))))
    assert "layer 0" in str(caught.value)
    assert load(plan=plan).plan == plan


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Fail at the graph run of a number, and count them."""
    state, bind = {"runs": 0, "fails at": 0}, SessionGraph.bind

    def bind_to_break(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            state["runs"] += 1
            if state["runs"] == state["fails at"]:
                raise GraphError("The graph of scores failed while running: the device is gone")
            call()

        return run

    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)
    return state


PASS = UNITS * 4
"""Graph runs of a pass: there are 4 layers."""


@pytest.mark.parametrize("run", [1, pytest.param(5, marks=pytest.mark.slow), PASS, 2 * PASS + 2])
def test_without_the_npu_the_tokens_are_those_of_dense_attention(
    run: int,
    failing: dict[str, int],
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    dense: LLM,
    ids: list[int],
) -> None:
    """The prompt is computed again from its first chunk, in dense attention."""
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    sparse = load(plan=plans(keep=0.2)).generate(ids[:300], **options)
    llm = load(plan=plans(keep=0.2), allow_fallback=True)
    failing["fails at"] = failing["runs"] + run
    got = llm.generate(ids[:300], **options)
    assert got.token_ids == dense.generate(ids[:300], **options).token_ids != sparse.token_ids
    assert failing["runs"] == failing["fails at"]
    (note,) = llm.failures
    assert "since token 0," in note
    assert not any(step.operator == "selection" for step in llm.steps("prefill", CHUNK))


def test_a_failure_behind_the_first_chunk_leaves_earlier_turns_as_they_are(
    failing: dict[str, int], plans: Callable[..., Plan], load: Callable[..., LLM], dense: LLM, ids: list[int]
) -> None:
    llm = load(plan=plans(keep=0.2), allow_fallback=True)
    session = llm.session()
    session.prefill(ids[:150])
    twin = session.fork()
    failing["fails at"] = failing["runs"] + PASS + 2
    got = session.prefill(ids[150:450], all_logits=True)
    assert "since token 150," in llm.failures[0]
    np.testing.assert_array_equal(got, twin.prefill(ids[150:450], all_logits=True))
    exact = dense.session().prefill(ids[:450], all_logits=True)[150:]
    assert 5 < sqnr_db(got, exact) < 60


def test_where_the_gpu_estimates_attention_stays_sparse_without_the_npu(
    failing: dict[str, int],
    plans: Callable[..., Plan],
    load: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    dense: LLM,
    ids: list[int],
) -> None:
    expected = load(plan=plans("gpu")).session().prefill(ids[:300], all_logits=True)
    llm = load(plan=plans("gpu", base=half_rows_plan(dense, CHUNK)), allow_fallback=True)
    steps = llm.steps("prefill", CHUNK)
    graphs = sum(step.action == "graph" and step.operator != "head" for step in steps)
    heads = CHUNK // HEAD_ROWS
    failing["fails at"] = failing["runs"] + graphs + heads + 3
    got = llm.session().prefill(ids[:300], all_logits=True)
    assert f"since token {CHUNK}," in llm.failures[0]
    assert any(step.operator == "selection" for step in llm.steps("prefill", CHUNK))
    assert sqnr_db(got, expected) > LOGITS_SQNR_DB["fp32"]
    np.testing.assert_array_equal(llm.session().prefill(ids[:300], all_logits=True), expected)


# -- memory and other devices --------------------------------------------------------------------------------


def test_the_memory_of_scores_is_counted(plans: Callable[..., Plan], dense: LLM) -> None:
    config, specs = dense.config, dense._weights.specs
    few, more = plans(lengths=(1, 40)), plans(keys=(1, 256))
    sizes = [pool_sizes(config, specs, plan, 4, CONTEXT) for plan in (few, more, dense.plan)]
    assert sizes[0]["scores"] == config.attention.heads * 64 * CONTEXT
    assert sizes[1]["scores"] == config.attention.heads * CHUNK * 256
    assert "scores" not in sizes[2]
    needs = [
        memory_need(config, specs, plan, CONTEXT, size, np.dtype(np.float32))
        for plan, size in zip((few, more, dense.plan), sizes, strict=True)
    ]
    scores = [need.techniques["scores of attention"] for need in needs]
    assert scores[2] == 0
    assert scores[0] > sizes[0]["scores"]
    assert "scores of attention" in str(needs[0])
    assert needs[0].total - scores[0] == needs[0].slots + needs[0].gpu_weights + needs[0].kv_cache


def test_passes_are_kept_by_standard_numbers_of_keys(
    plans: Callable[..., Plan], load: Callable[..., LLM], ids: list[int]
) -> None:
    llm = load(plan=plans())
    session = llm.session()
    for first in range(0, 600, 40):
        session.prefill(ids[first : first + 40])
    kept = [key for key in llm._engine.kept_passes if key[:2] == ("prefill", 40)]
    assert [keys for _, _, keys in kept] == [256, 384, 512, 640]


def test_a_simulated_device_runs_it_too(
    plans: Callable[..., Plan], bundled_model: Path, file: Path, dense: LLM, ids: list[int]
) -> None:
    base = structs.replace(dense.plan, device="sim:snapdragon-8gen3")
    options: dict[str, Any] = {
        "device": "sim:snapdragon-8gen3",
        "kv_bits": 32,
        "calibration": file,
        **OPTIONS,
    }
    with LLM.load(bundled_model, plan=plans(keep=1.0, base=base), trace=True, **options) as llm:
        got = llm.session().prefill(ids[:200], all_logits=True)
        trace = llm.take_trace()
    expected = dense.session().prefill(ids[:200], all_logits=True)
    assert sqnr_db(got, expected) > LOGITS_SQNR_DB["fp32"]
    assert {span.operator for span in trace.spans if span.track == "npu"} == {"scores"}


USABLE, REASON, _ = qnn_available(emulator=True)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_emulator_estimates_the_same_scores(
    plans: Callable[..., Plan], bundled_model: Path, file: Path, dense: LLM, ids: list[int]
) -> None:
    base = structs.replace(dense.plan, device="emulator")
    options: dict[str, Any] = {"device": "emulator", "calibration": file, **OPTIONS}
    found = {}
    for estimator in ("gpu", "npu"):
        plan = plans(estimator, base=base, lengths=(33, CHUNK))
        with LLM.load(bundled_model, plan=plan, allow_slow=True, **options) as llm:
            found[estimator] = llm.session().prefill(ids[:100], all_logits=True)
    # Its codes lie within one of the exact ones, so that a few other keys are kept.
    assert sqnr_db(found["npu"], found["gpu"]) > 25
