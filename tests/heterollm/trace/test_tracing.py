"""What is recorded: the calls as they ran, in memory laid out before, and nothing without being asked."""

import functools
import gc
import itertools
import json
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heterollm.kernels
from heterollm.base import GraphError, KernelError, OptionError
from heterollm.benchmarks import Configuration, engine_self
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.engine import Job
from heterollm.benchmarks.engine_self import SelfEngine
from heterollm.engine import SYNC_OPTIONS
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import HostClock
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.ops import ffn_specs
from heterollm.llm import LLM
from heterollm.solver import Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry
from heterollm.trace import Span, Trace, load_trace, summarise, summarise_phases
from heterollm.trace.recorder import Recorder, SpanTemplate
from heterollm.trace.summary import BETWEEN, PYTHON, busy

PACKAGES = (heterollm, heterollm.kernels)
PROMPT = 60
NEW = 6
CUT = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def gpu_only(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def plan(gpu_only: LLM, half_rows_plan: Callable[..., Plan]) -> Plan:
    return half_rows_plan(gpu_only)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(4).integers(1, 2048, PROMPT).tolist()


@pytest.fixture(scope="module")
def split(bundled_model: Path, plan: Plan) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan=plan, trace=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def trace(split: LLM, prompt: list[int]) -> Trace:
    split.take_trace()
    split.generate(prompt, session=split.session(), max_new_tokens=NEW, ignore_eos=True)
    return split.take_trace()


def spans_of(trace: Trace, track: str, number: int | None = None) -> list[Span]:
    return [span for span in trace.spans if span.track == track and number in (None, span.number)]


# -- off --------------------------------------------------------------------------------------------------


def test_without_tracing_nothing_is_recorded(bundled_model: Path, plan: Plan) -> None:
    with LLM.load(bundled_model, device="host", plan=plan) as llm:
        assert llm._engine.observer is None
        properties = llm.device.gpu.queue.properties
        assert not properties & 2  # CL_QUEUE_PROFILING_ENABLE
        with pytest.raises(OptionError, match="trace=True"):
            llm.take_trace()


def test_a_traced_pass_has_the_steps_of_one_that_is_not(
    split: LLM, bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM]
) -> None:
    llm = host_llm(bundled_model, plan=plan)
    for phase, tokens in (("prefill", 40), ("decode", 1)):
        assert split.steps(phase, tokens) == llm.steps(phase, tokens)


# -- on ---------------------------------------------------------------------------------------------------


def test_the_tokens_are_the_same(split: LLM, gpu_only: LLM, prompt: list[int]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    assert split.generate(prompt, **options).token_ids == gpu_only.generate(prompt, **options).token_ids


def test_every_pass_is_there(trace: Trace) -> None:
    assert [(one.phase, one.tokens, one.position) for one in trace.passes] == [
        ("prefill", PROMPT, 0),
        *(("decode", 1, PROMPT + step) for step in range(NEW - 1)),
    ]
    assert not any(one.failed for one in trace.passes)
    assert (trace.device, trace.time_kind, trace.plan, trace.precision) == ("host", "real", "rows", "w4a16")
    assert trace.clock_uncertainty_us > 0


def test_every_operator_of_every_layer_is_there(trace: Trace) -> None:
    layers = 4
    for one in trace.passes:
        expected = [f"{layer}.{group}" for layer in range(layers) for group in CUT] + ["head"]
        assert [span.name for span in spans_of(trace, "npu", one.number)] == expected
        kernels = [
            name for span in spans_of(trace, "gpu", one.number) for name in (span.merged or (span.name,))
        ]
        assert [name for name in kernels if name in expected] == expected
        for kernel in ("rope", "attention", "activation", "norm"):
            assert {f"{layer}.{kernel}" for layer in range(layers)} <= set(kernels), kernel
        assert kernels.count("final norm") == kernels.count("join") == 1


def test_the_work_of_a_cut_is_that_of_the_whole(trace: Trace, split: LLM) -> None:
    specs = {(spec.layer, spec.group): spec for spec in split._weights.specs}
    prefill = trace.passes[0].number
    for (layer, group), spec in specs.items():
        here = [
            span
            for span in trace.spans
            if span.number == prefill and span.category == "linear" and span.operator == group
        ]
        parts = {span.track: span.work for span in here if span.layer == (None if layer < 0 else layer)}
        gpu, npu = parts["gpu"], parts["npu"]
        assert gpu is not None
        assert npu is not None
        assert gpu.rows + npu.rows == spec.rows
        assert gpu.weight_bytes + npu.weight_bytes == spec.weight_bytes()
        assert gpu.tokens == (1 if group == "head" else PROMPT)
        assert npu.tokens == (1 if group == "head" else 64)  # padded
        assert gpu.flops == 2 * gpu.tokens * gpu.rows * spec.columns
    whole = sum(spec.weight_bytes() for spec in specs.values())
    for one in trace.passes:
        works = [
            span.work
            for span in trace.spans
            if span.number == one.number and span.track != "engine" and span.work
        ]
        assert sum(work.weight_bytes for work in works) == whole


def test_events_nest_and_do_not_overlap(trace: Trace) -> None:
    for track in ("gpu", "npu"):
        spans = spans_of(trace, track)
        assert sum(end - begin for begin, end in busy(spans, track)) == sum(
            span.end_ns - span.begin_ns for span in spans
        )
    outer: list[Span] = []
    windows = {one.number: one for one in trace.passes}
    for span in spans_of(trace, "engine"):
        assert span.begin_ns <= span.end_ns
        while outer and outer[-1].end_ns <= span.begin_ns:
            outer.pop()
        if outer:
            assert span.end_ns <= outer[-1].end_ns
        elif span.category != "tracing":
            assert span.category == "pass"
            assert (span.begin_ns, span.end_ns) == (
                windows[span.number].begin_ns,
                windows[span.number].end_ns,
            )
        outer.append(span)


def test_kernels_lie_in_their_pass(trace: Trace) -> None:
    slack_ns = 2000 * trace.clock_uncertainty_us
    windows = {one.number: one for one in trace.passes}
    for span in spans_of(trace, "gpu"):
        one = windows[span.number]
        assert one.begin_ns - slack_ns <= span.begin_ns < span.end_ns <= one.end_ns + slack_ns


def test_the_parts_add_up_to_the_wall(trace: Trace) -> None:
    for part in (trace, *(trace.select(lambda one, n=one.number: one.number == n) for one in trace.passes)):
        summary = summarise(part)
        wall_us = (part.passes[-1].end_ns - part.passes[0].begin_ns) / 1e3
        assert summary.wall_us == pytest.approx(wall_us, abs=1e-3)
        assert sum(summary.engine_us.values()) == pytest.approx(wall_us, abs=1e-3)
        assert sum(summary.critical_us.values()) == pytest.approx(summary.passes_us, abs=1e-3)
        idle_us = summary.gpu_idle_us + summary.npu_idle_us - summary.both_idle_us
        assert idle_us + summary.overlap_us == pytest.approx(summary.passes_us, abs=1e-3)
        assert all(time_us >= 0 for time_us in summary.engine_us.values())
    assert summarise(trace).engine_us[BETWEEN] > 0
    assert summarise(trace).engine_us[PYTHON] > 0


@pytest.mark.usefixtures("shards_meet")
def test_both_parts_of_a_cut_overlap(
    bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM], prompt: list[int]
) -> None:
    llm = host_llm(bundled_model, plan=plan, trace=True, sync="event")
    llm.generate(prompt, max_new_tokens=4, ignore_eos=True)
    found = llm.take_trace()
    slack_ns = round(2000 * found.clock_uncertainty_us)
    least_us = {"prefill": 0.0, "decode": 0.0}
    for one in found.passes:
        graphs = {span.name: span for span in spans_of(found, "npu", one.number)}
        shards = [span for span in spans_of(found, "gpu", one.number) if span.name in graphs]
        assert len(shards) == len(graphs) == 17
        for span in shards:
            graph = graphs[span.name]
            assert graph.begin_ns - slack_ns <= span.begin_ns < span.end_ns <= graph.end_ns + slack_ns
            least_us[one.phase] += max(0, span.end_ns - span.begin_ns - slack_ns) / 1e3
    for phase, summary in summarise_phases(found).items():
        assert 0 < summary.gpu_busy_us <= summary.passes_us
        assert 0 < summary.npu_busy_us <= summary.passes_us
        assert least_us[phase] <= summary.overlap_us <= min(summary.gpu_busy_us, summary.npu_busy_us)


def test_gpu_alone_has_no_npu_and_no_overlap(
    bundled_model: Path, host_llm: Callable[..., LLM], prompt: list[int]
) -> None:
    llm = host_llm(bundled_model, plan="gpu", trace=True)
    llm.generate(prompt, max_new_tokens=3, ignore_eos=True)
    found = llm.take_trace()
    assert not spans_of(found, "npu")
    for summary in summarise_phases(found).values():
        assert summary.gpu_busy_us > 0
        assert summary.npu_busy_us == summary.overlap_us == summary.hand_over_us == summary.hand_overs == 0
    assert llm.take_trace().passes == ()


SYNCS = ("operator", "event", "flag", "sleep_poll")
MORE_SYNCS = sorted(set(SYNC_OPTIONS) - {"auto", *SYNCS})


@pytest.mark.parametrize(
    "sync", [*SYNCS, *(pytest.param(sync, marks=pytest.mark.slow) for sync in MORE_SYNCS)]
)
def test_every_strategy_is_told_apart(
    sync: str, bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM], prompt: list[int]
) -> None:
    llm = host_llm(bundled_model, plan=plan, trace=True, sync=sync)
    llm.generate(prompt, max_new_tokens=3, ignore_eos=True)
    found = llm.take_trace()
    engine = [span for span in found.spans if span.track == "engine"]
    polls = [span for span in engine if span.category == "poll"]
    waits = [span for span in engine if span.category == "wait"]
    assert waits
    assert bool(polls) == (sync not in ("finish", "event", "operator"))
    # What is slept and polled is all of such a wait.
    inside = [span for span in engine if span.category in ("poll", "sleep")]
    for wait in waits:
        own = [span for span in inside if wait.begin_ns <= span.begin_ns and span.end_ns <= wait.end_ns]
        covered = sum(span.end_ns - span.begin_ns for span in own)
        assert covered in (0, wait.end_ns - wait.begin_ns)
    assert {span.layer for span in waits} >= {0, 1, 2, 3}


def test_building_and_binding_have_events(split: LLM, plan: Plan) -> None:
    split.take_trace()
    split.session().prefill(list(range(1, 38)))
    split.session().prefill(list(range(1, 38)))
    first, second = split.take_trace().passes
    split.session().prefill(list(range(1, 39)))
    found = split.take_trace()
    (one,) = found.passes
    assert one.number == second.number + 1 == first.number + 2
    builds = [span for span in found.spans if span.category == "build"]
    binds = [span for span in found.spans if span.category == "bind"]
    assert len(builds) == 1
    assert any(bind.begin_ns <= builds[0].begin_ns and builds[0].end_ns <= bind.end_ns for bind in binds)


def test_decode_steps_make_no_lasting_object(split: LLM) -> None:
    session = split.session()
    session.prefill(list(range(260)))

    def decode(count: int) -> None:
        for token in range(count):
            session.decode_in_place(token)

    split._thread.run(lambda: decode(20))
    gc.collect()
    ours = [tracemalloc.Filter(True, str(Path(package.__file__).parent / "*")) for package in PACKAGES]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        split._thread.run(lambda: decode(100))
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    grown = sum(difference.size_diff for difference in after.compare_to(before, "lineno"))
    assert grown < 2048
    assert len(split.take_trace().passes) > 100


def test_a_full_ring_keeps_the_latest_passes(
    bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterollm.trace.recorder.SPANS_KEPT", 1000)
    llm = host_llm(bundled_model, plan=plan, trace=True)
    llm.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    found = llm.take_trace()
    assert 1 < len(found.passes) < 40
    assert [one.number for one in found.passes] == list(range(40 - len(found.passes), 40))
    assert found.passes[-1].position == 41
    assert any(f"The first {40 - len(found.passes)} passes" in text for text in found.notes)
    assert len(spans_of(found, "npu")) == 17 * len(found.passes)
    # What was taken is not lost, and said no more.
    llm.generate([4, 5], max_new_tokens=2, ignore_eos=True)
    assert llm.take_trace().notes == ()


def break_graphs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let one run of a graph fail."""
    runs, bind = [], SessionGraph.bind

    def bind_to_break(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            runs.append(None)
            if len(runs) == number:
                raise GraphError("The device is gone.")
            call()

        return run

    monkeypatch.setattr(SessionGraph, "bind", bind_to_break)


def test_a_pass_that_fails_is_there(
    bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_graphs(monkeypatch, 30)
    llm = host_llm(bundled_model, plan=plan, trace=True)
    with pytest.raises(GraphError):
        llm.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True)
    found = llm.take_trace()
    assert [one.failed for one in found.passes] == [False, True]
    assert summarise(found).failed == 1
    wall_us = (found.passes[-1].end_ns - found.passes[0].begin_ns) / 1e3
    assert sum(summarise(found).engine_us.values()) == pytest.approx(wall_us, abs=1e-3)


@pytest.mark.parametrize("memory", ["coherent", "mapped"])
def test_cuts_of_every_kind_are_named(
    memory: str,
    bundled_model: Path,
    gpu_only: LLM,
    host_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block, a sequence cut and a row cut in one pass of 40 tokens, and a merged one with a block."""
    if memory == "mapped":
        opened = functools.partial(open_device, shared_memory="mapped")
        monkeypatch.setattr("heterollm.loading.open_device", opened)
    specs = gpu_only._weights.specs
    entries = []
    for block in ffn_specs(specs):
        entries += [
            PlanEntry(phase, lengths, (block.layer,) * 2, "ffn", FfnPlacement(256, (lengths[1],)))
            for phase, lengths in (("prefill", (33, 64)), ("decode", (1, 1)))
        ]
    for spec in specs:
        placement = GPU_ONLY
        if spec.group == "qkv":
            placement = RowsPlacement(spec.member_rows, (32,))
        elif spec.group == "o":
            placement = RowsPlacement((64,), (64,))
        entries.append(PlanEntry("prefill", (33, 64), (spec.layer,) * 2, spec.group, placement))
    entries += [
        PlanEntry(phase, (1, 64), (-1, 3), group, GPU_ONLY)
        for phase in ("prefill", "decode")
        for group in (*CUT, "head")
    ]
    plan = Plan("by hand", "host", "w4a16", model_shape(specs), 64, tuple(entries))
    llm = host_llm(bundled_model, plan=plan, trace=True)
    prompt = list(range(1, 41))
    options: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
    expected = gpu_only.generate(prompt, session=gpu_only.session(), **options).token_ids
    assert llm.generate(prompt, **options).token_ids == expected
    found = llm.take_trace()
    sizes = {(spec.layer, spec.group): spec.weight_bytes() for spec in specs}
    for one in found.passes:
        work = {
            track: sum(span.work.weight_bytes for span in spans_of(found, track, one.number) if span.work)
            for track in ("gpu", "npu")
        }
        # Under a sequence cut both parts read all of the weights.
        twice = sum(sizes[layer, "qkv"] for layer in range(4)) if one.phase == "prefill" else 0
        assert work["gpu"] + work["npu"] == sum(sizes.values()) + twice
    prefill = found.passes[0].number
    npu = [span.name for span in spans_of(found, "npu", prefill)]
    assert npu == [f"{layer}.{group}" for layer in range(4) for group in ("qkv", "o", "ffn")]
    kernels = spans_of(found, "gpu", prefill)
    for layer in range(4):
        own = [span.operator for span in kernels if span.layer == layer]
        assert own == ["norm", "qkv", "rope", "attention", "o", "norm", "ffn", "activation", "ffn"]
    engine = spans_of(found, "engine", prefill)
    mapped = [span for span in engine if span.operator in ("acquire", "acquire_to_read", "release")]
    assert bool(mapped) == (memory == "mapped")
    assert all(span.layer is not None for span in mapped)


def test_the_gpu_going_on_alone_is_traced(
    bundled_model: Path,
    plan: Plan,
    gpu_only: LLM,
    host_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_graphs(monkeypatch, 30)
    llm = host_llm(bundled_model, plan=plan, trace=True, allow_fallback=True)
    options: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    expected = gpu_only.generate([1, 2, 3], session=gpu_only.session(), **options).token_ids
    assert llm.generate([1, 2, 3], **options).token_ids == expected
    found = llm.take_trace()
    assert [(one.position, one.failed) for one in found.passes] == [
        (0, False),
        (3, True),
        (3, False),
        (4, False),
        (5, False),
    ]
    assert "computes alone since token 3" in found.notes[-1]
    assert summarise(found.select(lambda one: one.position > 3)).npu_busy_us == 0


def test_the_order_of_traced_calls_can_be_checked(
    bundled_model: Path, plan: Plan, host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEROLLM_CHECK_SLOTS", "1")
    llm = host_llm(bundled_model, plan=plan, trace=True)
    llm.session().prefill([1, 2, 3])
    found = llm.take_trace()
    assert "late write" in {span.operator for span in spans_of(found, "gpu")}
    assert len(spans_of(found, "npu")) == 17


# -- other clocks -----------------------------------------------------------------------------------------


class VirtualClock:
    """Moves on by what is asked of it, as a simulated device's does."""

    def __init__(self) -> None:
        self.ns = 1_000_000

    def now_ns(self) -> int:
        return self.ns

    def work(self, length_ns: int) -> Callable[[], tuple[int, int]]:
        def run() -> tuple[int, int]:
            begin = self.ns
            self.ns += length_ns
            return begin, self.ns

        return run


def test_a_simulated_clock_gives_exact_spans() -> None:
    clock = VirtualClock()
    recorder = Recorder(now_ns=clock.now_ns, kernel_times=lambda times: times)
    engine = SpanTemplate("engine", "launch", "qkv", 0)
    kernel = SpanTemplate("gpu", "linear", "qkv", 0)
    graph = SpanTemplate("engine", "graph", "qkv", 0)
    wait = SpanTemplate("engine", "wait", "before qkv", 0, polls=True)
    launch = recorder.launch(clock.work(100), engine, kernel)
    run = recorder.timed(clock.work(250), graph)
    slept = recorder.host_clock(
        HostClock(clock.now_ns, lambda s: clock.work(round(s * 1e9))(), lambda: None, 0.0)
    )

    def polling() -> None:
        clock.work(10)()
        slept.sleep_s(50e-9)
        clock.work(5)()

    launch()  # outside of a pass: not kept
    recorder.begin_pass("decode", 1, 7)
    for call in (launch, recorder.timed(polling, wait), run):
        call()
    recorder.end_pass(failed=False)
    passes, spans, notes = recorder.take(lambda ns: ns - 40)
    assert notes == ()
    (one,) = passes
    assert (one.position, one.end_ns - one.begin_ns) == (7, 100 + 65 + 250)
    zero = one.begin_ns
    found = {
        (span.track, span.category, span.begin_ns - zero, span.end_ns - zero)
        for span in spans
        if span.category not in ("pass", "tracing")
    }
    assert found == {
        ("engine", "launch", 0, 100),
        ("gpu", "linear", -40, 60),
        ("engine", "wait", 100, 165),
        ("engine", "poll", 100, 110),
        ("engine", "sleep", 110, 160),
        ("engine", "poll", 160, 165),
        ("engine", "graph", 165, 415),
        ("npu", "linear", 165, 415),
    }
    told = Trace("sim:soc", "simulated", "tensor", "w4a16", passes, spans)
    expected_us = {"graph": 0.25, "launch": 0.1, "sleep": 0.05, "poll": 0.015, "wait": 0, "python": 0}
    assert summarise(told).engine_us == pytest.approx(expected_us, abs=1e-9)


def test_an_outer_span_comes_first_where_both_take_the_same_time() -> None:
    clock = VirtualClock()
    recorder = Recorder(now_ns=clock.now_ns)
    build, bind = (SpanTemplate("engine", name, name) for name in ("build", "bind"))
    both = recorder.timed(recorder.timed(clock.work(80), build), bind)
    recorder.begin_pass("prefill", 3, 0)
    both()
    recorder.end_pass(failed=False)
    passes, spans, notes = recorder.take(lambda ns: ns)
    assert [span.category for span in spans] == ["pass", "bind", "build", "tracing"]
    told = summarise(Trace("sim:soc", "simulated", "tensor", "w4a16", passes, spans, notes=notes))
    assert told.engine_us == {"build": 0.08, "bind": 0, "python": 0}


def test_kernels_without_times_are_counted() -> None:
    def refuse(_event: object) -> tuple[int, int]:
        raise KernelError("no times")

    recorder = Recorder(kernel_times=refuse)
    site = SpanTemplate("gpu", "norm", "norm", 0)
    launch = recorder.launch(lambda: None, site, site)
    recorder.begin_pass("prefill", 3, 0)
    launch()
    recorder.end_pass(failed=True)
    passes, _, notes = recorder.take(lambda ns: ns)
    assert passes[0].failed
    assert notes == ("1 kernels have no times.",)


def test_the_command_line_writes_and_reads_traces(
    bundled_model: Path, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from heterollm.cli import main

    plan.save(tmp_path / "plan.json")
    target, picture = tmp_path / "new" / "run.json", tmp_path / "run.png"
    arguments = ["generate", str(bundled_model), "import os", "--device", "host", "--max-new-tokens", "3"]
    arguments += ["--plan", str(tmp_path / "plan.json")]
    assert main([*arguments, "--trace", str(target)]) == 0
    assert "heterollm trace" in capsys.readouterr().err.replace("\n", " ")
    assert main(["trace", str(target), "--png", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "real time" in shown
    assert "adds up to the wall" in " ".join(shown.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["trace", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["phases"]) == {"prefill", "decode"}
    assert told["phases"]["decode"]["passes"] == 2
    assert told["all"]["overlap_us"] >= 0


def test_a_run_that_fails_half_way_leaves_its_trace(
    bundled_model: Path,
    plan: Plan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from heterollm.cli import main

    break_graphs(monkeypatch, 17 * 3 + 2)
    plan.save(tmp_path / "plan.json")
    target = tmp_path / "run.json"
    arguments = ["generate", str(bundled_model), "import os", "--device", "host", "--max-new-tokens", "9"]
    assert main([*arguments, "--plan", str(tmp_path / "plan.json"), "--trace", str(target)]) == 1
    assert "The device is gone" in capsys.readouterr().err
    assert [one.failed for one in load_trace(target).passes] == [False, False, False, True]
    assert main(["trace", str(target)]) == 0
    assert "(1 failed)" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["folder", "file in a file"])
def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from heterollm.cli import main

    (tmp_path / "file").write_text("")
    target = tmp_path if where == "folder" else tmp_path / "file" / "trace.json"
    # The model is not even looked for.
    assert main(["generate", str(tmp_path / "no model"), "x", "--trace", str(target)]) == 1
    told = capsys.readouterr().err
    assert "no model" not in told
    assert "place" in told or "folder" in told
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# -- a bench's traced run ----------------------------------------------------------------------------

BENCHED = Case(20, 3, 4)


@pytest.fixture(scope="module")
def benched(
    split: LLM, bundled_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Return what the bench says of a traced run in which every operator is cut, and the file of that run."""
    file = tmp_path_factory.mktemp("traces") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_self.LLM, "load", lambda *_, **__: split)
        engine = SelfEngine(Job(bundled_model, Configuration(device="host"), 64, trace=True))
    return engine.trace(BENCHED, random_ids(0, 2048, BENCHED.end), file), file


@pytest.fixture(scope="module")
def events(benched: tuple[dict[str, Any], Path]) -> list[dict[str, Any]]:
    data = json.loads(benched[1].read_text(), parse_float=Decimal)
    assert data["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = data["traceEvents"]
    return found


def named(events: list[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


def test_the_file_sums_up_to_what_the_bench_says(benched: tuple[dict[str, Any], Path]) -> None:
    fields, file = benched
    found = summarise(load_trace(file))
    assert fields["overlap_fraction"] == found.overlap_fraction
    for name in ("gpu_busy", "npu_busy", "overlap", "hand_over"):
        assert fields[f"{name}_ms"] == getattr(found, f"{name}_us") / 1e3
    assert (fields["traced_ms"], fields["hand_overs"]) == (found.wall_us / 1e3, found.hand_overs)
    assert found.passes == 1 + BENCHED.n_gen


def test_the_overlap_is_that_of_the_events(
    benched: tuple[dict[str, Any], Path], events: list[dict[str, Any]]
) -> None:
    """Counted anew from the file's events, as anybody would who reads the format alone."""
    windows = [(one["ts"], one["ts"] + one["dur"]) for one in named(events, 3) if one["cat"] == "pass"]

    def inside(tid: int) -> list[tuple[Any, Any]]:
        found = [(one["ts"], one["ts"] + one["dur"]) for one in named(events, tid)]
        return [
            (max(begin, low), min(end, high))
            for begin, end in found
            for low, high in windows
            if max(begin, low) < min(end, high)
        ]

    both = sum(
        max(Decimal(0), min(one[1], other[1]) - max(one[0], other[0]))
        for one, other in itertools.product(inside(1), inside(2))
    )
    assert float(both) / 1e3 == pytest.approx(benched[0]["overlap_ms"], rel=1e-9)


def test_events_are_of_the_documented_format(events: list[dict[str, Any]]) -> None:
    """Complete events and metadata alone, on named threads of a named process, nested within each thread."""
    assert {event["ph"] for event in events} == {"M", "X"}
    metadata = [event for event in events if event["ph"] == "M"]
    assert {event["name"] for event in metadata} == {"process_name", "thread_name", "thread_sort_index"}
    named_threads = {event["tid"] for event in metadata if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} == {1}
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        assert isinstance(event["name"], str)
        assert event["name"]
    for tid in sorted(named_threads):
        ends: list[Decimal] = []
        spans = sorted(named(events, tid), key=lambda event: (event["ts"], -event["dur"]))
        assert spans
        for event in spans:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"]
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1], "an event that begins in another ends in it"
            ends.append(end)
