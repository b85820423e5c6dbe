"""Logits on the device ``opencl``: the GPU of ``--gpu``, or a CPU that is taken for one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from gates import LOGITS_SQNR_DB

from heterollm.llm import LLM
from heterollm.solver import Plan


@pytest.mark.usefixtures("taken_for_gpu")
@pytest.mark.parametrize("plan", ["gpu", "npu", "layer", "rows"])
def test_the_logits_are_those_of_transformers(
    plan: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    worst_logits_db: Callable[[LLM, Path], float],
) -> None:
    folder, own = checkpoint("llama"), {"device": "opencl", "context": 128}
    chosen = half_rows_plan(host_llm(folder, plan="gpu", **own), 64) if plan == "rows" else plan
    llm = host_llm(folder, plan=chosen, **own)
    assert worst_logits_db(llm, folder) > LOGITS_SQNR_DB["fp16"]
