"""The steps of a pass: their order for each kind of placement, and when passes are the same."""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest

from heterollm.base import OptionError
from heterollm.engine.passes import CompiledPass
from heterollm.engine.runner import Engine
from heterollm.engine.slot_check import step_category
from heterollm.engine.step import Buffer, LinearWork, Step
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import SharedArray, SyncChoice
from heterollm.kernels.ops import OpSpec, ffn_specs
from heterollm.kernels.sim import Simulation
from heterollm.kernels.sim.runtime import SimulatedRuntime
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.solver import PhaseSync, Placement, Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

CHUNK = 128
GROUPS = ("qkv", "o", "gate_up", "down", "head")
HIDDEN, WIDTH = 2048, 5632
"""Of TinyLlama, whose shapes are simulated here with two layers."""


def make_engine(
    placements: dict[str, Placement],
    tokens: int = 40,
    sync: SyncChoice = "event",
    layers: int = 2,
    **options: Any,
) -> Engine:
    """Return an engine without weights whose passes of so many tokens have placements of their own.

    Its NPU has a graph for 40 tokens, so that a row cut of such a pass needs no padding.
    """
    whole = find_model("tinyllama-1.1b").config
    config = dataclasses.replace(whole, per_layer=whole.per_layer[:layers])
    specs = op_specs(config, "w4a16", 128, True)
    entries = [
        PlanEntry("prefill", (tokens, tokens), (-1, layers - 1), group, placement)  # type: ignore[arg-type]
        for group, placement in placements.items()
    ]
    entries += [
        PlanEntry(phase, (1, CHUNK), (-1, layers - 1), group, GPU_ONLY)
        for phase, group in itertools.product(("prefill", "decode"), GROUPS)
    ]
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(lengths=(40,), every_form=True))
    plan = Plan(
        "by hand", device.name, "w4a16", model_shape(specs), CHUNK, tuple(entries), PhaseSync(sync, sync)
    )
    weights = shape_only_weights(config, specs)
    return Engine(device, weights, plan, 256, lambda *_: None, **options)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that host and GPU must hand to each other."""
    original = SimulatedRuntime.shared

    def shared(runtime: SimulatedRuntime, *arguments: Any) -> SharedArray:
        found = original(runtime, *arguments)
        return SharedArray(found.array, found.buffer, None, coherent=False)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedRuntime, "shared", shared)


def told(steps: tuple[Step, ...]) -> list[str]:
    """Return each step in one line: processor and action, name, buffers, wait."""
    lines = []
    for step in steps:
        buffers = " -> ".join(" ".join(map(str, some)) for some in (step.reads, step.writes) if some)
        wait = f"until {step.wait.buffer} by {step.wait.strategy}" if step.wait else ""
        lines.append(" ".join(filter(None, (step.processor, step.action, step.name, buffers, wait))))
    return lines


def of_operator(steps: tuple[Step, ...], layer: int | None, operator: str) -> list[str]:
    return told(tuple(step for step in steps if (step.layer, step.operator) == (layer, operator)))


# -- a whole pass -------------------------------------------------------------------------------------------


def test_a_pass_reads_like_a_decoder() -> None:
    steps = make_engine({}).steps("prefill", 40)
    first = [
        "gpu kernel 0.norm residual -> linear_input",
        "gpu kernel 0.qkv linear_input -> gpu_output",
        "gpu kernel 0.rope gpu_output step -> query kv_cache",
        "gpu kernel 0.attention query kv_cache step -> attention_output",
        "gpu kernel 0.o attention_output -> gpu_output",
        "gpu kernel 0.norm residual gpu_output -> residual linear_input",
        "gpu kernel 0.gate_up linear_input -> gpu_output",
        "gpu kernel 0.activation gpu_output -> activated",
        "gpu kernel 0.down activated -> gpu_output",
        "host flush 0.down",
    ]
    second = [line.replace(" 0.", " 1.") for line in first]
    second[0] = "gpu kernel 1.norm residual gpu_output -> residual linear_input"
    assert told(steps) == [
        "gpu kernel embedding tokens -> residual",
        *first,
        *second,
        "gpu kernel final norm residual gpu_output step -> head_input",
        "gpu kernel head head_input -> logits",
        "host finish end of pass",
    ]
    works = [step.work for step in steps if step.operator == "gate_up"]
    assert (
        works
        == [LinearWork(40, HIDDEN, 2 * WIDTH, 2 * 40 * HIDDEN * 2 * WIDTH, 2 * WIDTH * HIDDEN * 33 // 64)] * 2
    )


def test_a_pass_on_the_gpu_alone_is_submitted_early_and_seldom() -> None:
    """Each flush covers as many layers as all before it."""
    steps = make_engine({}, layers=9).steps("prefill", 40)
    assert [step.layer for step in steps if step.action == "flush"] == [0, 1, 3, 7]
    graphs = make_engine({"o": KINDS["npu"][0]}, layers=9).steps("prefill", 40)
    assert not [step for step in graphs if step.action == "flush"]


# -- a placement of each kind --------------------------------------------------------------------------------

O_ROW = HIDDEN * 2
"""Bytes of a token that ``o`` reads, and writes."""

SHARD = "gpu kernel 0.o attention_output -> gpu_output"
MARK = "host mark 0.o"
FLUSH = "host flush 0.o"
WAIT = "host wait 0.o until attention_output by event"


def graph(first: int, stop: int, rows: int = HIDDEN) -> str:
    source = Buffer("attention_output", first * O_ROW, stop * O_ROW)
    return f"npu graph 0.o {source} -> {Buffer('npu_output', first * rows * 2, stop * rows * 2)}"


BEHIND = Buffer("attention_output", 32 * O_ROW, 40 * O_ROW), Buffer("npu_output", 32 * O_ROW, 40 * O_ROW)
TOKENS_BEHIND = f"gpu kernel 0.o {BEHIND[0]} -> {BEHIND[1]}"


def acquire(tokens: int, rows: int = HIDDEN) -> list[str]:
    source, target = Buffer("attention_output", 0, tokens * O_ROW), Buffer("npu_output", 0, tokens * rows * 2)
    return [f"host acquire_to_read 0.o {source}", f"host acquire 0.o {target}"]


RELEASE = ["host release 0.o attention_output", "host release 0.o npu_output"]

KINDS: dict[str, tuple[Placement, list[str]]] = {
    "gpu": (GPU_ONLY, [SHARD]),
    "npu": (RowsPlacement((HIDDEN,), (64,)), [MARK, WAIT, graph(0, 64)]),
    "row": (RowsPlacement((512,), (40,)), [MARK, SHARD, FLUSH, WAIT, graph(0, 40, 512)]),
    "hybrid": (RowsPlacement((512,), (64,)), [MARK, SHARD, FLUSH, WAIT, graph(0, 64, 512)]),
    "hybrid, piped": (
        RowsPlacement((512,), (32, 32)),
        [MARK, SHARD, FLUSH, WAIT, graph(0, 32, 512), graph(32, 64, 512)],
    ),
    "sequence": (RowsPlacement((HIDDEN,), (32,)), [MARK, TOKENS_BEHIND, FLUSH, WAIT, graph(0, 32)]),
}
ON_MAPPED_MEMORY: dict[str, list[str]] = {
    "gpu": [SHARD],
    "npu": [MARK, WAIT, *acquire(64), graph(0, 64), *RELEASE],
    "row": [MARK, WAIT, *acquire(40, 512), SHARD, FLUSH, graph(0, 40, 512), *RELEASE],
    # Both processors write one slot: the host holds only the tokens of the NPU.
    "sequence": [MARK, WAIT, *acquire(32), TOKENS_BEHIND, FLUSH, graph(0, 32), *RELEASE],
}


@pytest.mark.parametrize("kind", KINDS)
def test_on_coherent_memory_the_signal_comes_before_the_gpu_and_the_wait_behind_it(
    kind: str,
) -> None:
    placement, expected = KINDS[kind]
    assert of_operator(make_engine({"o": placement}).steps("prefill", 40), 0, "o") == expected


@pytest.mark.parametrize("kind", ON_MAPPED_MEMORY)
def test_mapped_memory_is_acquired_before_the_gpu_has_its_shard(kind: str, mapped: None) -> None:
    steps = make_engine({"o": KINDS[kind][0]}).steps("prefill", 40)
    assert of_operator(steps, 0, "o") == ON_MAPPED_MEMORY[kind]


def test_finish_waits_before_the_gpu_has_its_shard() -> None:
    """It would wait for that as well."""
    steps = make_engine({"o": KINDS["row"][0]}, sync="finish").steps("prefill", 40)
    wait = "host wait 0.o until attention_output by finish"
    assert of_operator(steps, 0, "o") == [wait, SHARD, FLUSH, graph(0, 40, 512)]


def test_the_baseline_finishes_after_every_operator() -> None:
    steps = make_engine({"o": KINDS["row"][0]}, sync="operator").steps("prefill", 40)
    wait = "host wait 0.o until attention_output by finish"
    assert of_operator(steps, 0, "o") == [wait, SHARD, FLUSH, graph(0, 40, 512), "host finish 0.o"]
    assert of_operator(steps, 0, "down")[-1] == "host finish 0.down"


def test_a_block_is_three_kernels_beside_one_graph() -> None:
    steps = make_engine({"ffn": FfnPlacement(512, (64,))}).steps("prefill", 40)
    names = ("norm", "ffn", "activation")
    own = tuple(step for step in steps if step.layer == 0 and step.operator in names)
    assert told(own)[1:] == [
        "gpu kernel 0.norm residual gpu_output -> residual linear_input",
        "host mark 0.ffn",
        "gpu kernel 0.ffn linear_input -> gpu_output",
        "gpu kernel 0.activation gpu_output -> activated",
        "gpu kernel 0.ffn activated -> gpu_output",
        "host flush 0.ffn",
        "host wait 0.ffn until linear_input by event",
        f"npu graph 0.ffn linear_input[0:{64 * O_ROW}] -> npu_output[0:{64 * O_ROW}]",
    ]
    # The next norm adds both sums.
    assert "gpu kernel 1.norm residual npu_output gpu_output -> residual linear_input" in told(steps)
    labels = [
        step.label for step in steps if (step.layer, step.operator, step.action) == (0, "ffn", "kernel")
    ]
    assert labels == [
        f"0.ffn gate[512:{WIDTH}] up[512:{WIDTH}]",
        f"0.ffn down[:, 512:{WIDTH}]",
    ]


def test_the_shards_of_a_block_do_the_work_of_the_whole() -> None:
    engine = make_engine({"ffn": FfnPlacement(512, (64,))})
    whole = find_model("tinyllama-1.1b").config
    (block, *_) = ffn_specs(op_specs(whole, "w4a16", 128, True))
    works = {
        processor: [
            step.work
            for step in engine.steps("prefill", 40)
            if step.layer == 0 and step.operator == "ffn" and step.processor == processor and step.work
        ]
        for processor in ("gpu", "npu")
    }
    assert [work.tokens for some in works.values() for work in some] == [40, 40, 64]
    assert sum(work.weight_bytes for some in works.values() for work in some) == block.weight_bytes()
    assert sum(work.flops for work in works["gpu"]) + works["npu"][0].flops * 40 // 64 == block.flops(40)


# -- when passes are the same --------------------------------------------------------------------------------


def test_steps_of_the_same_pass_are_equal_whoever_compiled_them() -> None:
    placement = RowsPlacement((512,), (64,))
    one, other = make_engine({"o": placement}), make_engine({"o": placement})
    assert one.steps("prefill", 40) == other.steps("prefill", 40)
    assert one.steps("decode", 1) == other.steps("decode", 1)
    assert hash(one.steps("prefill", 40)) == hash(other.steps("prefill", 40))


def test_every_length_has_steps_of_its_own() -> None:
    engine = make_engine({})
    assert engine.steps("prefill", 40) != engine.steps("prefill", 41)
    assert {step.tokens for step in engine.steps("prefill", 41)[:-3]} == {41}
    # Of a prompt the last row has logits, of a pass of decode every one.
    assert {step.tokens for step in engine.steps("prefill", 41)[-3:]} == {1}
    assert {step.tokens for step in engine.steps("decode", 3)} == {3}


@pytest.mark.parametrize(
    "other",
    [
        RowsPlacement((768,), (64,)),
        RowsPlacement((512,), (32, 32)),
        GPU_ONLY,
    ],
)
def test_another_pass_has_other_steps(other: Placement) -> None:
    steps = make_engine({"o": RowsPlacement((512,), (64,))}).steps("prefill", 40)
    assert make_engine({"o": other}).steps("prefill", 40) != steps


def test_another_form_of_graph_has_other_steps() -> None:
    found = [
        make_engine({"down": RowsPlacement((512,), (64,), form)}).steps("prefill", 40)
        for form in ("matmul_nbits", "k_chunked")
    ]
    assert found[0] != found[1]


def test_another_cut_of_as_many_rows_has_other_steps() -> None:
    found = [
        make_engine({"qkv": RowsPlacement(rows, (64,))}).steps("prefill", 40)
        for rows in ((512, 256, 0), (512, 0, 256))
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize(("sync", "same"), [("event", True), ("poll", False)])
def test_how_the_host_waits_is_part_of_a_pass(sync: str, same: bool) -> None:
    placement = RowsPlacement((512,), (64,))
    one, other = make_engine({"o": placement}), make_engine({"o": placement}, sync=sync)
    assert (one.steps("prefill", 40) == other.steps("prefill", 40)) is same


def test_a_pass_without_graphs_ends_as_under_plan_gpu() -> None:
    """Also behind a pass with graphs, whose head ends in a poll: the two have heads of their own."""
    engine = make_engine({"o": RowsPlacement((512,), (40,))}, sync="poll")
    gpu = make_engine({}, sync="poll")
    with_graphs = engine.steps("prefill", 40)
    assert [step.action for step in with_graphs[-3:]] == ["mark", "wait", "finish"]
    for phase, tokens in (("prefill", 20), ("decode", 1), ("decode", 7)):
        steps = engine.steps(phase, tokens)
        assert steps == gpu.steps(phase, tokens)
        assert [step.action for step in steps[-2:]] == ["kernel", "finish"]
    assert engine.steps("prefill", 40) == with_graphs


def test_lengths_that_no_pass_has_are_refused() -> None:
    engine = make_engine({})
    for tokens in (0, CHUNK + 1):
        with pytest.raises(OptionError, match=f"{tokens} tokens"):
            engine.steps("prefill", tokens)


# -- who sees them ------------------------------------------------------------------------------------------


def test_without_an_observer_the_calls_are_those_of_the_steps() -> None:
    steps = make_engine({}).steps("decode", 1)
    assert CompiledPass.of(steps).calls == tuple(step.run for step in steps)


class Recording:
    """An observer that notes what it is told, and each step as it runs."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def during_pass(self, phase: str, tokens: int, position: int) -> Any:
        self.seen.append(f"begin {phase} of {tokens} at {position}")
        try:
            yield
        finally:
            self.seen.append("end")

    def during(self, section: str) -> AbstractContextManager[None]:
        return self._section(section)

    @contextmanager
    def _section(self, section: str) -> Any:
        self.seen.append(section)
        yield

    def call_of(self, step: Step) -> Callable[[], Any]:
        def run() -> None:
            self.seen.append(step.label)
            step.run()

        return run

    def watch(self, clock: Any) -> Any:
        return clock


def test_an_observer_sees_every_step_of_every_pass_in_order() -> None:
    observer = Recording()
    engine = make_engine({"o": RowsPlacement((512,), (64,))}, observer=observer)
    cache = engine.new_cache()
    engine.prefill(cache, 0, np.arange(40, dtype=np.int32), "prefill", None)
    prefill, observer.seen[:] = list(observer.seen), []
    engine.decode(cache, 40, 1)
    decode, observer.seen[:] = list(observer.seen), []
    engine.decode(cache, 41, 1)
    assert observer.seen == [line.replace("at 40", "at 41") for line in decode if line != "build"]
    labels = {
        phase: [step.label for step in engine.steps(phase, tokens)]  # type: ignore[arg-type]
        for phase, tokens in (("prefill", 40), ("decode", 1))
    }
    head = labels["prefill"].index("final norm")
    assert prefill == [
        "begin prefill of 40 at 0",
        "bind",
        "build",
        "step",
        *labels["prefill"][:head],
        "build",
        *labels["prefill"][head:],
        "end",
    ]
    assert [line for line in decode if line in labels["decode"]] == labels["decode"]


def test_every_kernel_has_a_category_in_traces() -> None:
    """Those of linears above all, which tables count by it."""
    specs: tuple[OpSpec, ...] = op_specs(find_model("tinyllama-1.1b").config, "w4a16", 128, True)
    assert {step_category(spec.group) for spec in (*specs, *ffn_specs(specs))} == {"linear"}
    steps = make_engine({}).steps("prefill", 40)
    assert all(step_category(step.operator) for step in steps if step.action == "kernel")
