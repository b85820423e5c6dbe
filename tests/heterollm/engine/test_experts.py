"""Mixtures of experts in the engine: which weights a pass reads, shared experts under splits, and memory."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates import LOGITS_SQNR_DB
from safetensors.torch import load_file, save_file

from heterollm.engine.memory import memory_need
from heterollm.engine.slots import pool_sizes
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import ModelWeights
from heterollm.solver import Plan

W4A8_SQNR_DB = 28.0
EXPERT_MEMBERS = ModelWeights.expert_members


def chosen_experts(llm: LLM, tokens: int) -> np.ndarray:
    """Return the experts of each token in the last layer of the last pass."""
    routing = llm.config.mixture.routing
    assert routing is not None
    found = np.empty(tokens * routing.chosen, np.int32)
    engine = llm._engine
    memory = engine.private["expert_chosen"]
    llm.on_engine_thread(lambda: engine.device.gpu.copy(found, memory.buffer))
    return found.reshape(tokens, routing.chosen)


def test_a_token_reads_no_weights_of_experts_that_it_did_not_choose(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and decoded tokens, with NaN as weights of all other experts."""
    options: dict[str, Any] = {"plan": "gpu", "precision": "fp16"}
    folder = checkpoint("qwen3_moe", num_hidden_layers=1)
    llm = host_llm(folder, **options)
    session, expected, used = llm.session(), [], set()
    for token in (5, 6, 7):
        expected.append(session.decode(token).copy())
        used |= {*chosen_experts(llm, 1).ravel().tolist()}
    assert len(used) < 12

    def poisoned(weights: ModelWeights, layer: int, members: Sequence[str]) -> list[np.ndarray]:
        own = EXPERT_MEMBERS(weights, layer, members)
        return [
            np.asarray(weight) if index // len(members) in used else np.full_like(weight, np.nan)
            for index, weight in enumerate(own)
        ]

    monkeypatch.setattr(ModelWeights, "expert_members", poisoned)
    llm = host_llm(folder, **options)
    session = llm.session()
    for token, logits in zip((5, 6, 7), expected, strict=True):
        np.testing.assert_array_equal(session.decode(token), logits)
    # Some other token chooses one of the others.
    assert np.isnan(llm.session().prefill(list(range(40)), all_logits=True)).any()


def test_of_experts_with_equal_logits_the_first_is_chosen(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs of experts with equal rows of the router, of which an odd number is chosen.

    The order of transformers' ``torch.topk`` among equal values is undefined, and changes with their number.
    The reference gets the order of the kernels: the expert with the lower number first.
    """
    folder, ids = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "ties"), token_ids(40)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name][1::2] = tensors[name][::2]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def topk(values: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Equal rows of a matrix may differ in the last bit of their float64 products.
        places = values.float().argsort(dim=dim, descending=True, stable=True)[..., :k]
        return values.gather(dim, places), places

    llm = host_llm(folder, plan="gpu")
    found = llm.session().prefill(ids, all_logits=True)
    chosen = np.sort(chosen_experts(llm, len(ids)), axis=1)
    singles = [next(one for one in row if one ^ 1 not in row) for row in chosen.tolist()]
    assert all(one % 2 == 0 for one in singles)
    monkeypatch.setattr(torch, "topk", topk)
    assert sqnr_db(found, reference(llm, folder, ids)) >= LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize("family", ["granitemoeshared", "phimoe", "gpt_oss"])
def test_splits_of_all_that_is_no_expert(
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[[LLM], Plan],
    token_ids: Callable[[int], list[int]],
) -> None:
    """Shared experts that both processors compute, and experts on the GPU, whose outputs are added."""
    folder, ids = checkpoint(family), token_ids(70)
    on_gpu = host_llm(folder, plan="gpu")
    expected = on_gpu.session().prefill(ids, all_logits=True)
    split = host_llm(folder, plan=half_rows_plan(on_gpu))
    assert any(step.processor == "npu" and step.operator == "o" for step in split.steps("decode", 1))
    assert not any(step.processor == "npu" and "expert" in step.operator for step in split.steps("decode", 1))
    session = split.session()
    found = [session.prefill(ids[:60], all_logits=True), *(session.decode(token)[None] for token in ids[60:])]
    assert sqnr_db(np.concatenate(found), expected) >= LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize(("family", "precision"), [("mixtral", "w4a16"), ("granitemoeshared", "w4a8")])
def test_need_of_memory_counts_all_experts(
    family: str, precision: str, checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    llm = host_llm(checkpoint(family), plan="gpu", precision=precision)
    weights, plan = llm._weights, llm.plan
    need = memory_need(llm.config, weights.specs, plan, 64, {}, np.dtype(np.float32))
    plain = sum(spec.weight_bytes() for spec in weights.specs)
    assert llm.config.mixture is not None
    experts = 2 * llm.config.mixture.routing.experts
    first = weights.experts[0]
    assert first.then is not None
    one = first.weight.weight_bytes(first.rows, first.columns)
    one += first.then.weight.weight_bytes(first.then.rows, first.then.columns)
    assert need.gpu_weights == plain + experts * one + plain_embedding(llm)
    sizes = pool_sizes(llm.config, weights.specs, plan, 4, 64)
    pairs = plan.chunk_length * llm.config.mixture.routing.chosen
    assert sizes["expert_rows"] == pairs * llm.config.hidden_size * 4
    assert ("expert_rows_codes" in sizes) == (precision == "w4a8")


def plain_embedding(llm: LLM) -> int:
    return llm._weights.specs[-1].weight_bytes()


def test_any_number_of_tokens_in_the_lists(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], token_ids: Callable[[int], list[int]]
) -> None:
    """Passes of every length up to 40, against one pass: lists are sized for the longest chunk."""
    llm, ids = host_llm(checkpoint("qwen3_moe"), plan="gpu"), token_ids(40)
    expected = llm.session().prefill(ids, all_logits=True)
    for length in range(1, 41):
        found = llm.session().prefill(ids[:length])
        assert sqnr_db(found, expected[length - 1]) >= LOGITS_SQNR_DB["fp32"], length


def test_w4a8_rounds_the_rows_of_experts(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    token_ids: Callable[[int], list[int]],
) -> None:
    folder, ids = checkpoint("qwen3_moe"), token_ids(40)
    llm = host_llm(folder, plan="gpu", precision="w4a8")
    session = llm.session()
    found = [session.prefill(ids[:36], all_logits=True), *(session.decode(token)[None] for token in ids[36:])]
    # A router near a tie may choose otherwise for rounded inputs: most tokens are within the gate.
    expected = reference(llm, folder, ids)
    within = [sqnr_db(*rows) for rows in zip(np.concatenate(found), expected, strict=True)]
    assert np.median(within) >= W4A8_SQNR_DB
