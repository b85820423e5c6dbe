"""The runtime against transformers on the tensors that the runtime computes with (design, section 5)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm import LLM
from heterollm.kernels.tolerances import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB, sqnr_db

LEVELS = ("gpu", "npu", "layer")
Reference = Callable[[LLM, Path, list[int]], np.ndarray]


def check_logits(actual: np.ndarray, expected: np.ndarray, compute: str = "fp32") -> float:
    """Hold logits ``[m, vocab]`` to the gates and return their SQNR in decibels."""
    overall = sqnr_db(actual, expected)
    gate = LOGITS_SQNR_DB[compute]
    assert overall >= gate
    error = np.square(actual - expected)
    power = np.square(expected)
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= gate - LOGITS_WORST_DROP_DB
    return overall


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"group_size": 64, "symmetric": False}),
        ("llama", {"precision": "fp16"}),
        ("qwen2", {}),
        ("qwen2", {"precision": "fp16"}),
    ],
)
def test_logits_of_every_position(
    family: str,
    options: dict[str, Any],
    level: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    folder = checkpoint(family)
    llm = host_llm(folder, plan=level, **options)
    ids = token_ids(75)
    session = llm.session()
    prompt = session.prefill(ids[:70], all_logits=True)
    decoded = np.stack([session.decode(token) for token in ids[70:]])
    expected = reference(llm, folder, ids)
    record_property("sqnr_db", float(check_logits(np.concatenate([prompt, decoded]), expected)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_every_prompt_length(
    family: str,
    level: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    """One long pass of transformers is the oracle for all prefixes, past the largest standard length."""
    folder = checkpoint(family, hidden_size=64, intermediate_size=96, num_attention_heads=2, vocab_size=256)
    llm = host_llm(folder, plan=level)
    ids = [index % 256 for index in token_ids(1030)]
    expected = reference(llm, folder, ids)
    session = llm.session()
    step = 1 if level == "layer" else 7
    lengths = sorted({*range(1, 1031, step), *range(1, 34), 1023, 1024, 1025, 1030})
    actual = np.empty((len(lengths), 256), np.float32)
    for row, length in enumerate(lengths):
        session.reset()
        actual[row] = session.prefill(ids[:length])
    check_logits(actual, expected[np.array(lengths) - 1])
