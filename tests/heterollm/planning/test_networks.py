"""Solved plans of networks without a gate: what they split, and transformers' logits at every level."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heterollm.kernels.devices import open_device
from heterollm.llm import LLM
from tests.heterollm.model.test_families import all_logits, within_gates

PROMPT, STEPS, WIDTH = 70, 5, 320


@pytest.mark.parametrize(
    "family", ["phi", *(pytest.param(one, marks=pytest.mark.slow) for one in ("opt", "gpt_neox"))]
)
def test_networks_without_a_gate_are_split(
    family: str,
    checkpoint: Callable[..., Path],
    keep_even_profile: Callable[..., None],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"ffn_dim" if family == "opt" else "intermediate_size": WIDTH}
    folder, ids = checkpoint(family, **wide), token_ids(PROMPT + STEPS)
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    keep_even_profile(open_device("host"), folder, "w4a16")
    for level, group in (("tensor", "gate_up"), ("block", "ffn")):
        with LLM.load(folder, device="host", plan=level, context=128, kv_bits=32) as llm:
            expected = reference(llm, folder, ids)
            rows = [entry.placement.npu_rows for entry in llm.plan.placed if entry.group == group]
            assert any(0 < width < WIDTH for (width,) in filter(None, rows)), level
            assert within_gates(all_logits(llm, ids), expected), level
            assert within_gates(all_logits(llm, ids, (33, 1, 30)), expected), level
