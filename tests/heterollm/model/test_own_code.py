"""Families whose code transformers does not have, against its models of the same equations and weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from own_code import OWN_CODE

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from own_code_checkpoints import write_own_code  # noqa: E402


@pytest.mark.parametrize("level", ["gpu", pytest.param("layer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", OWN_CODE)
def test_logits_are_those_of_the_same_equations(
    family: str,
    level: str,
    host_llm: Callable[..., LLM],
    bundled_model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    model = write_own_code(tmp_path, family, bundled_model)
    ids = [int(one) for one in np.random.default_rng(2).integers(3, 2000, 45)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    llm = host_llm(tmp_path, plan=level, precision="fp16")
    assert not [note for note in llm.notes if "no table" in note]
    session = llm.session()
    rows = [session.prefill(ids[:33], all_logits=True), *(session.decode(one)[None] for one in ids[33:])]
    found = sqnr_db(np.concatenate(rows), expected)
    record_property("sqnr_db", float(found))
    assert found >= LOGITS_SQNR_DB["fp32"]
