"""Latent attention: cut linears give the same logits, and the cache has one vector of a token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB

from heterollm.base import HeteroLLMError
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import KvSpec
from heterollm.solver import Plan

CONTEXT = 128


@pytest.mark.parametrize(
    ("family", "dense"),
    [("deepseek_v2", {"first_k_dense_replace": 2}), ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 2})],
)
def test_cut_linears_give_the_same_logits(
    family: str,
    dense: dict[str, Any],
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "5")
    folder, ids, found = checkpoint(family, **dense), token_ids(76), []
    whole = host_llm(folder, plan="gpu", context=CONTEXT)
    for llm in (whole, host_llm(folder, plan=half_rows_plan(whole, 64), context=CONTEXT)):
        session = llm.session()
        rows = [session.prefill(ids[:70], all_logits=True)]
        found.append(np.concatenate([*rows, *(session.decode(one)[None] for one in ids[70:])]))
    assert sqnr_db(found[1], found[0]) >= LOGITS_SQNR_DB["fp32"]


def test_a_token_has_one_vector_of_floats(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    folder = checkpoint("deepseek_v2")
    llm = host_llm(folder, plan="gpu", context=CONTEXT)
    specs = [spec for _, spec in llm.config.states]
    assert specs == [KvSpec(1, 48 + 16, 0, shares_values=True)] * 2
    own = sum(spec.bytes(CONTEXT, np.dtype(np.float32)) for spec in specs)
    assert llm.session().memory_bytes == own
    # Of 4 heads with keys of 56 and values of 40.
    assert own < 2 * CONTEXT * 4 * (56 + 40) * 4 / 5
    with pytest.raises(HeteroLLMError, match="8 bits are not possible in latent attention"):
        host_llm(folder, plan="gpu", context=CONTEXT, kv_bits=8).session().prefill([1, 2, 3])
