"""A memory budget of experts: the same bits at any budget, counts, memory, and files that change."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import CheckpointError, OptionError
from heterollm.engine import expert_budget
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.ops import Routing
from heterollm.llm import LLM

GIB = 2**30


def slot_gib(llm: LLM) -> float:
    """Return the packed size of an expert of a model without a budget."""
    own = llm._engine._compiler._experts._layers[0]
    assert llm.config.routing is not None
    return (own.gate_up.size_bytes + own.down.size_bytes) / llm.config.routing.experts / GIB


def routing_of(llm: LLM) -> Routing:
    assert llm.config.routing is not None
    return llm.config.routing


def answers(llm: LLM, ids: list[int]) -> list[np.ndarray]:
    """Return logits of prompts of odd lengths, tokens behind them, a fork, and all of it once more."""
    found = []
    for _ in range(2):
        for length in (1, 7, 33):
            session = llm.session()
            found.append(session.prefill(ids[:length], all_logits=True))
            found += [session.decode(token) for token in ids[length : length + 3]]
        fork = session.fork()
        found += [fork.decode(ids[0]), session.decode(ids[1]), fork.decode(ids[2])]
        found.append(session.decode(ids[3:6]))
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"precision": "fp16"}),
        ("granitemoeshared", {"precision": "w4a8"}),
        ("phimoe", {"symmetric": False}),
    ],
)
def test_any_budget_gives_the_bits_of_all_experts(
    family: str,
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the experts of one token to all but one, in the order that the check of buffers proves."""
    monkeypatch.setenv(CHECK_VARIABLE, "3")
    folder, ids = checkpoint(family), token_ids(40)
    llm = host_llm(folder, plan="gpu", **options)
    routing, slot, expected = routing_of(llm), slot_gib(llm), answers(llm, ids)
    every = routing.experts * llm.config.layers
    for slots in (routing.chosen, routing.chosen + 1, every // 2, every - 1):
        limited = host_llm(folder, plan="gpu", experts_gib=(slots + 0.5) * slot, **options)
        for own, other in zip(answers(limited, ids), expected, strict=True):
            np.testing.assert_array_equal(own, other)
        reads = limited.expert_reads
        assert reads is not None
        assert (reads.slots, reads.experts) == (slots, every)
        assert reads.resident_bytes == round(slots * slot * GIB)
        assert reads.misses > 0
        limited.close()
