"""The remaining families on the HTP emulator of Qualcomm, by the gates of float16.

Of each kind of layers there is one: plain ones, those with recurrent state, of several shapes, with experts,
with state spaces, and with latent attention.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import qnn_available
from heterollm.llm import LLM
from tests.heterollm.conftest import FAMILIES

USABLE, REASON, _ = qnn_available(emulator=True)
pytestmark = [pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)]

PROMPT, STEPS = 40, 3
"""Longer than the windows, so that the steps see less than all."""


@pytest.mark.parametrize(
    ("family", "level"),
    [
        ("phi3", "npu"),
        ("gemma3_text", "layer"),
        ("phi", "layer"),
        ("qwen3_next", "layer"),
        ("gpt_oss", "layer"),
        pytest.param("gpt_neox", "npu", marks=pytest.mark.slow),
        pytest.param("mistral", "npu", marks=pytest.mark.slow),
        pytest.param("qwen3", "layer", marks=pytest.mark.slow),
        pytest.param("gemma2", "npu", marks=pytest.mark.slow),
        pytest.param("smollm3", "layer", marks=pytest.mark.slow),
        *(
            pytest.param(name, "layer", marks=pytest.mark.slow)
            for name in ("gemma", "lfm2", "gemma4_text", "gemma3n_text", "olmo2", "glm4_moe")
        ),
        *(
            pytest.param(name, "layer", marks=pytest.mark.slow)
            for name in ("qwen3_5_text", "nemotron_h", "falcon_h1", "deepseek_v2")
        ),
    ],
)
def test_logits_of_a_few_layers(
    family: str,
    level: str,
    checkpoint: Callable[..., Path],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
    token_ids: Callable[[int], list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    listed = {"layer_types", "layers_block_type"} & FAMILIES[family].keys()
    folder = checkpoint(family, vocab_size=512, **({} if listed else {"num_hidden_layers": 2}))
    ids = [token % 512 for token in token_ids(PROMPT + STEPS)]
    with LLM.load(folder, device="emulator", plan=level, context=256) as llm:
        session = llm.session()
        prompt = session.prefill(ids[:PROMPT], all_logits=True)
        actual = np.concatenate([prompt, *(session.decode(token)[None] for token in ids[PROMPT:])])
        expected = reference(llm, folder, ids)
    overall, gate = sqnr_db(actual, expected), LOGITS_SQNR_DB["fp16"]
    record_property("sqnr_db", float(overall))
    assert overall >= gate
    error, power = np.square(actual - expected), np.square(expected)
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= gate - LOGITS_WORST_DROP_DB
