"""Gemma 3 270M, a published GGUF file in Q4_K_M: greedy text and logits beyond its window of 512.

``HETEROLLM_PUBLISHED_GGUF`` names the file; without it ``bench/published_model.py`` fetches it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from published import fetched

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.solver import Plan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
TOKENS = 64
WINDOW = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetched("HETEROLLM_PUBLISHED_GGUF", "fetch_gemma", tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    """transformers' model of the file's values, which it reads by itself."""
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF files")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("level", ["gpu", "rows"])
@pytest.mark.parametrize("precision", ["w4a16", "fp16"])
def test_greedy_text_is_that_of_the_dequantised_file(
    level: str,
    precision: str,
    path: Path,
    oracle: Any,
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[[LLM], Plan],
) -> None:
    """``rows`` cuts every group in the middle, between GPU and NPU."""
    llm = host_llm(path, plan="gpu", precision=precision, context=128)
    if level == "rows":
        llm = host_llm(path, plan=half_rows_plan(llm), precision=precision, context=128)
    ids = llm.tokenizer.encode(PROMPT)
    with torch.no_grad():
        whole = oracle.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS)[0].tolist()
    result = llm.generate(PROMPT, max_new_tokens=TOKENS, temperature=0.0)
    assert list(result.token_ids) == whole[len(ids) :]


@pytest.mark.parametrize("level", ["gpu", "layer"])
def test_logits_beyond_the_window(level: str, path: Path, oracle: Any, host_llm: Callable[..., LLM]) -> None:
    llm = host_llm(path, plan=level, precision="fp16", context=1024)
    text = (ROOT / "docs" / "soc-model.md").read_text("utf-8")
    ids = llm.tokenizer.encode(text)[: WINDOW + 100]
    session = llm.session()
    rows = [session.prefill(ids[:-4]), *(session.decode(token) for token in ids[-4:])]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), logits_to_keep=5).logits[0].numpy()
    assert sqnr_db(np.stack(rows), expected) >= LOGITS_SQNR_DB["fp32"]
