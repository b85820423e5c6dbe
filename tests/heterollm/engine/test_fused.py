"""Fused groups: plans with them give transformers' logits with half of the graph runs."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.solver import Plan
from heterollm.solver.placements import GPU_ONLY, FfnPlacement
from heterollm.solver.plan_records import PlanEntry

WIDTH = 768
Reference = Callable[[LLM, Path, list[int]], np.ndarray]


def fused(plan: Plan, width: int = WIDTH, *, norm: bool = True, form: str | None = None) -> Plan:
    """Return a plan of level ``npu`` with fused groups in place of others, the head on the GPU."""

    def entries() -> Iterator[PlanEntry]:
        for entry in plan.entries:
            lengths = entry.placement.npu_lengths
            if entry.group == "head":
                yield structs.replace(entry, placement=GPU_ONLY)
            elif entry.group == "o":
                yield structs.replace(entry, group="o_ffn", placement=FfnPlacement(width, lengths, form))
            elif entry.group == "qkv":
                yield structs.replace(entry, group="norm_qkv" if norm else "qkv")

    return structs.replace(plan, level="fused", entries=tuple(entries()), slices=())


@pytest.fixture(scope="module")
def npu(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="npu") as llm:
        yield llm


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(3).integers(1, 2000, 120).tolist()


@pytest.fixture(scope="module")
def expected(npu: LLM, bundled_model: Path, reference: Reference, ids: list[int]) -> np.ndarray:
    return reference(npu, bundled_model, ids)


@pytest.mark.parametrize(("width", "norm"), [(WIDTH, True), (WIDTH, False), (256, True), (320, False)])
def test_logits_and_tokens_are_those_of_the_gpu(npu, bundled_model, ids, expected, width, norm):
    with LLM.load(bundled_model, device="host", plan=fused(npu.plan, width, norm=norm)) as llm:
        session = llm.session()
        rows = [session.prefill(ids[:100], all_logits=True), session.decode(ids[100])[np.newaxis]]
        rows.append(session.decode(ids[101:108]))
        assert sqnr_db(np.concatenate(rows), expected[:108]) >= LOGITS_SQNR_DB["fp32"]
        tokens = llm.generate("def add(", max_new_tokens=64).token_ids
        assert tokens == npu.generate("def add(", max_new_tokens=64).token_ids


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_layer_has_two_graph_runs(npu, bundled_model, phase):
    with LLM.load(bundled_model, device="host", plan=fused(npu.plan, 256, norm=False)) as llm:
        tokens = 64 if phase == "prefill" else 1
        runs = [step.operator for step in llm.steps(phase, tokens) if step.action == "graph"]
        before = [step.operator for step in npu.steps(phase, tokens) if step.action == "graph"]
        assert Counter(runs) == {"qkv": 4, "o_ffn": 4}
        assert len(before) == 4 * 4 + 1
