"""The runtime against transformers on the tensors that the runtime computes with (design, section 5)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

from heterollm.kernels.formats.tolerances import ComputeType, sqnr_db
from heterollm.llm import LLM

OPTIMISED = True
"""Models have the programs that users have."""

LEVELS = ("gpu", "npu", "layer")
Reference = Callable[[LLM, Path, list[int]], np.ndarray]


def compute_of(llm: LLM) -> ComputeType:
    """Return the type whose gate a device's logits have: that of the KV cache, its coarsest."""
    return "fp16" if llm.device.cache_dtype == np.float16 else "fp32"


def check_logits(actual: np.ndarray, expected: np.ndarray, compute: ComputeType = "fp32") -> float:
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


ASYMMETRIC: dict[str, Any] = {"group_size": 64, "symmetric": False}
STEPPED: dict[str, Any] = {"scales": "stepped"}
FLOATS: dict[str, Any] = {"precision": "fp16"}
# The level layer runs the graphs of npu with the kernels of gpu.
SLOW = (
    ("llama", ASYMMETRIC, "layer"),
    ("llama", STEPPED, "layer"),
    ("llama", FLOATS, "layer"),
    *(("qwen2", FLOATS, level) for level in ("gpu", "npu")),
)


@pytest.mark.parametrize(
    ("family", "options", "level"),
    [
        pytest.param(
            *(family, options, level),
            id=f"{family}-{options}-{level}",
            marks=pytest.mark.slow if (family, options, level) in SLOW else (),
        )
        for family, options in (
            *(("llama", {}), ("llama", ASYMMETRIC), ("llama", STEPPED), ("llama", FLOATS)),
            *(("qwen2", {}), ("qwen2", FLOATS)),
        )
        for level in LEVELS
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
    found = np.concatenate([prompt, decoded])
    record_property("sqnr_db", float(check_logits(found, expected, compute_of(llm))))


@pytest.mark.parametrize(
    ("family", "level", "every"),
    [
        *(("llama", level, False) for level in LEVELS),
        pytest.param("llama", "layer", True, marks=pytest.mark.slow),
        *(pytest.param("qwen2", level, level == "layer", marks=pytest.mark.slow) for level in LEVELS),
    ],
)
def test_every_prompt_length(
    family: str,
    level: str,
    every: bool,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Reference,
    token_ids: Callable[[int], list[int]],
) -> None:
    """One long pass of transformers is the oracle for all prefixes, past the largest standard length.

    Steps of 7 meet every remainder of lengths up to 128, those of 29 of lengths up to 32, and of small ones
    each prompt is tried.
    """
    folder = checkpoint(family, hidden_size=64, intermediate_size=96, num_attention_heads=2, vocab_size=256)
    llm = host_llm(folder, plan=level)
    ids = [index % 256 for index in token_ids(1030)]
    expected = reference(llm, folder, ids)
    session = llm.session()
    step = 1 if every else 7 if level == "layer" else 29
    last_small = 130 if level == "layer" else 34
    edges = {length + more for length in (64, 128, 256, 512, 1024) for more in (-1, 0, 1)}
    lengths = sorted({*range(1, 1031, step), *range(1, last_small), *edges, 1030})
    actual = np.empty((len(lengths), 256), np.float32)
    for row, length in enumerate(lengths):
        session.reset()
        actual[row] = session.prefill(ids[:length])
    check_logits(actual, expected[np.array(lengths) - 1], compute_of(llm))
