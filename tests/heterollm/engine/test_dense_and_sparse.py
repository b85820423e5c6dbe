"""Dense layers among sparse ones: the logits of transformers at every level, and the memory of both kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.engine.memory import memory_need
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.ops import ffn_specs
from heterollm.llm import LLM
from heterollm.model import convert_model
from heterollm.solver import ExpertGroup, ExpertsEntry, ExpertsPlacement, Plan, PlannedExperts
from heterollm.solver.placements import FfnPlacement
from heterollm.solver.plan_records import PlanEntry

CHUNK = 128
LISTED: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": [1], "intermediate_size": 192}
STEPPED: dict[str, Any] = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "intermediate_size": 192}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "listed": ("qwen3_moe", LISTED),
    "stepped": ("qwen3_moe", STEPPED),
    # The network beside the experts has other sizes than that of a dense layer, and a gate of whole tokens.
    "gated": ("qwen2_moe", {**STEPPED, "shared_expert_intermediate_size": 160}),
    # Convolutions, and a choice of experts by sigmoid and bias.
    "biased": ("lfm2_moe", {"intermediate_size": 192}),
    # Norms of experts, of their router and of the network beside them.
    "normed": ("gemma4_text with experts", {}),
}
SPARSE = {"listed": (0, 2), "stepped": (1, 3), "gated": (1, 3), "biased": (1, 2), "normed": (0, 1)}
NETWORKS = {"listed": {1}, "stepped": {0, 2}, "gated": {0, 1, 2, 3}, "biased": {0}, "normed": {0, 1}}


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the logits of a prompt of an odd length, in two passes, and of some tokens behind it."""
    session = llm.session()
    rows = [session.prefill(ids[:33], all_logits=True), session.prefill(ids[33:68], all_logits=True)]
    rows += [session.decode(token)[np.newaxis] for token in ids[68:70]]
    return np.concatenate([*rows, session.decode(ids[70:73])])


def with_ffns(llm: LLM, rows: Plan) -> Plan:
    """Return a plan that cuts networks along their width instead of rows."""
    ffns = tuple(
        PlanEntry(phase, (low, high), (ffn.layer, ffn.layer), "ffn", FfnPlacement(64, (high,)))
        for ffn in ffn_specs(llm._weights.specs)
        for phase in ("prefill", "decode")
        for low, high in ((1, 1), (2, 32), (33, 64), (65, CHUNK))
    )
    kept = tuple(entry for entry in rows.entries if entry.group not in ("gate_up", "down"))
    return structs.replace(rows, entries=(*ffns, *kept), slices=())


def with_experts(plan: Plan, layers: tuple[int, ...]) -> Plan:
    """Return a plan with some experts of the sparse layers on the NPU; the first range has a dense one."""
    some = ExpertsPlacement((ExpertGroup((7, 2, 0), 32), ExpertGroup((4,), 1)))
    more = ExpertsPlacement((ExpertGroup((9, 11), 64),))
    entries = (
        ExpertsEntry((1, CHUNK), (0, layers[-1] - 1), some),
        ExpertsEntry((1, CHUNK), (layers[-1], layers[-1]), more),
    )
    return plan.with_technique(PlannedExperts(entries))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(
            ("listed", {}),
            ("stepped", {"precision": "fp16"}),
            ("gated", {}),
            ("gated", {"precision": "w4a8"}),
        ),
        *(("biased", {}), ("normed", {})),
        pytest.param("listed", {"precision": "w4a8"}, marks=pytest.mark.slow),
        pytest.param("normed", {"precision": "w4a8"}, marks=pytest.mark.slow),
        pytest.param("stepped", {}, marks=pytest.mark.slow),
        pytest.param("listed", {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param("stepped", {"precision": "w4a8"}, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_transformers(
    model: str,
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    token_ids: Callable[[int], list[int]],
) -> None:
    """All on the GPU and on the NPU, cut along rows and widths, and with experts on the NPU."""
    family, overrides = MODELS[model]
    folder, ids = checkpoint(family, **overrides), token_ids(73)
    on_gpu = host_llm(folder, plan="gpu", **options)
    rows = half_rows_plan(on_gpu, CHUNK)
    rounded = options.get("precision") == "w4a8"
    plans = {
        "gpu": "gpu",
        **({} if rounded else {"npu": "npu", "layer": "layer"}),
        "rows": rows,
        "widths": with_ffns(on_gpu, rows),
        "experts": with_experts(rows, SPARSE[model]),
    }
    expected = reference(on_gpu, folder, ids)
    if rounded:
        expected = answers(on_gpu, ids)
    for name, plan in plans.items():
        llm = on_gpu if plan == "gpu" else host_llm(folder, plan=plan, **options)
        npu = {(step.layer, step.operator) for step in llm.steps("prefill", 40) if step.action == "graph"}
        sparse = {layer for layer, operator in npu if operator == "experts"}
        dense = {layer for layer, operator in npu if operator in ("ffn", "down")}
        assert sparse == (set(SPARSE[model]) if name == "experts" else set())
        if name != "gpu":
            assert dense == NETWORKS[model]
        found = sqnr_db(answers(llm, ids), expected)
        assert found >= (40.0 if rounded else LOGITS_SQNR_DB["fp32"]), name


def test_any_budget_of_experts_gives_the_same_bits(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    folder, ids = checkpoint("qwen3_moe", **LISTED), token_ids(73)
    whole = host_llm(folder, plan="gpu")
    own = whole._engine._compiler._experts._layers[0]
    size = (own.gate_up.size_bytes + own.down.size_bytes) / 12 / 2**30
    expected = answers(whole, ids)
    for slots in (3, 20):
        llm = host_llm(folder, plan="gpu", experts_gib=(slots + 0.5) * size)
        np.testing.assert_array_equal(answers(llm, ids), expected)
        assert llm.expert_reads is not None
        assert (llm.expert_reads.slots, llm.expert_reads.experts) == (slots, 24)


@pytest.mark.parametrize("model", ["stepped", "gated", "biased", "normed"])
def test_a_saved_model_has_the_logits_of_its_source(
    model: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    family, overrides = MODELS[model]
    folder, ids = checkpoint(family, **overrides), token_ids(73)
    saved = convert_model(folder, tmp_path / "saved")
    found, expected = (
        answers(host_llm(own, plan="gpu", group_size=saved.block), ids) for own in (saved.folder, folder)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("model", ["listed", "stepped"])
def test_need_of_memory_sums_both_kinds(
    model: str, checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    family, overrides = MODELS[model]
    llm = host_llm(checkpoint(family, **overrides), plan="gpu", precision="fp16")
    need = memory_need(llm.config, llm._weights.specs, llm.plan, 64, {}, np.dtype(np.float32))
    sparse, layers = len(SPARSE[model]), llm.config.layers
    values = layers * 128 * (4 + 2 + 2 + 4) * 40 + sparse * 12 * 3 * 96 * 128
    values += (layers - sparse) * 3 * 192 * 128 + 2 * 2048 * 128
    assert need.gpu_weights == 4 * values
