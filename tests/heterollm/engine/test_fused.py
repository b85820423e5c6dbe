"""Fused groups: plans with them give transformers' logits with half of the graph runs."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB
from msgspec import structs

from heterollm.base import PlanError
from heterollm.calibration import Calibration, calibrate
from heterollm.kernels.formats.tolerances import ComputeType, sqnr_db
from heterollm.kernels.npu import qnn_available
from heterollm.llm import LLM
from heterollm.model import fusion_obstacle
from heterollm.solver import Plan
from heterollm.solver.placements import GPU_ONLY, FfnPlacement
from heterollm.solver.plan_records import PlanEntry
from tests.heterollm.conftest import config_of

USABLE, REASON, _ = qnn_available(emulator=True)
EMULATED = (pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON), pytest.mark.slow)
WIDTH = 768
Reference = Callable[[LLM, Path, list[int]], np.ndarray]


def fused(
    plan: Plan, width: int = WIDTH, *, norm: bool = True, integer: bool = False, gated: bool = True
) -> Plan:
    """Return a plan of level ``npu`` with fused groups in place of others, the head on the GPU."""

    def entries() -> Iterator[PlanEntry]:
        for entry in plan.entries:
            placement = entry.placement
            # Integer graphs have no length of 1.
            lengths = (
                tuple(max(32, own) for own in placement.npu_lengths) if integer else placement.npu_lengths
            )
            if entry.group == "head":
                yield structs.replace(entry, placement=GPU_ONLY)
            elif entry.group == "o":
                form = "ffn_integer" if integer else None
                yield structs.replace(
                    entry, group="o_ffn", placement=FfnPlacement.of((width,) * (1 + gated), lengths, form)
                )
            elif entry.group == "qkv":
                form = "integer" if integer else None
                own = structs.replace(placement, npu_lengths=lengths, form=form)
                yield structs.replace(entry, group="norm_qkv" if norm else "qkv", placement=own)

    return structs.replace(plan, level="fused", entries=tuple(entries()), slices=())


@pytest.fixture(scope="module")
def npu(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="npu", kv_bits=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(3).integers(1, 2000, 120).tolist()


@pytest.fixture(scope="module")
def text(npu: LLM) -> list[int]:
    """Ids of a text as the calibration's, whose activations are within its ranges."""
    return npu.tokenizer.encode(
        "def add(a, b):\n    return a + b\n\n\nclass Queue:\n    def __init__(self):\n" * 5
    )


@pytest.fixture(scope="module")
def calibration(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    return path, calibrate(bundled_model, output=path, windows=3, gpu_threads=1)


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the logits of a prompt, of a token behind it, and of several at once."""
    session = llm.session()
    rows = [session.prefill(ids[:100], all_logits=True), session.decode(ids[100])[np.newaxis]]
    return np.concatenate([*rows, session.decode(ids[101:108])])


def hold_to_gates(actual: np.ndarray, expected: np.ndarray, kind: ComputeType) -> None:
    error, power = np.square(actual - expected), np.square(expected)
    assert sqnr_db(actual, expected) >= LOGITS_SQNR_DB[kind]
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= LOGITS_SQNR_DB[kind] - LOGITS_WORST_DROP_DB


@pytest.mark.parametrize(("width", "norm"), [(WIDTH, True), (WIDTH, False), (256, True), (320, False)])
def test_logits_and_tokens_are_those_of_the_gpu(npu, bundled_model, reference, ids, width, norm):
    expected = reference(npu, bundled_model, ids)[:108]
    plan = fused(npu.plan, width, norm=norm)
    with LLM.load(bundled_model, device="host", plan=plan, kv_bits=32) as llm:
        hold_to_gates(answers(llm, ids), expected, "fp32")
        tokens = llm.generate("def add(", max_new_tokens=64).token_ids
        assert tokens == npu.generate("def add(", max_new_tokens=64).token_ids


@pytest.mark.parametrize(("width", "norm"), [(WIDTH, True), (256, False)])
def test_integer_graphs_give_the_logits(npu, bundled_model, reference, text, calibration, width, norm):
    path, found = calibration
    assert not found.failed
    plan = structs.replace(fused(npu.plan, width, norm=norm, integer=True), calibration=found.key)
    options: dict[str, Any] = {"scales": "stepped", "calibration": path}
    with LLM.load(bundled_model, device="host", plan=plan, **options) as llm:
        hold_to_gates(answers(llm, text), reference(llm, bundled_model, text[:108]), "fp16")
        assert not llm.pass_notes
        labels = [step.label for step in llm.steps("prefill", 64) if step.action == "graph"]
        assert sum("integer" in label for label in labels) == 8


@pytest.mark.parametrize(
    "integer",
    [pytest.param(False, marks=EMULATED), pytest.param(True, marks=EMULATED)],
    ids=["float", "integer"],
)
def test_the_emulator_gives_the_logits(npu, bundled_model, reference, text, calibration, integer):
    path, found = calibration
    plan = fused(npu.plan, WIDTH if integer else 256, norm=integer, integer=integer)
    plan = structs.replace(plan, device="emulator")
    options: dict[str, Any] = {"scales": "stepped", "calibration": path} if integer else {}
    if integer:
        plan = structs.replace(plan, calibration=found.key)
    with LLM.load(bundled_model, device="emulator", context=512, plan=plan, **options) as llm:
        actual, expected = answers(llm, text), reference(llm, bundled_model, text[:108])
        print(f"{sqnr_db(actual, expected):.1f} dB")
        hold_to_gates(actual, expected, "fp16")
        decided = np.sort(expected, axis=1)
        margin = decided[:, -1] - decided[:, -2] > 2 * np.abs(actual - expected).max()
        assert margin.mean() >= 0.8
        assert (actual.argmax(axis=1) == expected.argmax(axis=1))[margin].all()


@pytest.mark.parametrize(("phase", "tokens"), [("prefill", 64), ("decode", 1)])
def test_a_layer_has_two_graph_runs(npu, bundled_model, phase, tokens):
    with LLM.load(bundled_model, device="host", plan=fused(npu.plan, 256, norm=False)) as llm:
        runs = [step.operator for step in llm.steps(phase, tokens) if step.action == "graph"]
        before = [step.operator for step in npu.steps(phase, tokens) if step.action == "graph"]
        assert Counter(runs) == {"qkv": 4, "o_ffn": 4}
        assert len(before) == 4 * 4 + 1


def test_no_single_graphs_are_held_beside_fused_ones(npu):
    plan = fused(npu.plan)
    assert {held.group for held in plan.slices} == {"norm_qkv", "o_ffn"}
    assert {entry.group for entry in plan.without_npu().entries} == {"qkv", "o", "gate_up", "down", "head"}


def test_a_norm_is_placed_with_all_that_reads_it(npu, bundled_model):
    plan = fused(npu.plan)
    entry = next(entry for entry in plan.entries if entry.group == "norm_qkv")
    for changes in ({"npu_rows": (128, 64, 64)}, {"npu_rows": (), "npu_lengths": ()}):
        placement = structs.replace(entry.placement, **changes)
        entries = tuple(
            structs.replace(one, placement=placement) if one is entry else one for one in plan.entries
        )
        with pytest.raises(PlanError, match="all rows of all tokens"):
            LLM.load(bundled_model, device="host", plan=structs.replace(plan, entries=entries, slices=()))


# Biases of q, k, v; an offset of norms and GELU; norms of heads; multipliers of what layers add; xIELU.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen2", "gemma") else pytest.mark.slow)
        for name in ("qwen2", "gemma", "qwen3", "granite", "apertus")
    ],
)
def test_what_stays_on_the_gpu_may_be_anything(checkpoint, reference, family):
    biases = {} if family == "qwen2" else {"attention_bias": False}
    folder = checkpoint(family, intermediate_size=320, **biases)
    ids = np.random.default_rng(4).integers(1, 500, 60).tolist()
    with LLM.load(folder, device="host", plan="npu", kv_bits=32) as llm:
        plan, expected = llm.plan, reference(llm, folder, ids)
    for width in (320, 128):
        options = {"norm": width == 320, "gated": family != "apertus"}
        with LLM.load(folder, device="host", plan=fused(plan, width, **options), kv_bits=32) as llm:
            session = llm.session()
            rows = session.prefill(ids[:50], all_logits=True), session.decode(ids[50])[np.newaxis]
            hold_to_gates(np.concatenate(rows), expected[:51], "fp32")
            assert any(step.operator == "o_ffn" for step in llm.steps("decode", 1))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", ""),
        ("gemma2", "outputs have norms of their own"),
        ("stablelm", "no RMS norms"),
        ("phi", "no network of its own"),
        ("gemma3n_text", "no network of its own"),
        ("qwen3", "o has a bias"),
    ],
)
def test_layers_that_graphs_cannot_have_are_named(family, reason):
    config = config_of(family)
    found = {fusion_obstacle(config, layer) for layer in range(config.layers)}
    assert all(reason in one for one in found)
    assert bool(reason) is all(found)
