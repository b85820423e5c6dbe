"""Logits on the device ``intel:cpu``, whose NPU graphs are those of an Intel NPU."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB

from heterollm.base import HeteroLLMError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.solver import Plan

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(find_spec("openvino") is None, reason="needs the extra intel"),
]


@pytest.fixture
def load(checkpoint: Callable[..., Path]) -> Iterator[Callable[[str | Plan], LLM]]:
    """Return a function that loads a model with a plan, and closes it at the end."""
    loaded: list[LLM] = []

    def open_llm(plan: str | Plan) -> LLM:
        loaded.append(LLM.load(checkpoint("llama"), device="intel:cpu", plan=plan, context=128))
        return loaded[-1]

    yield open_llm
    for llm in loaded:
        llm.close()


@pytest.mark.parametrize("plan", ["npu", "rows"])
def test_the_logits_are_those_of_transformers(
    plan: str,
    load: Callable[[str | Plan], LLM],
    checkpoint: Callable[..., Path],
    half_rows_plan: Callable[..., Plan],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
) -> None:
    """A prompt in two chunks, and tokens behind it."""
    ids = np.random.default_rng(0).integers(1, 200, 76).tolist()
    llm = load(half_rows_plan(load("gpu"), 64) if plan == "rows" else plan)
    assert llm.plan.uses_npu
    session = llm.session()
    found = np.stack([*session.prefill(ids[:70], all_logits=True), *map(session.decode, ids[70:])])
    expected = reference(llm, checkpoint("llama"), ids)
    assert min(sqnr_db(*rows) for rows in zip(found, expected, strict=True)) > LOGITS_SQNR_DB["fp16"]


def test_rounded_inputs_are_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(HeteroLLMError, match=r"w4a8: .*openvino.* with float activations only"):
        LLM.load(checkpoint("llama"), device="intel:cpu", plan="npu", precision="w4a8", context=128)
