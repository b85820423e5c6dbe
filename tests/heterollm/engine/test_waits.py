"""How the executor waits: the order of the calls, each phase's strategy, the same answers by all of them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import OptionError
from heterollm.engine import SYNC_OPTIONS
from heterollm.engine.step import Step
from heterollm.engine.sync import default_sync
from heterollm.engine.waits import Fences
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import Strategy
from heterollm.kernels.threads import ThreadSplit
from heterollm.llm import LLM
from heterollm.solver import PhaseSync, Plan
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

FAST = [sync for sync in SYNC_OPTIONS if sync not in ("auto", "operator", "finish")]


@pytest.fixture(scope="module")
def plan(checkpoint: Callable[..., Path], half_rows_plan: Callable[..., Plan]) -> Plan:
    with LLM.load(checkpoint("llama"), device="host", plan="gpu") as llm:
        return half_rows_plan(llm)


@pytest.fixture
def load(checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], plan: Plan) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        return host_llm(checkpoint("llama"), **{"plan": plan, **options})

    return make


def steps_of(llm: LLM, phase: Any, tokens: int) -> list[Step]:
    """Return the steps of a pass without those of its head."""
    steps = list(llm.steps(phase, tokens))
    return steps[
        : next(
            place
            for place, step in enumerate(steps)
            if "head_input" in {one.name for one in (*step.reads, *step.writes)}
        )
    ]


def described(steps: list[Step]) -> list[str]:
    """Return what each step is: the names of kernels, the actions of the host, ``graph`` for a graph."""

    def name(step: Step) -> str:
        if step.merged:
            return f"merged {step.merged[0].name} to {step.merged[-1].name}"
        return step.name if step.action == "kernel" else step.action

    return [name(step) for step in steps]


def logits(llm: LLM, ids: list[int]) -> np.ndarray:
    session = llm.session()
    return np.stack(
        [
            *session.prefill(ids[:50], all_logits=True),
            *map(session.decode, ids[50:56]),
            *session.decode(ids[56:61]),
        ]
    )


# With whole groups on the NPU the strategies differ in fewer places than with cuts.
EVERY_WAY = [
    ("rows", SYNC_OPTIONS),
    ("npu", ("operator", "event", "sleep_flag")),
    ("layer", ("auto", "poll", "flag")),
    *(pytest.param(level, SYNC_OPTIONS, marks=pytest.mark.slow) for level in ("npu", "layer")),
]


@pytest.mark.parametrize(("level", "ways"), EVERY_WAY)
def test_every_way_of_waiting_gives_the_same_logits(
    level: str, ways: tuple[str, ...], load: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    ids = token_ids(61)
    options = {} if level == "rows" else {"plan": level}
    expected = logits(load(sync="finish", **options), ids)
    for sync in ways:
        if sync == "finish":
            continue
        np.testing.assert_array_equal(logits(load(sync=sync, **options), ids), expected, err_msg=sync)


# -- the order of the calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", FAST)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_gpu_has_its_part_before_the_host_waits(sync: str, phase: str, load: Callable[..., LLM]) -> None:
    llm = load(sync=sync)
    names = described(steps_of(llm, phase, 20))
    graphs = [place for place, name in enumerate(names) if name == "graph"]
    assert len(graphs) == 8
    for place, group in zip(graphs, ("qkv", "o", "gate_up", "down") * 2, strict=True):
        assert names[place - 4] == "mark"
        assert names[place - 3].endswith(f".{group}")
        assert names[place - 2 : place] == ["flush", "wait"]


@pytest.mark.parametrize("sync", ["flag", "sleep_flag"])
def test_in_decode_the_flag_and_the_gpu_part_are_in_the_launch_of_the_input(
    sync: str, load: Callable[..., LLM]
) -> None:
    llm = load(sync=sync)
    names = described(steps_of(llm, "decode", 1))
    parts = [f"{layer}.{group}" for layer in (0, 1) for group in ("qkv", "o", "gate_up", "down")]
    assert len(names) == 4 * len(parts)
    for index, part in enumerate(parts):
        begin, *rest = names[4 * index : 4 * index + 4]
        assert begin.startswith("merged ")
        assert begin.endswith(f" to {part}")
        assert rest == ["sent", "wait", "graph"]


def test_other_strategies_merge_what_lies_between_hand_overs(load: Callable[..., LLM]) -> None:
    llm = load(sync="event")
    names = described(steps_of(llm, "decode", 1))
    assert names[0].startswith("merged embedding to")
    assert names[1:6] == ["mark", "0.qkv", "flush", "wait", "graph"]
    assert names[6].startswith("merged 0.rope")
    assert not any("mark" in name and "merged" in name for name in names)


def test_the_driver_s_wait_for_the_queue_comes_before_the_gpu_part(load: Callable[..., LLM]) -> None:
    """It would wait for that part as well."""
    llm = load(sync="finish")
    names = described(steps_of(llm, "prefill", 20))
    for place in (place for place, name in enumerate(names) if name == "graph"):
        assert names[place - 3] == "wait"
        assert names[place - 1] == "flush"


def test_the_baseline_finishes_after_every_operator(load: Callable[..., LLM]) -> None:
    llm = load(sync="operator")
    for phase, tokens in (("prefill", 20), ("decode", 1)):
        steps = steps_of(llm, phase, tokens)
        names = described(steps)
        assert not any(step.merged for step in steps)
        for place, step in enumerate(steps):
            if step.action == "kernel":
                behind = names[place + 1 :]
                # A cut is one operator; attention may be two launches.
                assert (
                    behind[0] == "finish"
                    or behind[:3] == ["flush", "graph", "finish"]
                    or (step.operator == "attention" and behind[1] == "finish")
                ), names[place : place + 4]


def test_waits_for_equal_work_share_a_prediction(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], half_rows_plan: Callable[..., Plan]
) -> None:
    """The first layer has the embedding in front of it, and the GPU alone computes ``o`` of layer 3."""
    folder = checkpoint("llama", num_hidden_layers=6)
    plan = half_rows_plan(host_llm(folder, plan="gpu"))
    alone = PlanEntry("prefill", (2, 32), (3, 3), "o", RowsPlacement((), ()))
    llm = host_llm(folder, plan=structs.replace(plan, entries=(alone, *plan.entries)), sync="sleep_poll")
    waits = [step for step in steps_of(llm, "prefill", 20) if step.wait]
    layers_of: dict[tuple[str, Any], list[int | None]] = {}
    for step in waits:
        layers_of.setdefault((step.operator, step.run.__self__), []).append(step.layer)
    shared = {operator: [] for operator, _ in layers_of}
    for (operator, _), layers in layers_of.items():
        shared[operator].append(layers)
    assert shared == {
        "qkv": [[0], [1, 2, 3, 4, 5]],
        "o": [[0, 1, 2, 4, 5]],
        "gate_up": [[0, 1, 2, 4, 5], [3]],
        "down": [[0, 1, 2, 3, 4, 5]],
    }
    llm.session().prefill(list(range(20)))
    assert all(fence.prediction.mean_us >= 0 for _, fence in layers_of)


def test_a_new_length_finds_nothing_out(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(sync="sleep_flag")

    def never(*_: object) -> None:
        raise AssertionError("measured after loading")

    monkeypatch.setattr("heterollm.kernels.sync.litmus.flag_litmus", never)
    monkeypatch.setattr("heterollm.kernels.gpu.waiting._median_us", never)
    for length in (3, 40, 77):
        llm.session().prefill(list(range(length)))


# -- the strategy of a device -------------------------------------------------------------------------------


def like(host: Device, *, gpu: tuple[int, ...], npu: tuple[int, ...], coherent: bool = True) -> Any:
    runtime = host.gpu
    if not coherent:
        runtime = type(host.gpu)(host.gpu.context.devices[0], shared_memory="mapped")
    return SimpleNamespace(gpu=runtime, split=ThreadSplit(gpu, npu))


def test_auto_polls_where_the_engine_thread_has_a_core_of_its_own(host: Device) -> None:
    found = default_sync(like(host, gpu=(0,), npu=(1,)))
    assert (found.prefill, found.decode) == ("event", "flag")


def test_auto_polls_the_marker_where_no_flag_is_offered(
    host: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterollm.kernels.sync.strategies_for", lambda _: ("finish", "event", "poll"))
    assert default_sync(like(host, gpu=(0,), npu=(1,))).decode == "poll"


@pytest.mark.parametrize("cores", [((0, 1), ()), ((0, 1), (1,))])
def test_auto_blocks_where_cores_are_shared(host: Device, cores: tuple[tuple[int, ...], ...]) -> None:
    found = default_sync(like(host, gpu=cores[0], npu=cores[1]))
    assert (found.prefill, found.decode) == ("event", "event")


def test_auto_blocks_where_memory_is_mapped(host: Device) -> None:
    assert default_sync(like(host, gpu=(0,), npu=(1,), coherent=False)).decode == "event"


@pytest.mark.parametrize(("measured", "expected"), [("sleep_poll", "sleep_poll"), (None, "flag")])
def test_a_profile_decides(measured: Strategy | None, expected: str, host: Device) -> None:
    assert default_sync(like(host, gpu=(0,), npu=(1,)), measured).decode == expected


def test_a_plan_without_hand_overs_finds_nothing_out(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heterollm.kernels.sync.strategies_for", lambda _: pytest.fail("asked"))
    assert Fences(host, PhaseSync()).strategies["decode"] == "event"


def test_what_is_no_strategy_is_refused(load: Callable[..., LLM]) -> None:
    with pytest.raises(OptionError, match="'guess'") as caught:
        load(sync="guess")
    assert all(sync in caught.value.fix for sync in SYNC_OPTIONS)


def test_a_strategy_that_the_device_does_not_offer_is_refused(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "heterollm.kernels.sync.fence._flag_refusal", lambda _: "3 rounds of the litmus test were lost"
    )
    with pytest.raises(OptionError, match=r"does not offer .*'flag'.*3 rounds"):
        load(sync="flag")


# -- slots --------------------------------------------------------------------------------------------------


def test_the_slots_are_the_same_for_any_number_of_layers(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], half_rows_plan: Callable[..., Plan]
) -> None:
    found = []
    for layers in (1, 2, 5):
        folder = checkpoint("llama", num_hidden_layers=layers)
        plan = half_rows_plan(host_llm(folder, plan="gpu"))
        engine = host_llm(folder, plan=plan)._engine
        pool, private = engine.pool, engine.private
        found.append({name: memory.size_bytes for name, memory in private.items()})
        found[-1] |= {name: pool[name].size_bytes for name in pool}
    assert found[0] == found[1] == found[2]
