"""Logits on the device ``intel:cpu``, whose NPU graphs are those of an Intel NPU."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from gates import LOGITS_SQNR_DB

from heterollm.base import HeteroLLMError
from heterollm.llm import LLM
from heterollm.solver import Plan

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(find_spec("openvino") is None, reason="needs the extra intel"),
]


@pytest.mark.parametrize("plan", ["npu", "rows"])
def test_the_logits_are_those_of_transformers(
    plan: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    worst_logits_db: Callable[[LLM, Path], float],
) -> None:
    folder, own = checkpoint("llama"), {"device": "intel:cpu", "context": 128}
    chosen = half_rows_plan(host_llm(folder, plan="gpu", **own), 64) if plan == "rows" else plan
    llm = host_llm(folder, plan=chosen, **own)
    assert llm.plan.uses_npu
    assert worst_logits_db(llm, folder) > LOGITS_SQNR_DB["fp16"]


def test_rounded_inputs_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(HeteroLLMError, match=r"w4a8: .*openvino.* with float activations only"):
        LLM.load(checkpoint("llama"), device="intel:cpu", plan="npu", precision="w4a8", context=128)
