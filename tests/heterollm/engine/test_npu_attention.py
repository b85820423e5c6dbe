"""Attention on the NPU end to end: against the GPU's, in order, without the NPU, and where it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs
from prompt_lengths import answers

from heterollm.base import EngineError, PlanError
from heterollm.engine.builder import PassBuilder
from heterollm.engine.fit import check_runs
from heterollm.engine.memory import memory_need
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.engine.slots import pool_sizes
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu.opencl_devices import MEMORY_VARIABLE
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.ops import Precision
from heterollm.llm import LLM
from heterollm.model import op_specs
from heterollm.solver import NpuAttention, Plan, PlannedAttention, level_plan
from heterollm.solver.sparse.attention import AttentionEntry
from tests.heterollm.conftest import config_of

OPTIMISED = True
"""Long prompts take longer than compilers."""

CHUNK, CONTEXT = 128, 640
OPTIONS: dict[str, Any] = {"context": CONTEXT, "kv_bits": 32}


def on_npu(
    plan: Plan,
    *,
    lengths: tuple[int, int] = (1, CHUNK),
    keys: tuple[int, int] = (1, CONTEXT),
    layers: int = 4,
) -> Plan:
    entry = AttentionEntry(lengths, keys, (0, layers - 1), NpuAttention())
    return structs.replace(plan.with_technique(PlannedAttention((entry,))), chunk_length=CHUNK)


@pytest.fixture
def load(bundled_model: Path, host_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda **options: host_llm(bundled_model, **{**OPTIONS, **options})


@pytest.fixture
def on_gpu(load: Callable[..., LLM]) -> LLM:
    return load(plan="gpu")


@pytest.fixture
def ids(bundled_model: Path, on_gpu: LLM) -> list[int]:
    text = (bundled_model / "held_out.txt").read_text("utf-8")
    return on_gpu.tokenizer.encode(text[:6000])[:CONTEXT]


@pytest.mark.parametrize("level", ["gpu", "npu"])
def test_prompts_have_the_answers_of_the_gpu(
    level: str, load: Callable[..., LLM], on_gpu: LLM, ids: list[int]
) -> None:
    llm = load(plan=on_npu(load(plan=level).plan))
    assert sqnr_db(answers(llm, ids), answers(on_gpu, ids)) > LOGITS_SQNR_DB["fp32"]
    graphs = [step for step in llm.steps("prefill", 100) if step.action == "graph"]
    assert sum(step.operator == "attention" for step in graphs) == llm.config.layers
    kernels = [step.operator for step in llm.steps("prefill", 100) if step.action == "kernel"]
    assert "attention" not in kernels
    assert kernels.count("attention inputs") == llm.config.layers
    assert not any(step.operator == "attention inputs" for step in llm.steps("decode", 1))


@pytest.mark.parametrize("bits", [8, 16])
def test_caches_of_fewer_bits_are_read(bits: int, load: Callable[..., LLM], ids: list[int]) -> None:
    exact = load(plan="gpu", kv_bits=bits)
    got, expected = (
        load(plan=plan, kv_bits=bits).session().prefill(ids[:150]) for plan in (on_npu(exact.plan), "gpu")
    )
    # A key that rounds to another code is a step away.
    assert sqnr_db(got, expected) > (40 if bits == 8 else 70)


def test_outputs_are_rounded_for_integer_linears(load: Callable[..., LLM], ids: list[int]) -> None:
    exact = load(plan="gpu", precision="w4a8")
    expected = exact.session().prefill(ids[:150], all_logits=True)
    llm = load(plan=on_npu(exact.plan), precision="w4a8")
    # A sum in another order rounds a few inputs to another code.
    assert sqnr_db(llm.session().prefill(ids[:150], all_logits=True), expected) > 45


def test_what_lies_behind_a_session_is_never_read(load: Callable[..., LLM], ids: list[int]) -> None:
    """Keys and values behind the last token are those of a longer prompt before, which overflow."""
    llm = load(plan=on_npu(load(plan="gpu").plan))
    session = llm.session()
    expected = session.prefill(ids[:150], all_logits=True)
    session.prefill(ids[150:500])

    def spoil() -> None:
        for memory in llm._engine._compiler.states.memory.memories:
            llm.device.gpu.copy(memory.buffer, np.full(memory.size_bytes // 4, np.nan, np.float32))

    session.reset()
    llm.on_engine_thread(spoil)
    np.testing.assert_array_equal(session.prefill(ids[:150], all_logits=True), expected)


def test_the_ranges_of_the_plan_decide(load: Callable[..., LLM], ids: list[int]) -> None:
    llm = load(plan=on_npu(load(plan="gpu").plan, lengths=(64, CHUNK), keys=(150, 300), layers=3))
    session = llm.session()
    for first, last in ((0, 128), (128, 168), (168, 240), (240, 305), (305, 400)):
        session.prefill(ids[first:last])
    layers = {
        key[1:]: [step.layer for step in compiled.steps if step.action == "graph"]
        for key, compiled in llm._engine._passes.compiled.items()
        if key[0] == "prefill"
    }
    assert layers.pop((72, 256)) == [0, 1, 2]
    assert not any(layers.values())


# -- order of the steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["host", "mapped", pytest.param("svm", marks=pytest.mark.slow)])
def test_the_check_of_slots_passes_under_delays(
    memory: str, load: Callable[..., LLM], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = on_npu(load(plan="npu").plan)
    expected = load(plan=plan).session().prefill(ids[:300], all_logits=True)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    got = load(plan=plan).session().prefill(ids[:300], all_logits=True)
    np.testing.assert_array_equal(got, expected)


def test_a_missing_wait_is_refused(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_npu(load(plan="gpu").plan)
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    monkeypatch.setattr(PassBuilder, "wait", lambda *_: None)
    told = r"npu step '0\.attention' may run before kernel '0\.attention inputs' has written attention_q"
    with pytest.raises(EngineError, match=told):
        load(plan=plan)


def test_layers_share_a_graph_and_a_trace_names_it(load: Callable[..., LLM], ids: list[int]) -> None:
    llm = load(plan=on_npu(load(plan="gpu").plan), trace=True)
    llm.session().prefill(ids[:100])
    built = llm.device.npu.compiled_count
    assert built == 1
    spans = [span for span in llm.take_trace().spans if span.track == "npu"]
    assert [(span.operator, span.layer, span.category) for span in spans] == [
        ("attention", layer, "attention") for layer in range(llm.config.layers)
    ]
    llm.session().prefill(ids[:300])  # the keys of two larger graphs
    assert llm.device.npu.compiled_count == 2


def test_memory_counts_inputs_of_graphs(load: Callable[..., LLM]) -> None:
    on_gpu = load(plan="gpu")
    heads, specs = on_gpu.config.attention, on_gpu._weights.specs

    def need(plan: Plan) -> int:
        slots = pool_sizes(on_gpu.config, specs, plan, 4, CONTEXT)
        found = memory_need(on_gpu.config, specs, plan, CONTEXT, slots, np.dtype(np.float32))
        return found.techniques["inputs of attention on the NPU"]

    elements = (2 * heads.kv_heads * CONTEXT + heads.heads * CHUNK) * heads.head_dim + 2 * CHUNK
    assert need(on_npu(on_gpu.plan)) == 4 * elements
    assert need(on_gpu.plan) == 0


# -- without the NPU, and refused ----------------------------------------------------------------------------


def test_a_plan_without_the_npu_attends_on_the_gpu(load: Callable[..., LLM]) -> None:
    plan = on_npu(load(plan="gpu").plan)
    assert plan.uses_npu
    assert not plan.changes_values
    assert not plan.without_npu().uses_npu
    llm = load(plan="gpu")
    with pytest.raises(PlanError, match="attention of layers 0 to 3 on the NPU, and the device has no NPU"):
        check_runs(llm.config, llm._weights.specs, plan, None)


REFUSED = {
    "gemma2": "caps its scores",
    "gpt_oss": "has sinks",
    "deepseek_v3": "share latent vectors",
    "mistral": "has a window of 20 positions",
}


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_layers_that_no_graph_computes_are_refused(family: str, reason: str) -> None:
    config = config_of(family)
    precision: Precision = "w4a16"
    specs = op_specs(config, precision, 16, True)
    plan = level_plan(
        "gpu", specs, device="host", precision=precision, standard_lengths=(32,), chunk_length=CHUNK
    )
    check_runs(config, specs, plan, None)
    with pytest.raises(PlanError, match=rf"attention of layer \d+ on the NPU .*{reason}"):
        check_runs(config, specs, on_npu(plan, layers=2), None)


# -- Hexagon -------------------------------------------------------------------------------------------------

USABLE, REASON, _ = qnn_available(emulator=True)


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_emulator_attends_within_the_gate_of_float16(
    bundled_model: Path, host_llm: Callable[..., LLM], ids: list[int]
) -> None:
    exact = host_llm(bundled_model, device="emulator", plan="gpu", context=CONTEXT)
    llm = host_llm(bundled_model, device="emulator", plan=on_npu(exact.plan), context=CONTEXT)
    got, expected = (one.session().prefill(ids[:33], all_logits=True) for one in (llm, exact))
    assert sqnr_db(got, expected) > LOGITS_SQNR_DB["fp16"]
