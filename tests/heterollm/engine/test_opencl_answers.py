"""Answers on the device ``opencl``, where a CPU is taken for a GPU with mapped memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec.structs import replace

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.solver import Plan


@pytest.fixture(params=["gpu", "layer", "rows"])
def plan(request: pytest.FixtureRequest, folder: Path, half_rows_plan: Callable[..., Plan]) -> str | Plan:
    if request.param != "rows":
        return str(request.param)
    with LLM.load(folder, device="host", plan="gpu", context=128) as gpu:
        return replace(half_rows_plan(gpu, 64), device="opencl")


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def logits(folder: Path, device: str, plan: str | Plan) -> np.ndarray:
    """Return the logits of a prompt in two chunks, and of tokens behind it."""
    ids = np.random.default_rng(0).integers(1, 200, 76)
    with LLM.load(folder, device=device, plan=plan, context=128) as llm:
        session = llm.session()
        prompt = session.prefill(ids[:70], all_logits=True)
        return np.stack([*prompt, *map(session.decode, ids[70:].tolist())])


def test_the_logits_are_those_of_the_cores(
    folder: Path, plan: str | Plan, request: pytest.FixtureRequest
) -> None:
    expected = logits(folder, "host", "gpu")
    request.getfixturevalue("taken_for_gpu")
    found = logits(folder, "opencl", plan)
    assert min(sqnr_db(*rows) for rows in zip(found, expected, strict=True)) > LOGITS_SQNR_DB["fp16"]
