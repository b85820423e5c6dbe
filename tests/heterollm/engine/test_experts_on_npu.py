"""Experts on the NPU on ``host``: the logits of the GPU alone, whatever tokens choose and groups hold."""

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import heterollm
from heterollm.base import EngineError, GraphError
from heterollm.engine import memory_need, pool_sizes
from heterollm.engine.builder import PassBuilder
from heterollm.engine.slot_check import CHECK_VARIABLE, SlotCheck
from heterollm.kernels.formats.tolerances import LOGITS_SQNR_DB, sqnr_db
from heterollm.kernels.gpu.runtime import MEMORY_VARIABLE
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.npu.session import SessionGraph
from heterollm.llm import LLM
from heterollm.model import ModelWeights
from heterollm.solver import ExpertGroup, ExpertsEntry, ExpertsPlacement, Plan

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


def with_experts(plan: Plan, *groups: Groups, **options: Any) -> Plan:
    """Return the plan with groups for each layer; the last ones are those of all further layers."""
    entries = tuple(
        ExpertsEntry((1, CHUNK), (layer, layer if layer < len(groups) - 1 else 99), placement(own, **options))
        for layer, own in enumerate(groups)
    )
    return structs.replace(plan, chunk_length=CHUNK, experts=entries)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def on_gpu(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", **OPTIONS) as llm:
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
        assert [step.layer for step in graphs] == [
            layer for layer, own in enumerate(groups) for _ in own
        ]
        assert not any(step.processor == "npu" for step in llm.steps("decode", 1))
        found = answers(llm, ids)
        assert same(found, expected)
        np.testing.assert_array_equal(answers(llm, ids), found)
